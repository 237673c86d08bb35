"""boost(): a Transformers model in hand keeps its class, `forward` and training; its `generate()` runs in the engine.

Transformers itself prepares every call: it merges and checks the settings, makes masks, processors and criteria. Only
its decoding loop is replaced, through `custom_generate`, a public argument of `generate`. So whatever a release of
Transformers accepts means the same here, and what the engine cannot do goes to the loop it was meant for.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode, StopStringCriteria

from kvboost.api.boost_loop import DecodingLoop
from kvboost.api.boost_watch import Survey, has_adapters
from kvboost.api.kvboost import KVBoost
from kvboost.errors import ConfigError, InvalidRequest
from kvboost.models.fused.fuse import unfuse

log = logging.getLogger("kvboost")
Model = TypeVar("Model", bound=PreTrainedModel)

OURS = ("generate", "kvboost", "__deepcopy__", "__reduce_ex__")
"""Attributes that stand on a boosted instance. `copy` and `pickle` look their methods up on the instance."""

ONE_TOKEN_AT_A_TIME = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

NOT_FOR_THE_MODEL = ("tokenizer", "assistant_tokenizer", "trust_remote_code")
"""Keyword arguments that `generate` keeps to itself."""

OTHER_CACHES = ("quantized", "paged")
"""Values of `cache_implementation` that change what is computed. The others say where KV lies; here that is the pool."""


def boost(model: Model, tokenizer: Any = None, **engine_options: Any) -> Model:
    """Let `model.generate()` run in a KVBoost engine; returns the same model, and `model.kvboost` is the engine's face.

    Signature, settings and greedy tokens are those of Transformers; beam search and the like still run in its own
    loop, with one log line. engine_options: fields of `EngineConfig`. A boosted model that is boosted again gets a new
    engine. Raises `InvalidRequest` when `model` is no Transformers model, `UnsupportedModel`, `ConfigError`.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidRequest(
            "model", f"got {type(model).__name__}; give a loaded Transformers model, or use KVBoost.from_pretrained()."
        )
    for field in ("vram_budget_gib", "weights_budget_gib"):
        if engine_options.get(field) is not None:
            raise ConfigError(field, "a boosted model stays whole, so that it can be trained and changed. Use "
                              "KVBoost.from_pretrained() for one whose layers are streamed.")  # fmt: skip
    unboost(model)
    modes = [(module, module.training) for module in model.modules()]
    attention = model.config._attn_implementation
    try:
        kv = KVBoost.from_model(model, tokenizer, **engine_options)
    except BaseException:
        _restore_attention(model, attention)
        raise
    finally:
        for module, training in modes:
            module.training = training
    _Patch(model, kv, attention).apply()
    return model


def unboost(model: Model) -> Model:
    """Close the engine and give `model` its own `generate` and attention back. No effect on a model without one."""
    patch = getattr(vars(model).get("generate"), "kvboost_patch", None)
    if patch is not None:
        patch.remove()
    return model


class _Patch:
    """What `boost` put on one model. Invariant: the model's attributes `OURS` are ours from `apply` to `remove`."""

    def __init__(self, model: PreTrainedModel, kv: KVBoost, attention: str) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._own_generate = vars(model).get("generate")
        self._original: Callable[..., Any] = model.generate
        self._signature = inspect.signature(self._original)
        self._home = (model.device, model.dtype, os.getpid())
        self._lock = threading.Lock()
        self._weights = Survey.of(model).weights_state()
        self._said: set[str] = set()

    def apply(self) -> None:
        @functools.wraps(self._original)
        def generate(*args: Any, **kwargs: Any) -> Any:
            return self._generate(*args, **kwargs)

        generate.kvboost_patch = self  # type: ignore[attr-defined]
        vars(self._model).update(zip(OURS, (generate, self._kv, self._deepcopy, self._reduce), strict=True))

    def remove(self) -> None:
        """Idempotent."""
        self._kv.close()
        if vars(self._model).get("kvboost") is not self._kv:
            return  # someone kept an old `generate`; the model may have another engine by now
        for name in OURS:
            del vars(self._model)[name]
        if self._own_generate is not None:
            vars(self._model)["generate"] = self._own_generate
        unfuse(self._model)
        _restore_attention(self._model, self._attention)

    # -- generating ------------------------------------------------------------------------------------------------

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._kv.engine.closed:
            self.remove()
            return self._original(*args, **kwargs)
        call = self._signature.bind(*args, **kwargs)
        given = call.arguments
        extra: dict[str, Any] = given.get("kwargs", {})
        survey = Survey.of(self._model)
        reason = self._unfit_model(survey) or _unfit_arguments(given)
        if reason is None:
            settings, model_kwargs = self._model._prepare_generation_config(
                given.get("generation_config"), **{k: v for k, v in extra.items() if k not in NOT_FOR_THE_MODEL}
            )
            reason = _unfit_settings(settings) or _unfit_model_kwargs(model_kwargs)
        if reason is not None:
            answer = self._original(*args, **kwargs)  # a misspelt name raises here
            self._say(reason)
            return answer
        self._forget_if_weights_changed(survey)
        call.arguments["kwargs"] = extra = dict(extra)
        if settings.cache_implementation is not None:
            extra["cache_implementation"] = None
        tokenizer = extra.get("tokenizer") or self._kv.tokenizer
        if settings.stop_strings is not None and tokenizer is not None:
            # With `custom_generate`, Transformers (5.17 to 5.24) loses the tokenizer on the way to this criterion.
            extra["stop_strings"] = None
            matching = StopStringCriteria(stop_strings=settings.stop_strings, tokenizer=tokenizer)
            given["stopping_criteria"] = StoppingCriteriaList([*(given.get("stopping_criteria") or ()), matching])
        loop = DecodingLoop(
            self._kv,
            given.get("streamer"),
            given.get("prefix_allowed_tokens_fn"),
            given.get("logits_processor"),
            self._say,
        )
        given["custom_generate"] = loop.decode
        return self._original(*call.args, **call.kwargs)

    def _unfit_model(self, survey: Survey) -> str | None:
        """Why the model, as it stands now, cannot be run by the engine."""
        model = self._model
        device, dtype, pid = self._home
        if os.getpid() != pid:
            return "this process was forked from the one that boosted the model"
        if model.training:
            return "the model is in training mode; call model.eval() first"
        if (model.device, model.dtype) != (device, dtype):
            return "the model was moved to another device or dtype; boost() it again"
        if torch.is_autocast_enabled(device.type):
            return "torch.autocast is on"
        if type(model).generate is not GenerationMixin.generate:
            return "its class has a generate() of its own"
        if has_adapters(model):
            return "adapters are loaded"
        if survey.foreign_hooks:
            return "forward hooks are registered"
        return None

    def _forget_if_weights_changed(self, survey: Survey) -> None:
        """KV that other weights have computed is never used."""
        with self._lock:
            now = survey.weights_state()
            if now != self._weights:
                self._kv.reset_cache()
                self._weights = now

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("generate() runs in Transformers' own loop, without KV reuse: %s.", reason)

    # -- copies: plain models, since an engine has one model -----------------------------------------------------------

    def _plain_state(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self._model).items() if name not in OURS}
        if self._own_generate is not None:
            state["generate"] = self._own_generate
        return state

    def _deepcopy(self, memo: dict[int, Any]) -> PreTrainedModel:
        made = _empty(type(self._model))
        memo[id(self._model)] = made
        _set_plain_state(made, (copy.deepcopy(self._plain_state(), memo), self._attention))
        return made

    def _reduce(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (type(self._model),), (self._plain_state(), self._attention), None, None, _set_plain_state


def _empty(model_class: type[PreTrainedModel]) -> PreTrainedModel:
    made: PreTrainedModel = object.__new__(model_class)
    return made


def _set_plain_state(model: PreTrainedModel, state: tuple[dict[str, Any], str]) -> None:
    model.__setstate__(state[0])
    unfuse(model)
    _restore_attention(model, state[1])


def _restore_attention(model: PreTrainedModel, attention: str) -> None:
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)


def _unfit_arguments(given: dict[str, Any]) -> str | None:
    for name in ("custom_generate", "assistant_model", "synced_gpus", "negative_prompt_ids"):
        if given.get(name) is not None and given[name] is not False:
            return f"{name} is given"
    return None


def _unfit_settings(settings: Any) -> str | None:
    mode = settings.get_generation_mode()
    if mode not in ONE_TOKEN_AT_A_TIME:
        return f"the generation mode is {mode.value}"
    if settings.guidance_scale not in (None, 1):
        return "guidance_scale needs a second prompt"
    if settings.token_healing:
        return "token_healing changes the prompt"
    if settings.cache_implementation in OTHER_CACHES:
        return f"cache_implementation is {settings.cache_implementation!r}"
    return None


def _unfit_model_kwargs(model_kwargs: dict[str, Any]) -> str | None:
    for name, value in model_kwargs.items():
        if value is not None and name not in ("input_ids", "attention_mask"):
            return f"{name} is given"
    return None
