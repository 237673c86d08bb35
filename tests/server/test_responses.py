"""POST /v1/responses through OpenAI's client: its types parse what is sent, whole and as events."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from running_server import NAME, RunningServer

pytestmark = pytest.mark.real

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}
RIVER = "Name one river in Egypt. Answer with its name only."
TOOL: Any = {
    "type": "function", "name": "add", "description": "Adds.", "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
                   "required": ["a"], "additionalProperties": False},
}  # fmt: skip


def test_says_what_chat_says(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": RIVER}],
        max_tokens=30,
        **GREEDY,
    )
    answer = client.responses.create(
        input=RIVER, instructions="Be brief.", max_output_tokens=30, metadata={"a": "b"}, **GREEDY
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    assert answer.object == "response" and answer.id.startswith("resp_") and answer.metadata == {"a": "b"}
    assert answer.instructions == "Be brief." and answer.error is None and answer.model == NAME
    assert answer.usage and chat.usage
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.usage.total_tokens == chat.usage.total_tokens
    assert answer.usage.input_tokens_details.cached_tokens > 0, "the chat before it left its prefix"


def test_cut_off_is_incomplete(client: OpenAI) -> None:
    answer = client.responses.create(input="Tell a long story.", max_output_tokens=4, **GREEDY)
    assert answer.status == "incomplete" and answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.usage and answer.usage.output_tokens == 4


def test_items_are_a_conversation(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "I am Ada."}, {"role": "assistant", "content": "Hello!"},
                  {"role": "user", "content": "Who am I?"}], max_tokens=20, **GREEDY
    )  # fmt: skip
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "I am "}, {"type": "input_text", "text": "Ada."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Hello!", "annotations": []}]},
        {"role": "user", "content": "Who am I?"},
    ]  # fmt: skip
    answer = client.responses.create(input=items, max_output_tokens=20, **GREEDY)
    assert answer.output_text == chat.choices[0].message.content
    follow: Any = [
        *items,
        *[o.model_dump(exclude_none=True) for o in answer.output],
        {"role": "user", "content": "And?"},
    ]
    assert client.responses.create(input=follow, max_output_tokens=5, **GREEDY).status in ("completed", "incomplete")


def test_events_of_a_text(client: OpenAI) -> None:
    whole = client.responses.create(input=RIVER, max_output_tokens=20, **GREEDY)
    events = list(client.responses.create(input=RIVER, max_output_tokens=20, stream=True, **GREEDY))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          f"response.{whole.status}"]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds[4:-4]) >= 2
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text and last.response.usage.output_tokens
    assert len({e.item_id for e in events if hasattr(e, "item_id")}) == 1


def test_the_clients_stream_helper(client: OpenAI) -> None:
    pytest.importorskip("xgrammar")
    form: Any = {"format": {"type": "json_schema", "name": "p", "schema": {"enum": ["Nile", "Atbarah"]}}}
    with client.responses.stream(input=RIVER, text=form, max_output_tokens=20, **GREEDY) as stream:
        texts = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and json.loads("".join(texts)) in ("Nile", "Atbarah")
    assert "".join(texts) == final.output_text


class Person(BaseModel):
    name: str
    age: int


def test_structured_text(client: OpenAI) -> None:
    pytest.importorskip("xgrammar")
    answer = client.responses.parse(input="Ada Lovelace was 36.", text_format=Person, max_output_tokens=100, **GREEDY)
    assert isinstance(answer.output_parsed, Person)
    form: Any = {"format": {"type": "json_schema", "name": "p", "schema": {"enum": ["x", "y"]}}}
    assert json.loads(client.responses.create(input="x?", text=form, **GREEDY).output_text) in ("x", "y")


def test_a_call_and_its_result(client: OpenAI, server: RunningServer) -> None:
    pytest.importorskip("xgrammar")
    asked: Any = {"input": "Add 3.", "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}, **GREEDY}
    answer = client.responses.create(max_output_tokens=60, **asked)
    [call] = answer.output
    assert call.type == "function_call" and call.name == "add" and call.status == "completed"
    assert isinstance(json.loads(call.arguments)["a"], int)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    follow: Any = [{"role": "user", "content": "Add 3."}, call.model_dump(exclude_none=True), result]
    second = client.responses.create(input=follow, tools=[TOOL], tool_choice="none", max_output_tokens=8, **GREEDY)
    assert second.output[0].type == "message"
    events = list(client.responses.create(stream=True, max_output_tokens=60, **asked))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    done: Any = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert len(pieces) > 1 and "".join(pieces) == done[0].arguments == call.arguments
    last: Any = events[-1]
    assert last.type == "response.completed" and last.response.output[0].arguments == call.arguments
    server.wait_idle()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"unknown": 1}, "unknown"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "zz"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema.not"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "x", "more": 1}]}, "input[0].more"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(client: OpenAI, change: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": NAME, "input": "x", **change}, cast_to=object)
    assert caught.value.param == param
