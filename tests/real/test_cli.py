"""The command line on the real model, as a person uses it: through pipes, and on a terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvboost import KVBoost

SRC = Path(__file__).parents[2] / "src"
COMMAND = [sys.executable, "-m", "kvboost.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "dumb"}

LOAD_SECONDS = 120
"""Reading a GGUF through Transformers takes 15 s on a free machine, and this one may be shared."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("smollm2_path")]


def kvboost(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )


def test_run_prints_what_transformers_would(smollm2: KVBoost, hf_smollm2: PreTrainedModel) -> None:
    done = kvboost("run", "smollm2", "Name the capital of France.", "--temperature", "0", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    messages = [{"role": "user", "content": "Name the capital of France."}]
    text = smollm2.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = hf_smollm2.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert done.stdout == smollm2.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) + "\n"
    assert f"0 of {ids.shape[1]} prompt tokens reused" in done.stderr


def test_a_piped_chat_reuses_its_history() -> None:
    lines = "Name a river in Egypt, and say in which direction it flows.\nAnd one in France?\n"
    done = kvboost("chat", "smollm2", "--temperature", "0", "--max-tokens", "24", stdin=lines)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+) of (\d+) prompt tokens reused", done.stderr)
    (first, first_prompt), (second, second_prompt) = ((int(a), int(b)) for a, b in found)
    assert first == 0
    # All whole blocks of the first prompt and its answer are found again, up to 24 tokens of answer.
    assert second >= first_prompt // 16 * 16 and second_prompt > second


def test_info_says_how_the_model_is_run() -> None:
    done = kvboost("info", "smollm2", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["path"] == "paged" and facts["layers"] == 30 and facts["max_model_len"] == 8192
    size = {"bfloat16": 2, "float32": 4}[facts["dtype"]]  # what this machine's CPU computes natively
    assert facts["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * size, "layers x (K, V) x KV heads x head size x dtype"


class Terminal:
    """`kvboost chat` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # what is started in a shell's background inherits that it is ignored
            os.execve(COMMAND[0], [*COMMAND, *arguments], ENVIRONMENT)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, seconds: float) -> str:
        """What came since the last match, up to the end of this one."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            left = end - time.monotonic()
            assert left > 0, f"no {pattern!r} within {seconds} s in {self.seen!r}"
            if select.select([self._fd], [], [], left)[0]:
                try:
                    data = os.read(self._fd, 4096)
                except OSError:  # Linux reports the closed end of a terminal as an I/O error
                    data = b""
                assert data, f"the program ended before {pattern!r}: {self.seen!r}"
                self.seen += data.decode(errors="replace")
        got, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return got

    def exit_code(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        raise AssertionError("the program did not end")

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves() -> None:
    terminal = Terminal("chat", "smollm2", "--temperature", "0", "--max-tokens", "2000")
    try:
        terminal.wait_for("/help for help", LOAD_SECONDS)
        terminal.wait_for("> ", 5)
        terminal.send("Write a very long story about a fox and a river.\r")
        terminal.wait_for(r"\n.{40}", 60)
        terminal.send("\x03")
        terminal.wait_for("stopped", 10)
        terminal.wait_for("> ", 5)
        terminal.send("/stats\r")
        terminal.wait_for("1 finished", 10)  # the stopped request has given its blocks back
        terminal.wait_for("> ", 5)
        time.sleep(
            0.5
        )  # between showing the prompt and waiting, CPython's readline holds a signal back until a key comes
        terminal.send("\x03")
        terminal.wait_for("Ctrl-D or /exit leaves", 5)
        terminal.wait_for("> ", 5)
        terminal.send("\x04")
        assert terminal.exit_code(20) == 0
    finally:
        terminal.close()
