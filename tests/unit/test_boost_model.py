"""boost(): what stays Transformers' own, and the life of a boosted model: training, saving, copies, threads, its end."""

from __future__ import annotations

import copy
import gc
import io
import json
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from boost_models import Pair, assert_equal, build, one_thread, prompts  # noqa: F401
from kvboost import KVBoostError, boost
from kvboost.api.boost import OURS, unboost

NAMES = ["llama", "bloom"]


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair.make(request.param)
    yield made
    if "kvboost" in vars(made.ours):
        made.ours.kvboost.check()
        made.ours.kvboost.close()


@pytest.fixture
def llama() -> Iterator[Pair]:
    made = Pair.make("llama")
    yield made
    unboost(made.ours)


# -- Transformers' own loop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 3}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"position_ids": torch.arange(9)[None]}, "position_ids"),
        ({"custom_generate": lambda model, input_ids, **_: input_ids + 1}, "custom_generate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_engine_cannot_do(
    llama: Pair, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = prompts([9])
    with caplog.at_level(logging.INFO, "kvboost"):
        for _ in range(2):
            llama.same(**inputs, **{"max_new_tokens": 8, **settings}, in_engine=False)
    lines = [record.getMessage() for record in caplog.records if record.name == "kvboost"]
    assert len(lines) == 1 and reason in lines[0], lines
    llama.same(**inputs, max_new_tokens=4)


def test_inputs_the_engine_cannot_take(llama: Pair, caplog: pytest.LogCaptureFixture) -> None:
    inputs = prompts([12, 5])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for odd in (mask.flip(1), torch.where(torch.arange(12) == 9, 0, mask)):
        llama.same(ids, attention_mask=odd, max_new_tokens=6, in_engine=False)
    assert caplog.text.count("zeros elsewhere") == 1
    embeddings = llama.plain.get_input_embeddings()(ids[:1]).detach()
    llama.same(inputs_embeds=embeddings, max_new_tokens=6, in_engine=False)
    with torch.no_grad():
        answers = []
        for model in (llama.plain, llama.ours):
            first = model(ids[:1, :6], use_cache=True)
            held = first["cache" if "cache" in first else "past_key_values"]
            answers.append(model.generate(ids[:1], max_new_tokens=6, past_key_values=held))
    assert_equal(answers[1], answers[0])
    assert "past_key_values is given" in caplog.text
    with pytest.raises(IndexError):
        llama.ours.generate(torch.tensor([[5, 9999]]), max_new_tokens=2)
    llama.same(ids[:1], max_new_tokens=6)


def test_longer_than_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair.make("llama", num_blocks=2)
    pair.same(**prompts([20]), max_new_tokens=12)
    pair.same(**prompts([20]), max_new_tokens=13, in_engine=False)
    assert "max_model_len=32" in caplog.text
    unboost(pair.ours)


def test_an_assistant(llama: Pair) -> None:
    llama.same(**prompts([9]), max_new_tokens=8, assistant_model=build("llama"), in_engine=False)
    # The other way round: a boosted model may assist.
    out = llama.plain.generate(**prompts([9]), max_new_tokens=8, assistant_model=llama.ours)
    assert_equal(out, llama.plain.generate(**prompts([9]), max_new_tokens=8))


def test_models_in_a_state_of_their_own(llama: Pair, caplog: pytest.LogCaptureFixture) -> None:
    inputs = prompts([9])
    llama.same(**inputs, max_new_tokens=6)
    for model in (llama.ours, llama.plain):
        model.train()
    llama.same(**inputs, max_new_tokens=6, in_engine=False)
    for model in (llama.ours, llama.plain):
        model.eval()
    hooks = [
        model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
        for model in (llama.ours, llama.plain)
    ]
    llama.same(**inputs, max_new_tokens=6, in_engine=False)
    for hook in hooks:
        hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        llama.same(**inputs, max_new_tokens=6, in_engine=False)
    llama.same(**inputs, max_new_tokens=6, output_hidden_states=True, in_engine=False)
    llama.same(**inputs, max_new_tokens=6)  # the hooks Transformers leaves behind do no harm
    for model in (llama.ours, llama.plain):
        model.double()
    llama.same(**inputs, max_new_tokens=6, in_engine=False)
    for reason in ("training mode", "forward hooks", "autocast", "output_hidden_states is", "another device or dtype"):
        assert caplog.text.count(reason) == 1, reason


def test_misspelt_names_raise_as_before(llama: Pair, caplog: pytest.LogCaptureFixture) -> None:
    for wrong in ({"max_new_token": 3}, {"temprature": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            llama.ours.generate(**prompts([4]), **wrong)
    with pytest.raises(ValueError, match="max_length"):
        llama.ours.generate(**prompts([30]), max_length=20)
    assert not [record for record in caplog.records if record.name == "kvboost"]


def test_streamers_get_the_prompt_once(llama: Pair) -> None:
    class Count(BaseStreamer):
        def __init__(self) -> None:
            self.puts = 0

        def put(self, value: Tensor) -> None:
            self.puts += 1

        def end(self) -> None:
            pass

    for lengths in ([9], [9, 4]):
        count = Count()
        llama.ours.generate(**prompts(lengths), max_new_tokens=5, streamer=count)
        assert count.puts == 6


# -- KV -------------------------------------------------------------------------------------------------------------


def test_calls_share_prefixes(pair: Pair) -> None:
    inputs = prompts([64])
    first = pair.same(**inputs, max_new_tokens=20)
    before = pair.ours.kvboost.stats()
    assert_equal(pair.ours.generate(**inputs, max_new_tokens=20), first)
    turn = torch.cat([first, torch.tensor([[5, 6, 7]])], dim=1)
    pair.same(turn, max_new_tokens=8)  # a next turn finds the answer too
    after = pair.ours.kvboost.stats()
    assert after.prefix_hits_tokens - before.prefix_hits_tokens == 63 + 83
    batch = turn.repeat(3, 1)
    batch[:, -1] = torch.tensor([9, 10, 11])
    pair.same(batch, max_new_tokens=8)
    assert pair.ours.kvboost.stats().prefix_hits_tokens - after.prefix_hits_tokens == 3 * 86


def change_by_optimizer(model: PreTrainedModel, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    ids = prompts([30])["input_ids"]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def change_data(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.3)


def change_state_dict(model: PreTrainedModel, **options: Any) -> None:
    model.load_state_dict({name: value * 0.7 for name, value in model.state_dict().items()}, **options)


def change_one_parameter(model: PreTrainedModel) -> None:
    layer = model.get_input_embeddings()
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0))


CHANGES: list[Callable[[PreTrainedModel], None]] = [
    change_by_optimizer,
    lambda model: change_by_optimizer(model, fused=True),
    change_data,
    change_state_dict,
    lambda model: change_state_dict(model, assign=True),
    change_one_parameter,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_make_stored_kv_void(pair: Pair, change: Callable[[PreTrainedModel], None]) -> None:
    inputs = prompts([64])
    old = pair.same(**inputs, max_new_tokens=12)
    for model in (pair.ours, pair.plain):
        change(model)
    assert pair.same(**inputs, max_new_tokens=12).tolist() != old.tolist()
    hits = pair.ours.kvboost.stats().prefix_hits_tokens
    assert hits == 0
    pair.same(**inputs, max_new_tokens=12)
    assert pair.ours.kvboost.stats().prefix_hits_tokens == 63


# -- training, saving, copying ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom"])
def test_forward_and_training_are_untouched(name: str) -> None:
    pair = Pair.make(name)
    pair.same(**prompts([20, 7]), max_new_tokens=6)
    inputs = prompts([20, 7])
    for model in (pair.ours, pair.plain):
        model.train()
        torch.manual_seed(0)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        model.eval()
    for (where, a), (_, b) in zip(pair.ours.named_parameters(), pair.plain.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, where
        torch.testing.assert_close(a.grad, b.grad, msg=where)
    with torch.no_grad():
        torch.testing.assert_close(pair.ours(**inputs).logits, pair.plain(**inputs).logits)
    pair.same(**inputs, max_new_tokens=6)
    unboost(pair.ours)


def test_modes_are_kept() -> None:
    model = build("llama").train()
    model.model.layers[0].eval()
    boost(model, num_blocks=16)
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    unboost(model)


def test_saving_writes_nothing_of_ours(pair: Pair, tmp_path: Path) -> None:
    pair.ours.generate(**prompts([5]), max_new_tokens=3)
    pair.ours.save_pretrained(tmp_path / "ours")
    pair.plain.save_pretrained(tmp_path / "plain")
    names = sorted(os.listdir(tmp_path / "plain"))
    assert sorted(os.listdir(tmp_path / "ours")) == names
    for name in names:
        ours, plain = ((tmp_path / side / name).read_bytes() for side in ("ours", "plain"))
        assert ours == plain, name
        assert b"kvboost" not in ours
    assert set(pair.ours.state_dict()) == set(pair.plain.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_equal(
        loaded.generate(**prompts([9]), max_new_tokens=5), pair.ours.generate(**prompts([9]), max_new_tokens=5)
    )


def by_torch_save(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[PreTrainedModel], PreTrainedModel]] = [
    copy.deepcopy,
    lambda model: copy.deepcopy({"nested": [model]})["nested"][0],
    lambda model: copy.deepcopy(torch.nn.ModuleList([model]))[0],
    lambda model: pickle.loads(pickle.dumps(model)),
    by_torch_save,
]


@pytest.mark.parametrize("make", COPIES)
def test_copies_are_plain_models(pair: Pair, make: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    inputs = prompts([20, 7])
    other = make(pair.ours)
    assert type(other) is type(pair.ours)
    assert not set(OURS) & set(vars(other))
    assert other.config._attn_implementation == pair.plain.config._attn_implementation
    assert_equal(other.generate(**inputs, max_new_tokens=6), pair.plain.generate(**inputs, max_new_tokens=6))
    with torch.no_grad():
        next(other.parameters()).zero_()
    pair.same(**inputs, max_new_tokens=6)
    boost(other, num_blocks=16).generate(**inputs, max_new_tokens=2)
    unboost(other)


# -- threads and the end ----------------------------------------------------------------------------------------------


def test_threads_share_the_engine(llama: Pair) -> None:
    batches = [prompts([20 + 3 * i, 5 + i], seed=i) for i in range(8)]
    expected = [llama.plain.generate(**inputs, max_new_tokens=16, repetition_penalty=1.1 + 0.1 * (i % 2))
                for i, inputs in enumerate(batches)]  # fmt: skip
    found: dict[int, Tensor] = {}

    def work(i: int) -> None:
        found[i] = llama.ours.generate(**batches[i], max_new_tokens=16, repetition_penalty=1.1 + 0.1 * (i % 2))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, answer in enumerate(expected):
        assert_equal(found[i], answer)


def test_unboost_and_close(pair: Pair) -> None:
    inputs = prompts([20, 7])
    model, attention = pair.ours, pair.plain.config._attn_implementation
    kv = model.kvboost
    assert unboost(model) is model
    assert kv.engine.closed and not set(OURS) & set(vars(model))
    assert model.config._attn_implementation == attention
    assert_equal(model.generate(**inputs, max_new_tokens=6), pair.plain.generate(**inputs, max_new_tokens=6))
    unboost(model)
    boost(model, num_blocks=32)
    pair.same(**inputs, max_new_tokens=6)
    model.kvboost.close()
    assert_equal(model.generate(**inputs, max_new_tokens=6), pair.plain.generate(**inputs, max_new_tokens=6))
    assert not set(OURS) & set(vars(model)) and model.config._attn_implementation == attention


def test_boosting_twice_makes_a_new_engine(llama: Pair) -> None:
    first = llama.ours.kvboost
    boost(llama.ours, num_blocks=32, block_size=8)
    assert first.engine.closed and llama.ours.kvboost.config.block_size == 8
    llama.same(**prompts([20, 7]), max_new_tokens=6)


def test_a_dropped_model_is_freed_with_its_engine() -> None:
    model = boost(build("llama"), num_blocks=32)
    model.generate(**prompts([20]), max_new_tokens=4, repetition_penalty=1.2, no_repeat_ngram_size=2)
    engine, gone = model.kvboost.engine, weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and engine.closed


def test_a_forked_process_falls_back(llama: Pair) -> None:
    read, write = os.pipe()
    expected = llama.plain.generate(**prompts([6]), max_new_tokens=4).tolist()
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            os.write(write, json.dumps(llama.ours.generate(**prompts([6]), max_new_tokens=4).tolist()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        answer = file.read()
    os.waitpid(child, 0)
    assert json.loads(answer) == expected


def test_refusals() -> None:
    with pytest.raises(KVBoostError, match="model"):
        boost("a-model")  # type: ignore[type-var]
    with pytest.raises(KVBoostError, match="num_block"):
        boost(build("llama"), num_block=3)
    model = build("llama")
    for wrong in ({"path": "nonsense"}, {"kv_cache_gib": 1e-9}):
        with pytest.raises(KVBoostError):
            boost(model, **wrong)
        assert not set(OURS) & set(vars(model)) and model.config._attn_implementation == "sdpa"
