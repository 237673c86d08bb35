"""Bad input is refused with an error that names the field, and the engine serves the next request."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from byte_models import byte_tokenizer, tiny_llama
from kvboost import (
    ConfigError,
    EngineBusy,
    EngineClosed,
    EngineConfig,
    EngineStepError,
    InvalidRequest,
    KVBoost,
    ModelLoadError,
    PromptTooLong,
    SamplingParams,
)
from kvboost.models.loading import cpu_computes_bf16

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0}


def still_serves(kv: KVBoost) -> None:
    assert len(kv.generate("hello", max_new_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "field", "words"),
    [
        ("", "prompt", "empty"),
        ([], "prompt", "empty"),
        ([[]], "prompt", "empty"),
        (["ok", ""], "prompt", "empty"),
        ("lone \ud800 surrogate", "prompt", "surrogate"),
        (b"\xff\xfe", "prompt", "decode"),
        (None, "prompt", "NoneType"),
        (3.5, "prompt", "float"),
        ([5, 263], "prompt", "0 to 262"),
        ([5, -1], "prompt", "0 to 262"),
        ([5, 2**70], "prompt", "0 to 262"),
        ([5, True], "prompt", "True"),
        ([5, "x"], "prompt", "'x'"),
        ([5, 1.0], "prompt", "1.0"),
        ([None], "prompt", "NoneType"),
    ],
)
def test_prompts_are_refused_by_name(tiny: KVBoost, prompt: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny.generate(prompt, **GREEDY)
    assert caught.value.field == field
    assert words in str(caught.value)
    still_serves(tiny)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1.0, "top_p": 0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"temperature": 1.0, "top_k": -2}, "top_k"),
        ({"temperature": 1.0, "min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [263]}, "allowed_token_ids"),
        ({"logit_bias": {300: 1.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"logprobs": 1000}, "logprobs"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"max_new_token": 5}, "max_new_token"),
        ({"max_new_tokens": 5, "max_tokens": 5}, "max_tokens"),
        ({"sampling": SamplingParams(), "temperature": 0.5}, "temperature"),
        ({"sampling": {"temperature": 1}}, "sampling"),
        ({"sampling": [SamplingParams()] * 2}, "sampling"),
    ],
)
def test_sampling_arguments_are_refused_by_name(tiny: KVBoost, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny.generate("hello", **arguments)
    assert caught.value.field == field
    still_serves(tiny)


def test_an_unknown_argument_names_its_neighbours(tiny: KVBoost) -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        tiny.generate("hello", max_new_tokns=5)


def test_too_long_prompts_say_how_long_is_allowed(tiny: KVBoost) -> None:
    with pytest.raises(PromptTooLong, match="max_model_len is 512"):
        tiny.generate([5] * 512, **GREEDY)
    with pytest.raises(PromptTooLong):
        tiny.warm([5] * 600)
    result = tiny.generate([5] * 510, max_new_tokens=100, temperature=0, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (2, "length")


def test_pinned_blocks_leave_less_room_and_say_so(tiny: KVBoost) -> None:
    small = KVBoost.from_model(tiny.model, tiny.tokenizer, num_blocks=16)
    pinned = small.warm(list(range(10, 138)), pin=True)
    assert pinned.pinned_blocks == 8
    answer = small.generate([9] * 100, max_new_tokens=100, temperature=0, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (28, "length")
    with pytest.raises(PromptTooLong, match="pinned"):
        small.generate([8] * 130, **GREEDY)
    assert small.generate(list(range(10, 138)), **GREEDY).usage.cached_tokens == 127
    pinned.unpin()
    pinned.unpin()
    assert len(small.generate([8] * 130, max_new_tokens=2, temperature=0, ignore_eos=True).token_ids) == 2
    small.check()
    small.close()


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (["hi"], "messages[0]"),
    ],
)
def test_messages_are_refused_by_name(tiny: KVBoost, messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tiny.chat(messages, **GREEDY)
    assert caught.value.field == field
    still_serves(tiny)


def test_a_missing_chat_template_is_named(tiny: KVBoost) -> None:
    tiny.tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match="no chat template"):
        tiny.chat([{"role": "user", "content": "hi"}], **GREEDY)


def test_a_template_that_raises_is_the_callers_error(tiny: KVBoost) -> None:
    tiny.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tiny.chat([{"role": "user", "content": "hi"}], **GREEDY)


def test_without_a_tokenizer_ids_work_and_text_does_not() -> None:
    with KVBoost.from_model(tiny_llama(), num_blocks=16) as kv:
        assert kv.generate([5, 6, 7], max_new_tokens=3, temperature=0, ignore_eos=True).text == ""
        with pytest.raises(InvalidRequest, match="without a tokenizer"):
            kv.generate("hello")
        with pytest.raises(InvalidRequest, match="stop"):
            kv.generate([5], stop="x")


def test_arrays_and_tensors_are_prompts(tiny: KVBoost) -> None:
    plain = tiny.generate([5, 6, 7], **GREEDY).token_ids
    assert tiny.generate(np.array([5, 6, 7]), **GREEDY).token_ids == plain
    assert tiny.generate(torch.tensor([[5, 6, 7]]), **GREEDY)[0].token_ids == plain


# -- model directories -------------------------------------------------------------------------------------------------


def damaged(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def test_a_directory_without_weights(tiny_dir: Path, tmp_path: Path) -> None:
    path = damaged(tiny_dir, tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        KVBoost.from_pretrained(str(path))


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        KVBoost.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("keep", [4, 60, 3000, -1])
def test_truncated_safetensors(tiny_dir: Path, tmp_path: Path, keep: int) -> None:
    path = damaged(tiny_dir, tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        KVBoost.from_pretrained(str(path))


def test_a_header_that_lies(tiny_dir: Path, tmp_path: Path) -> None:
    path = damaged(tiny_dir, tmp_path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": "no"}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadError, match="damaged"):
        KVBoost.from_pretrained(str(path))


def test_weights_that_are_missing_are_not_replaced_by_random_ones(tiny_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = damaged(tiny_dir, tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="missing"):
        KVBoost.from_pretrained(str(path))


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "missing.gguf", "a/b/c", " "])
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelLoadError):
        KVBoost.from_pretrained(name)


def test_a_gguf_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match="GGUF"):
        KVBoost.from_pretrained(str(tmp_path / "model.gguf"))


def test_a_directory_loads_with_its_tokenizer(tiny_dir: Path) -> None:
    with KVBoost.from_pretrained(str(tiny_dir), num_blocks=16) as kv:
        assert kv.model.dtype == (torch.bfloat16 if cpu_computes_bf16() else torch.float32)
        still_serves(kv)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_size": 7}, "block_size"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"num_blocks": 4, "max_model_len": 512}, "max_model_len"),
        ({"kv_cache_gib": -1.0}, "kv_cache_gib"),
        ({"kv_cache_gib": 1e-9}, "kv_cache_gib"),
        ({"kv_cache_dtype": "int2"}, "kv_cache_dtype"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"path": "warp"}, "path"),
        ({"blok_size": 16}, "blok_size"),
    ],
)
def test_engine_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KVBoost.from_model(tiny_llama(), **options)
    assert caught.value.field == field


def test_wrong_devices_and_dtypes(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="device"):
        KVBoost.from_pretrained(str(tiny_dir), device="toaster")
    with pytest.raises(ConfigError, match="dtype"):
        KVBoost.from_pretrained(str(tiny_dir), dtype="float8")


def test_every_option_has_help() -> None:
    from dataclasses import fields

    assert all(f.metadata["help"] for f in fields(EngineConfig))


# -- lifetime ----------------------------------------------------------------------------------------------------------


def test_generating_after_close(tiny: KVBoost) -> None:
    tiny.close()
    tiny.close()
    for call in (lambda: tiny.generate("hello"), lambda: tiny.stream("hello"), tiny.stats, lambda: tiny.warm("x" * 40)):
        with pytest.raises(EngineClosed):
            call()


def test_closing_with_requests_in_flight(tiny: KVBoost) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            tiny.generate("hello", max_new_tokens=400, temperature=0, ignore_eos=True)
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while tiny.stats().num_running < 4:
        time.sleep(0.001)
    tiny.close()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert len(caught) == 4
    assert all(isinstance(error, EngineClosed) for error in caught)


def test_many_threads_get_the_same_answers(tiny: KVBoost) -> None:
    prompts = [f"thread {i} asks about " + "something " * (i % 5) for i in range(24)]
    alone = [tiny.generate(p, max_new_tokens=12, temperature=0).token_ids for p in prompts]
    tiny.reset_cache()
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        answers[i] = tiny.generate(prompts[i], max_new_tokens=12, temperature=0).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(prompts))] == alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(tiny: KVBoost) -> None:
    """Though this thread has a team of compute threads, and another holds the engine's lock, neither of which forks."""
    still_serves(tiny)
    torch.mm(torch.ones(500, 500), torch.ones(500, 500))
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with tiny._engine._changed:
            held.set()
            forked.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tiny.generate("hello")
            said = b"no error"
        except EngineClosed as error:
            said = str(error).encode()
        except BaseException as error:
            said = repr(error).encode()
        os.write(write, said)
        os._exit(0)
    forked.set()
    holder.join()
    os.waitpid(child, 0)
    assert b"fork" in os.read(read, 1000)
    still_serves(tiny)


def test_a_full_queue_refuses_streams_and_feeds_batches() -> None:
    with KVBoost.from_model(tiny_llama(), byte_tokenizer(), num_blocks=64, max_num_seqs=1, max_num_waiting=2) as kv:
        results = kv.generate([[5, 6, 7]] * 9, max_new_tokens=3, temperature=0, ignore_eos=True)
        assert len({tuple(r.token_ids) for r in results}) == 1
        streams = []
        with pytest.raises(EngineBusy, match="max_num_waiting"):
            for _ in range(10):
                streams.append(kv.stream([5, 6, 7], max_new_tokens=400, temperature=0, ignore_eos=True))
        assert 2 <= len(streams) <= 4
        for stream in streams:
            stream.close()
        still_serves(kv)


def test_a_step_that_breaks_fails_its_requests_only(tiny: KVBoost) -> None:
    """The model raises once; whoever was in that step is told, and nothing it named can be found again."""
    prompt = list(range(10, 60))
    expected = tiny.generate(prompt, **GREEDY).token_ids
    tiny.reset_cache()
    forward, broken = tiny.model.forward, threading.Event()

    def explode(*args: Any, **kwargs: Any) -> Any:
        if not broken.is_set():
            broken.set()
            raise RuntimeError("device on fire")
        return forward(*args, **kwargs)

    tiny.model.forward = explode
    with pytest.raises(EngineStepError, match="device on fire"):
        tiny.generate(prompt, **GREEDY)
    tiny.check()
    again = tiny.generate(prompt, **GREEDY)
    assert again.usage.cached_tokens == 0
    assert again.token_ids == expected


def test_attention_switched_away_is_an_error_not_a_wrong_answer() -> None:
    with KVBoost.from_model(tiny_llama(), byte_tokenizer(), num_blocks=16, compile=False) as kv:
        before = kv.model.config._attn_implementation
        kv.model.set_attn_implementation("sdpa")
        with pytest.raises(EngineStepError, match="switched away"):
            kv.generate("hello there, this is a prompt", **GREEDY)
        kv.model.set_attn_implementation(before)
        still_serves(kv)


def test_an_engine_that_cannot_be_made_leaves_the_model_as_it_was() -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError):
        KVBoost.from_model(model, num_blocks=4, max_model_len=512)
    assert model.config._attn_implementation == "sdpa"


def test_a_row_without_a_token_fails_alone(tiny: KVBoost) -> None:
    """NaN logits of one request, and KV full of NaN with them, leave its neighbours and successors untouched."""
    prompts = [list(range(10, 40)), list(range(50, 90)), list(range(100, 120))]
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = [tiny.generate(p, **options).token_ids for p in prompts]
    tiny.reset_cache()
    embeddings = tiny.model.get_input_embeddings().weight
    with torch.no_grad():
        saved = embeddings[262].clone()
        embeddings[262] = math.nan
    streams = [tiny.stream(p, **options) for p in (*prompts, [262] * 40)]
    answers = [[token for piece in stream for token in piece.token_ids] for stream in streams[:3]]
    with pytest.raises(EngineStepError, match="logits are nan"):
        list(streams[3])
    assert answers == expected
    with torch.no_grad():
        embeddings[262] = saved
    assert [tiny.generate(p, **options).token_ids for p in prompts] == expected
    assert tiny.generate([262] * 40, **options).usage.cached_tokens == 0


def test_a_receiver_that_raises_harms_nobody(tiny: KVBoost) -> None:
    stream = tiny.stream("hello", max_new_tokens=300, temperature=0, ignore_eos=True)
    next(stream)
    del stream
    deadline = time.monotonic() + 5
    while tiny.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert tiny.stats().num_running == 0
    still_serves(tiny)


def test_a_program_may_end_while_an_answer_is_written() -> None:
    """The engine ends before the interpreter does; a thread stopped inside a lock would hang whoever closes it later."""
    script = """
import atexit
atexit.register(lambda: print("engine alive:", kv._engine._thread.is_alive(), "closed:", kv._engine.closed))
from byte_models import byte_tokenizer, tiny_llama
from kvboost import KVBoost
kv = KVBoost.from_model(tiny_llama(), byte_tokenizer(), num_blocks=64)
stream = kv.stream([5, 6, 7], max_new_tokens=900, temperature=0, ignore_eos=True)
next(stream)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.split("\n")[-2] == "engine alive: False closed: True" and done.returncode == 0, done.stderr
