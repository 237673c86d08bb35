"""Keeps Transformers from reading one GGUF file five times, and from drawing a bar where nobody sees it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def read_once() -> Iterator[None]:
    """While active, a GGUF file is parsed once, whoever asks: config, tokenizer and weights each would again.

    One parse of SmolLM2's 49,152 tokens and their merges takes 1.5 s.
    """
    try:
        import gguf
        from transformers import modeling_gguf_pytorch_utils
    except ImportError:  # Transformers says what to install when a file is read
        yield
        return
    opened: dict[str, Any] = {}
    reader = gguf.GGUFReader

    def open_once(path: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return reader(path, *args, **kwargs)
        if str(path) not in opened:
            opened[str(path)] = reader(path)
        return opened[str(path)]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gguf, "GGUFReader", open_once))
        if hasattr(modeling_gguf_pytorch_utils, "tqdm") and not sys.stderr.isatty():
            bar = functools.partial(modeling_gguf_pytorch_utils.tqdm, disable=True)
            stack.enter_context(mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", bar))
        yield
