"""LLM: the shape of vLLM's offline API on top of KVBoost, so that a script written for it runs after one changed import.

Only translation happens here: names of options, forms of prompts, and the shape of outputs.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from kvboost.api.kvboost import KVBoost
from kvboost.api.params import named_defaults
from kvboost.api.prompts import encode_text, render_chat
from kvboost.api.results import GenerationResult
from kvboost.config import EngineConfig
from kvboost.engine.outputs import TokenLogprobs
from kvboost.engine.sampling_params import SamplingParams
from kvboost.errors import ConfigError, InvalidRequest, KVBoostError

log = logging.getLogger("kvboost")

GIB = 1 << 30

ENGINE_FIELDS = {f.name: f.default for f in fields(EngineConfig)}

ONE_VALUE: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code from a model directory is never run"),
    "tensor_parallel_size": ((1, None), "the model runs on one device"),
    "pipeline_parallel_size": ((1, None), "the model runs on one device"),
    "data_parallel_size": ((1, None), "the model runs on one device"),
    "quantization": ((None,), "weights run in the dtype they are loaded in; GGUF files are recognised by themselves"),
    "speculative_config": ((None,), "there is no speculative decoding yet"),
    "enable_lora": ((False, None), "adapters are not supported; merge them into the model first"),
    "cpu_offload_gb": ((0, None), "weights stay on the device"),
    "revision": ((None,), "give a local directory, or the default revision of a Hub id"),
    "tokenizer_revision": ((None,), "give a local directory, or the default revision of a Hub id"),
    "tokenizer_mode": (("auto",), "Transformers chooses the tokenizer"),
    "skip_tokenizer_init": ((False,), "token ids can be given all the same, as {'prompt_token_ids': [...]}"),
    "hf_overrides": ((None, {}), "the model's own config is used"),
    "load_format": (("auto", "safetensors"), "the format is recognised by the file"),
    "model_impl": (("auto", "transformers"), "models are those of Transformers"),
    "runner": (("auto", "generate"), "only generation is offered"),
    "task": (("auto", "generate"), "only generation is offered"),
    "logits_processors": ((None, []), "use the fields of SamplingParams"),
    "chat_template": ((None,), "give it to chat(), or set llm.get_tokenizer().chat_template"),
}
"""vLLM's options of which one setting is what happens here anyway: (that setting, what to say about any other)."""

WITHOUT_EFFECT = frozenset(
    {"enforce_eager", "swap_space", "enable_chunked_prefill", "disable_log_stats", "disable_custom_all_reduce",
     "max_seq_len_to_capture", "compilation_config", "use_tqdm_on_load", "distributed_executor_backend",
     "async_scheduling", "max_parallel_loading_workers", "limit_mm_per_prompt", "prefix_caching_hash_algo",
     "disable_sliding_window", "disable_cascade_attn", "max_logprobs", "hf_token", "download_dir"}
)  # fmt: skip
"""vLLM's options that change speed, logging or where files are kept, never tokens. Accepted so that scripts run."""


@dataclass
class CompletionOutput:
    """One continuation, with vLLM's field names."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request's first continuation, in seconds from submission."""

    num_generation_tokens: int
    time_in_queue: float
    first_token_latency: float
    total_latency: float


@dataclass
class RequestOutput:
    """The answer to one prompt, with vLLM's field names."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int


@dataclass(frozen=True)
class _Prompt:
    text: str | None
    token_ids: Sequence[int] | None = None
    cache_salt: str | None = None


class LLM:
    """A model for offline generation, shaped like vLLM's `LLM`.

    >>> from kvboost import LLM, SamplingParams
    >>> llm = LLM(model="path/or/hub-id")
    >>> llm.generate(["Hello"], SamplingParams(temperature=0.8, top_p=0.95))[0].outputs[0].text

    model: directory, Hub id or `.gguf` file. generation_config: `auto` (its settings are the sampling defaults) or
    `vllm` (they are not). options: every field of `EngineConfig` (`gpu_memory_utilization`, `max_num_seqs`,
    `block_size`, `max_model_len` ...), and vLLM's names for the same things. Options that cannot change a token, such
    as `enforce_eager` or `swap_space`, are accepted and do nothing. Any other is refused by name with `ConfigError`.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        *,
        dtype: Any = "auto",
        device: Any = "auto",
        generation_config: str = "auto",
        **options: Any,
    ) -> None:
        if generation_config not in ("auto", "vllm"):
            raise ConfigError("generation_config", f"got {generation_config!r}; allowed: auto, vllm.")
        self._model_defaults = generation_config == "auto"
        self._kv = KVBoost.from_pretrained(
            model, tokenizer=tokenizer, dtype=dtype, device=device or "auto", **engine_options(options)
        )
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        prompt_token_ids: Sequence[Any] | None = None,
        lora_request: None = None,
        priority: None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: text, token ids, `{"prompt": ...}`, `{"prompt_token_ids": [...]}`, or a list of these.

        sampling_params: one for all, or one for each; None takes `get_default_sampling_params()`. A dict may hold a
        `cache_salt`; prompts with different ones share no KV and run one group after the other. Outputs come in the
        order of the prompts. Raises `InvalidRequest`.
        """
        for name, value in (("lora_request", lora_request), ("priority", priority)):
            if value is not None:
                raise InvalidRequest(name, "is not supported; leave it out.")
        if prompt_token_ids is not None:
            if prompts is not None:
                raise InvalidRequest("prompt_token_ids", "give either prompts or prompt_token_ids.")
            prompts = prompt_token_ids
        return self._run(_split(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of conversations, in one batch."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequest("messages", "give a list of {'role': ..., 'content': ...}, or a list of such lists.")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        template: dict[str, Any] = dict(chat_template_kwargs or {})
        if chat_template is not None:
            template["chat_template"] = chat_template
        if continue_final_message:
            template["continue_final_message"] = True
        tokenizer = self._kv.tokenizer
        prompts = []
        for conversation in conversations:
            text = render_chat(
                conversation, tokenizer, tools=tools, add_generation_prompt=add_generation_prompt, **template
            )
            prompts.append(_Prompt(text, encode_text(text, tokenizer, add_special_tokens=False)))
        return self._run(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The Transformers tokenizer."""
        return self._kv.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`: the settings that the model's generation_config names."""
        return SamplingParams(**named_defaults(self._kv.model.generation_config) if self._model_defaults else {})

    def reset_prefix_cache(self) -> bool:
        """Forget all stored KV."""
        self._kv.reset_cache()
        return True

    @property
    def kv(self) -> KVBoost:
        """The KVBoost underneath: streaming, statistics, warming."""
        return self._kv

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._kv.close()

    def _run(self, prompts: list[_Prompt], sampling_params: Any, use_tqdm: bool) -> list[RequestOutput]:
        params = self._per_prompt(sampling_params, len(prompts))
        groups: dict[str | None, list[int]] = {}
        for i, prompt in enumerate(prompts):
            groups.setdefault(prompt.cache_salt, []).append(i)
        results: dict[int, GenerationResult] = {}
        with _progress(self._kv, sum(p.n for p in params), bool(use_tqdm)):
            for salt, members in groups.items():
                given: list[Any] = [
                    prompts[i].text if prompts[i].token_ids is None else prompts[i].token_ids for i in members
                ]
                answers: Any = self._kv.generate(given, sampling=[params[i] for i in members], cache_salt=salt)
                results.update(zip(members, answers, strict=True))
        return [_output(str(next(self._request_ids)), prompt.text, results[i]) for i, prompt in enumerate(prompts)]

    def _per_prompt(self, sampling_params: Any, count: int) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        listed = list(sampling_params) if isinstance(sampling_params, Sequence) else []
        if len(listed) != count or not all(isinstance(p, SamplingParams) for p in listed):
            raise InvalidRequest(
                "sampling_params", f"give one SamplingParams, or a list of {count}, one for each prompt."
            )
        return listed


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine options as fields of `EngineConfig`. Raises `ConfigError` naming the first that cannot be honoured."""
    known: dict[str, Any] = {}
    for name, value in options.items():
        if name in ENGINE_FIELDS:
            if value is not None or ENGINE_FIELDS[name] is None:  # None is vLLM's word for the default
                known[name] = value
        elif name == "num_gpu_blocks_override":
            known["num_blocks"] = value
        elif name == "kv_cache_memory_bytes":
            known["kv_cache_gib"] = None if value is None else value / GIB
        elif name in ONE_VALUE:
            allowed, remark = ONE_VALUE[name]
            if value not in allowed:
                raise ConfigError(name, f"got {value!r}; only {allowed[0]!r} is possible: {remark}.")
        elif name in WITHOUT_EFFECT:
            log.info("%s=%r has no effect in KVBoost.", name, value)
        else:
            names = [*ENGINE_FIELDS, *ONE_VALUE, *WITHOUT_EFFECT, "num_gpu_blocks_override", "kv_cache_memory_bytes"]
            close = difflib.get_close_matches(name, names, n=3)
            hint = f"Did you mean {' or '.join(close)}?" if close else f"Options: {', '.join(sorted(ENGINE_FIELDS))}."
            raise ConfigError(name, f"unknown option. {hint}")
    return known


def _split(prompts: Any) -> list[_Prompt]:
    """One prompt or many, in any of vLLM's forms. Raises `InvalidRequest`."""
    if isinstance(prompts, (str, Mapping)):
        return [_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequest(
            "prompts", f"got {type(prompts).__name__}; give text, token ids, a dict, or a list of these."
        )
    if not prompts:
        raise InvalidRequest("prompts", "the list is empty; give at least one prompt.")
    if isinstance(prompts[0], int):
        return [_prompt(prompts)]
    return [_prompt(prompt) for prompt in prompts]


def _prompt(prompt: Any) -> _Prompt:
    if isinstance(prompt, str):
        return _Prompt(prompt)
    if not isinstance(prompt, Mapping):
        return _Prompt(None, prompt)  # KVBoost checks that these are token ids
    unknown = sorted(k for k, v in prompt.items() if v and k not in ("prompt", "prompt_token_ids", "cache_salt"))
    if unknown:
        raise InvalidRequest(
            "prompts", f"a prompt holds {', '.join(unknown)}; allowed: prompt, prompt_token_ids, cache_salt."
        )
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise InvalidRequest("prompts", "a dict has neither 'prompt' nor 'prompt_token_ids'.")
    return _Prompt(prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt"))


def _output(request_id: str, prompt: str | None, result: GenerationResult) -> RequestOutput:
    first = result.outputs[0]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=result.prompt_token_ids,
        prompt_logprobs=result.prompt_logprobs,
        outputs=[
            CompletionOutput(
                c.index, c.text, c.token_ids, c.cumulative_logprob, c.logprobs, c.finish_reason, c.stop_reason
            )
            for c in result.outputs
        ],
        finished=True,
        metrics=RequestMetrics(
            len(first.token_ids), first.queue_ms / 1e3, first.ttft_ms / 1e3, first.total_ms / 1e3
        ),
        num_cached_tokens=first.usage.cached_tokens,
    )  # fmt: skip


@contextmanager
def _progress(kv: KVBoost, total: int, wanted: bool) -> Iterator[None]:
    """A bar on standard error while requests run, read off the engine's counts; nothing when that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeElapsedColumn())
    over = threading.Event()
    before = kv.stats()
    with Progress(TextColumn("Prompts"), *columns, console=console) as bar:
        task = bar.add_task("", total=total, speed="")

        def show() -> None:
            now = kv.stats()
            tokens = now.output_tokens - before.output_tokens
            speed = f"{tokens / max(bar.tasks[0].elapsed or 0, 1e-3):.0f} tok/s"
            done = now.num_requests_finished - before.num_requests_finished
            bar.update(task, completed=min(done, total), speed=speed)

        def poll() -> None:
            while not over.wait(0.2):
                try:
                    show()
                except KVBoostError:  # closed meanwhile: the caller is told by its own requests
                    return

        thread = threading.Thread(target=poll, name="kvboost-progress", daemon=True)
        thread.start()
        try:
            yield
            show()
        finally:
            over.set()
            thread.join()
