"""POST /v1/completions: text or token ids, continued without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from kvboost.engine.outputs import RequestOutput
from kvboost.engine.request import Request as EngineRequest
from kvboost.server.answers import StreamAnswer, WholeAnswer, event
from kvboost.server.errors import ApiError
from kvboost.server.generation import Event, Generation
from kvboost.server.logprobs import completion_logprobs
from kvboost.server.prompts import prompt_ids, prompt_size, split_prompt
from kvboost.server.sampling import cache_salt, make_requests, require_model, sampling_params, wants_usage
from kvboost.server.schema import ERRORS, CompletionRequest
from kvboost.server.state import ServerState, server_state
from kvboost.server.structured import asked_forms, require_form
from kvboost.server.usage import timing, usage

router = APIRouter()


@router.post("/v1/completions", responses=ERRORS, tags=["OpenAI"])
async def completions(
    body: CompletionRequest, request: Request, state: Annotated[ServerState, Depends(server_state)]
) -> Response:
    """Continue one prompt or several. Choices of prompt i are numbered from i * n."""
    arrival_s = time.perf_counter()
    model = require_model(state, body.model)
    with_usage = wants_usage(body)
    if body.echo and body.stream and body.logprobs is not None:
        raise ApiError(400, "echo: with logprobs, it cannot be streamed. Leave out stream.", param="echo",
                       code="unsupported_parameter")  # fmt: skip
    asked = asked_forms(body)
    params = sampling_params(
        state, body, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None,
        max_tokens=body.max_tokens, structured_outputs=await require_form(state, asked),
    )  # fmt: skip
    prompts = split_prompt(body.prompt)
    ids = await state.prepare(
        prompt_size(prompts), lambda: [prompt_ids(state.kv, p, body.add_special_tokens) for p in prompts]
    )
    groups = make_requests(state, ids, params, cache_salt(request.scope, body.cache_salt), arrival_s)
    reply = _Reply(state, model, prompts if body.echo else None, body.logprobs, params.n)
    if body.stream:
        return StreamAnswer(state, groups, _CompletionStream(reply, groups, with_usage))
    return WholeAnswer(state, groups, reply.whole)


class _Reply:
    """Turns continuations into choices. echo: the prompts to be repeated, or None."""

    def __init__(
        self, state: ServerState, model: str, echo: Sequence[Any] | None, logprobs: int | None, n: int
    ) -> None:
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
                     "model": model}  # fmt: skip
        self._tokenizer = state.kv.tokenizer
        self.texts = state.texts
        self._echo = echo
        self.top = logprobs
        self._n = n

    def whole(self, generation: Generation) -> dict[str, Any]:
        return {**self.head, "choices": [self._choice(c.completion(), c.request) for c in generation.continuations],
                "usage": usage(generation), "kvboost": timing(generation)}  # fmt: skip

    def prompt_text(self, index: int) -> str:
        """What `echo` puts before choice `index`."""
        if self._echo is None:
            return ""
        prompt = self._echo[index // self._n]
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))

    def _choice(self, completion: Any, request: EngineRequest) -> dict[str, Any]:
        logprobs = None
        if self.top is not None:
            tokens, rows = completion.token_ids, list(completion.logprobs or ())
            if self._echo is not None:
                tokens, rows = [*request.prompt_ids, *tokens], [*(request.prompt_logprobs or ()), *rows]
            logprobs = completion_logprobs(self.texts, tokens, rows, self.top)
        return {"index": completion.index, "text": self.prompt_text(completion.index) + completion.text,
                "logprobs": logprobs, "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason}  # fmt: skip


class _CompletionStream:
    """Chunks of `text_completion`."""

    def __init__(self, reply: _Reply, groups: Sequence[Sequence[EngineRequest]], wants_usage: bool) -> None:
        self._reply = reply
        self._offsets = [-1] * sum(len(group) for group in groups)
        self._wants_usage = wants_usage

    def write(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._chunk(index, output) for index, output in events)

    def _chunk(self, index: int, output: RequestOutput) -> bytes:
        text = output.text
        if self._offsets[index] < 0:
            before = self._reply.prompt_text(index)
            text = before + text
            self._offsets[index] = len(before)
        logprobs = None
        if self._reply.top is not None and output.logprobs:
            logprobs = completion_logprobs(
                self._reply.texts, output.token_ids, output.logprobs, self._reply.top, self._offsets[index]
            )
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        if not text and logprobs is None and output.finish_reason is None:
            return b""
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason,
                  "stop_reason": output.stop_reason}  # fmt: skip
        chunk: dict[str, Any] = {**self._reply.head, "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return event(chunk)

    def end(self, generation: Generation) -> bytes:
        if not self._wants_usage:
            return b"data: [DONE]\n\n"
        last = {**self._reply.head, "choices": [], "usage": usage(generation), "kvboost": timing(generation)}
        return event(last) + b"data: [DONE]\n\n"
