"""POST /v1/embeddings: the model's last hidden state, pooled. Any decoder gives some; whether they are good is the model's.

Computed in the engine's thread between two steps, in batches no larger than a step.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from kvboost.api.embed import batches, check_embeddable, embed_batch
from kvboost.server.answers import Json
from kvboost.server.errors import ApiError
from kvboost.server.prompts import prompt_ids, prompt_size, split_prompt
from kvboost.server.sampling import require_model
from kvboost.server.schema import ERRORS, Strict, Tokens
from kvboost.server.state import ServerState, server_state

router = APIRouter()

MAX_INPUTS = 2048
MAX_TOTAL_TOKENS = 300_000
"""As OpenAI has it: one request must not keep the others waiting for minutes."""


class EmbeddingsRequest(Strict):
    """POST /v1/embeddings. `pooling` is ours: over which tokens the last hidden state is taken."""

    model: str | None = None
    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[Annotated[Tokens, Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, strict=True)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    user: str | None = None


@router.post("/v1/embeddings", responses=ERRORS, tags=["OpenAI"])
async def embeddings(
    body: EmbeddingsRequest, request: Request, state: Annotated[ServerState, Depends(server_state)]
) -> Response:
    """Unit vectors of texts or token ids."""
    name = require_model(state, body.model)
    kv = state.kv
    size = int(kv.model.config.get_text_config().hidden_size)
    if body.dimensions is not None and body.dimensions > size:
        raise ApiError(400, f"dimensions: got {body.dimensions}; this model's vectors have {size}.", param="dimensions",
                       code="invalid_value")  # fmt: skip
    given = split_prompt(body.input)
    prompts = await state.prepare(prompt_size(given), lambda: [prompt_ids(kv, p) for p in given])
    check_embeddable(kv, prompts)
    total = sum(map(len, prompts))
    if total > MAX_TOTAL_TOKENS:
        raise ApiError(400, f"input: has {total} tokens together; at most {MAX_TOTAL_TOKENS} are allowed. Send fewer "
                       "at once.", param="input", code="invalid_value")  # fmt: skip
    try:
        async with asyncio.timeout(state.config.request_timeout):
            vectors = await _vectors(state, request, prompts, body.pooling)
    except TimeoutError as error:
        raise ApiError(504, f"The request took longer than {state.config.request_timeout:g} s (--request-timeout).",
                       code="request_timeout") from error  # fmt: skip
    state.metrics.embedded(len(vectors), total)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.dimensions, body.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": total, "total_tokens": total}
    return Json({"object": "list", "data": data, "model": name, "usage": usage})


async def _vectors(state: ServerState, request: Request, prompts: Sequence[list[int]], pooling: str) -> list[Any]:
    """One vector per prompt. Between two batches other requests have their step, and a client that left is noticed."""
    found: list[Any] = [None] * len(prompts)
    for batch in batches(prompts, state.kv.config.max_num_batched_tokens or 1):
        if await request.is_disconnected():
            break
        vectors = await _in_engine(state, [prompts[i] for i in batch], pooling)
        for i, vector in zip(batch, vectors, strict=True):
            found[i] = vector
    return [vector for vector in found if vector is not None]


async def _in_engine(state: ServerState, prompts: list[list[int]], pooling: str) -> Any:
    return await state.ask(lambda _: embed_batch(state.kv.model, prompts, pooling))


def _encoded(vector: Any, dimensions: int | None, form: str) -> list[float] | str:
    """A vector cut to `dimensions` and made a unit vector again, as numbers or as base64 of little-endian float32."""
    if dimensions is not None:
        vector = vector[:dimensions]
        vector = vector / vector.norm().clamp(min=1e-12)
    if form == "float":
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode("ascii")
