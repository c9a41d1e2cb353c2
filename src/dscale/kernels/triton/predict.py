"""The acceptance predictor in one launch, a program a draft block, in Triton; see speculation/survival.py.

Features are made where they are used, one after another in the order of `draft_features`, and never stored. Only the
projection of the hidden states, a matrix product, is made beforehand.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.triton import dense

BLOCK = 128  # features at once


@triton.jit
def _weights(first, start, index, unit, units, size, stride):
    inside = (unit < units)[:, None] & (index < size)[None, :]
    return tl.load(first + unit[:, None] * stride + start + index[None, :], mask=inside, other=0.0)


@triton.jit
def _predict(
    values, log_sum_exp, entropy, projected, live, initial, first, first_bias, second, second_bias, q,
    lanes, drafts, units, stride,
    RANKS: tl.constexpr, OF_HIDDEN: tl.constexpr, OF_LOGITS: tl.constexpr,
    CONFIDENCE: tl.constexpr, HIDDEN: tl.constexpr, LOGITS: tl.constexpr, CONTEXT: tl.constexpr, HAZARD: tl.constexpr,
    LANES: tl.constexpr, DRAFTS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    unit, part = tl.arange(0, UNITS), tl.arange(0, BLOCK)
    total = tl.zeros([UNITS, BLOCK], tl.float32)
    start = 0
    if CONFIDENCE:
        size = (RANKS + 2) * drafts
        for begin in range(0, size, BLOCK):
            index = begin + part
            inside = index < size
            position, kind = lane * drafts + index // (RANKS + 2), index % (RANKS + 2)
            best = tl.load(values + position * RANKS, mask=inside, other=0.0)
            other = tl.load(values + position * RANKS + kind, mask=inside & (kind > 0) & (kind < RANKS), other=0.0)
            other += tl.load(log_sum_exp + position, mask=inside & (kind == RANKS), other=0.0)
            spread = tl.load(entropy + position, mask=inside, other=0.0)
            feature = tl.where(kind == RANKS + 1, spread, best - other)
            total += _weights(first, start, index, unit, units, size, stride) * feature[None, :]
        start += size
    if HIDDEN:
        size = OF_HIDDEN * drafts
        for begin in range(0, size, BLOCK):
            index = begin + part
            at = (lane * drafts + index // OF_HIDDEN) * (OF_HIDDEN + OF_LOGITS) + index % OF_HIDDEN
            feature = tl.load(projected + at, mask=index < size, other=0.0)
            total += _weights(first, start, index, unit, units, size, stride) * feature[None, :]
        start += size
    if LOGITS:
        size = OF_LOGITS * drafts
        for begin in range(0, size, BLOCK):
            index = begin + part
            at = (lane * drafts + index // OF_LOGITS) * (OF_HIDDEN + OF_LOGITS) + OF_HIDDEN + index % OF_LOGITS
            feature = tl.load(projected + at, mask=index < size, other=0.0)
            total += _weights(first, start, index, unit, units, size, stride) * feature[None, :]
        start += size

    hidden = tl.sum(total, axis=1)
    if CONTEXT:  # 25 values, of which two are not zero: the number of live requests, and the first-step flag
        every = tl.arange(0, LANES)
        count = tl.sum((tl.load(live + every, mask=every < lanes, other=0).to(tl.int32) != 0).to(tl.int32), axis=0)
        is_first = tl.load(initial + lane).to(tl.float32)
        row = first + unit * stride + start
        hidden += tl.load(row, mask=unit < units, other=0.0) * count.to(tl.float32)
        hidden += tl.load(row + 3, mask=unit < units, other=0.0) * is_first
    hidden = tl.maximum(hidden + tl.load(first_bias + unit, mask=unit < units, other=0.0), 0.0)

    draft = tl.arange(0, DRAFTS)
    inside = (draft < drafts)[:, None] & (unit < units)[None, :]
    weight = tl.load(second + draft[:, None] * units + unit[None, :], mask=inside, other=0.0)
    z = tl.sum(weight * hidden[None, :], axis=1) + tl.load(second_bias + draft, mask=draft < drafts, other=0.0)
    passes = 1.0 / (1.0 + tl.exp(-z))
    if HAZARD:
        chance = tl.cumprod(passes, axis=0)
    else:
        chance = tl.min(tl.where(draft[None, :] <= draft[:, None], passes[None, :], 1.0), axis=1)
    tl.store(q + lane * (drafts + 1) + 1 + draft, chance, mask=draft < drafts)
    tl.store(q + lane * (drafts + 1) + draft, 1.0, mask=draft == 0)


def predict(
    values: Tensor,
    log_sum_exp: Tensor,
    entropy: Tensor,
    projected: Tensor | None,
    live: Tensor,
    initial: Tensor,
    layers: tuple[Tensor, Tensor, Tensor, Tensor],
    groups: tuple[str, ...],
    sizes: tuple[int, int],
    hazard: bool,
) -> Tensor:
    """q [N, D+1] float32 of draft blocks.

    values [N, D, 16], log_sum_exp, entropy [N, D] float32; projected [N, D, Σ sizes] float32, hidden then logits, or
    None where groups has neither; live, initial [N] bool; layers: weights and biases of the two linear layers.
    """
    first, first_bias, second, second_bias = layers
    lanes, drafts, ranks = values.shape
    q = torch.empty(lanes, drafts + 1, dtype=torch.float32, device=values.device)
    values, log_sum_exp, entropy = values.contiguous(), log_sum_exp.contiguous(), entropy.contiguous()
    _predict[(lanes,)](
        values, log_sum_exp, entropy, values if projected is None else projected.contiguous(), *dense(live, initial),
        first, first_bias, second, second_bias, q, lanes, drafts, first.shape[0], first.stride(0),
        RANKS=ranks, OF_HIDDEN=sizes[0], OF_LOGITS=sizes[1], CONFIDENCE="confidence" in groups,
        HIDDEN="hidden" in groups, LOGITS="logits" in groups, CONTEXT="context" in groups, HAZARD=hazard,
        LANES=int(triton.next_power_of_2(lanes)), DRAFTS=int(triton.next_power_of_2(drafts)),
        UNITS=int(triton.next_power_of_2(first.shape[0])), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return q
