"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from kvboost.api.collect import Continuation
from kvboost.engine.outputs import RequestOutput
from kvboost.server.answers import StreamAnswer, WholeAnswer, event
from kvboost.server.errors import ApiError
from kvboost.server.generation import Event, Generation
from kvboost.server.logprobs import chat_logprobs
from kvboost.server.prompts import chat_ids, chat_size, plain_messages
from kvboost.server.sampling import cache_salt, make_requests, require_model, sampling_params, wants_usage
from kvboost.server.schema import ERRORS, ChatRequest
from kvboost.server.state import ServerState, server_state
from kvboost.server.structured import asked_forms, require_form
from kvboost.server.tools.openai import delta as tool_delta
from kvboost.server.tools.openai import finish_reason
from kvboost.server.tools.openai import message as tool_message
from kvboost.server.tools.plan import ToolPlan, messages_for, plan_tools
from kvboost.server.usage import timing, usage

router = APIRouter()


@router.post("/v1/chat/completions", responses=ERRORS, tags=["OpenAI"])
async def chat_completions(
    body: ChatRequest, request: Request, state: Annotated[ServerState, Depends(server_state)]
) -> Response:
    """Answer a conversation."""
    arrival_s = time.perf_counter()
    model = require_model(state, body.model)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens: give max_completion_tokens or max_tokens, not both.", param="max_tokens",
                       code="invalid_value")  # fmt: skip
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs=true.", param="top_logprobs", code="invalid_value")
    with_usage = wants_usage(body)
    plan = plan_tools(
        body.tools, body.tool_choice, body.parallel_tool_calls, state.kv.tokenizer, state.config.tool_call_parser
    )
    asked = asked_forms(body)
    params = sampling_params(
        state, body,
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=await require_form(state, asked, plan),
    )  # fmt: skip
    messages = messages_for(plain_messages(body.messages), plan.tools, state.kv.tokenizer)
    ids = await state.prepare(chat_size(body.messages), lambda: chat_ids(
        state.kv, messages, tools=plan.tools, add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message, template_kwargs=body.chat_template_kwargs,
    ))  # fmt: skip
    groups = make_requests(state, [ids], params, cache_salt(request.scope, body.cache_salt), arrival_s)
    reply = _Reply(state, model, plan, body.top_logprobs or 0)
    if body.stream:
        return StreamAnswer(state, groups, _ChatStream(reply, params.n, with_usage))
    return WholeAnswer(state, groups, reply.whole)


class _Reply:
    """What is the same in every part of an answer."""

    def __init__(self, state: ServerState, model: str, plan: ToolPlan, top: int) -> None:
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()),
                     "model": model}  # fmt: skip
        self.texts = state.texts
        self.plan = plan
        self.top = top

    def whole(self, generation: Generation) -> dict[str, Any]:
        return {
            **self.head,
            "choices": [self._choice(c) for c in generation.continuations],
            "usage": usage(generation),
            "kvboost": timing(generation),
        }

    def _choice(self, continuation: Continuation) -> dict[str, Any]:
        done = continuation.completion()
        message: dict[str, Any] = {"role": "assistant", "content": done.text, "refusal": None}
        reader = self.plan.reader()
        if reader is not None:
            message |= tool_message(reader, continuation.pieces, done.finish_reason)
        logprobs = None
        if done.logprobs is not None:
            logprobs = chat_logprobs(self.texts, done.token_ids, done.logprobs, self.top)
        return {
            "index": done.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(done.finish_reason, "tool_calls" in message, self.plan.named),
            "stop_reason": done.stop_reason,
        }


class _ChatStream:
    """Chunks of `chat.completion.chunk`: one per token, or per piece of text that a token completes."""

    def __init__(self, reply: _Reply, n: int, wants_usage: bool) -> None:
        self._reply = reply
        self._head = {**reply.head, "object": "chat.completion.chunk"}
        self._begun = [False] * n
        self._readers = [reply.plan.reader() for _ in range(n)]
        self._has_calls = [False] * n
        self._wants_usage = wants_usage

    def write(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._chunks(index, output) for index, output in events)

    def _chunks(self, index: int, output: RequestOutput) -> bytes:
        data = b""
        if not self._begun[index]:
            self._begun[index] = True
            data = self._chunk(index, {"role": "assistant", "content": ""}, None)
        logprobs = None
        if output.logprobs:
            logprobs = chat_logprobs(self._reply.texts, output.token_ids, output.logprobs, self._reply.top)
        deltas = self._deltas(index, output)
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        for change in deltas:
            data += self._chunk(index, change, logprobs)
            logprobs = None
        if output.finish_reason is not None:
            reason = finish_reason(output.finish_reason, self._has_calls[index], self._reply.plan.named)
            data += self._chunk(index, {}, None, reason, output.stop_reason)
        return data

    def _deltas(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        reader = self._readers[index]
        if reader is None:
            return [{"content": output.text}] if output.text else []
        events = reader.feed(output.text, output.token_ids)
        if output.finish_reason is not None:
            events += reader.finish()
        deltas = [change for change in map(tool_delta, events) if change is not None]
        self._has_calls[index] |= any("tool_calls" in change for change in deltas)
        return deltas

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Any,
        finish_reason: str | None = None,
        stop_reason: Any = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        chunk = {**self._head, "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return event(chunk)

    def end(self, generation: Generation) -> bytes:
        if not self._wants_usage:
            return b"data: [DONE]\n\n"
        last = {**self._head, "choices": [], "usage": usage(generation), "kvboost": timing(generation)}
        return event(last) + b"data: [DONE]\n\n"
