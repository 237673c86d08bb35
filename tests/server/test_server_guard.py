"""Who is let in and what is let through: keys, hosts, origins, sizes, speeds, depth. On a tiny model."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kvboost import KVBoost
from kvboost.errors import ConfigError
from kvboost.server.settings import ApiKey, ServerConfig
from running_server import NAME, RunningServer, running
from small_model import free_engine

PROMPT = {"prompt": "abcdefghijklmnopqrstuvwxyz" * 4, "max_tokens": 2, "temperature": 0}


@contextmanager
def served(kv: KVBoost, **settings: Any) -> Iterator[tuple[RunningServer, httpx.Client]]:
    with running(kv, **settings) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield server, http


def code(response: httpx.Response) -> str:
    """The error's code; every error has the whole body of OpenAI's."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return str(error["code"])


# -- who asks ----------------------------------------------------------------------------------------------------------


def test_keys(small: KVBoost) -> None:
    with served(small, api_key=("first", "second:salt")) as (_, http):
        for path in ("/health", "/ready", "/version"):
            assert http.get(path).status_code == 200
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Authorization": "Bearer"},
                       {"Authorization": "Basic first"}, {"Authorization": "Bearer second:salt"}):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/v1/cache", "/v1/events", "/no/such/path"):
                refused = http.get(path, headers=header)
                assert refused.status_code == 401 and code(refused) == "invalid_api_key", (path, header)
            assert http.post("/v1/completions", json=PROMPT, headers=header).status_code == 401
        for key in ("first", "second"):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        twice = [("Authorization", "Bearer first"), ("Authorization", "Bearer wrong")]
        assert http.get("/v1/models", headers=twice).status_code == 400


def test_a_salted_key_shares_no_kv_and_may_not_touch_that_of_others(small: KVBoost) -> None:
    with served(small, api_key=("open", "tenant:s1", "rival:s2")) as (_, http):

        def cached(key: str, **fields: Any) -> int:
            answer = http.post("/v1/completions", json={**PROMPT, **fields}, headers={"Authorization": f"Bearer {key}"})
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("open") == 0 and cached("open") > 0
        assert cached("tenant") == 0 and cached("tenant") > 0, "not the KV of the open key"
        assert cached("rival") == 0 and cached("tenant", cache_salt="own") == 0
        # Whoever has no salt of their own cannot write themselves into a tenant's.
        assert cached("open", cache_salt="s1\x01own") == 0
        forged = http.post("/v1/completions", json={**PROMPT, "cache_salt": "s1\x00own"},
                           headers={"Authorization": "Bearer open"})  # fmt: skip
        assert forged.status_code == 400 and forged.json()["error"]["param"] == "cache_salt"
        tenant = {"Authorization": "Bearer tenant"}
        assert http.post("/v1/cache/reset", headers=tenant).status_code == 403
        assert http.post("/v1/cache/warm", json={"prompt": "x" * 64, "pin": True}, headers=tenant).status_code == 403
        assert "top_prefixes" not in http.get("/v1/cache", headers=tenant).json()
        assert "top_prefixes" in http.get("/v1/cache", headers={"Authorization": "Bearer open"}).json()


@pytest.mark.parametrize("text", ["", ":salt", "key:", "two words", "schlüssel"])
def test_keys_that_could_never_match_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        ApiKey.parse(text)


def test_a_foreign_host_name_is_refused_on_loopback(small: KVBoost) -> None:
    with served(small, allowed_hosts=("box.local",)) as (server, http):
        for host in (f"127.0.0.1:{server.port}", "localhost", "LOCALHOST:1", "[::1]:80", "box.local:8000"):
            assert http.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]"):
            refused = http.get("/v1/models", headers={"Host": host})
            assert refused.status_code == 421 and code(refused) == "wrong_host"


def test_pages_of_other_origins_are_refused_unless_allowed(small: KVBoost) -> None:
    with served(small) as (server, http):
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            refused = http.post("/v1/completions", json=PROMPT, headers={"Origin": origin})
            assert refused.status_code == 403 and code(refused) == "wrong_origin"
        own = http.post("/v1/completions", json=PROMPT, headers={"Origin": server.url})
        assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
        simple = http.post(
            "/v1/cache/warm", content=json.dumps({"prompt": "x" * 64}), headers={"Content-Type": "text/plain"}
        )
        assert simple.status_code == 400 and code(simple) == "invalid_json"
    with served(small, allowed_origins=("http://friend.example",), api_key=("k",)) as (_, http):
        asked = http.options("/v1/completions", headers={
            "Origin": "http://friend.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"})  # fmt: skip
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "http://friend.example"
        there = http.get("/v1/models", headers={"Origin": "http://friend.example", "Authorization": "Bearer k"})
        assert there.status_code == 200
        assert http.get("/v1/models", headers={"Origin": "http://evil.example", "Authorization": "Bearer k"}).is_error


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_large_bodies_are_refused_announced_or_not(small: KVBoost) -> None:
    with served(small, max_body_mib=0.125) as (_, http):
        large = json.dumps({"prompt": "x" * 200_000}).encode()
        refused = http.post("/v1/completions", content=large, headers={"Content-Type": "application/json"})
        assert refused.status_code == 413 and code(refused) == "body_too_large"

        def pieces() -> Iterator[bytes]:
            yield from (large[i : i + 1000] for i in range(0, len(large), 1000))

        streamed = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
        assert streamed.status_code == 413
        assert http.post("/v1/completions", json=PROMPT).status_code == 200


def test_deep_json_is_refused_and_deep_text_is_not(small: KVBoost) -> None:
    with served(small) as (_, http):
        for deep in ("[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000, '{"prompt":' + "[" * 200 + "]" * 200 + "}"):
            refused = http.post("/v1/completions", content=deep, headers={"Content-Type": "application/json"})
            assert refused.status_code == 400 and code(refused) == "invalid_json"
        text = '[{"' * 60 + '\\"[[[[' * 10
        assert http.post("/v1/completions", json={**PROMPT, "prompt": text}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nul", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
     b'{"prompt": "\\ud800"}', b'{"prompt": "x", "cache_salt": "\\udfff"}',
     b'{"prompt": "x", "\\ud800": 1}', b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x", "user": 5}'],
    ids=lambda c: repr(c[:40]),
)  # fmt: skip
def test_broken_json_is_a_400(small: KVBoost, content: bytes) -> None:
    with served(small) as (_, http):
        refused = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert refused.status_code == 400, refused.text
        code(refused)


def test_odd_json_is_fine(small: KVBoost) -> None:
    with served(small) as (_, http):
        twice = b'{"prompt": "x", "max_tokens": 99999, "max_tokens": 2, "prompt": "\\u0000\\u001b[2J\\u202eabc", "stop": "\\ud800"}'
        answer = http.post("/v1/completions", content=twice, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize(
    "begun",
    [b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n",
     b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
     b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"],
    ids=["silent", "headers", "after an answer", "body", "chunks"],
)  # fmt: skip
def test_slow_clients_are_cut(small: KVBoost, begun: bytes) -> None:
    """A byte now and then keeps no connection alive."""
    with served(small, client_timeout=0.6) as (server, http):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(begun)
            drip = b"" if b"POST" in begun and b"\r\n\r\n" in begun else b"X-A: b\r\n" if b"POST" in begun else b"\r\n"
            with pytest.raises(ConnectionError):
                for _ in range(60):  # rounds of 0.1 s, not the clock: a paused test run loses none
                    sock.sendall(drip if begun else b"")
                    sock.settimeout(0.1)
                    try:
                        if not sock.recv(65536):
                            raise ConnectionResetError
                    except TimeoutError:
                        continue
        assert http.get("/health").status_code == 200


def test_large_heads_are_refused(small: KVBoost) -> None:
    with served(small) as (server, http):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            with pytest.raises(OSError):
                for _ in range(100):
                    sock.sendall(b"X-Filler: " + b"y" * 8000 + b"\r\n")
                    time.sleep(0.005)
        assert http.get("/health").status_code == 200
        # A large body in the same packet as its head is no large head.
        body = json.dumps({**PROMPT, "prompt": "x" * 100, "user": "u" * 150_000}).encode()
        assert (
            http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}).status_code == 200
        )


# -- limits of the engine ----------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_with_retry_after() -> None:
    with free_engine(max_num_waiting=2, max_num_seqs=1, num_blocks=128) as kv, served(kv) as (_, http):
        refused = http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 2})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        held = threading.Event()
        with httpx.stream("POST", f"{http.base_url}/v1/completions", timeout=30,
                          json={"prompt": ["a", "b"], "max_tokens": 400, "ignore_eos": True, "stream": True}):  # fmt: skip
            kv.engine.call_soon(lambda _: held.wait(30))  # one runs and one waits, for as long as the next is refused
            busy = http.post("/v1/completions", json={"prompt": ["c"], "max_tokens": 2, "n": 2})
            held.set()
        assert busy.status_code == 429 and code(busy) == "engine_busy" and busy.headers["retry-after"] == "1"


def test_too_slow_is_504(small: KVBoost) -> None:
    with served(small, request_timeout=0.3) as (server, http):
        small.engine.call_soon(lambda _: time.sleep(0.8))
        late = http.post("/v1/completions", json=PROMPT)
        assert late.status_code == 504 and code(late) == "request_timeout"
        server.wait_idle()
        # In a stream the time may run out after the status has gone out: the error is an event then.
        slow = {**PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=slow) as response:
            lines = []
            for line in response.iter_lines():
                lines += [line] if line else []
                if len(lines) == 1:
                    small.engine.call_soon(lambda _: time.sleep(0.8))
        assert response.status_code == 200 and json.loads(lines[-1][6:])["error"]["code"] == "request_timeout"


def test_a_failed_step_is_a_500_and_the_next_request_is_fine(small: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(small) as (_, http):
        with monkeypatch.context() as patch:
            patch.setattr(small.engine._runner, "run", lambda plan: 1 / 0)
            for stream in (False, True):
                broken = http.post("/v1/completions", json={**PROMPT, "stream": stream})
                assert broken.status_code == 500 and code(broken) == "engine_error"
        assert http.post("/v1/completions", json=PROMPT).status_code == 200


def test_no_prompt_text_reaches_the_log(small: KVBoost, caplog: pytest.LogCaptureFixture) -> None:
    secret = "XYZZY-SECRET"
    with caplog.at_level(logging.INFO), served(small) as (_, http):
        http.post("/v1/completions", json={**PROMPT, "prompt": secret})
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": secret}], "max_tokens": 1})
        http.post("/v1/chat/completions", json={"messages": [{"role": secret, "content": secret}]})
        http.post(
            "/v1/completions",
            content=f'{{"prompt": "{secret}", '.encode(),
            headers={"Content-Type": "application/json"},
        )
        http.post("/v1/cache/warm", json={"prompt": secret * 10})
        http.post("/tokenize", json={"prompt": secret})
    assert "POST /v1/completions" in caplog.text and secret not in caplog.text


@pytest.mark.parametrize(
    "options", [{"port": 70000}, {"max_body_mib": 0}, {"request_timeout": -1}, {"log_level": "loud"}, {"api_key": ("a", "a:b")},
                {"served_model_name": ("",)}]
)  # fmt: skip
def test_wrong_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


def test_the_name_of_the_model_is_checked(small: KVBoost) -> None:
    with served(small, served_model_name=("a", "b")) as (_, http):
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["a", "b"]
        assert http.post("/v1/completions", json={**PROMPT, "model": "b"}).json()["model"] == "b"
        assert http.post("/v1/completions", json=PROMPT).json()["model"] == "a"
        assert http.post("/v1/completions", json={**PROMPT, "model": NAME}).status_code == 404
