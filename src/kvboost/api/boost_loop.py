"""The decoding loop that stands in for Transformers': prepared rows become requests, their tokens become its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from kvboost.api.boost_rows import Row, native_sampling, row_processors, unpadded_rows
from kvboost.api.kvboost import KVBoost
from kvboost.api.params import Resolved
from kvboost.api.stream import TokenStream
from kvboost.engine.request import Request
from kvboost.engine.sampling_params import SamplingParams

SEED_LIMIT = 2**63 - 1


class DecodingLoop:
    """One call of `generate()`: what Transformers does not pass on to a decoding loop, and the loop itself."""

    def __init__(
        self,
        kv: KVBoost,
        streamer: Any,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None,
        custom_processors: LogitsProcessorList | None,
        say: Callable[[str], None],
    ) -> None:
        self._kv = kv
        self._streamer = streamer
        self._prefix_allowed_tokens_fn = prefix_allowed_tokens_fn
        self._custom_processors = custom_processors
        self._say = say

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Continue `input_ids [rows, tokens]`, left-padded where `attention_mask` is 0, as Transformers' loop would."""
        mask = model_kwargs.get("attention_mask")
        prompts = unpadded_rows(input_ids, mask)
        limits = [c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria]
        # Criteria are looked at after a token, so there is always one.
        room = max(1, min(limits) - input_ids.shape[1]) if limits else self._kv.max_model_len
        reason = self._unfit(model, prompts, room)
        if prompts is None or reason is not None:
            self._say(reason or "the attention mask has zeros elsewhere than on the left")
            own_loop: Any = type(model)._sample
            return own_loop(
                model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                generation_config=generation_config, streamer=self._streamer, **model_kwargs,
            )  # fmt: skip
        keep_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
        keep_logits = bool(generation_config.return_dict_in_generate and generation_config.output_logits)
        sampling = None if keep_scores or keep_logits else native_sampling(logits_processor, mask is not None)
        eos = [c for c in stopping_criteria if type(c) is EosTokenCriteria]
        others = StoppingCriteriaList(
            c for c in stopping_criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        rows = [
            Row(
                padding=input_ids[i : i + 1, : input_ids.shape[1] - len(prompt)],
                processors=None if sampling is not None else row_processors(
                    model, generation_config, input_ids, mask, i, self._prefix_allowed_tokens_fn, self._custom_processors
                ),
                criteria=others,
                keep_scores=keep_scores,
                keep_logits=keep_logits,
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        call = _Call(self._kv, rows, _params(sampling, generation_config.do_sample), generation_config.do_sample)
        stop_ids = frozenset(int(token) for c in eos for token in c.eos_token_id.reshape(-1))
        outputs = call.run(prompts, stop_ids, room, self._streamer)
        longest = max(map(len, outputs))
        if not any(hasattr(c, "eos_token_id") for c in stopping_criteria):
            # Without an EOS, Transformers lets rows that met a criterion run on until the last one has met its own.
            outputs = call.extend(prompts, outputs, longest)
        pad = generation_config._pad_token_tensor
        return _assemble(input_ids, outputs, longest, pad, rows, generation_config)

    def _unfit(self, model: PreTrainedModel, prompts: list[list[int]] | None, room: int) -> str | None:
        if prompts is None:
            return None
        if self._streamer is not None and len(prompts) > 1:
            return "a streamer is given for a batch"
        if max(map(len, prompts)) + room > self._kv.max_model_len:
            return f"prompt and max_new_tokens are longer than max_model_len={self._kv.max_model_len}"
        vocabulary = model.get_input_embeddings().weight.shape[0]
        if any(not 0 <= token < vocabulary for prompt in prompts for token in prompt):
            return "a token id is outside the vocabulary"
        return None


class _Call:
    """The requests of one call; the rows' settings are the same but for their seeds."""

    def __init__(self, kv: KVBoost, rows: Sequence[Row], params: SamplingParams, sampled: bool) -> None:
        self._kv = kv
        self._rows = rows
        # From torch's global generator, so that torch.manual_seed() makes a call repeatable, as in Transformers.
        seeds = torch.randint(0, SEED_LIMIT, (len(rows),)).tolist() if sampled else [0] * len(rows)
        self._params = [params.replace(seed=seed) for seed in seeds]

    def run(self, prompts: list[list[int]], stop_ids: frozenset[int], room: int, streamer: Any) -> list[list[int]]:
        """At most `room` tokens for each prompt. Raises what a processor, criterion or streamer raised."""
        requests = [self._request(i, prompt, stop_ids, room) for i, prompt in enumerate(prompts)]
        for request, row in zip(requests, self._rows, strict=True):
            request.should_stop = row.should_stop if row.watches else None
        outputs = self._kv.run(requests) if streamer is None else [self._stream(requests[0], streamer)]
        self._raise_row_errors()
        return outputs

    def extend(self, prompts: list[list[int]], outputs: list[list[int]], length: int) -> list[list[int]]:
        """Let shorter outputs grow to `length` tokens, whatever they hold."""
        short = [i for i, output in enumerate(outputs) if len(output) < length]
        requests = [self._request(i, prompts[i] + outputs[i], frozenset(), length - len(outputs[i])) for i in short]
        for i, more in zip(short, self._kv.run(requests) if requests else [], strict=True):
            outputs[i] = outputs[i] + more
        self._raise_row_errors()
        return outputs

    def _request(self, row: int, ids: list[int], stop_ids: frozenset[int], room: int) -> Request:
        params = self._params[row].replace(max_tokens=room)
        request = self._kv.make_requests(ids, Resolved(params, stop_ids))[0]
        request.processors = (self._rows[row].process,) if self._rows[row].processes else ()
        return request

    def _stream(self, request: Request, streamer: Any) -> list[int]:
        with TokenStream(self._kv.engine, None, [request]) as stream:
            for piece in stream:
                for token in piece.token_ids:
                    if self._rows[0].error is None:
                        streamer.put(torch.tensor([token]))
        self._raise_row_errors()
        streamer.end()
        return request.output_ids

    def _raise_row_errors(self) -> None:
        for row in self._rows:
            if row.error is not None:
                raise row.error


def _params(sampling: dict[str, Any] | None, sampled: bool) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 1.0, **(sampling or {})}
    if not sampled:
        values["temperature"] = 0.0
    return SamplingParams(detokenize=False, **values)


def _assemble(
    input_ids: Tensor,
    outputs: list[list[int]],
    length: int,
    pad: Tensor | None,
    rows: Sequence[Row],
    generation_config: GenerationConfig,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Sequences `[rows, prompt + length]`, padded on the right; scores `length` times `[rows, vocabulary]`."""
    filler = 0 if pad is None else int(pad)
    new = torch.tensor([output + [filler] * (length - len(output)) for output in outputs], device=input_ids.device)
    sequences = torch.cat([input_ids, new], dim=-1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_stacked([row.scores for row in rows], length, filler),
        logits=_stacked([row.logits for row in rows], length, filler),
    )


def _stacked(kept: list[list[Tensor] | None], length: int, filler: int) -> tuple[Tensor, ...] | None:
    """One `[rows, vocabulary]` per step. A row that has ended predicts padding with certainty."""
    tracks = [track for track in kept if track is not None]
    if not tracks:
        return None
    ended = torch.full_like(tracks[0][0], float("-inf"))
    ended[..., filler] = 0.0
    return tuple(torch.cat([track[t] if t < len(track) else ended for track in tracks]) for t in range(length))
