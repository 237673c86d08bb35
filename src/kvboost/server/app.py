"""Puts the FastAPI application together: routes, the guard before them, and OpenAI's form for every error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from kvboost import __version__
from kvboost.api.kvboost import KVBoost
from kvboost.server import cache, chat, completions, embeddings, events, info, responses
from kvboost.server.answers import error_response
from kvboost.server.errors import ApiError, validation_error
from kvboost.server.guard import Guard
from kvboost.server.page import page
from kvboost.server.settings import ServerConfig
from kvboost.server.state import ServerState
from kvboost.server.tracing import Tracing

ROUTERS = (
    info.router, completions.router, chat.router, responses.router, embeddings.router, cache.router, events.router,
    page.router,
)  # fmt: skip


def create_app(
    kv: KVBoost, config: ServerConfig | None = None, model_name: str = "model", tracing: Tracing | None = None
) -> FastAPI:
    """The application around `kv`, which stays the caller's to close.

    model_name: what the model is called where `served_model_name` says nothing. tracing: closed with the application.
    While it runs, `app.state.server` is its `ServerState`.
    """
    settings = config or ServerConfig()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.server = state = ServerState(kv, settings, model_name, tracing)
        state.ready = True
        try:
            yield
        finally:
            state.close()
            if tracing is not None:
                tracing.close()

    app = FastAPI(title="KVBoost", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, config=settings)
    if settings.allowed_origins:  # outside the guard: a browser asks first, and without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {404: f"There is no {request.method} {request.url.path[:200]} here.",
            405: f"{request.url.path[:200]} does not take {request.method}."}  # fmt: skip
    message = told.get(error.status_code, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))
