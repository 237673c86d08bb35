"""The API through OpenAI's own client, on SmolLM2: what it sends is understood, what it gets parses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from kvboost import KVBoost
from running_server import NAME, RunningServer

pytestmark = pytest.mark.real

RIVER = [{"role": "user", "content": "Name one river in Egypt. Answer with its name only."}]
LONG = [{"role": "system", "content": "You are a careful librarian. " * 40}, {"role": "user", "content": "Hello?"}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}


def greedy_text(kv: KVBoost, messages: Any, max_tokens: int) -> str:
    return kv.chat(messages, temperature=0, max_tokens=max_tokens).text  # type: ignore[union-attr]


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "kvboost"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_chat_says_what_the_engine_says(client: OpenAI, smollm2: KVBoost) -> None:
    answer = client.chat.completions.create(messages=RIVER, max_completion_tokens=12, **GREEDY)
    [choice] = answer.choices
    assert choice.message.content == greedy_text(smollm2, RIVER, 12)
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert answer.object == "chat.completion" and answer.model == NAME and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_whole_answer_token_by_token(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=RIVER, max_tokens=12, **GREEDY)
    chunks = list(client.chat.completions.create(
        messages=RIVER, max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
    ))  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(texts) == whole.choices[0].message.content
    assert whole.usage is not None and len(texts) >= whole.usage.completion_tokens - 1, "one chunk per token"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1


def test_the_second_question_finds_the_first_ones_kv(client: OpenAI, server: RunningServer) -> None:
    server.kv.reset_cache()
    messages: list[Any] = list(LONG)
    first = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "So?"}]
    second = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
    assert first.usage and second.usage and second.usage.prompt_tokens_details and first.usage.prompt_tokens_details
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= first.usage.prompt_tokens // 16 * 16
    split = second.usage.model_extra["kvboost"]
    assert split == {"cached": {"device": cached}, "computed": second.usage.prompt_tokens - cached}
    times = second.model_extra["kvboost"]
    assert times["blocks"] == [["device", cached], ["computed", second.usage.prompt_tokens - cached]]
    parts = times["queue_ms"] + times["lookup_ms"] + times["load_ms"] + times["compute_ms"]
    assert times["ttft_ms"] == pytest.approx(parts, abs=0.01) and 0 < times["ttft_ms"] <= times["total_ms"]
    assert times["lookup_ms"] > 0


def test_n_continuations_with_a_seed(client: OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model=NAME, messages=RIVER, n=3, seed=7, temperature=1.5, max_tokens=10, top_p=0.95
        )
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert answer.usage is not None and answer.usage.completion_tokens <= 30
        return [c.message.content for c in answer.choices]

    first = texts()
    assert len(set(first)) > 1 and texts() == first


def test_n_streams_are_told_apart(client: OpenAI) -> None:
    texts = {0: "", 1: ""}
    stream = client.chat.completions.create(
        model=NAME, messages=RIVER, n=2, seed=7, temperature=1.5, max_tokens=10, stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    whole = client.chat.completions.create(model=NAME, messages=RIVER, n=2, seed=7, temperature=1.5, max_tokens=10)
    assert texts == {c.index: c.message.content for c in whole.choices}


def test_stop_strings_end_the_text_and_are_left_out(client: OpenAI) -> None:
    text = client.chat.completions.create(messages=RIVER, max_tokens=12, **GREEDY).choices[0].message.content
    assert text
    word = text.split()[-1]
    stopped = client.chat.completions.create(messages=RIVER, max_tokens=12, stop=[word], **GREEDY).choices[0]
    assert stopped.message.content == text[: text.index(word)] and stopped.finish_reason == "stop"
    pieces = client.chat.completions.create(messages=RIVER, max_tokens=12, stop=word, stream=True, **GREEDY)
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == stopped.message.content


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=RIVER, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content and answer.usage and len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert bytes(entry.bytes or []).decode() == entry.token
    none = client.chat.completions.create(messages=RIVER, max_tokens=2, logprobs=True, **GREEDY)
    assert none.choices[0].logprobs.content[0].top_logprobs == []  # type: ignore[union-attr,index]
    streamed = client.chat.completions.create(
        messages=RIVER, max_tokens=6, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    tokens = [e.token for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert tokens == [e.token for e in content]


def test_a_bias_and_penalties_change_the_answer(client: OpenAI, smollm2: KVBoost) -> None:
    plain = client.chat.completions.create(messages=RIVER, max_tokens=8, **GREEDY).choices[0].message.content
    assert plain
    first = smollm2.tokenizer(plain, add_special_tokens=False)["input_ids"][0]
    banned = client.chat.completions.create(messages=RIVER, max_tokens=8, logit_bias={str(first): -100}, **GREEDY)
    assert banned.choices[0].message.content and not banned.choices[0].message.content.startswith(plain.split()[0])
    request: dict[str, Any] = {"prompt": "river river river river river", "max_tokens": 12, **GREEDY}
    often = client.completions.create(**request).choices[0].text
    rarely = client.completions.create(**request, frequency_penalty=2.0, presence_penalty=2.0).choices[0].text
    assert often != rarely


def test_vllms_extra_fields_reach_the_sampler(client: OpenAI) -> None:
    extra = {"min_tokens": 9, "ignore_eos": True, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1}
    answer = client.chat.completions.create(model=NAME, messages=RIVER, max_tokens=9, extra_body=extra)
    assert answer.usage and answer.usage.completion_tokens == 9


def test_completions_of_text_lists_and_token_ids(client: OpenAI, smollm2: KVBoost) -> None:
    text = "The capital of France is"
    ids = smollm2.tokenizer(text)["input_ids"]
    one = client.completions.create(prompt=text, max_tokens=4, **GREEDY)
    assert one.choices[0].text == smollm2.generate(text, temperature=0, max_tokens=4).text
    assert client.completions.create(prompt=ids, max_tokens=4, **GREEDY).choices[0].text == one.choices[0].text
    many = client.completions.create(prompt=[text, "One, two, three,"], max_tokens=4, n=2, **GREEDY)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert [c.text for c in many.choices[:2]] == [one.choices[0].text] * 2
    assert many.choices[2].text == many.choices[3].text != one.choices[0].text
    assert many.usage and many.usage.prompt_tokens == len(ids) + len(smollm2.tokenizer("One, two, three,")["input_ids"])
    both = client.completions.create(prompt=[ids, ids[:3]], max_tokens=2, **GREEDY)
    assert len(both.choices) == 2


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI, smollm2: KVBoost) -> None:
    text = "The capital of France is"
    answer = client.completions.create(prompt=text, max_tokens=1, echo=True, logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    assert found and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert answer.choices[0].text.startswith(text) and "".join(found.tokens) == answer.choices[0].text
    assert found.token_logprobs[0] is None and all(p is not None and p <= 0 for p in found.token_logprobs[1:])
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(found.tokens))]
    assert max(found.top_logprobs[-1].values()) == found.token_logprobs[-1]
    streamed = list(client.completions.create(prompt=text, max_tokens=3, echo=True, stream=True, **GREEDY))
    assert "".join(c.choices[0].text for c in streamed).startswith(text)


def test_a_streamed_completion_is_the_whole_one(client: OpenAI) -> None:
    request: dict[str, Any] = {"prompt": ["Once upon a time", "In the year"], "max_tokens": 10, **GREEDY}
    whole = client.completions.create(**request)
    texts = ["", ""]
    last = None
    for chunk in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        last = chunk
    assert texts == [c.text for c in whole.choices]
    assert last is not None and last.usage is not None and whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_text_parts_are_joined_and_empty_fields_of_answers_may_come_back(client: OpenAI, smollm2: KVBoost) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Name one river in Egypt. "},
                                                     {"type": "text", "text": "Answer with its name only."}]}]  # fmt: skip
    answer = client.chat.completions.create(messages=parts, max_tokens=12, **GREEDY)
    assert answer.choices[0].message.content == greedy_text(smollm2, RIVER, 12)
    again = [*parts, answer.choices[0].message.model_dump(), {"role": "user", "content": "Another?"}]
    assert client.chat.completions.create(messages=again, max_tokens=2, **GREEDY).choices


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": "two"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"store": True}, "store"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"functions": []}, "functions"),
    ({"nonsense": 1}, "nonsense"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
     "messages[0].content[0].type"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[json.dumps(fields)[:60] for fields, _ in REFUSED])
def test_what_is_wrong_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    body = {"model": NAME, "messages": RIVER, "max_completion_tokens": 2, **fields}
    if "max_tokens" in fields and "max_completion_tokens" not in fields:
        del body["max_completion_tokens"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=httpx.Response)
    assert caught.value.param == param, caught.value.message
    assert caught.value.type == "invalid_request_error" and param.split("[")[0].split(".")[0] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"prompt": []}, "prompt"), ({"prompt": [-1]}, "prompt[0]"),
     ({"prompt": [10**7]}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
     ({"logprobs": 101}, "logprobs"), ({"echo": True, "logprobs": 1, "stream": True}, "echo")],
    ids=str,
)  # fmt: skip
def test_completions_refuse_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 2, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body=body, cast_to=httpx.Response)
    assert (caught.value.param or "").split("[")[0] == param.split("[")[0], caught.value.message


def test_errors_are_the_clients_exception_types(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=RIVER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="river " * 9000, **GREEDY)
    assert long.value.code == "context_length_exceeded" and long.value.param == "prompt"
    with pytest.raises(openai.NotFoundError):
        client.post("/nothing/here", body={}, cast_to=httpx.Response)


def test_async_requests_share_the_batch(server: RunningServer) -> None:
    async def ask() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str | None:
                messages: list[Any] = [{"role": "user", "content": f"Count to {i}."}]
                if i % 2:
                    answer = await client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
                    return answer.choices[0].message.content
                text = ""
                stream = await client.chat.completions.create(messages=messages, max_tokens=8, stream=True, **GREEDY)
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            return list(await asyncio.gather(*(one(i) for i in range(8))))

    texts = asyncio.run(ask())
    assert texts == [greedy_text(server.kv, [{"role": "user", "content": f"Count to {i}."}], 8) for i in range(8)]


def test_langchain_talks_to_it(server: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        model=NAME, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=12, max_retries=0
    )
    expected = greedy_text(server.kv, RIVER, 12)
    answer = chat.invoke([("user", RIVER[0]["content"])])
    assert answer.content == expected and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream([("user", RIVER[0]["content"])])) == expected
