"""Any OpenAI-compatible endpoint, over HTTP with server-sent events. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from kvboost.bench.engines.base import Answer, Batch
from kvboost.errors import ConfigError, EngineStepError

TIMEOUT_S = 600


class OpenAIEngine:
    """Sends token ids to `/completions`, or their text when the server refuses ids. Key: the variable OPENAI_API_KEY.

    `ignore_eos` and `min_tokens` are extensions that vLLM, llama.cpp and KVBoost know; a server that ignores them
    may answer with fewer tokens, which then shows in the counts.
    """

    def __init__(self, url: str, tokenizer: Any = None) -> None:
        url, _, model = url.partition("@")
        parts = urlsplit(url)
        if not parts.hostname:
            raise ConfigError("engines", f"got {url!r}; an endpoint looks like http://127.0.0.1:8000/v1")
        self.name = url
        self._secure = parts.scheme == "https"
        self._address = (parts.hostname, parts.port or (443 if self._secure else 80))
        self._path = parts.path.rstrip("/") or "/v1"
        self._tokenizer = tokenizer
        self._sends_text = False
        self._model = model or self._first_model()

    def generate(self, ids: list[int], max_new_tokens: int, ignore_eos: bool = True) -> Answer:
        try:
            return self._stream(ids, max_new_tokens, ignore_eos)
        except _Refused as refusal:
            if self._sends_text or self._tokenizer is None or refusal.status not in (400, 422):
                raise EngineStepError(str(refusal)) from refusal
            self._sends_text = True
            return self.generate(ids, max_new_tokens, ignore_eos)

    def batch(self, prompts: list[list[int]], max_new_tokens: int) -> Batch:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda ids: self.generate(ids, max_new_tokens), prompts))
        total = time.perf_counter() - start
        cached = [a.cached_tokens for a in answers if a.cached_tokens is not None]
        return Batch(
            [a.token_ids for a in answers], total, sum(a.output_tokens for a in answers), "a connection each", cached
        )

    def close(self) -> None:
        pass

    def _stream(self, ids: list[int], max_new_tokens: int, ignore_eos: bool) -> Answer:
        body = {
            "model": self._model,
            "prompt": self._tokenizer.decode(ids) if self._sends_text else ids,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"ignore_eos": True, "min_tokens": max_new_tokens} if ignore_eos else {}),
        }
        start = time.perf_counter()
        times: list[float] = []
        output: list[int] = []
        text = ""
        usage: dict[str, Any] = {}
        connection, response = self._request("POST", "/completions", body)
        try:
            for event in _events(response):
                if "error" in event:
                    raise EngineStepError(f"{self.name}: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    token_ids = choice.get("token_ids") or []
                    if choice.get("text") or token_ids:
                        times += [time.perf_counter() - start] * max(1, len(token_ids))
                    output += token_ids
                    text += choice.get("text") or ""
        finally:
            connection.close()
        if not times:
            raise EngineStepError(f"{self.name}: the stream ended without a token.")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        count = usage.get("completion_tokens") or len(output) or len(times)
        return Answer(output, times, time.perf_counter() - start, count, cached, text)

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/models")
        try:
            models = json.load(response)["data"]
            return str(models[0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError("engines", f"{self.name}/models lists no model. Name one: {self.name}@MODEL") from error
        finally:
            connection.close()

    def _request(self, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, Any]:
        """Raises `_Refused` for any status but 200, `EngineStepError` when nobody answers."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(*self._address, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineStepError(f"{self.name}: no answer ({error}). Is the server running?") from error
        if response.status != 200:
            detail = response.read(2000).decode("utf-8", "replace")
            connection.close()
            raise _Refused(response.status, f"{self.name}{path}: HTTP {response.status}: {detail}")
        return connection, response


class _Refused(EngineStepError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _events(response: Any) -> Any:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
