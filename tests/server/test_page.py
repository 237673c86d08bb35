"""The files of the page as a client gets them: types, caching, headers, and nothing that the headers forbid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvboost import KVBoost
from kvboost.server.page import page
from running_server import RunningServer, running

FOLDER = Path(page.__file__).parent
FILES = sorted(f.name for f in FOLDER.iterdir() if f.suffix not in (".py", ".pyc") and f.is_file())


@pytest.fixture
def served(small: KVBoost) -> Iterator[RunningServer]:
    """With a key, which the page does not need."""
    with running(small, api_key=("secret",)) as server:
        yield server


def test_every_file_is_served_with_its_type_and_without_a_key(served: RunningServer) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert {"index.html", "style.css", "main.js", "icon.svg"} <= set(FILES)
    for name in FILES:
        response = httpx.get(f"{served.url}/page/{name}")
        assert response.status_code == 200, name
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["content-type"].partition(";")[0] == kinds[Path(name).suffix]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
    index = httpx.get(f"{served.url}/")
    assert index.content == (FOLDER / "index.html").read_bytes()
    assert index.headers["content-type"] == "text/html; charset=utf-8"


def test_a_file_that_is_known_is_not_sent_again(served: RunningServer) -> None:
    for path in ("/", "/page/main.js"):
        first = httpx.get(served.url + path)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = httpx.get(served.url + path, headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert httpx.get(served.url + path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert httpx.get(f"{served.url}/").headers["etag"] != httpx.get(f"{served.url}/page/main.js").headers["etag"]


def test_head_gives_the_headers_only(served: RunningServer) -> None:
    response = httpx.head(f"{served.url}/")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == (FOLDER / "index.html").stat().st_size


def test_nothing_else_is_served(served: RunningServer) -> None:
    names = (
        "page.py",
        "__init__.py",
        "",
        ".",
        "nothing.js",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "sub/main.js",
        "main.js%00",
    )
    for name in names:
        response = httpx.get(f"{served.url}/page/{name}", headers={"Authorization": "Bearer secret"})
        assert response.status_code == 404 and response.json()["error"]["code"] == "unknown_url", name
    assert httpx.post(f"{served.url}/", json={}).status_code == 405
    assert httpx.get(f"{served.url}/v1/models").status_code == 401


def test_the_page_is_not_part_of_the_api(served: RunningServer) -> None:
    document = httpx.get(f"{served.url}/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert not [path for path in document["paths"] if path == "/" or path.startswith("/page")]


def test_what_the_files_name_exists_and_nothing_comes_from_elsewhere() -> None:
    """Relative names only: the page also works behind a proxy that serves it under a path."""
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', index))
    for script in FOLDER.glob("*.js"):
        text = script.read_text(encoding="utf-8")
        named |= set(re.findall(r'from "\./([^"]+)"', text))
        assert not re.search(r"\binnerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), script
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), script
        assert not re.search(r'(?:request|json|fetch)\("/', text), script
    assert named == set(FILES) - {"index.html"}
    assert not re.search(r"https?://|\sstyle=|\son\w+=|<style|<script>", index)
    assert "url(" not in (FOLDER / "style.css").read_text(encoding="utf-8")


def test_files_of_the_page_are_short() -> None:
    for name in FILES:
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 300, name
