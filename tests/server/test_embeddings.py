"""POST /v1/embeddings through OpenAI's client: equal to Transformers' hidden states, whatever else runs."""

from __future__ import annotations

import math
import threading
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import PreTrainedModel

from kvboost import KVBoost
from kvboost.api.embed import batches
from running_server import NAME, RunningServer

pytestmark = pytest.mark.real

TEXTS = [
    "The Nile is a river.",
    "Ein Fluss",
    "A much longer sentence about rivers, lakes and the sea, with commas.",
    "Katze",
]


def reference(model: PreTrainedModel, ids: list[int], pooling: str) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return torch.nn.functional.normalize(pooled, dim=0)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_equal_to_transformers_in_a_batch(
    client: OpenAI, smollm2: KVBoost, hf_smollm2: PreTrainedModel, pooling: str
) -> None:
    answer = client.embeddings.create(model=NAME, input=TEXTS, extra_body={"pooling": pooling})
    ids = [smollm2.tokenizer(text)["input_ids"] for text in TEXTS]
    assert [d.index for d in answer.data] == [0, 1, 2, 3]
    for data, tokens in zip(answer.data, ids, strict=True):
        torch.testing.assert_close(
            torch.tensor(data.embedding), reference(hf_smollm2, tokens, pooling), atol=2e-4, rtol=0
        )
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    from_ids = client.embeddings.create(model=NAME, input=ids[2], extra_body={"pooling": pooling})
    torch.testing.assert_close(
        torch.tensor(from_ids.data[0].embedding), torch.tensor(answer.data[2].embedding), atol=2e-4, rtol=0
    )


def test_dimensions_and_formats(client: OpenAI) -> None:
    whole = client.embeddings.create(model=NAME, input="Nile", encoding_format="float").data[0].embedding
    as_bytes = client.embeddings.create(model=NAME, input="Nile").data[0].embedding  # the client asks for base64
    assert as_bytes == pytest.approx(whole, abs=1e-6) and len(whole) == 576
    short = client.embeddings.create(model=NAME, input="Nile", dimensions=64).data[0].embedding
    assert len(short) == 64 and math.hypot(*short) == pytest.approx(1.0, abs=1e-5)
    assert short[0] / short[1] == pytest.approx(whole[0] / whole[1], rel=1e-4)


def test_generation_beside_it_says_the_same(client: OpenAI, server: RunningServer) -> None:
    def story() -> str:
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Tell a story."}], max_tokens=40, temperature=0
        )
        return answer.choices[0].message.content or ""

    alone, vector = story(), client.embeddings.create(model=NAME, input=TEXTS[0]).data[0].embedding
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(story()))
    thread.start()
    for _ in range(5):
        again = client.embeddings.create(model=NAME, input=TEXTS).data[0].embedding
        assert again == pytest.approx(vector, abs=1e-4)
    thread.join()
    assert found == [alone]
    server.wait_idle()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "dimensions": 10_000}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ""}, "prompt"),
        ({"input": [99_999_999]}, "prompt"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "task": "search"}, "task"),
        ({"input": ["a", "word " * 9000]}, "input[1]"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_bad_requests_are_named(client: OpenAI, body: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body={"model": NAME, **body}, cast_to=object)
    assert caught.value.param == param


def test_batches_hold_neighbours_and_stay_small() -> None:
    prompts = [[0] * n for n in (5, 100, 7, 1, 30, 30, 64)]
    found = list(batches(prompts, 64))
    assert sorted(i for batch in found for i in batch) == list(range(7))
    assert found == [[3, 0, 2], [4, 5], [6], [1]]
    assert all(len(b) == 1 or max(len(prompts[i]) for i in b) * len(b) <= 64 for b in found)
