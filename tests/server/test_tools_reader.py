"""Readers of tool calls: the same calls however the text is cut, text around calls, and what is no call after all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.server.tools.formats import BARE_LIST, FORMATS
from kvboost.server.tools.openai import collect, delta
from kvboost.server.tools.reader import CallBegin, CallEnd, CallPiece, ForcedReader, FormatReader, Text
from kvboost.server.tools.scan import JsonScanner

KNOWN = frozenset({"get_weather", "add"})
WEATHER = {"city": 'Zürich "old" {town}', "days": [1, 2.5e3, None], "deep": {"a": [{}, []]}}


def reader(name: str) -> FormatReader:
    return FormatReader(BARE_LIST if name == "list" else FORMATS[name], KNOWN)


def read(form: str, *pieces: str) -> list[Any]:
    r = reader(form)
    return [e for piece in pieces for e in r.feed(piece)] + r.finish()


def told(events: list[Any]) -> list[Any]:
    """Events with ids left out and neighbours joined: what must not depend on the pieces."""
    out: list[Any] = []
    for e in events:
        key = {Text: "text", CallBegin: "begin", CallPiece: "arguments", CallEnd: "end"}[type(e)]
        value = {"text": "text", "begin": "name", "arguments": "arguments", "end": "source"}[key]
        if out and out[-1][0] == key and key in ("text", "arguments"):
            out[-1] = (key, out[-1][1] + getattr(e, value))
        else:
            out.append((key, getattr(e, value)))
    return out


def calls(events: list[Any]) -> list[tuple[str, Any]]:
    found = collect(events).get("tool_calls", [])
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]


def hermes(name: str, arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


TWO = [("get_weather", WEATHER), ("add", {"a": 1})]
A, B = (json.dumps({"name": n, "arguments": a}) for n, a in TWO)
LA, LB = (json.dumps({"name": n, "parameters": a}) for n, a in TWO)
GOOD = [
    ("hermes", hermes(*TWO[0]) + "\n" + hermes(*TWO[1]), ""),
    ("hermes", f"<tool_call>[{A}, {B}]</tool_call>", ""),
    ("hermes", f"Let me look.\n\n<tool_call>{A}</tool_call><tool_call> {B} </tool_call>\n\nDone.", "Let me look.Done."),
    ("hermes", f"<tool_call>{A}\n<tool_call>{B}", ""),
    (
        "hermes",
        f'<tool_call>{{"arguments": {json.dumps(WEATHER)}, "name": "get_weather"}}</tool_call>{hermes(*TWO[1])}',
        "",
    ),
    ("hermes", hermes("get_weather", json.dumps(WEATHER)) + hermes("add", '{"a": 1}'), ""),
    ("llama3", f"{LA}; {LB}", ""),
    ("llama3", f"<|python_tag|>{LA};{LB}", ""),
    ("llama3", f" [{LA}, {LB}]\n", ""),
    ("llama3", f"I will call.<|python_tag|>{LA};{LB}", "I will call."),
    ("llama3", f'{{"type": "function", {LA[1:]}\n{LB}', ""),
    ("mistral", f"[TOOL_CALLS] [{A}, {B}]", ""),
    ("mistral", f"Well: [TOOL_CALLS][{A},{B}]", "Well:"),
    ("mistral", f'[TOOL_CALLS]get_weather{json.dumps(WEATHER)}[TOOL_CALLS]add[ARGS]{{"a": 1}}', ""),
    ("mistral", f'[TOOL_CALLS]get_weather[CALL_ID]x1y2[ARGS]{json.dumps(WEATHER)}[TOOL_CALLS]add{{"a":1}}', ""),
    ("list", f"[{A},\n{B}]", ""),
]


@pytest.mark.parametrize(("form", "text", "content"), GOOD)
def test_two_calls_in_every_form(form, text, content):
    events = read(form, text)
    assert calls(events) == TWO
    assert (collect(events)["content"] or "") == content
    assert all(e.whole for e in events if isinstance(e, CallEnd))


NO_CALLS = [
    ("hermes", "Just text with { and <tool and </tool_call> in it.  \n"),
    ("hermes", "<tool_call>\nnot json</tool_call> after"),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>{"nom": "f", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "ends in a mark <tool_ca"),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "f"'),
    ("hermes", "  \n "),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("llama3", '{"name": "Ava", "age": 3}'),
    ("llama3", '{"answer": 42} and more'),
    ("llama3", "[1, 2, 3]"),
    ("llama3", "The answer is {}"),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]hello world {"),
    ("mistral", "[TOOL_CALLS] ... [TOOL_C"),
    ("mistral", "[TOOL_CALLS]name_without_arguments"),
    ("list", "[]"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_the_text_it_was(form, text):
    events = read(form, text)
    assert not [e for e in events if isinstance(e, CallBegin)]
    assert collect(events)["content"] == text
    assert told(read(form, *text)) == told(events)


def test_a_call_that_breaks_is_text_in_a_whole_answer_and_verbatim_in_a_stream():
    broken = '<tool_call>{"name": "add", "arguments": {\'a\': 1}}</tool_call>'
    text = f"{broken}\n{hermes(*TWO[1])} x"
    events = read("hermes", text)
    assert told(events)[:2] == [("begin", "add"), ("arguments", "{'a': 1}}")]
    whole = collect(events)
    assert [c["function"]["arguments"] for c in whole["tool_calls"]] == ['{"a": 1}']
    assert whole["content"] == broken + "x"
    assert told(read("hermes", *text)) == told(events)


def test_a_call_cut_off_by_length_stays_a_call():
    events = read("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1')
    assert collect(events, cut_off=True)["tool_calls"][0]["function"]["arguments"] == '{"a": 1'
    assert "tool_calls" not in collect(events)
    assert collect(events)["content"] == '<tool_call>{"name": "add", "arguments": {"a": 1'


def test_arguments_come_piece_by_piece_after_the_name():
    r = reader("hermes")
    assert r.feed('<tool_call>{"name": "add", "argu') == []
    (begin,) = [e for e in r.feed('ments": {"a"') if isinstance(e, CallBegin)]
    assert begin.name == "add" and begin.id.startswith("call_") and len(begin.id) == 29
    assert [e.arguments for e in r.feed(": 1")] == [": 1"]
    assert [e.arguments for e in r.feed("}") if isinstance(e, CallPiece)] == ["}"]
    (end,) = r.feed("}</tool_call>")
    assert end.whole and r.finish() == []


def test_text_is_shown_at_once_up_to_what_may_begin_a_call():
    r = reader("hermes")
    assert r.feed("Hello") == [Text("Hello")]
    assert r.feed(" <too") == []
    assert r.feed("th> ") == [Text(" <tooth>")]
    assert r.finish() == [Text(" ")]


def test_marks_that_are_special_tokens_are_taken_from_the_ids():
    r = FormatReader(FORMATS["mistral"], KNOWN, {5: "[TOOL_CALLS]", 6: "[ARGS]"})
    events = r.feed("ok") + r.feed("", [5]) + r.feed("add", [77]) + r.feed("", [6]) + r.feed('{"a": 1}') + r.finish()
    assert calls(events) == [TWO[1]] and collect(events)["content"] == "ok"
    (begin,) = [e for e in events if isinstance(e, CallBegin)]
    assert len(begin.id) == 9 and begin.id.isalnum()


def test_forced_arguments():
    r = ForcedReader("add", short_ids=False)
    events = r.feed("") + r.feed('{"a"') + r.feed(": 1}") + r.finish()
    assert calls(events) == [TWO[1]]
    assert [delta(e) for e in events][1:] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        None,
    ]


def test_ids_are_unique():
    ids = {e.id for _ in range(300) for e in read("hermes", hermes(*TWO[1]) * 3) if isinstance(e, CallBegin)}
    assert len(ids) == 900


fragments = st.sampled_from(
    [A, B, LA, LB, "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}",
     ",", ";", " ", "\n", "add", '{"a": 1}', "text", '"', "\\", '{"name": "add", "arguments": {', "'x'", "é\U0001f600", ":", "1",
     '{"name": "zz", "arguments": {}}', "null", '{"arguments": null, "name": "add"}']
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["hermes", "llama3", "mistral", "list"]),
    st.lists(fragments, max_size=12).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
)
@example("hermes", "<tool_call> <tool_call>" + A, [14])
@example("llama3", LA + ";" + LB, [len(LA), len(LA) + 1])
def test_any_cut_gives_the_same(form, text, cuts):
    at = sorted({min(c, len(text)) for c in cuts})
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    whole = told(read(form, text))
    assert told(read(form, *pieces)) == whole
    assert told(read(form, *text)) == whole
    names = [value for key, value in whole if key == "begin"]
    assert len(names) == sum(key == "end" for key, _ in whole)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=12,
    ).filter(lambda v: isinstance(v, (dict, list))),
    st.booleans(),
    st.data(),
)
def test_the_scanner_agrees_with_json(value, ascii_only, data):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 1])))
    scan = JsonScanner()
    for i, c in enumerate(text):
        scan.step(c)
        assert not scan.failed and scan.done == (i == len(text) - 1)
    place = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:place] + data.draw(st.sampled_from('{}[]",:x1\\\n')) + text[place + 1 :]
    scan, end = JsonScanner(), 0
    while end < len(damaged) and not (scan.failed or scan.done):
        scan.step(damaged[end])
        end += 1
    lead = len(damaged) - len(damaged.lstrip(" \t\r\n"))  # the scanner skips it, raw_decode does not
    try:
        _, stop = json.JSONDecoder().raw_decode(damaged, lead)
        valid = True
    except ValueError:
        valid = False
    if scan.done and not scan.failed:
        assert valid and stop == end
    else:
        assert not valid or damaged[lead : lead + 1] not in ("[", "{")


def test_deep_nesting_is_no_call():
    events = read("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 500)
    assert "tool_calls" not in collect(events)
