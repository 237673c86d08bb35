"""`kvboost serve` as people start it: a process of its own, curl, signals, a configuration file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvboost.cli.main import app
from kvboost.server.settings import TOOL_CALL_PARSERS, ServerConfig
from kvboost.server.tools.formats import FORMATS
from small_model import small_engine

SRC = Path(__file__).parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SRC)}
pytestmark = pytest.mark.slow

READY = re.compile(r"ready on (http://\S+)")


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("small")
    with small_engine() as kv:
        kv.model.save_pretrained(path)
        kv.tokenizer.save_pretrained(path)
    return str(path)


class Process:
    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "kvboost.cli.main", "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self.log = ""
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if found := READY.search(line):
                self.url = found[1]
                break
        assert self.url, self.log

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=60)
        self.log += rest
        return self.process.returncode


@contextlib.contextmanager
def process(model: str, *flags: str) -> Iterator[Process]:
    started = Process(model, *flags)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def test_sigterm_lets_it_finish_what_runs_and_a_file_configures_it(small_dir: str, tmp_path: Path) -> None:
    """One process for several questions: each start costs seconds."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<<{{ m.content }}>>{% endfor %}")
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"served-model-name: [from-file, second]\napi_key: secret:salt\nshutdown-timeout: 20\nchat-template: {template}\n"
        "host: 0.0.0.0\n"
    )
    with process(small_dir, "--config", str(file), "--served-model-name", "from-flag") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=60) as http:
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["from-flag"]
            found = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
            assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "<<hi>>"}
            body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(30) == 0, server.log
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert "secret" not in server.log and "WARNING" not in server.log


def test_ctrl_c_ends_an_idle_server_at_once_whatever_connections_are_open(small_dir: str) -> None:
    with process(small_dir, "--host", "0.0.0.0") as server, httpx.Client() as http:
        assert "has no API key" in server.log, "it is public"
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        http.get(f"{url}/health")
        with http.stream("GET", f"{url}/v1/events") as response:
            assert response.status_code == 200
            began = time.monotonic()
            assert server.end(signal.SIGINT) == 0, server.log
        assert time.monotonic() - began < 20, "far below the shutdown timeout of 30 s"


@pytest.mark.parametrize(
    ("text", "said"),
    [("prot: 1", "prot"), ("- port", "must hold"), ("port: [", "cannot read"), ("port: many", "--port")],
)
def test_a_wrong_configuration_file_is_refused(small_dir: str, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["serve", small_dir, "--config", str(file)])
    assert done.exit_code != 0 and said in f"{done.output} {done.exception}"


def test_a_port_in_use_is_told_in_one_line_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "kvboost.cli.main", "serve", "no/such/model", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 1 and f"port: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_every_option_of_the_server_is_a_flag() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    for name in (
        *ServerConfig.__dataclass_fields__,
        "config",
        "max_model_len",
        "max_num_seqs",
        "gpu_memory_utilization",
    ):
        assert f"--{name.replace('_', '-')}" in text
    assert set(TOOL_CALL_PARSERS) == set(FORMATS)


@pytest.mark.real
def test_the_start_is_quick_and_says_where_its_time_went_and_the_documented_curl_works(smollm2_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with process("smollm2", "--kv-cache-gib", "0.5") as server:
        parts = re.search(r"start: (.+); total ([\d.]+) s", server.log)
        assert parts and all(name in parts[1] for name in ("imports", "load", "engine", "bind"))
        for command in curl_examples():
            done = subprocess.run(
                ["bash", "-c", command.replace("http://127.0.0.1:8000", server.url)],
                capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert done.stdout.rstrip().endswith("data: [DONE]")
            said = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in said if c["choices"])
        assert server.end() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, since the machine may be shared: loading and one answer.
    assert after.ru_utime - before.ru_utime < 40


def curl_examples() -> list[str]:
    """The commands in the documentation that stream with curl."""
    assert shutil.which("curl"), "the documentation's example needs curl"
    text = (SRC.parent / "docs" / "server.md").read_text(encoding="utf-8")
    found = re.findall(r"^(curl -N .+?[^\\])$", text, re.MULTILINE | re.DOTALL)
    assert found
    return found
