"""Streamed layers give the same tokens as resident ones, whoever runs them and whatever interrupts them."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from kvboost import KVBoost, boost
from kvboost.errors import ConfigError, EngineStepError, KVBoostError, ModelLoadError
from kvboost.models.fingerprint import weights_fingerprint
from kvboost.weights.streamer import Streamer, streamer_of
from stream_rig import (
    FAMILIES,
    LAYERS,
    OPTIONS,
    PROMPTS,
    answers,
    budget_gib,
    link,
    native_kernels_as_they_are,
    own_cache,
    streamed,
    tiny,
)

__all__ = ["link", "native_kernels_as_they_are", "own_cache"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def expected(family: str, dtype: torch.dtype = torch.float32) -> tuple[list[list[int]], dict[str, int]]:
    """Answers of the resident model, and what was fused in it."""
    with KVBoost.from_model(tiny(family, dtype), **OPTIONS) as kv:
        return answers(kv), kv.built.fused


def streamer(kv: KVBoost) -> Streamer:
    found = streamer_of(kv.model)
    assert found is not None
    return found


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [0, 1, LAYERS // 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_equal_those_of_the_resident_model(resident: int, dtype: torch.dtype, link: str) -> None:
    want, fused = expected("llama", dtype)
    assert len({tuple(tokens) for tokens in want}) == len(want), "the answers differ, or little would be seen"
    with streamed("llama", resident, dtype) as kv:
        assert kv.built.fused == fused, "streamed layers are fused as resident ones are"
        assert streamer(kv).plan.link == link
        assert answers(kv) == want, "eight at once"
        kv.reset_cache()
        assert [answers(kv, [prompt])[0] for prompt in PROMPTS] == want, "one at a time"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_is_streamed(family: str) -> None:
    want, fused = expected(family)
    with streamed(family, 1) as kv:
        assert kv.built.fused == fused
        assert answers(kv) == want


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
@pytest.mark.parametrize("resident", [0, LAYERS // 2])
def test_a_directory_is_streamed_without_being_whole_in_memory(
    weights: str, resident: int, tmp_path: Path, own_cache: Path
) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    options = {**OPTIONS, "dtype": "float32", "weights": weights}
    with KVBoost.from_pretrained(str(tmp_path / "model"), **options) as kv:
        want, fused, budget = answers(kv), kv.built.fused, budget_gib(kv.model, resident)
        namespace = kv.built.namespace
    seen = []
    for _ in range(2):
        with KVBoost.from_pretrained(str(tmp_path / "model"), weights_budget_gib=budget, **options) as kv:
            assert len(streamer(kv).plan.resident) == resident
            assert (answers(kv), kv.built.fused) == (want, fused)
            assert kv.built.namespace == namespace, "KV stored by one is found by the other"
        seen.append({file: file.stat().st_mtime_ns for file in own_cache.rglob("*.kvl")})
    assert len(seen[0]) == LAYERS - resident
    assert seen[0] == seen[1], "the files of the first time are read the second time, not written again"


def test_other_weights_never_find_the_files_of_these(tmp_path: Path) -> None:
    options = {**OPTIONS, "dtype": "float32", "weights_budget_gib": budget_gib(tiny("llama"), 0)}
    for seed in (3, 4):
        tiny("llama", seed=seed).save_pretrained(tmp_path / "model")
        with KVBoost.from_model(tiny("llama", seed=seed), **OPTIONS) as kv:
            want = answers(kv)
        with KVBoost.from_pretrained(str(tmp_path / "model"), **options) as kv:
            assert answers(kv) == want, seed


def test_a_budget_that_holds_everything_streams_nothing() -> None:
    with KVBoost.from_model(tiny("llama"), weights_budget_gib=1.0, **OPTIONS) as kv:
        assert kv.stats().weights is None and streamer_of(kv.model) is None
        assert answers(kv) == expected("llama")[0]


# -- whatever interrupts them ------------------------------------------------------------------------------------------


def test_after_an_aborted_request(link: str) -> None:
    with streamed("llama", 1) as kv:
        for piece in kv.stream(PROMPTS[3], max_new_tokens=64, temperature=0, ignore_eos=True):
            if piece.result is None and len(piece.token_ids) > 0:
                break
        assert answers(kv) == expected("llama")[0]


@pytest.mark.parametrize("place", [0, 3, LAYERS - 1])
def test_after_a_layer_that_raised(place: int, link: str) -> None:
    with streamed("llama", 0) as kv:
        layer = kv.model.model.layers[place]
        calls = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) in (1, 4):
                raise RuntimeError("a layer raised")

        layer.register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(EngineStepError, match="a layer raised"):
                answers(kv, PROMPTS[:1])
            kv.check()
        assert answers(kv) == expected("llama")[0]


def test_a_layer_that_cannot_be_read_fails_its_step_only(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvboost.weights.disk import _LayerFile

    with streamed("llama", 0) as kv:
        read = _LayerFile.read
        broken = threading.Event()

        def sometimes(self: Any, offset: int, memory: memoryview) -> None:
            if broken.is_set():
                raise OSError("the drive is gone")
            read(self, offset, memory)

        monkeypatch.setattr(_LayerFile, "read", sometimes)
        broken.set()
        with pytest.raises(EngineStepError, match="the drive is gone"):
            answers(kv, PROMPTS[:2])
        broken.clear()
        assert answers(kv) == expected("llama")[0]


def test_layers_called_alone_and_out_of_order() -> None:
    plain = tiny("llama")
    with streamed("llama", 2) as kv, torch.no_grad():
        x = torch.randn(1, 5, 64)
        rotary = plain.model.rotary_emb(x, torch.arange(5)[None])
        for place in (6, 2, 2, 0, 5, 1, 4, 3):
            theirs = plain.model.layers[place](x, position_embeddings=rotary)
            ours = kv.model.model.layers[place](x, position_embeddings=rotary)
            assert torch.equal(ours, theirs), place
        assert answers(kv) == expected("llama")[0]


def test_a_plain_call_of_the_model_beside_the_engine(link: str) -> None:
    """Two threads take turns: each layer has its own weights for whom it runs."""
    plain, ids = tiny("llama"), torch.tensor([PROMPTS[2]])
    with streamed("llama", 1) as kv, torch.no_grad():
        want = plain(ids).logits
        found: list[bool] = []
        stop = threading.Event()

        def call() -> None:
            with torch.no_grad():
                while not stop.is_set():
                    found.append(torch.equal(kv.model(ids).logits, want))

        thread = threading.Thread(target=call)
        thread.start()
        try:
            for _ in range(4):
                kv.reset_cache()
                assert answers(kv) == expected("llama")[0]
        finally:
            stop.set()
            thread.join()
        assert found and all(found)


def test_a_busy_engine_does_not_keep_a_caller_waiting() -> None:
    """One step after the other takes the slots; a plain call of the model gets them in between."""
    ids = torch.tensor([PROMPTS[0]])
    with streamed("llama", 1, max_num_batched_tokens=16) as kv, torch.no_grad():
        pieces = kv.stream(PROMPTS[7], max_new_tokens=350, temperature=0, ignore_eos=True)
        next(iter(pieces))
        before = kv.stats().num_steps
        kv.model(ids)
        now = kv.stats()
        assert now.num_running == 1, "the call was answered while the request ran"
        assert now.num_steps - before <= 2 * LAYERS
        pieces.close()


def test_ctrl_c_inside_a_layer_does_not_lock_others_out() -> None:
    with streamed("llama", 0) as kv:
        ids = torch.tensor([PROMPTS[0]])

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = kv.model.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            kv.model(ids)
        handle.remove()
        assert answers(kv) == expected("llama")[0], "the engine's thread gets the slots"


def test_a_closed_engine_leaves_a_model_that_still_runs() -> None:
    plain, ids = tiny("llama"), torch.tensor([PROMPTS[0]])
    with streamed("llama", 0) as kv:
        model = kv.model
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    with KVBoost.from_model(model, **OPTIONS) as again:
        assert answers(again) == expected("llama")[0], "a second engine around it"


# -- what a streamed model is to others --------------------------------------------------------------------------------


def test_its_state_dict_and_fingerprint_are_the_models(tmp_path: Path) -> None:
    plain = tiny("llama")
    with streamed("llama", 1) as kv:
        for (name, theirs), ours in zip(plain.state_dict().items(), kv.model.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
        assert weights_fingerprint(kv.model) == weights_fingerprint(plain)
        kv.model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(saved[name], theirs) for name, theirs in plain.state_dict().items())


def test_streamed_weights_take_the_memory_of_their_slots() -> None:
    with streamed("llama", 1) as kv:
        plan = streamer(kv).plan
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in kv.model.parameters()}
        huge_page = 2 << 20  # what each buffer is rounded up to, untouched
        assert sum(held.values()) == plan.used_bytes + huge_page * len(held)
        assert len(held) == plan.slots + len(plan.resident) + 1


def test_what_cannot_be_done_with_it_says_so() -> None:
    with streamed("llama", 1) as kv:
        model = kv.model
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(KVBoostError, match="cannot be copied or pickled"):
                attempt(model)
        with pytest.raises(KVBoostError, match="cannot be loaded into"):
            model.load_state_dict(tiny("llama").state_dict())
        embeds = torch.randn(1, 4, 64, requires_grad=True)
        with pytest.raises(KVBoostError, match="cannot be trained"):
            model(inputs_embeds=embeds)
        model.double()
        with pytest.raises(KVBoostError, match="moved or replaced"), torch.no_grad():
            model(torch.tensor([[1, 2]]))


def test_it_is_freed_with_its_last_reference() -> None:
    threads = threading.active_count()
    with streamed("llama", 0) as kv:
        gone = weakref.ref(kv.model), weakref.ref(streamer(kv))
    del kv
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert not [t for t in threading.enumerate() if t.name.startswith(("kvboost-stream", "kvboost-read"))]
    assert threading.active_count() <= threads


def test_a_boosted_model_is_not_streamed() -> None:
    with pytest.raises(ConfigError, match="weights_budget_gib: a boosted model stays whole"):
        boost(tiny("llama"), weights_budget_gib=1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"weights_budget_gib": 1e-5},
            r"weights_budget_gib: .* is too little: .* Set weights_budget_gib=0\.\d+ at least",
        ),
        ({"weights_budget_gib": 0.0}, "must be above 0"),
        ({"vram_budget_gib": -1.0}, "must be above 0"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KVBoost.from_model(tiny("llama"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_a_gpu_budget_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="vram_budget_gib: this machine has no usable CUDA device"):
        KVBoost.from_model(tiny("llama"), vram_budget_gib=1.0)


def test_the_least_budget_that_is_named_works() -> None:
    model = tiny("llama")
    with pytest.raises(ConfigError) as caught:
        KVBoost.from_model(model, weights_budget_gib=1e-5, **OPTIONS)
    named = float(str(caught.value).partition("Set weights_budget_gib=")[2].partition(" ")[0])
    with KVBoost.from_model(model, weights_budget_gib=named, **OPTIONS) as kv:
        assert answers(kv) == expected("llama")[0]


def test_weights_that_are_gone_are_told_before_anything_runs(tmp_path: Path) -> None:
    model: PreTrainedModel = tiny("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        KVBoost.from_pretrained(str(tmp_path), dtype="float32", weights_budget_gib=0.01)
