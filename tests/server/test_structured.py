"""Structured output on SmolLM2: what comes out parses and is valid, and what cannot be enforced never gets to the engine."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")

import jsonschema
import openai
from openai import OpenAI
from pydantic import BaseModel

from kvboost import InvalidRequest, KVBoost, SamplingParams
from kvboost import StructuredOutputsParams as Form
from kvboost.engine import grammar
from kvboost.server.tools.scan import JsonScanner
from running_server import NAME, RunningServer
from schemas import BAD_SCHEMAS, SCHEMAS

pytestmark = pytest.mark.real

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}


PROMPTS = {"recursion": "Trees as JSON:\n" + '{"value": 1, "children": [{"value": 2}]}\n' * 3}
"""Left to itself the model likes recursion so much that it never comes back."""


def asking(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def valid(text: str, schema: Any) -> Any:
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


@pytest.fixture(scope="module")
def answers(smollm2: KVBoost) -> dict[str, str]:
    """All twenty schemas in one batch, every other one drawn at random: a step masks twenty rows of twenty grammars."""
    samplings = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=300, structured_outputs=Form(json=schema))
        for i, schema in enumerate(SCHEMAS.values())
    ]
    prompts = [PROMPTS.get(name, f"An example of {name} as JSON:\n") for name in SCHEMAS]
    results = smollm2.generate(prompts, sampling=samplings)
    assert [r.finish_reason for r in results] == ["stop"] * len(SCHEMAS), [r.text for r in results]
    return {name: result.text for name, result in zip(SCHEMAS, results, strict=True)}


@pytest.mark.parametrize("name", SCHEMAS)
def test_output_is_valid(answers: dict[str, str], name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    valid(answers[name], SCHEMAS[name])


def test_json_schema_over_http(client: OpenAI) -> None:
    schema = SCHEMAS["enum"]
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        messages=asking("Give an example."), response_format=form, max_tokens=100, **GREEDY
    )
    assert answer.choices[0].finish_reason == "stop"
    value = valid(answer.choices[0].message.content or "", schema)
    pieces = client.chat.completions.create(
        messages=asking("Give an example."), response_format=form, max_tokens=100, stream=True, **GREEDY
    )
    assert json.loads("".join(p.choices[0].delta.content or "" for p in pieces)) == value


class Person(BaseModel):
    name: str
    age: int


def test_a_pydantic_model_through_the_client(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        messages=asking("Ada Lovelace was 36."), response_format=Person, max_tokens=120, **GREEDY
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_json_object_is_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=asking("Write a list of three numbers."),
        response_format={"type": "json_object"},
        max_tokens=30,
        **GREEDY,
    )
    scan = JsonScanner()
    text = answer.choices[0].message.content or ""
    for c in text:
        scan.step(c)
    assert text.startswith("{") and not scan.failed
    assert scan.done == (answer.choices[0].finish_reason == "stop")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [({"regex": r"\d{3}-[xyz]{2}"}, r"\d{3}-[xyz]{2}"), ({"choice": ["Nile", "Rhône"]}, "Nile|Rhône"),
     ({"grammar": 'root ::= "a" [0-9]+ "z"'}, "a[0-9]+z?"), ({"json": {"type": "boolean"}}, "true|false")],
)  # fmt: skip
def test_vllms_field(client: OpenAI, form: Any, pattern: str) -> None:
    answer = client.completions.create(
        prompt="Q: Which?\nA:", max_tokens=12, extra_body={"structured_outputs": form}, n=2, logprobs=1, **GREEDY
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text)
        assert choice.logprobs is not None and all(p is not None for p in choice.logprobs.token_logprobs or [])


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_bad_schema_is_refused_before_any_compute(client: OpenAI, server: RunningServer, name: str) -> None:
    schema, field = BAD_SCHEMAS[name]
    steps = server.kv.stats().num_steps
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=asking("x"), response_format=form, **GREEDY)
    assert (caught.value.param or "").startswith("response_format")
    assert (caught.value.param or "").endswith(field), caught.value.param
    assert server.kv.stats().num_steps == steps


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
        ({"structured_outputs": {"regex": "((("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_forms_are_named(client: OpenAI, body: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=asking("x"), extra_body=body, **GREEDY)
    assert caught.value.param == param


def test_a_bomb_ends_the_helper_not_the_engine(smollm2: KVBoost) -> None:
    """10,000 places for a letter of 49,152 tokens: the compiler would be busy for minutes."""
    bomb = Form(json={"type": "string", "pattern": "^([a-z]{1,100}){1,100}$"})
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="takes more than"):
        smollm2.grammars.compiled(bomb)
    again = time.monotonic()
    assert again - began < grammar.WALL_SECONDS
    with pytest.raises(InvalidRequest, match="takes more than"):
        smollm2.grammars.compiled(bomb)
    assert time.monotonic() - again < 1.0, "a refusal is remembered"
    assert smollm2.generate("x", structured_outputs=Form(regex="after[0-9]"), max_tokens=9).text.startswith("after")
