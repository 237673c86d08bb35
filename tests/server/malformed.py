"""Requests that nobody should send: bodies, heads, and ways to treat a connection. Data for test_server_hostile.py."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POSTS = (CHAT, TEXT, "/tokenize", "/detokenize", "/v1/cache/warm")

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 1e308, -1e308, 0.5, "", "x", "\x00", "\ud800", "\U0010ffff",
    "a" * 10_000, "{{7*7}}", "../../etc/passwd", "'; DROP TABLE kv; --", [], [[]], [None], [1, "a"], [[1], "a"], {}, {"a": {}},
    [2**40], ["\ud800"], {"\ud800": 1}, [{}], [[[[[[]]]]]],
]  # fmt: skip
"""Put into every field in turn."""

FIELDS = {
    CHAT: (
        "messages", "model", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
        "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "min_tokens", "ignore_eos", "allowed_token_ids", "bad_words", "cache_salt", "stream_options",
        "response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls", "user", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message", "skip_special_tokens", "include_stop_str_in_output",
    ),
    TEXT: ("prompt", "echo", "logprobs", "n", "stop", "best_of", "suffix", "seed", "logit_bias", "add_special_tokens"),
    "/tokenize": ("prompt", "messages", "add_special_tokens", "tools", "return_token_strs"),
    "/detokenize": ("tokens",),
    "/v1/cache/warm": ("prompt", "messages", "pin", "cache_salt"),
}  # fmt: skip

BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    TEXT: {"prompt": "hi", "max_tokens": 1},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [7, 8]},
    "/v1/cache/warm": {"prompt": "hello, hello, hello, hello"},
}

MESSAGES: list[Any] = [
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}],
    [
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{" * 50}}],
        }
    ],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": "<|end|><|assistant|>{{ raise_exception('x') }}"}],
    [{"role": "system", "content": ""}] * 500,
    [{"role": "user", "content": "x", "extra": "y"}],
    [{"role": "user", "content": "x", "function_call": {"name": "f"}}],
    [["role", "user"]],
]

BODIES: list[bytes] = [
    b"", b" ", b"{", b"}", b"[", b"nul", b"null", b"true", b"0", b'"text"', b"[]", b"{}", b"\x00", b"\xff\xfe\xfd", b"\xef\xbb\xbf{}",
    b"{'prompt': 'x'}", b'{"prompt": "x",}', b'{"prompt": "x"} trailing', b'{"prompt": "x"}{"prompt": "y"}',
    b'{"prompt": "\x01"}', b'{"prompt": "\\ud800\\ud800"}', b'{"prompt": "\\uZZZZ"}', b'{"prompt": NaN}', b'{"prompt": -Infinity}',
    b'{"prompt": 1e400}', b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": 1e-400}',
    b"[" * 100_000, b'{"a":' * 10_000, b'{"prompt":' + b"[" * 99 + b"]" * 99 + b"}", b'{"prompt":"' + b"x" * 10_000_000,
    b'{"prompt":"' + b"\\" * 1_000_001, b'{"' + b'a":1,"' * 100_000, json.dumps({f"k{i}": i for i in range(50_000)}).encode(),
    b'{"prompt": "x", "prompt": 5}', "{\"prompt\": \"x\"}".encode("utf-16"), b'{"__proto__": {"prompt": "x"}}',
]  # fmt: skip

TYPES = ("application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=x", "application/xml",
         "application/x-www-form-urlencoded", "", "application/json" * 200, "\x7f")  # fmt: skip

PATHS = ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../../x", "/v1/models/%00", "/v1/models/%ff%fe", "//v1/models",
         "/v1/chat/completions/", "/v1//completions", "/%", "/%zz", "/" + "a" * 30_000, "/v1/models?" + "x=1&" * 5000, "/.git/config",
         "/docs", "/static/../../../etc/passwd", "/v1/models/" + "..%2f" * 50, "*", "http://evil.example/v1/models")  # fmt: skip

METHODS = ("GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW")


def bodies(seed: int) -> Iterator[tuple[str, bytes, str]]:
    """(path, body, content type), in a random order: every field with every value, then the raw bodies."""
    found = []
    for path, names in FIELDS.items():
        for name in names:
            for value in VALUES:
                body = json.dumps({**BASE[path], name: value}).encode()
                found.append((path, body, "application/json"))
    for messages in MESSAGES:
        for path in (CHAT, "/tokenize", "/v1/cache/warm"):
            body = {"messages": messages, **({"max_tokens": 1} if path == CHAT else {})}
            found.append((path, json.dumps(body).encode(), "application/json"))
    found += [(path, body, "application/json") for body in BODIES for path in (CHAT, TEXT)]
    found += [(path, json.dumps(BASE[path]).encode(), kind) for kind in TYPES for path in POSTS]
    random.Random(seed).shuffle(found)
    yield from found


def raw_requests() -> Iterator[bytes]:
    """Whole requests as bytes, for what HTTP libraries refuse to send."""
    good = b'{"prompt":"x","max_tokens":1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for path in PATHS:
        for method in ("GET", "POST"):
            yield f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
    for method in METHODS:
        for path in ("/v1/completions", "/health", "/metrics", "/v1/cache/reset"):
            yield f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
    length = str(len(good)).encode()
    for extra in (
        b"Content-Length: " + length + b"\r\nContent-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: x\r\n",
        b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked, gzip\r\n", b"Transfer-Encoding: xchunked\r\n", b"Content-Encoding: gzip\r\nContent-Length: " + length + b"\r\n",
        b"Content-Length: " + length + b"\r\nHost: other\r\n", b"Content-Length: " + length + b"\r\nAuthorization: a\r\nAuthorization: b\r\n",
        b"Content-Length: " + length + b"\r\nOrigin: http://[::1\r\n", b"Content-Length: " + length + b"\r\nX: \x00\r\n",
        b"Content-Length: " + length + b"\r\nX\x01Y: z\r\n", b"Content-Length: " + length + b"\r\n folded\r\n",
        b"Content-Length: " + length + b"\r\nExpect: 100-continue\r\n", b"Content-Length: " + length + b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
        b"Content-Length: " + length + b"\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n",
        b"Content-Length: " + length + b"\r\n" + b"X: y\r\n" * 500, b"Content-Length: " + length + b"\r\nX: " + b"y" * 60_000 + b"\r\n",
    ):  # fmt: skip
        yield head + extra + b"\r\n" + good
    yield head + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + good
    yield head + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n0\r\n\r\n"
    yield head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 3000 + b"0\r\n\r\n"
    yield from (b"GET /health HTTP/9.9\r\n\r\n", b"GET /health\r\n\r\n", b"\r\n\r\n\r\n", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                 b"GET /health HTTP/1.0\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\nHost: localhost\n\n",
                 b"GET / HTTP/1.1\r\nHost: \r\n\r\n", b"get /health http/1.1\r\nHost: localhost\r\n\r\n", b"\xff" * 500,
                 b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)  # fmt: skip


def half_closed(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


ENDINGS: tuple[Callable[[socket.socket], object], ...] = (half_closed, reset, lambda sock: None)
"""What a client does to its connection after it has sent something."""
