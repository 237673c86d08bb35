"""Mixtures of experts compiled: all tiles and dtypes, against float64 and Transformers' modules; in graphs, and in the engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from experts_rig import Mixture, build, check_route, expected, routing
from triton_rig import close

pytest.importorskip("triton")

from kvboost import KVBoost
from kvboost.kernels.triton.experts import chosen_tile, routed_experts, tokens_of_each_tile

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routed", ["random", "one", "uneven"])
@pytest.mark.parametrize(
    ("top", "experts", "hidden", "inner"), [(8, 64, 2048, 768), (2, 8, 1024, 3584), (3, 5, 200, 136), (1, 16, 99, 51)]
)
def test_every_tile_equals_the_definition(
    top: int, experts: int, hidden: int, inner: int, routed: str, dtype: torch.dtype
) -> None:
    for tokens in {*tokens_of_each_tile(top, experts), 1, 7, 129}:
        case = Mixture(tokens, top, experts, hidden, inner, routed)
        inputs = build(case, dtype, "cuda")
        out = routed_experts(**inputs)
        close(out, expected(**inputs), (str(case), chosen_tile(tokens, top, experts)))
        assert torch.equal(out, routed_experts(**inputs)), "the order of sums is fixed"
        residual = torch.randn_like(out)
        assert torch.equal(routed_experts(**inputs, residual=residual), residual + out)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations(activation: str) -> None:
    for tokens in (1, 50):
        inputs = build(Mixture(tokens, 4, 16, 512, 256, activation=activation), torch.float16, "cuda")
        close(routed_experts(**inputs), expected(**inputs))


@pytest.mark.parametrize("tokens", [1, 3, 16, 200, 1000])
def test_rounds_like_transformers_module(tokens: int) -> None:
    """Sums in another order change a last bit now and then; what is rounded elsewhere would change nearly all."""
    inputs = build(Mixture(tokens, 8, 64, 2048, 768), torch.bfloat16, "cuda")
    module = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=64, hidden_size=2048, moe_intermediate_size=768))
    module.config._experts_implementation = "grouped_mm"
    module.gate_up_proj, module.down_proj = nn.Parameter(inputs["gate_up"]), nn.Parameter(inputs["down"])
    for weights in (inputs["weights"], inputs["weights"].float() * 1.001):
        inputs["weights"] = weights
        with torch.no_grad():
            own = module(inputs["x"], inputs["index"], weights)
        out, exact = routed_experts(**inputs), expected(**inputs)
        ours, theirs = (float((y.double() - exact).norm() / exact.norm()) for y in (out, own))
        assert ours < 1.05 * theirs, f"{ours:.2e} from the exact sum, the module {theirs:.2e}"
        assert (out == own).double().mean() > 0.4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "top"), [(128, 8), (8, 2), (60, 4), (512, 10), (1000, 22)])
def test_routes(experts: int, top: int, dtype: torch.dtype) -> None:
    for tokens in (1, 300):
        logits = (3 * torch.randn(tokens, experts, device="cuda")).to(dtype)
        check_route(logits, top, renormalise=True)
        check_route((2 * logits).round(), top, renormalise=False)  # many are equal


def test_torch_takes_the_lowest_of_equals() -> None:
    """What `route` relies on to choose as Transformers' routers do: on a GPU, in any place of the order."""
    for experts, top in ((128, 8), (8, 2), (512, 10)):
        probability = (2 * torch.randn(2000, experts, device="cuda")).round().softmax(-1)
        chosen = probability.topk(top, dim=-1).indices.sort(-1).values
        stable = probability.sort(dim=-1, descending=True, stable=True).indices[:, :top].sort(-1).values
        assert torch.equal(chosen, stable)


def test_more_than_two_billion_weights() -> None:
    experts, hidden, inner = 160, 4096, 2048  # gate and up: 2.7e9 elements
    inputs = build(Mixture(40, 4, 4, hidden, inner), torch.bfloat16, "cuda")
    gate_up = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device="cuda")
    for i in (0, 77, 150, experts - 1):
        gate_up[i].normal_(0, hidden**-0.5)
        down[i].normal_(0, inner**-0.5)
    index = torch.tensor([0, 77, 150, experts - 1], device="cuda").expand(40, 4).contiguous()
    inputs |= {"gate_up": gate_up, "down": down, "index": index}
    for tokens in (1, 40):
        few = {**inputs, **{k: inputs[k][:tokens] for k in ("x", "index", "weights")}}
        close(routed_experts(**few), expected(**few))


@pytest.mark.parametrize("tokens", [1, 4, 16, 256, 700])
def test_a_graph_of_many_layers_serves_other_routings(tokens: int) -> None:
    """Kernels that start before the one before has ended wait for it: nothing stale is read, replay after replay."""
    case = Mixture(tokens, 8, 64, 1024, 512)
    layers = [build(case, torch.bfloat16, "cuda") for _ in range(6)]
    start = torch.randn(tokens, 1024, device="cuda").bfloat16()

    def run(wait: bool) -> Tensor:
        x = start
        for layer in layers:
            x = torch.nn.functional.rms_norm(routed_experts(**{**layer, "x": x}) + x, (1024,))
            if wait:
                torch.cuda.synchronize()
        return x

    run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(wait=False)
    for i in range(20):
        start.normal_()
        for layer in layers:
            index, weights = routing(Mixture(tokens, 8, 64, 1, 1, ("random", "one", "uneven")[i % 3]), "cuda")
            layer["index"].copy_(index)
            layer["weights"].copy_(weights)
        reference = run(wait=True)
        graph.replay()
        assert torch.equal(out, reference), i


SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)).eval().cuda()
    sizes = {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 32, "num_experts_per_tok": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **sizes, norm_topk_prob=True)).eval().cuda()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_tokens_equal_those_of_transformers(kind: str) -> None:
    """In float32, where Transformers' own experts wait for the device: with ours, steps can be captured."""
    model = model_of(kind)
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (1, 9, 70, 300, 17)]
    expected_ids = [
        reference.generate(torch.tensor([p], device="cuda"), max_new_tokens=16, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    options = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    with KVBoost.from_model(model, num_blocks=256, max_num_seqs=16) as kv:
        assert {kv.built.fused[kind] for kind in ("experts", "routers", "mixtures", "layers")} == {3}
        assert kv.warm_up() > 5
        for _ in range(2):
            assert [r.token_ids for r in kv.generate(prompts, **options)] == expected_ids
        assert [kv.generate(p, **options).token_ids for p in prompts[:2]] == expected_ids[:2]
        kv.engine.check()
