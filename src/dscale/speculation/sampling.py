"""The target's own token at every verified row, y ~ P (dscale.md §3).

P is softmax(logits / temperature) restricted to the tokens that the filters keep. With tokens ordered by (logit
downwards, id upwards) every filter keeps a beginning of that order, so together they keep one beginning:
    min_p   tokens of probability ≥ min_p · the highest probability
    top_k   the first k tokens (equal logits at the edge: the lower ids, so exactly k)
    top_p   the shortest beginning whose mass reaches top_p of what min_p and top_k left
y is drawn by Gumbel-max: the argmax over kept v of logits_v / temperature + g_v, with g of (seed, position, token id).
Temperature 0 is argmax, the lowest id among equals. Meaning and order of the filters follow vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dscale.kernels import native, triton
from dscale.kernels.native.sampling import draw_into
from dscale.kernels.top_logits import RANKS, argmax, top_logits
from dscale.speculation.noise import gumbel_noise

CANDIDATES = (320, 4096)  # sizes of the beginnings tried on a CPU before a whole row is sorted
CHUNK = 200_000  # logits at once on a CPU, so that their temporaries stay in its cache
TINY = 1e-38  # relative weight below which no noise can make a token win


@dataclass(frozen=True)
class RowParams:
    """How each of R rows is sampled, one tensor [R] a field.

    temperature float32 (0: greedy); top_k int64 (0: off); top_p float32 (1: off); min_p float32 (0: off); seed int64 of
    the request; position int64, the absolute position of the token being drawn (the first token of a prompt is at 0).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    def at(self, index: Tensor) -> RowParams:
        """The rows at index [S] int64."""
        return RowParams(*(getattr(self, field.name)[index] for field in fields(self)))


def draw(logits: Tensor, rows: RowParams, all_greedy: bool) -> Tensor:
    """One token for every row: logits [M, V] of any float dtype → [M] int64.

    A row's token depends on that row alone. all_greedy promises that every temperature is 0.
    """
    if not all_greedy and triton.usable(logits):
        from dscale.kernels.triton import sample

        return sample.draw(logits, vars(rows))
    greedy = argmax(logits)
    if all_greedy:
        return greedy
    if native.usable(logits):
        draw_into(greedy, logits, vars(rows))
        return greedy
    return draw_on_cpu(logits, rows, greedy) if logits.device.type == "cpu" else draw_on_device(logits, rows, greedy)


def draw_on_device(logits: Tensor, rows: RowParams, greedy: Tensor) -> Tensor:
    """`draw` without reading anything back: every row is sorted, greedy ones too, at temperature 1, and thrown away."""
    warm = rows.temperature.where(rows.temperature > 0, 1.0)
    sampled, _ = draw_filtered(logits.float() / warm[:, None], rows, logits.shape[-1])
    return torch.where(rows.temperature > 0, sampled, greedy)


def draw_on_cpu(logits: Tensor, rows: RowParams, greedy: Tensor) -> Tensor:
    """`draw` by the cheapest way to each row's token; writes into greedy [M] and returns it."""
    for index in (rows.temperature > 0).nonzero().flatten().split(max(CHUNK // logits.shape[1], 1)):
        chosen = rows.at(index)
        greedy[index] = draw_rows(logits[index].float() / chosen.temperature[:, None], chosen)
    return greedy


def draw_rows(scaled: Tensor, rows: RowParams) -> Tensor:
    """Tokens [R] for rows of logits / temperature, scaled [R, V] float32; tries short beginnings first."""
    open_rows = (rows.top_k == 0) & (rows.top_p >= 1) & (rows.min_p <= 0)
    tokens = torch.empty(scaled.shape[0], dtype=torch.int64)
    free = open_rows.nonzero().flatten()
    if free.numel() > 0:
        tokens[free] = draw_unfiltered(scaled[free], rows.at(free))
    pending = (~open_rows).nonzero().flatten()
    for size in (*(size for size in CANDIDATES if size < scaled.shape[1]), scaled.shape[1]):
        if pending.numel() == 0:
            break
        tokens[pending], sure = draw_filtered(scaled[pending], rows.at(pending), size)
        pending = pending[~sure]
    return tokens


def draw_unfiltered(scaled: Tensor, rows: RowParams) -> Tensor:
    """Tokens [R] for rows without a filter: noise for every token of the vocabulary."""
    noise = gumbel_noise(rows.seed, rows.position, torch.arange(scaled.shape[1], device=scaled.device))
    return noise.add_(scaled).max(dim=-1).indices


def draw_filtered(scaled: Tensor, rows: RowParams, size: int) -> tuple[Tensor, Tensor]:
    """Tokens [R] drawn among the first `size` tokens of each row's order, and whether those were sure to suffice [R].

    scaled [R, V] float32, logits / temperature. With size = V all rows are sure.
    """
    values, ids = beginning(scaled, size)
    kept, known = kept_tokens(scaled, values, rows)
    last = values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0)).squeeze(1)
    # Ids that share the last candidate's logit may lie outside the candidates.
    sure = known & (last > values[:, -1]) if size < scaled.shape[1] else torch.ones_like(known)
    scores = (values + gumbel_noise(rows.seed, rows.position, ids)).masked_fill(~kept, -torch.inf)
    return ids.gather(1, scores.max(dim=-1, keepdim=True).indices).squeeze(1), sure


def beginning(scaled: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first `size` of each row in the order (value downwards, id upwards): values, ids [R, size]."""
    if size >= scaled.shape[1]:
        return scaled.sort(dim=-1, descending=True, stable=True)
    ids = scaled.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def kept_tokens(scaled: Tensor, values: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """Which of the ordered values [R, S] the filters keep, and whether S values told all the mass they need [R]."""
    size = values.shape[1]
    highest, floor = values[:, :1], rows.min_p[:, None].clamp_min(TINY)  # a logit of -inf is never kept
    limit = torch.where(rows.top_k > 0, rows.top_k, scaled.shape[1])[:, None]
    weight = (values - highest).exp()  # relative to the likeliest token
    alive = (weight >= floor) & (torch.arange(size, device=values.device) < limit)
    mass = (weight * alive).double()
    reached = mass.cumsum(-1)
    whole = (scaled - highest).exp_()
    whole = whole.mul_(whole >= floor).sum(-1, dtype=torch.float64)
    total = torch.where(rows.top_k > 0, reached[:, -1], whole)
    open_end = rows.top_p >= 1
    kept = alive & ((reached - mass < (rows.top_p * total)[:, None]) | open_end[:, None])
    return kept, (rows.top_k <= size) | open_end


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of rows, float32: chosen [M] of the drawn token; the n likeliest tokens, values, ids [M, n]."""

    chosen: Tensor
    values: Tensor
    ids: Tensor


def logprobs(logits: Tensor, y: Tensor, count: int) -> RowLogprobs:
    """Log-probabilities under the target's raw logits [M, V], before temperature, penalties and filters (as vLLM's).

    y [M] int64, the drawn tokens; count ≥ 0, how many alternatives (at most V of them exist).
    """
    top, count = top_logits(logits), min(count, logits.shape[1])
    values, ids = (top.values[:, :count], top.ids[:, :count]) if count <= RANKS else logits.topk(count, dim=-1)
    chosen = logits.gather(1, y[:, None]).squeeze(1).float() - top.log_sum_exp
    return RowLogprobs(chosen, values.float() - top.log_sum_exp[:, None], ids)
