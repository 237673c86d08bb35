"""The page at `/`: static files, read once, each with its type, an ETag and headers that let nothing in from outside."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""By suffix. A file of another kind in this folder is not served."""

HEADERS = {
    "Cache-Control": "no-cache",  # keep it, and ask each time whether it is still the same
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Asset(NamedTuple):
    body: bytes
    media_type: str
    etag: str


def _read() -> dict[str, Asset]:
    """Every file of the page by name."""
    found = {}
    for file in files(__package__).iterdir():
        media_type = TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            body = file.read_bytes()
            found[file.name] = Asset(body, media_type, f'"{blake2b(body, digest_size=12).hexdigest()}"')
    return found


ASSETS = _read()
"""About 60 KB: held in memory, so that a name is looked up here and never in the file system."""


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """A chat, and beside it where each prompt's KV came from."""
    return _answer(request, ASSETS["index.html"])


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def asset(name: str, request: Request) -> Response:
    """What the page is made of."""
    if name not in ASSETS:
        raise HTTPException(404)
    return _answer(request, ASSETS[name])


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
