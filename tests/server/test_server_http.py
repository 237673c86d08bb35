"""What is ours beside OpenAI's API: tokens, cache, metrics, events, clients that leave, and the end of the server."""

from __future__ import annotations

import gzip
import http.server
import json
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvboost import KVBoost, __version__
from kvboost.errors import ConfigError
from kvboost.server.tracing import Tracing
from running_server import NAME, RunningServer, running
from small_model import slow_down, small_engine

LONG = "The quick brown fox jumps over the lazy dog. " * 4


def post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def metrics(server: RunningServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels (without the model's name), through Prometheus' own parser."""
    text = httpx.get(f"{server.url}/metrics").text
    return {
        (
            s.name.removeprefix("kvboost:"),
            tuple(sorted((k, v) for k, v in s.labels.items() if k != "model_name")),
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


# -- tokens and small questions ----------------------------------------------------------------------------------------


def test_tokenize_and_back(small: KVBoost) -> None:
    with running(small) as server:
        found = post(server, "/tokenize", prompt="naïve 😀", return_token_strs=True)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 512
        assert found["tokens"] == small.tokenizer("naïve 😀")["input_ids"]
        assert post(server, "/detokenize", tokens=found["tokens"])["prompt"] == "naïve 😀"
        assert post(server, "/detokenize", tokens=[])["prompt"] == ""
        chat = post(server, "/tokenize", messages=[{"role": "user", "content": "hi"}])
        text = small.tokenizer.decode(chat["tokens"])
        assert text == "<|user|>user:hi<|end|><|assistant|>"
        bare = post(server, "/tokenize", messages=[{"role": "user", "content": "hi"}], add_generation_prompt=False)
        assert chat["tokens"][: len(bare["tokens"])] == bare["tokens"] and len(bare["tokens"]) < len(chat["tokens"])
        assert httpx.post(f"{server.url}/tokenize", json={}).status_code == 400
        assert httpx.post(f"{server.url}/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "prompt"


def test_a_long_text_is_tokenised_off_the_event_loop(small: KVBoost) -> None:
    with running(small) as server:
        text = "x" * 600_000
        slow = threading.Thread(target=httpx.post, args=(f"{server.url}/tokenize",),
                                kwargs={"json": {"prompt": text}, "timeout": 60})  # fmt: skip
        slow.start()
        longest = 0.0
        while slow.is_alive():
            began = time.perf_counter()
            httpx.get(f"{server.url}/health", timeout=60)
            longest = max(longest, time.perf_counter() - began)
        began = time.perf_counter()
        small.tokenizer(text)
        assert longest < 0.7 * (time.perf_counter() - began), "others wait for less than the whole of it"


def test_health_ready_version(small: KVBoost) -> None:
    with running(small) as server:
        assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
        assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ready").status_code == 200
        assert httpx.get(f"{server.url}/openapi.json").json()["info"]["title"] == "KVBoost"
        for path in ("/nothing", "/v1/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page/../../pyproject.toml"):
            assert httpx.get(server.url + path).status_code == 404
        assert httpx.delete(f"{server.url}/v1/models").status_code == 405
    assert small.generate("still its owner's", max_new_tokens=1).token_ids


def test_health_tells_a_dead_engine() -> None:
    kv = small_engine()
    server = RunningServer(kv)
    kv.close()
    assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ready").status_code == 503
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    server.stop()


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_warm_reset_and_what_the_cache_holds(small: KVBoost) -> None:
    with running(small) as server:
        size = len(small.tokenizer(LONG)["input_ids"]) // 16 * 16
        assert post(server, "/v1/cache/warm", prompt=LONG) == {"tokens": size, "cached_tokens": 0, "pinned_blocks": 0}
        assert post(server, "/v1/cache/warm", prompt=LONG)["cached_tokens"] == size
        for _ in range(3):
            usage = post(server, "/v1/completions", prompt=LONG + "?", max_tokens=1)["usage"]
            assert usage["kvboost"]["cached"]["device"] >= size
        held = httpx.get(f"{server.url}/v1/cache").json()
        [tier] = held["tiers"]
        assert tier["name"] == "device" and tier["blocks_total"] == 128 and tier["blocks_cached"] >= size // 16
        assert tier["bytes_cached"] == tier["blocks_cached"] * small.built.layout.slab_bytes
        first = held["top_prefixes"][0]
        assert first["tokens"] == size and first["hits"] == 3 and first["saved_tokens"] == 3 * size and first["present"]
        assert "quick" not in json.dumps(held)
        key = small.engine.call(lambda s: next(iter(s.pool.index._block_of))).hex()
        assert key not in json.dumps(held), "the index's own keys would confirm a guess of the text"

        pinned = post(server, "/v1/cache/warm", prompt=list(range(10, 74)), pin=True)
        assert pinned == {"tokens": 64, "cached_tokens": 0, "pinned_blocks": 4}
        assert httpx.get(f"{server.url}/v1/cache").json()["tiers"][0]["blocks_pinned"] == 4
        assert post(server, "/v1/cache/reset")["forgotten_blocks"] >= size // 16 + 4
        held = httpx.get(f"{server.url}/v1/cache").json()
        assert (
            held["top_prefixes"] == [] and held["tiers"][0]["blocks_cached"] == held["tiers"][0]["blocks_pinned"] == 0
        )
        usage = post(server, "/v1/completions", prompt=LONG + "?", max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert post(server, "/v1/cache/warm", prompt="short")["tokens"] == 0
        messages = [{"role": "system", "content": LONG}]
        assert post(server, "/v1/cache/warm", messages=messages)["tokens"] >= size
        assert (
            httpx.post(f"{server.url}/v1/cache/warm", json={"prompt": "x" * 600}).json()["error"]["param"] == "prompt"
        )


def test_prefixes_end_where_requests_part(small: KVBoost) -> None:
    with running(small) as server:
        shared, a, b = list(range(100, 164)), list(range(10, 42)), list(range(50, 82))
        for prompt in (shared + a, shared + b, shared + a, shared + a, shared + b, [*shared, 9]):
            post(server, "/v1/completions", prompt=[*prompt, 7], max_tokens=1)
        top = httpx.get(f"{server.url}/v1/cache").json()["top_prefixes"]
        assert [(t["tokens"], t["hits"]) for t in top] == [(64, 5), (96, 2), (96, 1)]


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_equal_what_the_requests_reported(small: KVBoost) -> None:
    with running(small) as server:
        before = metrics(server)
        assert before["prompt_tokens_total", ()] == 0
        prompt = cached = output = 0
        reasons = {"stop": 0, "length": 0}
        times = []
        for i, body in enumerate(
            [{"prompt": LONG}, {"prompt": LONG}, {"prompt": LONG[:100], "n": 3, "seed": 1, "temperature": 1.0},
             {"prompt": [LONG, "other"]}, {"prompt": "abc", "stop_token_ids": list(range(6, 262)), "max_tokens": 4}]
        ):  # fmt: skip
            answer = post(server, "/v1/completions", **{"max_tokens": 3 + i, "ignore_eos": True, **body})
            usage = answer["usage"]
            prompt += usage["prompt_tokens"]
            output += usage["completion_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            assert usage["kvboost"]["computed"] + sum(usage["kvboost"]["cached"].values()) == usage["prompt_tokens"]
            for choice in answer["choices"]:
                reasons[choice["finish_reason"]] += 1
            times.append(answer["kvboost"])
        embedded = post(server, "/v1/embeddings", input=[LONG, "other"])["usage"]["total_tokens"]
        now = metrics(server)
        assert now["embedded_prompts_total", ()] == 2 and now["embedded_tokens_total", ()] == embedded
        assert now["prompt_tokens_total", ()] == now["prefix_cache_queries_total", ()] == prompt
        assert now["generation_tokens_total", ()] == output and now["prefix_cache_hits_total", ()] == cached > 0
        assert now["prompt_tokens_by_source_total", (("source", "device"),)] == cached
        assert now["prompt_tokens_by_source_total", (("source", "computed"),)] == prompt - cached
        for reason, count in reasons.items():
            assert now["request_success_total", (("finished_reason", reason),)] == count
        choices = sum(reasons.values())
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
                     "request_generation_tokens"):  # fmt: skip
            assert now[f"{name}_count", ()] == choices, name
        assert now["inter_token_latency_seconds_count", ()] == output - choices
        assert now["request_prompt_tokens_sum", ()] == prompt and now["request_generation_tokens_sum", ()] == output
        assert now["time_to_first_token_seconds_sum", ()] * 1e3 >= sum(t["ttft_ms"] for t in times) - 0.01
        assert now["num_requests_running", ()] == now["num_requests_waiting", ()] == 0
        assert now["kv_cache_usage_perc", ()] == 0
        stats = small.stats()
        assert now["engine_steps_total", ()] == stats.num_steps
        assert now["kv_blocks", (("state", "cached"),)] == stats.blocks_cached
        assert now["http_responses_total", (("status", "200"),)] >= 6


def test_gauges_show_what_runs(slow: KVBoost) -> None:
    with running(slow) as server:
        body = {"prompt": LONG, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()  # held: dropping the iterator would close the connection
            next(lines)
            now = metrics(server)
            assert now["num_requests_running", ()] == 1 and 0 < now["kv_cache_usage_perc", ()] < 1
        server.wait_idle()
        assert metrics(server)["num_requests_running", ()] == 0


def test_the_dashboard_asks_for_metrics_that_exist(small: KVBoost) -> None:
    dashboard = Path(__file__).parents[2] / "docs" / "grafana" / "kvboost.json"
    wanted = set(re.findall(r"kvboost:(\w+)", dashboard.read_text(encoding="utf-8")))
    with running(small) as server:
        post(server, "/v1/completions", prompt="abc", max_tokens=2)
        names = {name for name, _ in metrics(server)}
    assert wanted and wanted <= names, wanted - names


def test_events_tell_numbers_while_something_changes(small: KVBoost) -> None:
    with running(small) as server:
        events: list[dict[str, Any]] = []
        with httpx.stream("GET", f"{server.url}/v1/events", timeout=20) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.iter_lines()
            for line in lines:
                if not line.startswith("data: "):
                    continue
                events.append(json.loads(line[6:]))
                if len(events) == 1:
                    post(server, "/v1/completions", prompt=LONG, max_tokens=4, ignore_eos=True)
                if events[-1]["requests_finished"] == 1:
                    break
        first, last = events[0], events[-1]
        assert first["requests_finished"] == 0 and last["tokens_per_second"] > 0
        assert last["pool"]["total"] == 128 and last["tiers"][0]["name"] == "device" and last["running"] == 0
        assert last["prefix_queries_tokens"] == len(small.tokenizer(LONG)["input_ids"])
        end = time.monotonic() + 5
        while server.state.num_listeners and time.monotonic() < end:
            time.sleep(0.02)
        assert server.state.num_listeners == 0


def test_traces_tell_numbers_and_never_text(small: KVBoost) -> None:
    """A collector of our own takes what the exporter sends."""
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with running(small, otlp_traces_endpoint=endpoint) as server:
            usage = post(server, "/v1/completions", prompt=LONG, max_tokens=3, ignore_eos=True)["usage"]
        collector.shutdown()
    spans = [
        span
        for data in received
        for resource in trace_service.ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [s.name for s in spans] == ["llm_request"] and b"quick" not in b"".join(received)
    values = {a.key: a.value for a in spans[0].attributes}
    assert values["gen_ai.usage.prompt_tokens"].int_value == usage["prompt_tokens"]
    assert values["gen_ai.usage.completion_tokens"].int_value == 3
    assert 0 < values["gen_ai.latency.time_to_first_token"].double_value < 60
    assert [e.name for e in spans[0].events] == ["first token"]
    assert spans[0].start_time_unix_nano < spans[0].events[0].time_unix_nano <= spans[0].end_time_unix_nano


def test_tracing_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"kvboost\[otlp\]"):
        Tracing("http://localhost:4318", NAME)
    with pytest.raises(ConfigError, match="URL"):
        Tracing("localhost:4318", NAME)


# -- clients that leave ------------------------------------------------------------------------------------------------


def raw_request(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
                 + str(len(data)).encode() + b"\r\n\r\n" + data)  # fmt: skip
    return sock


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_a_client_that_leaves_frees_its_blocks_within_a_step(slow: KVBoost, stream: bool, how: str) -> None:
    with running(slow) as server:
        sock = raw_request(server, {"prompt": LONG, "max_tokens": 320, "ignore_eos": True, "stream": stream, "n": 2})
        end = time.monotonic() + 10
        while server.kv.stats().num_running < 2:
            assert time.monotonic() < end
        if how == "half":
            sock.shutdown(socket.SHUT_WR)
        elif how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            sock.close()
        else:
            sock.close()
        server.wait_idle()
        now = metrics(server)
        assert now["request_success_total", (("finished_reason", "abort"),)] == 2
        assert now["generation_tokens_total", ()] < 640, "it did not run to the end"
        sock.close()


def test_a_client_that_leaves_the_queue() -> None:
    with slow_down(small_engine(max_num_seqs=1), 0.01) as kv, running(kv) as server:
        first = raw_request(server, {"prompt": LONG, "max_tokens": 320, "ignore_eos": True})
        second = raw_request(server, {"prompt": LONG, "max_tokens": 320, "ignore_eos": True})
        end = time.monotonic() + 10
        while server.kv.stats().num_waiting < 1:
            assert time.monotonic() < end
        second.close()
        while server.kv.stats().num_waiting:
            assert time.monotonic() < end
        assert server.kv.stats().num_running == 1, "the other one goes on"
        first.close()
        server.wait_idle()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_shutdown_lets_requests_finish(slow: KVBoost) -> None:
    server = RunningServer(slow, shutdown_timeout=20)
    with httpx.stream("POST", f"{server.url}/v1/completions", timeout=60,
                      json={"prompt": LONG, "max_tokens": 60, "ignore_eos": True, "stream": True}) as response:  # fmt: skip
        lines = response.iter_lines()
        next(lines)
        server._server.should_exit = True
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_shutdown_tells_what_it_cuts(slow: KVBoost) -> None:
    server = RunningServer(slow, shutdown_timeout=0.3)
    whole: list[httpx.Response] = []
    body = {"prompt": LONG, "max_tokens": 300, "ignore_eos": True}
    waiting = threading.Thread(target=lambda: whole.append(httpx.post(f"{server.url}/v1/completions", json=body)))
    waiting.start()
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        slow.engine.call_soon(lambda _: time.sleep(1.0))  # longer than the server waits
        server._server.should_exit = True
        rest = [line for line in lines if line]
    assert json.loads(rest[-1][6:])["error"]["code"] == "shutting_down"
    server.stop()
    waiting.join()
    assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "shutting_down"
    slow.engine.call(lambda _: None)
    assert slow.stats().num_running == 0 and slow.stats().blocks_referenced == 0
