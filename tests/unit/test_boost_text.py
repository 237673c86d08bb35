"""boost() with a tokenizer: stop strings, pipeline(), text streamers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer, pipeline

from boost_models import Pair, assert_equal, build, one_thread, prompts  # noqa: F401
from kvboost import boost


@pytest.fixture(scope="module")
def byte_pair(tiny_dir: Path) -> Iterator[tuple[Pair, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir, padding_side="left")
    models = [AutoModelForCausalLM.from_pretrained(tiny_dir) for _ in range(2)]
    yield Pair(boost(models[0], tokenizer, num_blocks=128), models[1]), tokenizer
    models[0].kvboost.close()


def test_stop_strings(byte_pair: tuple[Pair, Any]) -> None:
    pair, tokenizer = byte_pair
    inputs = tokenizer(["Hello there", "Once upon a time, in a"], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    whole = pair.plain.generate(**inputs, max_new_tokens=40)
    letters = [letter for letter in tokenizer.decode(whole[0, -35:]) if letter.isascii() and letter.isalnum()]
    stop = letters[len(letters) // 3]
    out = pair.same(**inputs, max_new_tokens=40, stop_strings=[stop], tokenizer=tokenizer)
    assert out.tolist() != whole.tolist(), "it never stopped"
    assert_equal(pair.ours.generate(**inputs, max_new_tokens=40, stop_strings=stop), out)  # boost() has a tokenizer
    pair.same(
        **inputs,
        generation_config=GenerationConfig(max_new_tokens=40, stop_strings=stop, pad_token_id=0),
        tokenizer=tokenizer,
    )


def test_stop_strings_without_a_tokenizer() -> None:
    model = boost(build("llama"), num_blocks=16)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**prompts([4]), max_new_tokens=4, stop_strings="x")
    model.kvboost.close()


def test_pipeline(byte_pair: tuple[Pair, Any]) -> None:
    pair, tokenizer = byte_pair
    texts = ["Hello", "A longer prompt than that", "Third"]
    chat = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "What is it?"}]]
    answers = []
    before = pair.served()
    for model in (pair.plain, pair.ours):
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        answers.append([
            pipe(texts, max_new_tokens=10, do_sample=False, batch_size=2),
            pipe(texts[0], max_new_tokens=10, do_sample=False, return_full_text=False),
            pipe(chat, max_new_tokens=10, do_sample=False, batch_size=2),
        ])  # fmt: skip
    assert answers[0] == answers[1]
    assert pair.served() - before == 6


def test_text_streamer(byte_pair: tuple[Pair, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pair, tokenizer = byte_pair
    inputs = tokenizer("Hello there", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    printed = []
    for model in (pair.plain, pair.ours):
        model.generate(**inputs, max_new_tokens=12, streamer=TextStreamer(tokenizer, skip_prompt=True))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""
