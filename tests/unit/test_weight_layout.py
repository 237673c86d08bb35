"""Where weights lie, how they are counted, and what names them: dense and packed alike."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from gguf_files import TinyFile
from kvboost.bench.limits import ModelCost
from kvboost.models.arena import Arena, Piece, in_order, settle
from kvboost.models.fingerprint import weights_fingerprint
from kvboost.models.loading import load_model, locate
from kvboost.weights.packing import Packing, Scheme
from kvboost.weights.sizes import packed_modules, parameter_sizes, total

CPU = torch.device("cpu")


def qwen2() -> torch.nn.Module:
    config = Qwen2Config(
        vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_an_arena_aligns_and_joins() -> None:
    names = ("a.q.weight", "a.q.bias", "a.k.weight", "a.o.weight", "b.q.weight")
    shapes = ((3, 5), (3,), (2, 5), (2, 7), (4, 5))
    pieces = in_order([Piece(n, s, torch.float32) for n, s in zip(names, shapes, strict=True)])
    assert [piece.name for piece in pieces] == ["a.q.weight", "a.k.weight", "a.o.weight", "a.q.bias", "b.q.weight"]
    arena = Arena(pieces)
    at = {piece.name: arena.place(piece.name).data_ptr() for piece in pieces}
    assert at["a.k.weight"] == at["a.q.weight"] + 3 * 5 * 4
    assert all(at[name] % 64 == 0 for name in names if name != "a.k.weight")
    ends = [(at[piece.name], at[piece.name] + piece.nbytes) for piece in pieces]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


def test_settling_keeps_values_and_ties_and_joins_siblings_across_their_biases() -> None:
    model = qwen2()
    ids = torch.arange(5)[None]
    before = model(ids).logits
    settle(model)
    assert torch.equal(model(ids).logits, before)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    attention = model.model.layers[1].self_attn
    assert attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1


def test_what_lies_in_an_arena_is_not_moved_again(tmp_path: Path) -> None:
    for model in (qwen2(), load_model(locate(TinyFile("llama").write(tmp_path / "x.gguf")), "bfloat16", CPU)):
        settle(model)
        before = {name: p.data_ptr() for name, p in model.named_parameters()}
        settle(model)
        assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_the_arena_of_a_file_is_the_only_one(tmp_path: Path) -> None:
    model = load_model(locate(TinyFile("llama").write(tmp_path / "x.gguf")), "bfloat16", CPU)
    before = [p.data_ptr() for p in model.parameters()]
    settle(model)
    assert before == [p.data_ptr() for p in model.parameters()]


def test_sizes_count_weights_and_bytes(tmp_path: Path) -> None:
    path = TinyFile("llama", kinds=("Q4_0", "Q8_0")).write(tmp_path / "x.gguf")
    packed, dense = (load_model(locate(path), "bfloat16", CPU, weights) for weights in ("auto", "dense"))
    small, large = total(parameter_sizes(packed)), total(parameter_sizes(dense))
    assert small.weights == large.weights == sum(p.numel() for p in dense.parameters())
    assert large.bits_per_weight == 16 and 4.5 < small.bits_per_weight < 8.6
    assert small.nbytes == sum(p.nbytes for p in packed.parameters())
    assert len(packed_modules(packed)) == 2 * 7 + 2 and not packed_modules(dense)


def test_limits_read_packed_bytes_and_multiply_all_weights(tmp_path: Path) -> None:
    path = TinyFile("llama").write(tmp_path / "x.gguf")
    packed, dense = (ModelCost.of(load_model(locate(path), "bfloat16", CPU, weights)) for weights in ("auto", "dense"))
    assert (packed.flops_per_token, packed.head_flops) == (dense.flops_per_token, dense.head_flops)
    assert packed.weight_bytes < 0.55 * dense.weight_bytes


def test_fingerprints_tell_packed_weights_apart(tmp_path: Path) -> None:
    path = TinyFile("llama", kinds=("Q4_0", "Q8_0")).write(tmp_path / "x.gguf")
    names = set()
    for change in range(4):
        model = load_model(locate(path), "float32", CPU, "dense" if change == 3 else "auto")
        packed = packed_modules(model)
        if change == 1:  # each byte of one row's first half
            packed[3].weight.data[0, : packed[3].weight.shape[1] // 2] ^= 1
        if change == 2:  # the same bytes, read otherwise
            packed[3].packing = Packing(Scheme.ZEROS, 8, packed[3].packing.k, packed[3].packing.group)
        names.add(weights_fingerprint(model))
    assert len(names) == 4
    assert weights_fingerprint(load_model(locate(path), "float32", CPU)) in names
