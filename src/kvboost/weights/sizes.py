"""How many weights a model has and in how many bytes it holds them, packed or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kvboost.weights.modules import PackedEmbedding, PackedLinear


@dataclass(frozen=True)
class WeightSize:
    """weights: numbers that the model multiplies with. nbytes: what they take in memory, scales and padding included."""

    weights: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.weights if self.weights else 0.0


def parameter_sizes(model: nn.Module) -> dict[nn.Parameter, WeightSize]:
    """The size of each parameter; a tied one is there once."""
    sizes = {p: WeightSize(p.numel(), p.nbytes) for p in model.parameters()}
    for module in packed_modules(model):
        sizes[module.weight] = WeightSize(module.weight.shape[0] * module.packing.k, module.weight.nbytes)
    return sizes


def packed_modules(model: nn.Module) -> list[PackedLinear | PackedEmbedding]:
    return [module for module in model.modules() if isinstance(module, (PackedLinear, PackedEmbedding))]


def total(sizes: dict[nn.Parameter, WeightSize]) -> WeightSize:
    return WeightSize(sum(size.weights for size in sizes.values()), sum(size.nbytes for size in sizes.values()))
