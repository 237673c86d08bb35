"""Malformed and hostile requests: no 500, no crash, and a valid request is served after each hundred.

The list here is written by hand (malformed.py); the long run adds what schemathesis makes of our OpenAPI document.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import Counter
from typing import Any

import httpx
import pytest

from kvboost import KVBoost
from malformed import ENDINGS, bodies, raw_requests
from running_server import RunningServer, running
from small_model import small_engine

LONG_RUN = bool(os.environ.get("KVBOOST_LONG"))

SHORT_COUNT = 700
"""Of about 2,000, which take half a minute."""
SCHEMA_REQUESTS = 2000


def require_alive(server: RunningServer, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "still there?", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    server.kv.check()


def check(response: httpx.Response) -> None:
    """A client error has a status below 500 and the body of all errors."""
    assert response.status_code < 500, f"{response.request.method} {response.url}: {response.text[:500]}"
    if response.status_code >= 400 and response.request.method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 4000, "an error does not repeat what it was sent"


def test_hostile_bodies(small: KVBoost) -> None:
    with running(small) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        statuses: Counter[int] = Counter()
        chosen = bodies(seed=3)
        for i, (path, body, kind) in enumerate(chosen if LONG_RUN else itertools.islice(chosen, SHORT_COUNT)):
            response = http.post(path, content=body, headers={"Content-Type": kind} if kind.isprintable() else None)
            check(response)
            statuses[response.status_code] += 1
            if i % 100 == 99:
                require_alive(server, http)
        assert statuses[200] > 20 and statuses[400] > 100, statuses


def test_hostile_heads_and_connections(small: KVBoost) -> None:
    """Whatever comes back is no 5xx; nothing at all (a closed connection) is fine too."""
    with running(small, client_timeout=1.0) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for i, (data, end) in enumerate((d, e) for d in raw_requests() for e in ENDINGS):
            answer = b""
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.settimeout(0.05)
                try:
                    sock.sendall(data)
                    end(sock)
                    while piece := sock.recv(65536):
                        answer += piece
                except OSError:
                    pass
            status = answer[9:12] if answer.startswith(b"HTTP/1.") else b"none"
            assert not status.startswith(b"5"), (data[:200], answer[:300])
            if i % 100 == 99:
                require_alive(server, http)
        require_alive(server, http)


@pytest.mark.skipif(not LONG_RUN, reason="takes minutes: set KVBOOST_LONG=1")
@pytest.mark.timeout(1800)
def test_two_thousand_requests_made_of_our_openapi_document() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    with (
        small_engine(num_blocks=256) as kv,
        running(kv) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [r.ok() for r in schema.get_all_operations() if r.ok().path != "/v1/events"]
        statuses: Counter[int] = Counter()
        modes = list(schemathesis.GenerationMode)
        each = SCHEMA_REQUESTS // (len(operations) * len(modes)) + 1
        for operation, mode in itertools.product(operations, modes):

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=each * 3, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def send(case: Any) -> None:
                response = case.call(base_url=server.url, timeout=60)
                assert response.status_code < 500, (case.method, case.path, case.body, response.text[:300])
                statuses[response.status_code] += 1
                if sum(statuses.values()) % 100 == 99:
                    require_alive(server, http)

            try:
                send()
            except Exception as error:
                if "Unsatisfiable" not in type(error).__name__:  # a path without parameters cannot be made wrong
                    raise
        print(dict(statuses))
        assert sum(statuses.values()) >= SCHEMA_REQUESTS, statuses
