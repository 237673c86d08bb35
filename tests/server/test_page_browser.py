"""The page as people use it: Chromium on a real server with SmolLM2, or with a tiny model where speed does not matter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvboost import KVBoost
from page_browser import ANSWER_MS, NARROW, WIDE, Visit, browser, find_chromium
from running_server import RunningServer, running
from small_model import slow_down

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'kvboost[dev]'")
CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]

LONG = "The lighthouse on the south mole shows a white flash every five seconds. " * 30


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Of this module only: Playwright's event loop would stand in the way of other tests' own."""
    assert CHROMIUM is not None
    with browser(CHROMIUM) as opened:
        yield opened


Open = Callable[..., Visit]


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Open]:
    """`visit(url, **context)` opens the page. Afterwards: no console error but those expected, and no foreign host."""
    visits: list[Visit] = []

    def open_page(url: str, **context: Any) -> Visit:
        visits.append(Visit(chromium, f"{url}/", **context))
        return visits[-1]

    yield open_page
    for opened in visits:
        opened.context.close()
        assert opened.errors == []
        assert len(opened.hosts) == 1, opened.hosts


def violations(page: Page) -> list[str]:
    """Everything that axe-core finds, the moderate and the minor too."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [f"{v['id']} ({v['impact']}): {n['html']}" for v in found for n in v["nodes"]]


def ttft_ms(page: Page) -> float:
    number, unit = re.fullmatch(r"([\d.,]+) (ms|s)", page.locator("#ttft").inner_text()).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * (1000 if unit == "s" else 1)


# -- with the real model -----------------------------------------------------------------------------------------------


@pytest.mark.real
def test_the_second_question_is_faster_and_the_page_shows_why(server: RunningServer, visit: Open) -> None:
    server.kv.reset_cache()
    v = visit(server.url)
    page = v.page
    v.settings(max_tokens=12, temperature=0)
    page.get_by_role("button", name="Try it with a short document").click()
    v.wait_for_panel(1)
    first = ttft_ms(page)
    total = sum(tokens for _, tokens in v.runs())
    assert total > 900 and v.runs() == [("read now", total)]
    assert {source for source, _ in v.blocks()} == {"computed"} and len(v.blocks()) == -(-total // 16)
    assert f"All {total:,} prompt tokens were read" in page.locator("#sentence").inner_text()

    page.get_by_role("button", name="Ask a second question").click()
    v.wait_for_panel(2)
    second = ttft_ms(page)
    assert second < first / 2
    (known, reused), (new, computed) = v.runs()
    assert (known, new) == ("remembered, in the device’s memory", "read now")
    assert reused > 0.95 * (reused + computed) and computed < 40
    squares = v.blocks()
    assert sum(w for source, w in squares if source == "device") > 0.95 * sum(w for _, w in squares)
    assert [source for source, _ in squares] == sorted((s for s, _ in squares), reverse=True)  # device, then computed
    sentence = page.locator("#sentence").inner_text()
    told = re.fullmatch(rf"{reused:,} of {reused + computed:,} prompt tokens were remembered from your last question, "
                        r"so the first word came after ([\d.]+) (ms|s) instead of about ([\d.]+) s\.", sentence)  # fmt: skip
    assert told, sentence
    assert first / 2 < float(told[3]) * 1000 < first * 2
    assert page.locator("#strip svg").get_attribute("aria-label") == (
        f"The prompt from its beginning: {reused:,} tokens remembered, in the device’s memory, then {computed} tokens read now."
    )
    parts = page.locator("#ttft-parts b").all_inner_texts()
    assert len(parts) == 4 and all(re.fullmatch(r"[\d.]+ (ms|s)", part) for part in parts)
    assert page.locator("#history text.strong").all_text_contents()[0] == "0%"
    assert "of 512 MiB remembered" in page.locator("#tiers").inner_text()
    page.get_by_role("meter", name="Device: remembered").wait_for()
    server.wait_idle()


@pytest.mark.real
def test_stop_and_regenerate(server: RunningServer, visit: Open) -> None:
    v = visit(server.url)
    page = v.page
    v.settings(max_tokens=300, temperature=0.8)
    v.ask("Tell a long story about a fox.")
    page.locator(".answer-text p").wait_for(timeout=ANSWER_MS)
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    server.wait_idle(5.0)
    partial = page.locator(".answer-text").inner_text()
    assert 0 < len(partial.split()) < 200
    page.wait_for_timeout(200)
    assert page.locator(".answer-text").inner_text() == partial
    assert page.get_by_role("button", name="Send").is_visible()

    v.settings(max_tokens=8)
    page.get_by_role("button", name="Regenerate").click()
    v.wait_for_panel(1)
    assert page.locator(".turns > li").count() == 1
    assert page.locator(".answer-text").inner_text() != partial
    assert page.get_by_text("Stopped.").count() == 0
    assert re.search(r"; 8 tokens written, .* Cut off at the limit", page.locator(".note").inner_text())
    assert v.runs()[0][0].startswith("remembered")


@pytest.mark.real
@pytest.mark.parametrize(("scheme", "size"), [("light", WIDE), ("dark", WIDE), ("light", NARROW), ("dark", NARROW)],
                         ids=["light", "dark", "light-narrow", "dark-narrow"])  # fmt: skip
def test_accessible(server: RunningServer, visit: Open, scheme: str, size: dict[str, int]) -> None:
    v = visit(server.url, color_scheme=scheme, viewport=size, reduced_motion="reduce")
    page = v.page
    assert violations(page) == []
    v.settings(max_tokens=4)
    page.get_by_role("button", name="Add a document").click()
    page.get_by_label("Text", exact=True).fill(LONG)
    assert violations(page) == []
    page.get_by_role("button", name="Add", exact=True).click()
    v.ask("What is `this`?\n```python\nprint(1)\n```\nSay it.")
    v.wait_for_panel(1)
    for summary in page.locator("summary").all():
        summary.click()
    assert violations(page) == []
    if size is NARROW:
        assert (
            page.locator("html, body, main, #settings, aside").evaluate_all(
                "nodes => nodes.filter(n => n.scrollWidth > n.clientWidth).map(n => n.outerHTML.slice(0, 80))"
            )
            == []
        )
        assert page.locator("aside").bounding_box()["y"] > page.locator("#composer").bounding_box()["y"]  # type: ignore[index]


# -- with a tiny model -------------------------------------------------------------------------------------------------


def test_themes(small: KVBoost, visit: Open) -> None:
    def lightness(page: Page) -> int:
        return int(re.search(r"\d+", page.evaluate("() => getComputedStyle(document.body).backgroundColor"))[0])  # type: ignore[index]

    with running(small) as server:
        v = visit(server.url, color_scheme="dark")
        page = v.page
        assert lightness(page) < 60
        page.get_by_role("button", name="Theme: system").click()
        assert lightness(page) > 200
        page.reload()
        assert lightness(page) > 200  # the choice stays
        page.get_by_role("button", name="Theme: light").click()
        page.emulate_media(color_scheme="light")
        assert lightness(page) < 60
        page.get_by_role("button", name="Theme: dark").click()
        assert lightness(page) > 200


def test_nothing_that_is_written_becomes_markup(small: KVBoost, visit: Open) -> None:
    with running(small) as server:
        v = visit(server.url)
        v.settings(max_tokens=5)
        v.ask("<img src=x onerror=alert(1)> & <b>x</b>\n```html\n<i>y</i>\n```\nafter")
        v.wait_for_panel(1)
        question = v.page.locator("article.question")
        assert question.locator("img, b, i").count() == 0
        assert question.locator("p").all_inner_texts() == ["<img src=x onerror=alert(1)> & <b>x</b>", "after"]
        assert question.locator("pre code").inner_text() == "<i>y</i>"
        assert "monospace" in question.locator("pre").evaluate("node => getComputedStyle(node).fontFamily")


def test_what_is_sent(slow: KVBoost, visit: Open) -> None:
    """System prompt, sampling, documents as parts of their own, and the whole conversation each time."""
    with running(slow) as server:
        v = visit(server.url)
        page = v.page
        sent: list[dict[str, Any]] = []
        page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("/v1/chat/completions") else None)
        page.get_by_text("Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        v.settings(temperature=0.5, top_p=0.9, max_tokens=3, seed=7)
        paste = "text => { const d = new DataTransfer(); d.setData('text/plain', text); document.getElementById('question')" \
                ".dispatchEvent(new ClipboardEvent('paste', { clipboardData: d, cancelable: true })) }"  # fmt: skip
        page.evaluate(paste, "short")
        assert page.locator("#parts details").count() == 0
        page.evaluate(paste, "ab " * 500)
        page.evaluate(paste, "cd " * 600)
        assert page.locator("#parts summary").all_inner_texts() == [
            "Document 1 1,500 characters", "Document 2 1,800 characters",
        ]  # fmt: skip
        page.get_by_role("button", name="Remove Document 2").click()
        page.get_by_role("button", name="Remove Document 1").click()
        page.locator("#document-file").set_input_files(
            {"name": "n.txt", "mimeType": "text/plain", "buffer": b"from a file"}
        )
        page.get_by_role("button", name="Add a document").click()
        page.get_by_label("Text", exact=True).fill("typed")
        page.get_by_role("button", name="Add", exact=True).click()
        page.locator("#parts details").nth(1).wait_for()
        v.ask("Why?")
        v.wait_for_panel(1)
        assert page.locator("article.question details").count() == 2 and page.locator("#parts details").count() == 0
        v.ask("And?")
        v.wait_for_panel(2)
        first, second = sent
        assert {k: first[k] for k in ("temperature", "top_p", "max_tokens", "seed")} == {
            "temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "seed": 7,
        }  # fmt: skip
        texts = [part["text"] for part in first["messages"][1]["content"]]
        assert first["messages"][0] == {"role": "system", "content": "Be brief."}
        assert texts == ["typed\n\n", "from a file\n\n", "Why?"]
        assert second["messages"][:2] == first["messages"]
        assert [m["role"] for m in second["messages"][2:]] == ["assistant", "user"]
        assert second["messages"][3]["content"] == "And?"
        # <|user|>user:And?<|end|><|assistant|>, of bytes and three marks
        assert "Your new question is the last 12 tokens;" in page.locator("#boundary").inner_text()
        page.get_by_role("button", name="New conversation").click()
        assert page.locator(".turns > li").count() == 0
        v.ask("Who?")
        v.wait_for_panel(3)
        assert [m["role"] for m in sent[2]["messages"]] == ["system", "user"]


def test_a_setting_out_of_range_is_pointed_at(small: KVBoost, visit: Open) -> None:
    with running(small) as server:
        v = visit(server.url)
        v.settings(temperature=9)
        v.ask("Hello")
        field = v.page.get_by_label("Temperature")
        assert field.is_visible() and field.evaluate("node => node === document.activeElement")
        assert v.page.get_by_label("Your question").input_value() == "Hello"


def test_a_refused_question_comes_back(small: KVBoost, visit: Open) -> None:
    with running(small) as server:
        v = visit(server.url)
        page = v.page
        page.get_by_role("button", name="Add a document").click()
        page.get_by_label("Text", exact=True).fill("x" * 600)
        page.get_by_role("button", name="Add", exact=True).click()
        v.ask("Why?")
        page.get_by_role("alert").get_by_text("512").wait_for()
        assert page.get_by_label("Your question").input_value() == "Why?"
        assert page.locator("#parts details").count() == 1 and page.locator(".turns > li").count() == 0
        page.get_by_role("button", name="Remove Document 1").click()
        v.settings(max_tokens=3)
        v.ask("Why?")
        v.wait_for_panel(1)
        assert page.get_by_role("alert").inner_text() == ""
        assert [e for e in v.errors if "400" not in e] == []
        v.errors.clear()


def test_stopped_before_the_first_word(small: KVBoost, visit: Open) -> None:
    with running(slow_down(small, 1.0)) as server:
        v = visit(server.url)
        page = v.page
        v.ask("Hello")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Stop").press("Enter")
        page.get_by_role("button", name="Send").wait_for()
        assert page.get_by_label("Your question").input_value() == "Hello"
        assert page.locator(".turns > li").count() == 0


def test_the_key_is_asked_for_and_kept_in_memory_only(small: KVBoost, visit: Open, chromium: Browser) -> None:
    with running(small, api_key=("right",)) as server:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(f"{server.url}/")
        page.get_by_role("textbox", name="API key").fill("wrong")
        assert violations(page) == []
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("does not accept this API key").wait_for()
        page.get_by_role("button", name="Not now").click()
        page.get_by_label("Your question").fill("Hello")
        page.keyboard.press("Enter")  # asked again, because now it is needed
        page.get_by_role("textbox", name="API key").fill("clé")  # no header can hold it
        page.keyboard.press("Enter")
        page.get_by_text("does not accept this API key").wait_for()
        page.get_by_role("textbox", name="API key").fill("right")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for(timeout=ANSWER_MS)
        page.get_by_text("Live.", exact=True).wait_for()
        page.get_by_text("smollm2, up to").wait_for()
        kept = page.evaluate(
            "() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href])"
        )
        assert "right" not in kept
        assert json.loads(kept)[3] == f"{server.url}/"  # a link shares nothing
        assert page.locator("#key").input_value() == ""
        context.close()


def test_the_pulse_and_a_server_that_goes_away(slow: KVBoost, visit: Open) -> None:
    with running(slow) as server:
        v = visit(server.url)
        page = v.page
        v.settings(max_tokens=300)
        v.ask("Hello")
        page.locator("#running").get_by_text("1", exact=True).wait_for()
        page.wait_for_timeout(1500)
        assert float(page.locator("#written").inner_text()) > 5
        page.get_by_role("button", name="Stop").click()
        page.locator("#running").get_by_text("0", exact=True).wait_for()
    page.get_by_text("Trying again.").wait_for()
    v.ask("Are you there?")
    page.get_by_role("alert").get_by_text("The server does not answer.").wait_for()
    assert "Are you there?" in page.get_by_label("Your question").input_value()
    assert all("ERR_CONNECTION_REFUSED" in e for e in v.errors)
    v.errors.clear()


def test_reduced_motion(small: KVBoost, visit: Open) -> None:
    with running(small) as server:
        still = visit(server.url, reduced_motion="reduce").page
        moving = visit(server.url).page
        duration = "() => { const f = document.createElement('span'); f.className = 'fill'; document.body.append(f);" \
                   " return getComputedStyle(f).transitionDuration }"  # fmt: skip
        assert still.evaluate(duration) == "0s" and moving.evaluate(duration) == "0.4s"


def test_the_keyboard_reaches_everything_in_order(small: KVBoost, visit: Open) -> None:
    with running(small) as server:
        page = visit(server.url).page
        reached = []
        for _ in range(10):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("() => document.activeElement.id || document.activeElement.className"
                                         " || document.activeElement.tagName"))  # fmt: skip
        assert reached == [
            "skip",
            "new-chat",
            "theme",
            "log",
            "example",
            "question",
            "send",
            "add-document",
            "SUMMARY",
            "SUMMARY",
        ]
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"


# -- what the figures say ----------------------------------------------------------------------------------------------

EXPLAIN = """async ([facts, earlier, followsUp]) => {
  const { explain } = await import(new URL('page/explain.js', location.href));
  return explain(facts, earlier, followsUp);
}"""


def facts(cached: int, computed: int, compute: float, queue: float = 1.0) -> dict[str, Any]:
    return {"prompt": cached + computed, "cached": cached, "computed": computed, "ttft": compute + queue,
            "queue": queue, "lookup": 0, "load": 0, "compute": compute}  # fmt: skip


def test_the_sentence_claims_only_what_was_measured(small: KVBoost, visit: Open) -> None:
    with running(small) as server:
        page = visit(server.url).page

        def sentence(now: dict[str, Any], earlier: list[dict[str, Any]], follows_up: bool = True) -> str:
            told: str = page.evaluate(EXPLAIN, [now, earlier, follows_up])["sentence"]
            return told

        warm = facts(960, 50, 99)
        assert sentence(warm, [facts(0, 1000, 1200)]) == (
            "960 of 1,010 prompt tokens were remembered from your last question, so the first word came after 0.10 s "
            "instead of about 1.2 s."
        )
        # the smallest rate counts; answers that computed little measure nothing
        assert "about 0.51 s" in sentence(warm, [facts(0, 1000, 1200), facts(0, 1000, 500), facts(900, 63, 9)])
        for earlier in ([], [facts(900, 63, 500)], [facts(0, 1000, 50)]):
            assert "instead" not in sentence(warm, earlier)
        assert "from an earlier request" in sentence(warm, [], follows_up=False)
        assert "Of that, 0.90 s went by before its turn came." in sentence(facts(960, 50, 99, queue=900), [])
        assert sentence(facts(0, 10, 99), [warm]).startswith("Nothing of these 10 prompt tokens was known yet")


def test_the_strip_tells_sources_apart_and_very_long_prompts_fit(small: KVBoost, visit: Open) -> None:
    draw = """async ([runs, size]) => {
      const { strip } = await import(new URL('page/charts.js', location.href));
      const { picture, blocksPerCell } = strip(runs, size);
      const cells = [...picture.children].map(c => [c.dataset.source, c.getAttribute('fill'), c.width.baseVal.value]);
      return { blocksPerCell, cells, label: picture.getAttribute('aria-label') };
    }"""
    sources = ["device", "host", "disk", "remote", "chunk", "computed"]
    with running(small) as server:
        page = visit(server.url).page
        drawn = page.evaluate(draw, [[[s, 16] for s in sources], 16])
        assert [cell[0] for cell in drawn["cells"]] == sources
        assert len({cell[1] for cell in drawn["cells"]}) == 6  # each has a pattern of its own
        for _, fill, _ in drawn["cells"]:
            assert page.locator(fill[4:-1]).count() == 1
        assert drawn["label"].count("16 tokens") == 6
        shared = page.evaluate(draw, [[["device", 24], ["computed", 8]], 16])["cells"]
        assert [(s, w) for s, _, w in shared] == [("device", 12), ("device", 6), ("computed", 4.5)]
        long = page.evaluate(draw, [[["disk", 128_000], ["computed", 16]], 16])
        assert long["blocksPerCell"] == 16 and len(long["cells"]) <= 505
