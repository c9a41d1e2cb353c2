"""Counter-based noise: one number for (request seed, absolute position, token id) on any device, in any batch.

    stream  = mix(mix(seed) + position · GOLDEN)          one per row
    bits    = mix(stream + id · GOLDEN)                   63 bits, one per token
    w       = (bits + 1/2) / 2^63                         uniform, strictly inside (0, 1)
    gumbel  = -log(-log(1 - w))                           float32; the upper tail is exact down to w = 2^-64

`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014) on 63 bits, so that torch's signed shift brings in zeros.
dscale.md §3 says why: the noise of a token does not depend on how it was reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = (1 << 63) - 1
GOLDEN = 0x1E3779B97F4A7C15
ROUNDS = ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB))
BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def mix(x: Tensor) -> Tensor:
    """Scramble integers [...] int64: a bijection of their lower 63 bits."""
    x = x & MASK
    for shift, multiplier in ROUNDS:
        x ^= x >> shift
        x *= multiplier
        x &= MASK
    x ^= x >> 31
    return x


def streams(seed: Tensor, position: Tensor) -> Tensor:
    """What a row's bits begin with: seed, position [R] int64 → [R] int64."""
    return mix(mix(seed) + position * GOLDEN)


def random_bits(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """63 random bits for every (seed [R], position [R], ids [V] or [R, K]), all int64 → [R, V] or [R, K] int64."""
    return mix(streams(seed, position)[:, None] + ids * GOLDEN)


def gumbel_noise(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [R, V] or [R, K]; arguments as in `random_bits`."""
    return _gumbel(random_bits(seed, position, ids))


def stream_noise(stream: Tensor, ids: Tensor) -> Tensor:
    """`gumbel_noise` of rows whose `streams` [R] are known."""
    return _gumbel(mix(stream[:, None] + ids * GOLDEN))


def _gumbel(bits: Tensor) -> Tensor:
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-63).clamp_(max=BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
