"""RMS norms as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """`x / sqrt(mean(x ** 2) + eps) * (weight + offset)` over the last dimension of x; weight `[n]`."""

    weight: Tensor
    eps: float
    offset: float = 0.0

    @property
    def round_first(self) -> bool:
        """Whether what is multiplied with the weight was rounded to the dtype, as in LlamaRMSNorm, or only the result is, as in
        GemmaRMSNorm, whose offset is 1."""
        return self.offset == 0.0
