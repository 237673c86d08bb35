"""Grammars over tokens: compiled once per tokenizer and text, followed by each request, applied to a batch's logits.

xgrammar (the extra `structured`) is imported when the first grammar is asked for.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.engine import grammar_helper
from kvboost.engine.detokenizer import special_ids
from kvboost.engine.structured_outputs import FIELD, Form
from kvboost.errors import EngineBusy, EngineClosed, InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

INSTALL = "pip install 'kvboost[structured]'"

MAX_COMPILED = 256
MAX_COMPILED_BYTES = 256 << 20
"""What compiled grammars are kept for reuse; a large one takes 2 MB."""

MAX_REFUSED = 1024

BUSY_SECONDS = 30.0
"""How long a request waits for the grammars of others: ten that are cut off after 3 s each."""

WALL_SECONDS = 120.0
"""How long the helper may take by the clock, its start included: its CPU time is limited much closer."""


class GrammarState:
    """Where one request is in its grammar.

    Invariant: the matcher has accepted exactly the first `num_accepted` output tokens of its request. It catches up
    when a mask is wanted, so that a preemption, which keeps the tokens, changes nothing.
    """

    def __init__(self, compiled: Any, stop_ids: frozenset[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(stop_ids))
        self._vocab_size = int(compiled.tokenizer_info.vocab_size)
        self.num_accepted = 0

    def follow(self, output_ids: Sequence[int]) -> bool:
        """Accept the output tokens that are new. False when one does not fit the grammar."""
        while self.num_accepted < len(output_ids):
            if not self._matcher.accept_token(output_ids[self.num_accepted]):
                return False
            self.num_accepted += 1
        return True

    @property
    def complete(self) -> bool:
        """Whether what was accepted matches the grammar, whole."""
        return bool(self._matcher.is_completed())


class TokenMasks:
    """Which tokens the grammars of a batch allow next: one bit a token, `[rows, ceil(vocab / 32)]` int32 on the CPU."""

    def __init__(self, states: Sequence[tuple[int, GrammarState]], num_rows: int) -> None:
        import xgrammar

        self._rows = [row for row, _ in states]
        self._width = min(state._vocab_size for _, state in states)
        self._bits = xgrammar.allocate_token_bitmask(num_rows, self._width)
        matchers = [state._matcher for _, state in states]
        _filler().batch_fill_next_token_bitmask(matchers, self._bits, self._rows)

    def leaves_only(self, row: int, tokens: frozenset[int]) -> bool:
        """Whether nothing but some of `tokens` is allowed."""
        bits = self._bits[row]
        allowed = bits.nonzero()[:, 0].tolist()
        found = [word * 32 + b for word in allowed[:2] for b in range(32) if int(bits[word]) >> b & 1]
        return len(allowed) <= len(tokens) and len(found) <= len(tokens) and tokens.issuperset(found)

    def apply_(self, scores: Tensor) -> None:
        """Set forbidden logits of `scores [R, V]` to minus infinity, in place."""
        import xgrammar

        xgrammar.apply_token_bitmask_inplace(
            scores,
            self._bits.to(scores.device),
            vocab_size=min(self._width, scores.shape[1]),
            indices=None if len(self._rows) == scores.shape[0] else self._rows,
            backend="cpu" if scores.device.type == "cpu" else "torch_native",
        )
        if scores.shape[1] > self._width:
            scores[self._rows, self._width :] = float("-inf")


def _filler() -> Any:
    global _FILLER
    if _FILLER is None:
        import xgrammar

        _FILLER = xgrammar.BatchGrammarMatcher()
    return _FILLER


_FILLER: Any = None


class Grammars:
    """The compiled grammars of one tokenizer. Thread-safe.

    Invariant: what is kept is at most `MAX_COMPILED` grammars of `MAX_COMPILED_BYTES` together, least recently used
    out first. Every grammar was compiled by the helper process first, under its limits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._compiler: Any = None
        self._helper: _Helper | None = None
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._bytes = 0
        self._refused: OrderedDict[tuple[str, str], str] = OrderedDict()

    def compiled(self, wanted: Form) -> Any:
        """The compiled grammar, from what is kept or anew. Raises `InvalidRequest` when it cannot be compiled.

        The first call starts the helper and takes 3 s on 2 cores; a new schema later some milliseconds. Raises
        `EngineBusy` when others' grammars keep the compiler busy.
        """
        key = wanted.key
        found = self._look_up(key)
        if found is None:
            if not self._compiling.acquire(timeout=BUSY_SECONDS):
                raise EngineBusy("other requests' grammars are being compiled. Try again later.")
            try:
                found = self._look_up(key) or self._compile(key)
            finally:
                self._compiling.release()
        return found

    def _look_up(self, key: tuple[str, str]) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            if key in self._refused:
                raise InvalidRequest(FIELD, f"the {_NAMES[key[0]]} cannot be used: {self._refused[key]}.")
        return None

    def _compile(self, key: tuple[str, str]) -> Any:
        """Only one at a time: under `_compiling`."""
        if self._helper is None:
            self._start()
        assert self._helper is not None
        problem = self._helper.try_compiling(*key)
        compiled = None if problem else grammar_helper.compile_with(self._compiler, *key)
        with self._lock:
            if compiled is not None:
                return self._keep(key, compiled)
            self._refused[key] = problem
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        return self._look_up(key)

    def state(self, wanted: Form, stop_ids: frozenset[int]) -> GrammarState:
        """A new request's place at the beginning of a grammar. `stop_ids` are allowed where it may end, and only there."""
        if not stop_ids:
            raise InvalidRequest(
                FIELD,
                "needs a token that ends the text, and there is none. Leave ignore_eos out, or give stop_token_ids.",
            )
        return GrammarState(self.compiled(wanted), stop_ids)

    def close(self) -> None:
        """End the helper process, and what it is trying. Idempotent."""
        if self._helper is not None:
            self._helper.close()

    def _keep(self, key: tuple[str, str], compiled: Any) -> Any:
        self._kept[key] = compiled
        self._bytes += compiled.memory_size_bytes
        while len(self._kept) > 1 and (len(self._kept) > MAX_COMPILED or self._bytes > MAX_COMPILED_BYTES):
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.memory_size_bytes
        return compiled

    def _start(self) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise InvalidRequest(FIELD, f"needs xgrammar, which is not installed. Run: {INSTALL}") from error
        if self._tokenizer is None:
            raise InvalidRequest(FIELD, "needs a tokenizer, and this model has none.")
        info = _tokenizer_info(xgrammar, self._tokenizer, self._vocab_size)
        self._helper = _Helper(info.serialize_json())
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


_NAMES = {"json": "schema", "regex": "pattern", "grammar": "grammar", "tags": "tools' schemas"}


def _tokenizer_info(xgrammar: Any, tokenizer: Any, vocab_size: int) -> Any:
    """The vocabulary as xgrammar wants it, special tokens left blank.

    It reads them as the text of their names, `<|im_end|>` inside a JSON string for example: they would be generated
    there, and then be missing from the text.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    found = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=[0 if eos is None else eos]
    )
    special = special_ids(tokenizer)
    vocab = [b"" if i in special else token for i, token in enumerate(found.decoded_vocab)]
    return xgrammar.TokenizerInfo(
        vocab, vocab_size=vocab_size, stop_token_ids=found.stop_token_ids, add_prefix_space=found.add_prefix_space
    )


class _Helper:
    """The process that tries grammars. Started when made; started again when it died of one, or of idleness."""

    def __init__(self, tokenizer_info: str) -> None:
        self._greeting = json.dumps(tokenizer_info) + "\n"
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._launch()

    def try_compiling(self, kind: str, text: str) -> str:
        """Empty when the grammar is fine, otherwise why it is not."""
        for attempt in (1, 2):
            if self._process is None or self._process.poll() is not None:
                self._launch()
            process = self._process
            if process is None:
                raise EngineClosed("the engine is closed. Make a new one with KVBoost.from_pretrained(...).")
            answer = self._ask(process, json.dumps([kind, text]) + "\n")
            if answer is not None:
                return str(json.loads(answer))
            code = process.wait()
            self._launch()  # its start is over by the time the next grammar comes
            if code != 0 or attempt == 2:
                return _cause(code)
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _launch(self) -> None:
        self._end()
        if self._closed:
            return
        # One thread, and no GPU: it would take 300 MB of the device's memory for nothing.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(grammar_helper.__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
            env=environment,
        )  # fmt: skip
        self._greeted = threading.Thread(target=_write, args=(self._process, self._greeting), daemon=True)
        self._greeted.start()  # it holds the vocabulary: more than a pipe takes before its reader is up

    def _ask(self, process: subprocess.Popen[str], question: str) -> str | None:
        """One line of answer; None when the process died, or was ended because it took too long."""
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        greeted = self._greeted

        def talk() -> None:
            greeted.join()
            _write(process, question)
            answers.put(process.stdout.readline() if process.stdout is not None else "")

        threading.Thread(target=talk, daemon=True).start()
        try:
            answer = answers.get(timeout=WALL_SECONDS)
        except queue.Empty:
            answer = ""
        if not answer:
            process.kill()
        return answer or None


def _write(process: subprocess.Popen[str], line: str) -> None:
    try:
        if process.stdin is not None:
            process.stdin.write(line)
            process.stdin.flush()
    except (OSError, ValueError):
        pass  # it died: the reader notices


def _cause(code: int) -> str:
    if code in (-24, -9):  # SIGXCPU, or the clock
        return f"compiling it takes more than {grammar_helper.CPU_SECONDS} s. Use smaller counts and fewer alternatives"
    return "the grammar compiler cannot deal with it. Simplify it"
