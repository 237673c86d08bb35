"""KVBoost: a model with an engine around it. The main thing people hold."""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from transformers import PreTrainedModel

from kvboost.api.build import Built, build
from kvboost.api.collect import Continuation, result_of
from kvboost.api.params import GenerationDefaults, Resolved, resolve
from kvboost.api.prompts import encode, encode_text, render_chat, split_prompts
from kvboost.api.results import GenerationResult, StreamPiece
from kvboost.api.stream import TokenStream, stream_async
from kvboost.cache.pages import return_freed_memory
from kvboost.cache.prefix import root_key
from kvboost.config import EngineConfig
from kvboost.engine.detokenizer import Detokenizer
from kvboost.engine.engine import Engine
from kvboost.engine.grammar import Grammars, GrammarState
from kvboost.engine.request import Request
from kvboost.engine.sampler import bad_word_sequences
from kvboost.engine.sampling_params import SamplingParams
from kvboost.engine.stats import EngineStats
from kvboost.errors import EngineClosed, InvalidRequest, PromptTooLong
from kvboost.models.arena import settle
from kvboost.models.capabilities import Capabilities
from kvboost.models.loading import load_model, load_tokenizer, locate, resolve_device
from kvboost.weights.streamer import streamer_of
from kvboost.weights.streaming import load_streaming, must_stream, stream_in_hand

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class WarmResult:
    """What `warm` did. `tokens`: whole blocks of the text, now stored; `cached_tokens` of them were already there."""

    tokens: int
    cached_tokens: int
    pinned_blocks: int
    _engine: Engine
    _pin_id: str

    def unpin(self) -> None:
        """Let the pinned blocks be reused when memory is needed. Idempotent."""
        self._engine.call(lambda scheduler: scheduler.unpin(self._pin_id))


class KVBoost:
    """A causal language model whose KV is computed once.

    >>> from kvboost import KVBoost
    >>> llm = KVBoost.from_pretrained("path/or/hub-id")
    >>> print(llm.generate("The capital of France is", max_new_tokens=8).text)

    Thread-safe: any number of threads may call it at once; their requests run in the same batches.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, config: EngineConfig) -> None:
        self.model = model
        self.tokenizer = tokenizer
        began = time.perf_counter()
        self._built: Built = build(model, config)
        self.build_seconds = time.perf_counter() - began
        return_freed_memory()
        self._engine = self._built.engine
        self._defaults = GenerationDefaults.read(model.generation_config, tokenizer)
        self._ids = itertools.count()
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.grammars = Grammars(tokenizer, self._vocab_size)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        tokenizer: Any = None,
        **engine_options: Any,
    ) -> KVBoost:
        """Load a model directory, a Hub id or a `.gguf` file.

        dtype: auto (on a GPU the checkpoint's own; on a CPU bfloat16 where it is native, else float32), float32,
        float16 or bfloat16. device: auto, cpu, cuda, cuda:N. tokenizer: one in hand, or a path or id, when it is not the model's own. engine_options: fields
        of `EngineConfig`. Raises `ModelLoadError`, `UnsupportedModel` or `ConfigError`.
        """
        config = EngineConfig.from_kwargs(**engine_options)
        source = locate(path_or_id)
        place = resolve_device(device)
        if must_stream(config, source, place):
            model = load_streaming(source, dtype, place, config)
        else:
            model = load_model(source, dtype, place, config.weights)
        if tokenizer is None:
            tokenizer = load_tokenizer(source)
        elif isinstance(tokenizer, str):
            tokenizer = load_tokenizer(locate(tokenizer))
        if streamer_of(model) is None:
            settle(model)
        return cls(model, tokenizer, config)

    @classmethod
    def from_model(cls, model: PreTrainedModel, tokenizer: Any = None, **engine_options: Any) -> KVBoost:
        """Put an engine around a Transformers model in hand. The model can still be called and trained as before;
        after changing its weights, call `reset_cache()`. With a budget its layers are moved out, and it can only be called."""
        config = EngineConfig.from_kwargs(**engine_options)
        if (config.vram_budget_gib or config.weights_budget_gib) and streamer_of(model) is None:
            model = stream_in_hand(model, config)
        return cls(model.eval(), tokenizer, config)

    # -- generating ------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | Sequence[int], **kwargs: Any) -> GenerationResult: ...
    @overload
    def generate(self, prompt: Sequence[str] | Sequence[Sequence[int]], **kwargs: Any) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Any,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str | None = None,
        **arguments: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Continue one prompt (text or token ids) or a list of them, in one batch.

        Keyword arguments have Transformers' names (`max_new_tokens`, `temperature`, `top_p`, `do_sample` ...) or those
        of `SamplingParams`; what is not given comes from the model's generation_config. Prompts with different
        `cache_salt` never share KV. Raises `InvalidRequest`, `EngineClosed`, `EngineStepError`.
        """
        prompts, many = split_prompts(prompt)
        samplings = _per_prompt(sampling, len(prompts))
        groups = [
            self._requests(p, resolve(s, dict(arguments), self._defaults), cache_salt)
            for p, s in zip(prompts, samplings, strict=True)
        ]
        results = self._run_all([p if isinstance(p, str) else None for p in prompts], groups)
        return results if many else results[0]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        cache_salt: str | None = None,
        **arguments: Any,
    ) -> TokenStream:
        """Continue one prompt, piece by piece; arguments as for `generate`. The last piece carries the result."""
        text, requests = self._single(prompt, sampling, cache_salt, arguments)
        return TokenStream(self._engine, text, requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        tools: Any = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        cache_salt: str | None = None,
        **arguments: Any,
    ) -> GenerationResult | TokenStream:
        """Answer a conversation `[{"role": ..., "content": ...}, ...]` through the model's chat template."""
        text, ids = self._chat_ids(messages, tools, add_generation_prompt, chat_template_kwargs)
        requests = self._requests(ids, resolve(sampling, dict(arguments), self._defaults), cache_salt)
        if stream:
            return TokenStream(self._engine, text, requests)
        return self._run_all([text], [requests])[0]

    async def agenerate(self, prompt: Any, **arguments: Any) -> GenerationResult | list[GenerationResult]:
        """`generate` for asyncio. Cancelling the task ends its requests."""
        prompts, many = split_prompts(prompt)
        samplings = _per_prompt(arguments.pop("sampling", None), len(prompts))
        tasks = [asyncio.ensure_future(self._alast(p, s, arguments)) for p, s in zip(prompts, samplings, strict=True)]
        try:
            results = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return results if many else results[0]

    async def astream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        cache_salt: str | None = None,
        **arguments: Any,
    ) -> AsyncIterator[StreamPiece]:
        """`stream` for asyncio. Leaving the loop ends the generation."""
        text, requests = self._single(prompt, sampling, cache_salt, arguments)
        async for piece in stream_async(self._engine, text, requests):
            yield piece

    def warm(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        pin: bool = False,
        cache_salt: str | None = None,
    ) -> WarmResult:
        """Compute and keep the KV of a text, token ids or the start of a conversation, whole blocks of it.

        With `pin` the blocks stay until `unpin()`; at most half of the pool can be pinned.
        """
        request = self.warm_request(prompt, pin=pin, cache_salt=cache_salt)
        if request is not None:
            self._wait([[Continuation(request, 0)]])
        return self.warm_result(request)

    def warm_request(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        pin: bool = False,
        cache_salt: str | None = None,
    ) -> Request | None:
        """The request behind `warm`, for those who submit it themselves; None when the text fills no block."""
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            _, ids = self._chat_ids(prompt, None, False, None)
        else:
            ids = encode(prompt, self.tokenizer, self._vocab_size)
        size = self._built.layout.block_size
        whole = ids[: len(ids) // size * size]
        root = self._root(cache_salt)
        if not whole:
            return None
        self._require_fits(len(whole), len(whole))
        return Request(
            f"warm-{next(self._ids)}", whole, SamplingParams(max_tokens=1, detokenize=False), root, prefill_only=True,
            pin=pin, max_total_tokens=len(whole),
        )  # fmt: skip

    def warm_result(self, request: Request | None) -> WarmResult:
        """What a finished `warm_request` did. Waits for the step under way, except in the engine's thread."""
        if request is None:
            return WarmResult(0, 0, 0, self._engine, "")
        pinned = self._engine.call(lambda scheduler: len(scheduler.pinned.get(request.id, ())))
        return WarmResult(request.num_prompt, request.cached_tokens or 0, pinned, self._engine, request.id)

    # -- looking after it ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts since the start and the pool as it is now."""
        return self._engine.stats()

    def reset_cache(self) -> int:
        """Forget all stored KV, pinned too. Returns the number of blocks that could have been found."""
        return self._engine.call(lambda scheduler: scheduler.forget_cached())

    def check(self) -> None:
        """Verify the engine's invariants (for tests and bug reports). Raises `AssertionError`."""
        self._engine.check()

    def close(self) -> None:
        """End what is running and stop the engine. Idempotent. The model stays usable as a Transformers model."""
        self._engine.close()
        self.grammars.close()

    def warm_up(self) -> int:
        """Capture CUDA graphs for all usual step shapes now, instead of when each comes up; returns how many there are.

        Takes some ten seconds on a GPU; 0 at once where there are none. Nothing is cached by it.
        """
        runner = self._built.runner
        return self._engine.call(lambda _: runner.warm_up(self.config.num_seqs))

    @property
    def attention_backend(self) -> str:
        """Which attention runs, and why."""
        if self._built.capabilities.path == "compat":
            return f"the model's own: {self._built.capabilities.reason}"
        return str(self._built.backend)

    @property
    def capabilities(self) -> Capabilities:
        """How this model is run, and why."""
        return self._built.capabilities

    @property
    def config(self) -> EngineConfig:
        """The engine's options, with automatic ones filled in."""
        return self._built.config

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        return self._built.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocab_size

    @property
    def defaults(self) -> GenerationDefaults:
        """What the model's generation_config says."""
        return self._defaults

    @property
    def engine(self) -> Engine:
        """The loop itself, for those who build on it."""
        return self._engine

    @property
    def built(self) -> Built:
        """Layout, namespace and sizes decided at load."""
        return self._built

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()
        grammars = getattr(self, "grammars", None)
        if grammars is not None:
            grammars.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def make_requests(self, ids: list[int], resolved: Resolved, cache_salt: str | None = None) -> list[Request]:
        """The `n` requests of one prompt, checked against the model's and the pool's limits. Raises `InvalidRequest`."""
        params = replace(resolved.params)  # the caller may change theirs while this one runs
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self._vocab_size:
                    raise InvalidRequest(name, f"holds {token}; this model has ids 0 to {self._vocab_size - 1}.")
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise InvalidRequest("stop" if params.stop else "bad_words", "needs a tokenizer, and this model has none.")
        total = self._require_fits(len(ids), len(ids) + (params.max_tokens or self.max_model_len))
        bad_words = bad_word_sequences(params.bad_words, self.tokenizer) if params.bad_words else ()
        root = self._root(cache_salt)
        number = next(self._ids)
        seed = params.seed if params.seed is not None else _mix(self.config.seed, number)
        return [
            Request(
                id=f"{number}-{i}",
                prompt_ids=ids,
                params=params,
                root=root,
                seed=seed if i == 0 else _mix(seed, i),
                stop_ids=resolved.stop_ids,
                bad_word_ids=bad_words,
                grammar=self._grammar(resolved),
                detokenizer=self._detokenizer(ids, params),
                max_total_tokens=total,
            )
            for i in range(params.n)
        ]

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Output tokens of requests from `make_requests`. Raises `EngineClosed`, `EngineStepError`."""
        self._wait([[Continuation(r, 0)] for r in requests])
        return [r.output_ids for r in requests]

    def _single(
        self, prompt: Any, sampling: SamplingParams | None, cache_salt: str | None, arguments: dict[str, Any]
    ) -> tuple[str | None, list[Request]]:
        prompts, many = split_prompts(prompt)
        if many:
            raise InvalidRequest("prompt", "got a list of prompts; stream one at a time, or use generate().")
        requests = self._requests(prompts[0], resolve(sampling, arguments, self._defaults), cache_salt)
        return prompts[0] if isinstance(prompts[0], str) else None, requests

    def _requests(self, prompt: Any, resolved: Resolved, cache_salt: str | None) -> list[Request]:
        return self.make_requests(encode(prompt, self.tokenizer, self._vocab_size), resolved, cache_salt)

    def _chat_ids(
        self, messages: Any, tools: Any, add_generation_prompt: bool, options: Mapping[str, Any] | None
    ) -> tuple[str, list[int]]:
        text = render_chat(
            messages, self.tokenizer, tools=tools, add_generation_prompt=add_generation_prompt, **(options or {})
        )
        return text, encode_text(text, self.tokenizer, add_special_tokens=False)

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            ids,
            stop=tuple(params.stop or ()),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _grammar(self, resolved: Resolved) -> GrammarState | None:
        wanted = resolved.params.structured_outputs
        return None if wanted is None else self.grammars.state(wanted, resolved.stop_ids)

    def _root(self, cache_salt: str | None) -> bytes:
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidRequest("cache_salt", f"got {cache_salt!r}; it must be a non-empty string.")
        return root_key(self._built.namespace, cache_salt)

    def _require_fits(self, prompt_tokens: int, wanted_total: int) -> int:
        """Tokens this request may grow to. Raises `PromptTooLong` when not even one more token fits."""
        if prompt_tokens >= self.max_model_len and wanted_total > prompt_tokens:
            raise PromptTooLong(
                "prompt",
                f"has {prompt_tokens} tokens; max_model_len is {self.max_model_len}, prompt and output together. "
                "Shorten it, or raise max_model_len or the KV memory.",
            )
        if prompt_tokens > self.max_model_len:
            raise PromptTooLong("prompt", f"has {prompt_tokens} tokens; max_model_len is {self.max_model_len}.")
        return min(wanted_total, self.max_model_len)

    def _run_all(self, texts: Sequence[str | None], groups: list[list[Request]]) -> list[GenerationResult]:
        continuations = [[Continuation(r, i) for i, r in enumerate(requests)] for requests in groups]
        self._wait(continuations)
        return [result_of(text, group) for text, group in zip(texts, continuations, strict=True)]

    def _wait(self, groups: list[list[Continuation]]) -> None:
        """Submit and collect until all have finished; on any error or Ctrl-C, end the rest first."""
        everything = [c for group in groups for c in group]
        outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for c in everything:
            c.request.sink = lambda output, c=c: outputs.put((c, output))
        open_count = len(everything)
        try:
            self._engine.submit([c.request for c in everything], block=True)
            while open_count:
                continuation, output = outputs.get()
                if output.error is not None:
                    raise output.error
                if output.finish_reason == "abort" and self._engine.closed:
                    raise EngineClosed("the engine was closed while this request was running.")
                continuation.add(output)
                open_count -= output.finish_reason is not None
        except BaseException:
            for c in everything:
                if c.finish_reason is None:
                    self._engine.abort(c.request)
            raise

    async def _alast(self, prompt: Any, sampling: SamplingParams | None, arguments: dict[str, Any]) -> GenerationResult:
        result = None
        async for piece in self.astream(prompt, sampling=sampling, **arguments):
            result = piece.result
        assert result is not None, "a stream ends with its result"
        return result


def _per_prompt(sampling: Any, count: int) -> list[Any]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, Sequence) or len(sampling) != count:
        raise InvalidRequest("sampling", f"give one SamplingParams, or a list of {count}, one for each prompt.")
    return list(sampling)


def _mix(seed: int, number: int) -> int:
    """A seed of its own for each request and continuation (multiplier of Knuth's MMIX generator)."""
    return ((seed ^ 0x9E3779B97F4A7C15) + (number + 1) * 6364136223846793005) & _MASK64
