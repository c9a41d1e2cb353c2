"""Rotary position embeddings: the table of angles, with the scalings that checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dscale.config import RopeConfig, require


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Per-pair frequencies [head_dim/2] in float32 and the factor on cos and sin (yarn only, else 1)."""
    base = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.scaling == "default":
        return base.float(), 1.0
    factor = float(rope.parameters.get("factor", 1.0))
    require(factor >= 1.0, f"rope scaling factor: {factor} must be at least 1")
    if rope.scaling == "linear":
        return (base / factor).float(), 1.0
    if rope.scaling == "llama3":
        return _llama3(base, rope, factor).float(), 1.0
    return _yarn(base, rope, head_dim, factor)


def _llama3(base: Tensor, rope: RopeConfig, factor: float) -> Tensor:
    """Long wavelengths divided by factor, short ones kept, a linear ramp between (Llama 3.1)."""
    low, high = float(rope.parameters["low_freq_factor"]), float(rope.parameters["high_freq_factor"])
    original = float(rope.parameters["original_max_position_embeddings"])
    turns = original * base / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return base / factor * (1 - keep) + base * keep


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int, factor: float) -> tuple[Tensor, float]:
    """Yarn (arXiv 2309.00071): interpolate what turns less than beta_slow times, keep what turns over beta_fast."""
    p = rope.parameters
    fast, slow = float(p.get("beta_fast") or 32), float(p.get("beta_slow") or 1)
    original = float(p["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(fast), dimension(slow)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    frequencies = base / factor * ramp + base * (1 - ramp)
    return frequencies.float(), _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: dict[str, object], factor: float) -> float:
    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    given = p.get("attention_factor")
    if given is not None:
        return float(given)  # type: ignore[arg-type]
    top, bottom = p.get("mscale"), p.get("mscale_all_dim")
    if top and bottom:
        return mscale(factor, float(top)) / mscale(factor, float(bottom))  # type: ignore[arg-type]
    return mscale(factor, 1.0)


def rotary_table(rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """cos and sin by position: float32 [positions, head_dim], the first half cosines, the second half sines."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * factor).to(device)
