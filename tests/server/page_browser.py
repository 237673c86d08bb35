"""A browser on the page: Debian's Chromium driven by Playwright, and what its user would do. Also takes the screenshots.

`PYTHONPATH=src python tests/server/page_browser.py` writes docs/images/page-light.png and page-dark.png.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 800}
ANSWER_MS = 60_000
"""How long an answer may take: SmolLM2 reads the example in 2 s, on a machine that does nothing else."""

LABELS = {"temperature": "Temperature", "top_p": "Top p", "max_tokens": "Tokens at most", "seed": "Seed"}
"""Of the settings, by their name in the API."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser(chromium: str) -> Iterator[Browser]:
    """Without Chromium's own sandbox, which does not start for root: it visits our page only."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


class Visit:
    """One visitor with a fresh profile. Notes what must not happen: console errors, and requests to other hosts."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, "color_scheme": "light", **context})
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("request", lambda r: self.hosts.add(urlsplit(r.url).netloc))
        self.page.goto(url)
        self.page.get_by_text("Live.", exact=True).wait_for(timeout=30_000)

    def settings(self, **values: Any) -> None:
        """Fill in sampling settings; names as in the API."""
        self.page.locator("#settings").evaluate("node => { node.open = true }")
        for name, value in values.items():
            self.page.get_by_label(LABELS[name]).fill(str(value))
        self.page.locator("#settings").evaluate("node => { node.open = false }")

    def ask(self, text: str) -> None:
        self.page.get_by_label("Your question").fill(text)
        self.page.keyboard.press("Enter")

    def wait_for_panel(self, answers: int) -> None:
        """Until the panel shows `answers` answers in its history."""
        self.page.locator("#history text.strong").nth(2 * answers - 1).wait_for(timeout=ANSWER_MS)

    def blocks(self) -> list[tuple[str, float]]:
        """(source, width) of every square of the strip, in order."""
        cells = "nodes => nodes.map(n => [n.dataset.source, n.width.baseVal.value])"
        return [tuple(cell) for cell in self.page.locator("#strip rect").evaluate_all(cells)]

    def runs(self) -> list[tuple[str, int]]:
        """(where from, tokens) of each row of the table that says what the strip shows."""
        rows = "rows => rows.map(r => [r.cells[1].textContent, Number(r.cells[2].textContent.replaceAll(',', ''))])"
        return [tuple(row) for row in self.page.locator("#runs tbody tr").evaluate_all(rows)]


def take_screenshots(url: str, chromium: str) -> None:
    """The example, asked and followed up, in light and in dark."""
    with browser(chromium) as opened:
        visit = Visit(opened, url, viewport={"width": 1280, "height": 1190})
        visit.settings(temperature=0.3, max_tokens=30, seed=int(sys.argv[1]) if len(sys.argv) > 1 else 1)
        visit.page.get_by_role("button", name="Try it with a short document").click()
        visit.wait_for_panel(1)
        visit.page.get_by_role("button", name="Ask a second question").click()
        visit.wait_for_panel(2)
        visit.page.locator("#log").focus()
        visit.page.wait_for_timeout(2500)  # until the pulse has told that nothing runs
        IMAGES.mkdir(parents=True, exist_ok=True)
        for scheme in ("light", "dark"):
            visit.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            visit.page.screenshot(path=IMAGES / f"page-{scheme}.png")


def main() -> None:
    from kvboost import KVBoost
    from kvboost.models.smollm2 import find_smollm2
    from running_server import running

    chromium = find_chromium()
    if chromium is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    with KVBoost.from_pretrained(str(find_smollm2()), kv_cache_gib=0.5) as kv, running(kv) as server:
        take_screenshots(f"{server.url}/", chromium)


if __name__ == "__main__":
    main()
