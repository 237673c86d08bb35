"""One row of a `generate()` call: how its processors and criteria, made by Transformers, meet the engine's requests.

Processors and criteria get what Transformers would give them, padding included: `[1, padding + tokens]` ids and
`[1, vocabulary]` scores in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvboost.engine.sampling_params import SamplingParams
from kvboost.errors import InvalidRequest

NATIVE = (
    (RepetitionPenaltyLogitsProcessor, "penalty", "repetition_penalty"),
    (TemperatureLogitsWarper, "temperature", "temperature"),
    (TopKLogitsWarper, "top_k", "top_k"),
    (TopPLogitsWarper, "top_p", "top_p"),
    (MinPLogitsWarper, "min_p", "min_p"),
)
"""Processors the engine's sampler has itself: their class, their attribute, our field; in the order both apply them."""


class Row:
    """Runs a row's processors and criteria in the engine's thread, and keeps what was asked for.

    What they raise is kept in `error` and ends the row: it must not take down the other requests of the step.
    """

    def __init__(
        self,
        padding: Tensor,
        processors: LogitsProcessorList | None,
        criteria: StoppingCriteriaList,
        keep_scores: bool,
        keep_logits: bool,
    ) -> None:
        self._padding = padding
        self._processors = processors
        self._criteria = criteria
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None
        self.error: Exception | None = None

    @property
    def processes(self) -> bool:
        return self._processors is not None

    @property
    def watches(self) -> bool:
        return bool(self._criteria) or self.processes

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """ids `[1, n]` without padding, scores `[1, vocabulary]`."""
        if self.error is not None or self._processors is None:
            return scores
        try:
            device = self._padding.device
            raw = scores.to(device, torch.float32, copy=True)
            if self.logits is not None:
                self.logits.append(raw.clone())
            processed = self._processors(self._padded(input_ids), raw)
            if self.scores is not None:
                self.scores.append(processed.clone())
            return processed.to(scores.device)
        except Exception as error:
            self.error = error
            return scores

    def should_stop(self, tokens: Sequence[int]) -> bool:
        """Whether a criterion is met after the last of `tokens`, the prompt's included."""
        if self.error is not None:
            return True
        try:
            scores = None if self.scores is None else tuple(self.scores)
            ids = self._padded(torch.tensor([tokens], dtype=torch.long))
            return bool(self._criteria and self._criteria(ids, scores).all())
        except Exception as error:
            self.error = error
            return True

    def _padded(self, input_ids: Tensor) -> Tensor:
        return torch.cat([self._padding, input_ids.to(self._padding.device)], dim=-1)


def unpadded_rows(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]] | None:
    """Token ids of each row without its left padding; None when the mask has zeros elsewhere, or a row has no token."""
    if attention_mask is None:
        return input_ids.tolist() if input_ids.shape[1] else None
    seen = attention_mask != 0
    if seen.shape != input_ids.shape:
        return None
    lengths = seen.sum(dim=1)
    positions = torch.arange(seen.shape[1], device=seen.device)
    if not bool((seen == (positions >= seen.shape[1] - lengths[:, None])).all()) or not bool(lengths.all()):
        return None
    return [row[len(row) - length :] for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)]


def native_sampling(processors: LogitsProcessorList, padded: bool) -> dict[str, Any] | None:
    """Fields of `SamplingParams` that do the same as `processors`, or None when those must run themselves."""
    values: dict[str, Any] = {}
    allowed = iter(NATIVE)
    for processor in processors:
        match = next((entry for entry in allowed if type(processor) is entry[0]), None)
        if match is None or not _plain(processor, padded):
            return None
        values[match[2]] = getattr(processor, match[1])
    try:
        SamplingParams(**values)
    except InvalidRequest:  # Transformers allows a little more, top_p=0 for one
        return None
    return values


def _plain(processor: Any, padded: bool) -> bool:
    """Without options that the sampler lacks; Transformers before 5.24 penalises padding tokens as well."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        return processor.prompt_ignore_length is None and not padded
    if getattr(processor, "min_tokens_to_keep", 1) != 1:
        return False
    return bool(getattr(processor, "filter_value", float("-inf")) == float("-inf"))


def row_processors(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    row: int,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None,
    custom: LogitsProcessorList | None,
) -> LogitsProcessorList:
    """The processors Transformers would make for a batch of this row alone; `custom` ones are shared by all rows."""
    settings = copy.copy(generation_config)
    batch_id = row // generation_config.num_return_sequences
    settings.num_return_sequences = 1
    allowed = None
    if prefix_allowed_tokens_fn is not None:

        def allowed(_: int, ids: Tensor) -> list[int]:
            return prefix_allowed_tokens_fn(batch_id, ids)

    made: LogitsProcessorList = model._get_logits_processor(
        generation_config=settings,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids[row : row + 1],
        prefix_allowed_tokens_fn=allowed,
        logits_processor=custom,
        device=input_ids.device,
        model_kwargs={"attention_mask": None if attention_mask is None else attention_mask[row : row + 1]},
    )
    return made
