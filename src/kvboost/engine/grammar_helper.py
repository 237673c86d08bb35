"""Compiles grammars in a process of its own, under limits of time and memory, to see whether they can be compiled.

The compiler is native code: `^([a-z]{1,100}){1,100}$` as a pattern keeps it busy for minutes, and nothing stops it from
inside. What passes here is compiled again by the server. Run as a script; imports nothing of kvboost, so that it
starts as fast as xgrammar allows (2 s, most of it torch). Protocol: one JSON value a line, in and out.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from typing import Any

CPU_SECONDS = 3
"""For compiling one grammar and walking through it. A schema of 200 properties takes 0.07 s."""

MEMORY_BYTES = 1 << 30
"""Address space that one grammar may take on top of what the process has."""

WALK_TOKENS = 48
MASK_SECONDS = 0.02
"""Mean time of a token mask on the walk: a step of a small model takes as long, and every sequence would wait."""

IDLE_SECONDS = 300
"""After so long without work the process ends, and its 300 MB with it."""

MAX_WHITESPACE = 20
"""Whitespace characters in a row between JSON tokens: small models write blanks for ever where they may."""


def compile_with(compiler: Any, kind: str, text: str) -> Any:
    """A compiled grammar of (`json`, schema), (`regex`, pattern), (`grammar`, EBNF) or (`tags`, structural tag).

    Raises what xgrammar raises.
    """
    if kind == "json":
        return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
    if kind == "tags":
        return compiler.compile_structural_tag(text)
    return compiler.compile_regex(text) if kind == "regex" else compiler.compile_grammar(text)


def reason(error: BaseException) -> str:
    """xgrammar's message without its place in their source."""
    first = str(error).strip().split("\n")[0]
    _, separator, message = first.partition("] ")
    message = message if separator and first.startswith("[") else first
    where, separator, rest = message.partition(": ")
    return (rest if separator and ".cc:" in where else message)[:300]


def walk(xgrammar: Any, compiled: Any, vocab_size: int) -> None:
    """Take some allowed tokens one after another. Raises `TimeoutError` when their masks are slow."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    choose = random.Random(0)
    spent = 0.0
    for count in range(1, WALK_TOKENS + 1):
        began = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        spent += time.thread_time() - began
        words = [(i, word & 0xFFFFFFFF) for i, word in enumerate(mask[0].tolist()) if word]
        if not words:
            raise ValueError("no token of this model's vocabulary can begin or continue it")
        index, word = choose.choice(words)
        bits = [b for b in range(32) if word >> b & 1]
        if not matcher.accept_token(index * 32 + choose.choice(bits)) or matcher.is_terminated():
            return
        if count >= 8 and spent / count > MASK_SECONDS:
            raise TimeoutError(f"choosing a token takes {spent / count * 1e3:.0f} ms under this grammar")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the library prints warnings
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _limit_memory()
    while True:
        idle = threading.Timer(IDLE_SECONDS, os._exit, (0,))
        idle.daemon = True
        idle.start()
        line = sys.stdin.readline()
        idle.cancel()
        if not line:
            return
        kind, text = json.loads(line)
        _limit_time()
        try:
            walk(xgrammar, compile_with(compiler, kind, text), info.vocab_size)
            answer = ""
        except MemoryError:
            answer = f"needs more than {MEMORY_BYTES >> 20} MiB"
        except Exception as error:
            answer = reason(error) or type(error).__name__
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _limit_time() -> None:
    """The kernel ends this process when it has used `CPU_SECONDS` more. Where there is none, its caller's clock does."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory() -> None:
    try:
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except (ImportError, OSError):
        return
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
