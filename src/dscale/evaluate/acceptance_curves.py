"""How far blocks of drafts get, from which drafts equal the text (measurement.md §5). Pure arithmetic.

A block is one row of D drafts: match[k] says whether draft k equals the text at that place, valid[k] whether the text
goes that far; valid is a prefix (a block near the end of an answer is truncated). prefix = leading drafts that match
and are valid, that is, what a server accepts. Depths k count from 1.

    E[L]         1 + Σ_k P(prefix ≥ k)                 tokens a step, bonus token included
    survival     S(k) = P(prefix ≥ k)
    hazard       h(k) = P(draft k fails | drafts before it matched)
    marginal     m(k) = P(draft k matches), whatever came before it
    proxy        1 + Σ_k Π_{t≤k} m(t): retired, right only when the drafts of a block match independently

Two cohorts. Full depth: blocks valid at all D depths, one set of blocks for every k. Variable: at depth k all blocks
valid at k, S(k) = #(prefix ≥ k) / #(valid at k) and h(k) = #(fails at k) / #(valid at k, reached k); each depth has its
own set of blocks, so nothing says that S falls or that E[L] is the mean of any one set. Blocks valid nowhere count in
neither.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from dscale.config import require


@dataclass(frozen=True)
class Counts:
    """Weighted numbers of blocks, each float64 [..., D]; leading axes are clusters or resamples.

    Of full-depth blocks: full (how many; the same in every column), full_reach (prefix ≥ k), full_match (draft k
    matches). Of all blocks: valid (valid at k), risk (valid at k and all before matched), reach (prefix ≥ k), match.
    """

    full: np.ndarray
    full_reach: np.ndarray
    full_match: np.ndarray
    valid: np.ndarray
    risk: np.ndarray
    reach: np.ndarray
    match: np.ndarray

    def weighted(self, weights: np.ndarray) -> Counts:
        """Clusters [C, D] summed with weights [..., C] → [..., D]; what a bootstrap over clusters needs."""
        return Counts(*(weights @ getattr(self, one.name) for one in fields(self)))

    def total(self) -> Counts:
        """The sum over all clusters."""
        return self.weighted(np.ones(len(self.full)))

    def take(self, clusters: np.ndarray) -> Counts:
        """Some clusters of [C, D]."""
        return Counts(*(getattr(self, one.name)[clusters] for one in fields(self)))


@dataclass(frozen=True)
class Curves:
    """expected and proxy [...]; survival, hazard, marginal and blocks (their denominators) [..., D]. NaN: no block."""

    expected: np.ndarray
    survival: np.ndarray
    hazard: np.ndarray
    marginal: np.ndarray
    proxy: np.ndarray
    blocks: np.ndarray


def prefixes(match: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """int64 [B]: leading drafts that match and are valid. match, valid bool [B, D]."""
    return (match & valid).cumprod(axis=1, dtype=np.int64).sum(axis=1)


def count_blocks(
    match: np.ndarray,
    valid: np.ndarray,
    cluster: np.ndarray | None = None,
    clusters: int = 1,
    weight: np.ndarray | None = None,
) -> Counts:
    """Counts [clusters, D] of blocks match, valid bool [B, D].

    cluster int [B], which cluster (conversation, workload) a block counts in, None: all in cluster 0; weight [B].
    InputError when the shapes differ or a valid row is not a prefix.
    """
    require(
        match.ndim == 2 and match.shape == valid.shape,
        f"blocks: match has shape {match.shape} and valid {valid.shape}; both must be [blocks, depth]",
    )
    require(bool((valid[:, 1:] <= valid[:, :-1]).all()), "blocks: valid must be a prefix of every block")
    match, valid = match.astype(bool) & valid.astype(bool), valid.astype(bool)
    reached = match.cumprod(axis=1).astype(bool)
    risk = valid & np.concatenate([np.ones((len(match), 1), bool), reached[:, :-1]], axis=1)
    full = np.broadcast_to(valid[:, -1:], valid.shape)
    owner = np.zeros(len(match), np.int64) if cluster is None else np.asarray(cluster)
    scale = np.ones(len(match)) if weight is None else np.asarray(weight, np.float64)

    def summed(flags: np.ndarray) -> np.ndarray:
        out = np.zeros((clusters, flags.shape[1]))
        np.add.at(out, owner, flags * scale[:, None])
        return out

    return Counts(*map(summed, (full, full & reached, full & match, valid, risk, reached, match)))


def full_depth(counts: Counts) -> Curves:
    """Curves of the blocks valid at every depth: the headline."""
    survival = _share(counts.full_reach, counts.full)
    before = np.concatenate([counts.full[..., :1], counts.full_reach[..., :-1]], axis=-1)
    return _curves(survival, counts.full_reach, before, _share(counts.full_match, counts.full), counts.full)


def variable_depth(counts: Counts) -> Curves:
    """Curves whose depth k counts all blocks valid at k."""
    survival, marginal = _share(counts.reach, counts.valid), _share(counts.match, counts.valid)
    return _curves(survival, counts.reach, counts.risk, marginal, counts.valid)


def _curves(
    survival: np.ndarray, reach: np.ndarray, risk: np.ndarray, marginal: np.ndarray, blocks: np.ndarray
) -> Curves:
    proxy = 1 + np.cumprod(marginal, axis=-1).sum(axis=-1)
    return Curves(1 + survival.sum(axis=-1), survival, 1 - _share(reach, risk), marginal, proxy, blocks)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) > 0)


def resamples(group: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Weights float64 [count, C] of a bootstrap over C clusters, drawn with replacement within each group [C]."""
    rng = np.random.default_rng(seed)
    out = np.zeros((count, len(group)))
    for one in np.unique(group):
        members = np.flatnonzero(group == one)
        out[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), size=count)
    return out


def interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of resampled values [N]; NaN values (resamples without a block) are left out."""
    good = values[np.isfinite(values)]
    if not len(good):
        return float("nan"), float("nan")
    low, high = np.percentile(good, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)
