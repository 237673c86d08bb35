"""Where each byte of a slab is. One layout per model and block size; the same bytes in every tier.

    slab = | layer 0: K [block_size, k_heads, k_dim] | V [block_size, v_heads, v_dim] | layer 1: K | V | ... | pad |

Layers stand in order; K and V may differ in heads and dimension, per layer. The slab is padded to 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

SLAB_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class LayerShape:
    """Heads and head dimension of one layer's keys and values."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int

    @property
    def k_row(self) -> int:
        """Elements of one token's key."""
        return self.k_heads * self.k_dim

    @property
    def v_row(self) -> int:
        """Elements of one token's value."""
        return self.v_heads * self.v_dim


@dataclass(frozen=True)
class SlabLayout:
    """Offsets and sizes of a slab, in elements of `dtype` unless the name says bytes."""

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: str
    itemsize: int

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer's K begins; its V follows at once."""
        offsets, at = [], 0
        for layer in self.layers:
            offsets.append(at)
            at += self.block_size * (layer.k_row + layer.v_row)
        return tuple(offsets)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, padding left out."""
        return sum(layer.k_row + layer.v_row for layer in self.layers) * self.itemsize

    @cached_property
    def slab_bytes(self) -> int:
        content = self.bytes_per_token * self.block_size
        return -(-content // SLAB_ALIGNMENT_BYTES) * SLAB_ALIGNMENT_BYTES

    @property
    def slab_elements(self) -> int:
        return self.slab_bytes // self.itemsize

    @cached_property
    def fingerprint(self) -> bytes:
        """Equal for two layouts exactly when a slab of one can be read as the other's."""
        text = f"{self.dtype}/{self.itemsize}/{self.block_size}/" + ";".join(
            f"{x.k_heads},{x.k_dim},{x.v_heads},{x.v_dim}" for x in self.layers
        )
        return blake2b(text.encode(), digest_size=16).digest()
