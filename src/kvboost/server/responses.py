"""POST /v1/responses: OpenAI's newer interface, without its memory."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from kvboost.engine.sampling_params import SamplingParams
from kvboost.server.answers import StreamAnswer, WholeAnswer, dumps
from kvboost.server.errors import ApiError
from kvboost.server.generation import Event, Generation
from kvboost.server.prompts import chat_ids, chat_size, plain_messages
from kvboost.server.responses_input import ResponsesRequest, messages_of, nested_choice, nested_tools, text_format
from kvboost.server.sampling import cache_salt, make_requests, require_model, sampling_params
from kvboost.server.schema import ERRORS
from kvboost.server.state import ServerState, server_state
from kvboost.server.structured import require_form, structured_outputs
from kvboost.server.tools.openai import collect
from kvboost.server.tools.plan import ToolPlan, messages_for, plan_tools
from kvboost.server.tools.reader import CallBegin, CallEnd, CallPiece, Text, ToolEvent
from kvboost.server.usage import timing, usage

router = APIRouter()


@router.post("/v1/responses", responses=ERRORS, tags=["OpenAI"])
async def responses(
    body: ResponsesRequest, request: Request, state: Annotated[ServerState, Depends(server_state)]
) -> Response:
    """Answer a conversation given as items."""
    arrival_s = time.perf_counter()
    model = require_model(state, body.model)
    messages = messages_of(body)
    plan = _plan(body, state)
    shown_format, form = text_format(body.text)
    wanted = {"text.format": form, "structured_outputs": structured_outputs(body.structured_outputs)}
    params = sampling_params(
        state, body, max_tokens=body.max_output_tokens, structured_outputs=await require_form(state, wanted, plan)
    )
    plain = messages_for(plain_messages(messages), plan.tools, state.kv.tokenizer)
    ids = await state.prepare(chat_size(messages), lambda: chat_ids(state.kv, plain, tools=plan.tools))
    groups = make_requests(state, [ids], params, cache_salt(request.scope, body.cache_salt), arrival_s)
    reply = _Reply(body, params, model, shown_format, plan)
    if body.stream:
        return StreamAnswer(state, groups, _ResponseStream(reply))
    return WholeAnswer(state, groups, reply.whole)


def _plan(body: ResponsesRequest, state: ServerState) -> ToolPlan:
    try:
        return plan_tools(
            nested_tools(body.tools), nested_choice(body.tool_choice), body.parallel_tool_calls, state.kv.tokenizer,
            state.config.tool_call_parser,
        )  # fmt: skip
    except ApiError as error:  # this API has no `function` between a tool and its fields
        param = (error.param or "tools").replace(".function", "")
        message = str(error).replace(error.param or "", param, 1)
        raise ApiError(error.status, message, param=param, code=error.code) from error


class _Reply:
    """What is the same in every form of an answer."""

    def __init__(
        self, body: ResponsesRequest, params: SamplingParams, model: str, shown_format: dict[str, Any], plan: ToolPlan
    ) -> None:
        self.plan = plan
        self._fields = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "error": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "background": False, "reasoning": {"effort": None, "summary": None},
            "store": False, "temperature": params.temperature, "text": {"format": shown_format},
            "tool_choice": body.tool_choice or "auto", "tools": [_shown_tool(tool) for tool in body.tools or ()],
            "top_p": params.top_p, "truncation": "disabled", "user": body.user,
        }  # fmt: skip

    def response(self, status: str, output: Sequence[dict[str, Any]], generation: Generation | None) -> dict[str, Any]:
        """The response object. generation: the finished one, for the counts; None: not yet."""
        counts: dict[str, Any] = {"usage": None}
        if generation is not None:
            counts = {"usage": _usage(generation), "kvboost": timing(generation)}
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._fields, "status": status, "incomplete_details": details, "output": list(output), **counts}

    def whole(self, generation: Generation) -> dict[str, Any]:
        (continuation,) = generation.continuations
        reader = self.plan.reader()
        pieces = continuation.pieces
        events: list[ToolEvent] = []
        for text, ids in pieces:
            events += reader.feed(text, ids) if reader is not None else [Text(text)]
        events += reader.finish() if reader is not None else []
        status = _status(continuation.finish_reason)
        found = collect(events, cut_off=status == "incomplete")
        output = [_message(found["content"], status)] if found["content"] or "tool_calls" not in found else []
        for call in found.get("tool_calls", ()):
            output.append(_call(call["id"], call["function"]["name"], call["function"]["arguments"], status))
        return self.response(status, output, generation)


class _ResponseStream:
    """OpenAI's events: response.created, those of each item in turn, response.completed or response.incomplete.

    Invariant: `_output` holds the items that are done; at most one item is open, a message or a call.
    """

    def __init__(self, reply: _Reply) -> None:
        self._reply = reply
        self._reader = reply.plan.reader()
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._text = ""
        self._number = 0
        self._status = "completed"

    def write(self, events: Sequence[Event]) -> bytes:
        data = b""
        if self._number == 0:
            for kind in ("response.created", "response.in_progress"):
                data += self._event(kind, response=self._reply.response("in_progress", (), None))
        for _, output in events:
            if self._reader is None:
                found: list[ToolEvent] = [Text(output.text)] if output.text else []
            else:
                found = self._reader.feed(output.text, output.token_ids)
                if output.finish_reason is not None:
                    found += self._reader.finish()
            if output.finish_reason is not None:
                self._status = _status(output.finish_reason)
            data += b"".join(map(self._told, found))
        return data

    def end(self, generation: Generation) -> bytes:
        data = b""
        if self._item is None and not self._output:
            data += self._open(_message("", "in_progress"))
        data += self._close(self._status)
        response = self._reply.response(self._status, self._output, generation)
        return data + self._event(f"response.{self._status}", response=response)

    def _told(self, event: ToolEvent) -> bytes:
        if isinstance(event, Text):
            data = b""
            if self._item is None or self._item["type"] != "message":
                data = self._close("completed") + self._open(_message("", "in_progress"))
            self._text += event.text
            return data + self._item_event("response.output_text.delta", content_index=0, delta=event.text, logprobs=[])
        if isinstance(event, CallBegin):
            return self._close("completed") + self._open(_call(event.id, event.name, "", "in_progress"))
        if isinstance(event, CallPiece):
            self._text += event.arguments
            return self._item_event("response.function_call_arguments.delta", delta=event.arguments)
        assert isinstance(event, CallEnd)
        return self._close("completed") if event.whole else b""

    def _open(self, item: dict[str, Any]) -> bytes:
        self._item, self._text = item, ""
        is_message = item["type"] == "message"
        shown = {**item, "content": []} if is_message else item
        data = self._event("response.output_item.added", output_index=len(self._output), item=shown)
        if is_message:
            data += self._item_event("response.content_part.added", content_index=0, part=_part(""))
        return data

    def _close(self, status: str) -> bytes:
        if self._item is None:
            return b""
        item, text = self._item, self._text
        if item["type"] == "message":
            item = {**_message(text, status), "id": item["id"]}
            data = self._item_event("response.output_text.done", content_index=0, text=text, logprobs=[])
            data += self._item_event("response.content_part.done", content_index=0, part=_part(text))
        else:
            item = {**item, "arguments": text, "status": status}
            data = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        data += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = None
        return data

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + dumps(body) + b"\n\n"


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _message(text: str, status: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": status, "role": "assistant",
            "content": [_part(text)]}  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": status, "call_id": call_id, "name": name,
            "arguments": arguments}  # fmt: skip


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "description": None, "parameters": None, **tool}


def _usage(generation: Generation) -> dict[str, Any]:
    counts = usage(generation)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "kvboost": counts["kvboost"],
    }
