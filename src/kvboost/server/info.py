"""Small questions: models, health, version, metrics, and what the tokenizer does."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from kvboost import __version__
from kvboost.server.answers import Json
from kvboost.server.errors import ApiError
from kvboost.server.metrics import CONTENT_TYPE
from kvboost.server.prompts import chat_ids, chat_size, plain_messages, prompt_ids
from kvboost.server.sampling import require_model
from kvboost.server.schema import ERRORS, DetokenizeRequest, TokenizeRequest
from kvboost.server.state import ServerState, server_state
from kvboost.server.tools.plan import messages_for, plan_tools

router = APIRouter()
State = Annotated[ServerState, Depends(server_state)]


@router.get("/v1/models", tags=["OpenAI"])
async def models(state: State) -> Response:
    """The names this server answers to."""
    return Json({"object": "list", "data": [_model(state, name) for name in state.model_names]})


@router.get("/v1/models/{name:path}", responses=ERRORS, tags=["OpenAI"])
async def model(name: str, state: State) -> Response:
    """One of them."""
    return Json(_model(state, require_model(state, name)))


def _model(state: ServerState, name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": state.created, "owned_by": "kvboost",
            "root": state.model_names[0], "max_model_len": state.kv.max_model_len}  # fmt: skip


@router.get("/health", tags=["server"])
async def health(state: State) -> Response:
    """200 while the engine runs; 503 when it has ended."""
    return Response(status_code=503 if state.kv.engine.closed else 200)


@router.get("/ready", tags=["server"])
async def ready(state: State) -> Response:
    """200 when requests are taken; 503 before that, and during shutdown."""
    return Response(status_code=200 if state.ready and not state.kv.engine.closed else 503)


@router.get("/version", tags=["server"])
async def version() -> Response:
    """The version of KVBoost."""
    return Json({"version": __version__})


@router.get("/metrics", tags=["server"])
async def metrics(state: State) -> Response:
    """For Prometheus."""
    return Response(state.metrics.text(), media_type=CONTENT_TYPE)


@router.post("/tokenize", responses=ERRORS, tags=["tokens"])
async def tokenize(body: TokenizeRequest, state: State) -> Response:
    """Token ids of a text, or of a conversation through the chat template."""
    require_model(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give prompt or messages, one of them.", param="prompt", code="invalid_value")
    kv = state.kv
    if body.messages is not None:
        plan = plan_tools(body.tools, None, None, kv.tokenizer, state.config.tool_call_parser)
        messages = messages_for(plain_messages(body.messages), plan.tools, kv.tokenizer)
        ids = await state.prepare(chat_size(body.messages), lambda: chat_ids(
            kv, messages, tools=plan.tools, add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message, template_kwargs=body.chat_template_kwargs,
        ))  # fmt: skip
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
        ids = await state.prepare(len(text), lambda: prompt_ids(kv, text, special))
    strings = kv.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return Json({"count": len(ids), "max_model_len": kv.max_model_len, "tokens": ids, "token_strs": strings})


@router.post("/detokenize", responses=ERRORS, tags=["tokens"])
async def detokenize(body: DetokenizeRequest, state: State) -> Response:
    """The text of token ids, special tokens included."""
    require_model(state, body.model)
    ids = prompt_ids(state.kv, body.tokens) if body.tokens else []
    text = await state.prepare(4 * len(ids), lambda: state.kv.tokenizer.decode(ids) if ids else "")
    return Json({"prompt": text})
