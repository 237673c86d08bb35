"""Tools through OpenAI's client on SmolLM2, which was never taught any: the grammar makes it call."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")

from openai import OpenAI

from kvboost import KVBoost
from kvboost.server.errors import ApiError
from kvboost.server.tools.formats import FORMATS, find_format
from kvboost.server.tools.plan import messages_for, plan_tools
from running_server import NAME, RunningServer

pytestmark = pytest.mark.real

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {
    "$defs": {"n": {"type": "integer", "minimum": -999, "maximum": 999}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add": ADD}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK: Any = [{"role": "user", "content": "What is the weather in Paris, and what is 3 + 4?"}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 100}


def check_calls(calls: Any) -> None:
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def joined(chunks: Any) -> tuple[list[dict[str, Any]], str, str | None]:
    """Calls, text and finish_reason of a stream, checking its order: index, id and name first, arguments after."""
    calls: list[dict[str, Any]] = []
    text, reason = "", None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or ():
                if part.index == len(calls):
                    assert part.id and part.type == "function" and part.function.name and part.function.arguments == ""
                    calls.append({"id": part.id, "name": part.function.name, "arguments": "", "pieces": 0})
                else:
                    assert part.index == len(calls) - 1 and part.id is None and part.function.name is None
                    calls[-1]["arguments"] += part.function.arguments
                    calls[-1]["pieces"] += 1
    return calls, text, reason


@pytest.mark.parametrize("parallel", [True, False])
def test_required_whole_and_streamed(client: OpenAI, parallel: bool) -> None:
    asked: Any = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel, **GREEDY}
    answer = client.chat.completions.create(**asked)
    choice = answer.choices[0]
    if choice.finish_reason == "tool_calls":
        check_calls(choice.message.tool_calls)
    else:  # a small model may list calls until it is cut off
        assert parallel and choice.finish_reason == "length"
        check_calls((choice.message.tool_calls or [])[:-1])
    assert choice.message.content is None
    assert parallel or len(choice.message.tool_calls or []) == 1
    calls, text, reason = joined(client.chat.completions.create(stream=True, **asked))
    assert text == "" and reason == choice.finish_reason
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c.function.name, c.function.arguments) for c in choice.message.tool_calls or []
    ]
    assert calls[0]["pieces"] > 3, "arguments arrive as they are made"


def test_a_named_function(client: OpenAI) -> None:
    asked: Any = {
        "messages": ASK, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}, **GREEDY
    }  # fmt: skip
    choice = client.chat.completions.create(**asked).choices[0]
    assert [c.function.name for c in choice.message.tool_calls or []] == ["add"] and choice.finish_reason == "stop"
    check_calls(choice.message.tool_calls)
    calls, _, reason = joined(client.chat.completions.create(stream=True, **asked))
    assert [c["name"] for c in calls] == ["add"] and reason == "stop"
    assert json.loads(calls[0]["arguments"]) == json.loads((choice.message.tool_calls or [])[0].function.arguments)


def test_several_answers_each_with_its_calls(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}, n=3,
        model=NAME, temperature=1.0, seed=3, max_tokens=120, logprobs=True,
    )  # fmt: skip
    for choice in answer.choices:
        check_calls(choice.message.tool_calls)
    assert len({c.message.tool_calls[0].id for c in answer.choices if c.message.tool_calls}) == 3


def test_the_loop_of_call_and_result(client: OpenAI) -> None:
    """What the client sends back of a call is understood, in a template that knows neither tools nor empty content."""
    first = client.chat.completions.create(
        messages=ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}}, **GREEDY
    )
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    again = client.chat.completions.create(messages=[*ASK, message, result], tools=TOOLS, tool_choice="none", **GREEDY)
    assert again.choices[0].message.tool_calls is None and again.choices[0].message.content
    assert again.usage and first.usage and again.usage.prompt_tokens > 0


def test_auto_reads_calls_that_the_model_writes(client: OpenAI, server: RunningServer) -> None:
    """The model is shown a call of its own; what it repeats is read as one."""
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    messages: Any = [{"role": "user", "content": "Add 3 and 4."}, {"role": "assistant", "content": written}] * 4
    asked: Any = {"messages": [*messages, messages[0]], "tools": TOOLS, **GREEDY}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []] == [
        ("add", '{"a": 3, "b": 4}')
    ]
    calls, text, reason = joined(client.chat.completions.create(stream=True, **asked))
    assert [c["arguments"] for c in calls] == ['{"a": 3, "b": 4}'] and reason == "tool_calls" and text == ""
    server.wait_idle()


@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_function_that_the_model_calls_by_itself(client: OpenAI, strict: bool) -> None:
    """It repeats the call it sees, which lacks a field that the schema wants; only a grammar makes it write one."""
    schema = {**ADD, "properties": {**ADD["properties"], "unit": {"enum": ["kg"]}}, "required": ["a", "b", "unit"]}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": schema, "strict": strict}}, TOOLS[0]]
    earlier = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    messages: Any = [
        *ASK, {"role": "assistant", "content": earlier},
        {"role": "user", "content": "Now call add with 5 and 6 the same way."},
    ]  # fmt: skip
    asked: Any = {"messages": messages, "tools": tools, **GREEDY}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 5, "b": 6, **({"unit": "kg"} if strict else {})}
    (streamed,), _, _ = joined(client.chat.completions.create(stream=True, **asked))
    assert streamed["arguments"] == call.function.arguments


def test_strict_is_refused_where_it_could_not_be_kept(smollm2: KVBoost) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}]
    for parser in ("llama3", "mistral"):
        with pytest.raises(ApiError) as caught:
            plan_tools(tools, "auto", None, smollm2.tokenizer, parser)
        assert caught.value.param == "tools[0].function.strict" and "'required'" in str(caught.value)
        assert plan_tools(tools, "required", None, smollm2.tokenizer, parser).structured_outputs is not None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {
            "type": "object", "properties": {"x": {"not": {}}}}}}]}, "tools[0].function.parameters.properties.x.not"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "more": 1}}]}, "tools[0].function.more"),
        ({"tools": TOOLS * 70}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "zz"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {
            "type": "object", "properties": {"x": {"not": {}}}}}}], "tool_choice": "required"},
         "tools[0].function.parameters.properties.x.not"),
    ],
)  # fmt: skip
def test_malformed_tools_are_named(client: OpenAI, change: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=ASK, extra_body=change, **GREEDY)
    assert caught.value.param == param


def test_the_format_follows_the_template() -> None:
    assert find_format(None, "{{ '[TOOL_CALLS]' }}").name == "mistral"
    assert find_format(None, "<tool_call> {{ tools }}").name == "hermes"
    assert find_format(None, "<|python_tag|>").name == "llama3"
    assert find_format(None, 'ipython {"parameters": ...}').name == "llama3"
    assert find_format(None, "nothing").name == "hermes"
    assert find_format("llama3", "<tool_call>") is FORMATS["llama3"]
    with pytest.raises(Exception, match="XML"):
        find_format(None, "<tool_call><function=f><parameter=x>")
    with pytest.raises(Exception, match="known: hermes, llama3, mistral"):
        find_format("yaml", "")


def test_templates_without_tools_are_told_in_words(smollm2: KVBoost) -> None:
    plan = plan_tools(TOOLS, None, None, smollm2.tokenizer, None)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    told = messages_for(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"},
         {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "3"}],
        plan.tools, smollm2.tokenizer,
    )  # fmt: skip
    assert told[0]["content"].startswith("Be brief.\n\n# Tools") and '"get_weather"' in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert told[3] == {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}

    class Knowing:
        chat_template = "{{ tools }} <tool_call>"

    same = [{"role": "user", "content": "x"}]
    assert messages_for(same, plan.tools, Knowing()) == same
