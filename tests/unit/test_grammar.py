"""Structured outputs in the engine: masks in the batch sampler, state that survives preemption, and limits on schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")

from byte_models import byte_tokenizer, tiny_llama
from kvboost import EngineBusy, EngineClosed, EngineStepError, InvalidRequest, KVBoost, SamplingParams
from kvboost import StructuredOutputsParams as Form
from kvboost.engine import grammar
from kvboost.engine.grammar import Grammars, GrammarState
from kvboost.engine.json_schema import enforceable
from kvboost.engine.patterns import whole_pattern
from kvboost.engine.sampler import SampleError, SampleRow, sample
from kvboost.engine.structured_outputs import ToolCallForm

EOS = 2


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """For the byte tokenizer: ids 7 to 262 are bytes."""
    made = Grammars(byte_tokenizer(), 263)
    yield made
    made.close()


@pytest.fixture(scope="module")
def kv(grammars: Grammars) -> Iterator[KVBoost]:
    """A tiny model of random weights: under a grammar even its answers have form. 24 blocks: a few sequences preempt."""
    kv = KVBoost.from_model(tiny_llama(), byte_tokenizer(), num_blocks=24, max_num_batched_tokens=64)
    kv.grammars.close()
    kv.grammars = grammars
    yield kv
    kv.check()
    kv.close()


def ids(text: str) -> list[int]:
    return list(byte_tokenizer()(text)["input_ids"])


def row(state: GrammarState | None, output: str = "", **params) -> SampleRow:
    return SampleRow(
        SamplingParams(**{"temperature": 0.0, **params}), ids("p"), ids(output), 0, frozenset({EOS}), (), (), state
    )


def allowed(state: GrammarState, output: str = "") -> set[str]:
    """Characters (and `$` for the end) that may follow."""
    tokenizer = byte_tokenizer()
    found = set()
    logits = torch.zeros(1, 263)
    for _ in range(263):
        try:
            (token,) = sample(logits, [row(state, output)]).token_ids
        except SampleError:
            return found
        found.add("$" if token == EOS else tokenizer.decode([token]))
        logits[0, token] = -torch.inf
    return found


def test_masks_follow_the_output_and_end_where_the_grammar_does(grammars):
    state = grammars.state(Form(regex="a(b|c)d?"), frozenset({EOS}))
    assert allowed(state) == {"a"}
    assert allowed(state, "a") == {"b", "c"}
    assert allowed(state, "ab") == {"d", "$"}
    assert allowed(state, "abd") == {"$"}


def test_calls_in_free_text_are_held_to_their_schemas(grammars):
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form = ToolCallForm("<call>", "</call>", (("f", schema), ("g", {"type": "object"})))
    free = allowed(grammars.state(form, frozenset({EOS})), "well <cal")
    assert {"$", "a", "l", "<", "{"} <= free
    begun = 'well <call>\n{"name": "f", "arguments": {"n":7'
    assert "8" not in allowed(grammars.state(form, frozenset({EOS})), begun)
    assert allowed(grammars.state(form, frozenset({EOS})), '<call>\n{"name": "') == {"f", "g"}
    over = begun + "}}\n</call>"
    assert {"$", "a"} <= allowed(grammars.state(form, frozenset({EOS})), over)
    one = ToolCallForm("<call>", "</call>", form.tools, only_one=True)
    assert allowed(grammars.state(one, frozenset({EOS})), over) == {"$"}


def test_asking_again_changes_nothing(grammars):
    """After a preemption the same output is there when the next token is wanted: nothing may be accepted twice."""
    state = grammars.state(Form(regex="(ab)+"), frozenset({EOS}))
    for _ in range(3):
        assert allowed(state, "aba") == {"b"}
    assert state.num_accepted == 3


def test_only_constrained_rows_of_a_batch_are_masked(grammars):
    states = [grammars.state(Form(choice=[c]), frozenset({EOS})) for c in "xyz"]
    logits = torch.zeros(6, 263)
    logits[:, 100] = 5.0
    rows = [row(None), row(states[0]), row(None, temperature=1.0, top_k=1), row(states[1], temperature=1.0, seed=4),
            row(states[2], logprobs=2), row(None)]  # fmt: skip
    before = logits.clone()
    found = sample(logits, rows)
    assert found.token_ids == [100, *ids("x"), 100, *ids("y"), *ids("z"), 100]
    assert logits.equal(before)
    (chosen, *_), best = found.logprobs[4], found.logprobs[4][100]
    assert chosen == ids("z")[0] and best.rank == 1, "log-probabilities are the model's own, not the grammar's"


def test_logits_wider_and_narrower_than_the_vocabulary(grammars):
    wide = torch.zeros(2, 300)
    wide[:, 290] = 9.0
    state = grammars.state(Form(choice=["x"]), frozenset({EOS}))
    assert sample(wide, [row(state), row(None)]).token_ids == [*ids("x"), 290]
    state = grammars.state(Form(choice=["x"]), frozenset({EOS}))
    assert sample(torch.zeros(1, 200), [row(state)]).token_ids == ids("x")


def test_min_tokens_gives_way_where_nothing_else_is_allowed(grammars):
    state = grammars.state(Form(regex="ab?"), frozenset({EOS}))
    assert sample(torch.zeros(1, 263), [row(state, "a", min_tokens=9)]).token_ids == ids("b")
    assert sample(torch.zeros(1, 263), [row(state, "ab", min_tokens=9)]).token_ids == [EOS]


def test_contradictions_and_foreign_tokens_end_the_row_alone(grammars):
    rows = [row(None), row(grammars.state(Form(choice=["x"]), frozenset({EOS})), allowed_token_ids=ids("y"))]
    with pytest.raises(SampleError, match="structured_outputs") as caught:
        sample(torch.zeros(2, 263), rows)
    assert caught.value.rows == (1,)
    lost = row(grammars.state(Form(choice=["x"]), frozenset({EOS})), "q")
    with pytest.raises(SampleError, match="does not allow") as caught:
        sample(torch.zeros(2, 263), [rows[0], lost])
    assert caught.value.rows == (1,)


def test_special_tokens_are_never_part_of_a_text(grammars):
    """Their names would be legal characters of a JSON string, and would then be missing from the text."""
    state = grammars.state(Form(json={"type": "string"}), frozenset({EOS}))
    logits = torch.zeros(1, 263)
    logits[0, :7] = 50.0
    assert sample(logits, [row(state, '"')]).token_ids[0] >= 7


FORMS = [
    Form(json={"type": "object", "properties": {"a": {"type": "integer", "maximum": 999, "minimum": 0},
                                                "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"]}),
    Form(regex="[a-f]{20,24}"), Form(choice=["alpha", "beta", 'q"\\\n\t', "ключ"]),
    Form(grammar='root ::= "<" inner ">"\ninner ::= [0-9]{30}'), None,
]  # fmt: skip
MATCHES = [
    lambda t: set(json.loads(t)) == {"a", "b"}, lambda t: re.fullmatch("[a-f]{20,24}", t),
    lambda t: t in ("alpha", "beta", 'q"\\\n\t', "ключ"), lambda t: re.fullmatch("<[0-9]{30}>", t), lambda t: True,
]  # fmt: skip


def test_a_mixed_batch_with_several_continuations_under_preemption(kv):
    def params(form):
        return SamplingParams(n=3, temperature=1.0, max_tokens=250, seed=5, structured_outputs=form)

    alone = [kv.generate(ids("0123456789" * 3), sampling=params(form)) for form in FORMS]
    before = kv.stats().num_preemptions
    together = kv.generate([ids("0123456789" * 3)] * 5, sampling=[params(form) for form in FORMS])
    assert kv.stats().num_preemptions > before, "the pool must be too small for all of them"
    for matches, one, many in zip(MATCHES, alone, together, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in many.outputs]
        for out in many.outputs:
            assert matches(out.text), out.text
    assert all(o.finish_reason == "stop" for result in together[:4] for o in result.outputs)
    assert len({o.text for o in together[1].outputs}) == 3


def test_stop_strings_min_tokens_and_length_beside_a_grammar(kv):
    form = Form(grammar='root ::= "ab" "cd" "ef"')
    base = SamplingParams(temperature=0, max_tokens=50, structured_outputs=form)
    assert kv.generate(ids("x"), sampling=base).text == "abcdef"
    assert kv.generate(ids("x"), sampling=base.replace(min_tokens=40)).finish_reason == "stop"
    cut = kv.generate(ids("x"), sampling=base.replace(stop="de"))
    assert (cut.text, cut.outputs[0].stop_reason) == ("abc", "de")
    short = kv.generate(ids("x"), sampling=base.replace(max_tokens=3, min_tokens=1))
    assert (short.text, short.finish_reason) == ("abc", "length")
    with pytest.raises(EngineStepError, match="every token is forbidden"):
        kv.generate(ids("x"), sampling=base.replace(stop_token_ids=ids("e")))  # it may only end where the grammar does


def test_conflicts_are_named():
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        SamplingParams(structured_outputs=Form(json_object=True), ignore_eos=True)
    with pytest.raises(InvalidRequest, match="it must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": {}})
    for wrong in ({}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": "abc"}, {"choice": [""]}, {"regex": ""},
                  {"regex": "a" * 5000}, {"json": "{"}, {"json": "NaN"}, {"json": 3}, {"json_object": 1},
                  {"grammar": "\ud800"}, {"json": {"enum": ["\ud800"]}}, {"json": '{"enum": ["\\ud83d"]}'}, {"json": "[" * 100_000}, {"json": {"enum": [float]}}):  # fmt: skip
        with pytest.raises(InvalidRequest) as caught:
            Form(**wrong)
        assert caught.value.field.startswith("structured_outputs")


def test_a_model_without_an_end_is_refused(grammars):
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        grammars.state(Form(regex="a"), frozenset())


def test_missing_xgrammar_names_the_command(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(InvalidRequest, match=re.escape("pip install 'kvboost[structured]'")):
        Grammars(byte_tokenizer(), 263).compiled(Form(regex="a"))


@pytest.mark.parametrize(
    ("form", "match"),
    [
        (Form(regex="((("), "parenthesis"),
        (Form(grammar="root ::= nothing"), "not defined"),
        (Form(grammar='root ::= ' + "(" * 5000 + '"a"' + ")" * 5000), "(?i)nest"),
        (Form(json={"type": "integer", "minimum": 5, "maximum": 3}), "(?i)range"),
    ],
)  # fmt: skip
def test_what_the_compiler_refuses_is_told_in_its_words(grammars, form, match):
    with pytest.raises(InvalidRequest, match=match) as caught:
        grammars.compiled(form)
    assert ".cc:" not in str(caught.value)


def test_closing_ends_the_helper_and_refuses_what_comes_later():
    own = Grammars(byte_tokenizer(), 263)
    own.compiled(Form(choice=["a"]))
    process = own._helper._process
    own.close()
    own.close()
    assert process.poll() is not None
    assert own.compiled(Form(choice=["a"])) is not None, "what is kept needs no helper"
    with pytest.raises(EngineClosed):
        own.compiled(Form(choice=["b"]))


def test_a_helper_that_died_idle_is_started_again(grammars):
    grammars.compiled(Form(choice=["before"]))
    grammars._helper._process.stdin.close()  # the end of its input ends it, with code 0
    assert grammars._helper._process.wait(20) == 0
    assert grammars.compiled(Form(choice=["after"])) is not None


def test_others_grammars_do_not_block_for_ever(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "BUSY_SECONDS", 0.05)
    kept = grammars.compiled(Form(choice=["kept"]))
    with grammars._compiling:
        assert grammars.compiled(Form(choice=["kept"])) is kept
        with pytest.raises(EngineBusy):
            grammars.compiled(Form(choice=["new"]))


def test_what_is_kept_is_bounded(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_COMPILED", 3)
    forms = [Form(choice=[f"kept {i}"]) for i in range(5)]
    first = grammars.compiled(forms[0])
    for form in forms[1:3]:
        grammars.compiled(form)
    assert grammars.compiled(Form(choice=("kept 0",))) is first, "equal keys are one grammar"
    for form in forms[3:]:
        grammars.compiled(form)
    assert len(grammars._kept) == 3 and grammars._bytes == sum(c.memory_size_bytes for c in grammars._kept.values())
    assert grammars.compiled(forms[0]) is first and forms[1].key not in grammars._kept


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [("^a$", "^a$"), ("a", ".*a.*"), ("^a", "^a.*"), ("a$", ".*a$"), (r"a\$", r".*a\$.*"), ("^a|b$", "^a|b$"), ("[$^|]", ".*[$^|].*"),
     ("(a|b)", ".*(a|b).*")],
)  # fmt: skip
def test_patterns_search_as_json_schema_does(pattern, whole):
    assert whole_pattern(pattern, "p") == whole


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["type", "properties", "items", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "required", "pattern",
                         "minimum", "maxLength", "$defs", "a", "additionalProperties", "patternProperties", "prefixItems",
                         "propertyNames", "format", "multipleOf"]), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(json_values)
def test_any_junk_is_a_schema_or_a_named_error(junk):
    try:
        enforceable(junk, "schema")
    except InvalidRequest as error:
        assert error.field.startswith("schema")
