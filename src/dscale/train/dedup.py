"""User turns that must not be in a corpus twice, or at all: equal ones, near-equal ones, evaluation prompts.

A turn is the set of its runs of 5 tokens; the likeness of two turns is the Jaccard index of their sets. Near-equal
pairs are found by MinHash with banding (Broder 1997; Leskovec, Rajaraman, Ullman, chapter 3) and then measured exactly:

    signature_k = min over the set of (a_k · run mod 2^32), a_k odd     20 bands of 5 such minima
    candidates  = turns that agree in all 5 of some band                 found with likelihood 1 - (1 - J^5)^20
    near        = candidates whose J, counted on the sets, reaches the threshold
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

GRAM = 5  # tokens of a run
BANDS, ROWS = 20, 5
NEIGHBOURS = 16  # members of a bucket that each member is compared with, besides the first
SLACK = 0.25  # how far under the threshold an estimate may lie and still be measured: five deviations of 100 minima
GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 1 << 13  # runs hashed at a time, so that 100 products of each stay in the processor's cache


class Turns(NamedTuple):
    """Token sequences one after another: tokens int32 [T]; turn i is tokens[bounds[i] : bounds[i + 1]]."""

    tokens: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, sequences: list[np.ndarray] | list[list[int]]) -> Turns:
        """Out of single sequences."""
        lengths = np.array([len(one) for one in sequences], np.int64)
        parts = [np.asarray(one, np.int32) for one in sequences]
        return cls(np.concatenate([np.zeros(0, np.int32), *parts]), np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each turn."""
        return np.diff(self.bounds)

    def take(self, rows: np.ndarray) -> Turns:
        """The turns numbered `rows`."""
        picked, _ = spread(self.bounds, rows)
        return Turns(self.tokens[picked], np.concatenate([[0], np.cumsum(self.lengths[rows])]))


def spread(bounds: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index of every element of the rows, which of `rows` it belongs to), for ragged rows within bounds."""
    lengths = (bounds[1:] - bounds[:-1])[rows]
    owner = np.repeat(np.arange(len(rows)), lengths)
    ends = np.cumsum(lengths)
    within = np.arange(len(owner)) - np.repeat(ends - lengths, lengths)
    return np.repeat(bounds[rows], lengths) + within, owner


def scramble(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def run_hashes(tokens: np.ndarray, size: int) -> np.ndarray:
    """64-bit hashes of all runs of `size` tokens of a sequence [n] → [max(n - size + 1, 0)] uint64."""
    count = max(len(tokens) - size + 1, 0)
    total = np.zeros(count, np.uint64)
    wide = scramble(tokens.astype(np.uint64) + np.uint64(1))
    with np.errstate(over="ignore"):
        for k in range(size):
            total += wide[k : k + count] * np.uint64(pow(GOLDEN, k + 1, 1 << 64))
    return scramble(total)


def prompt_ids(turns: Turns) -> np.ndarray:
    """A 63-bit hash of each turn's tokens, int64 [N]: the id of a prompt, the same in every run."""
    index = np.arange(len(turns.tokens)) - np.repeat(turns.bounds[:-1], turns.lengths)
    place = scramble(index.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(1))
    mixed = scramble((turns.tokens.astype(np.uint64) + np.uint64(1)) ^ place)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    with np.errstate(over="ignore"):
        total = sums[turns.bounds[1:]] - sums[turns.bounds[:-1]] + turns.lengths.astype(np.uint64)
    return (scramble(total) >> np.uint64(1)).astype(np.int64)


def run_sets(turns: Turns) -> Turns:
    """The distinct runs of every turn as 32-bit hashes, ascending; a turn shorter than a run is one run."""
    lengths = turns.lengths
    runs = (run_hashes(turns.tokens, GRAM) >> np.uint64(32)).astype(np.uint64)
    full = np.maximum(lengths - GRAM + 1, 0)
    starts = np.repeat(turns.bounds[:-1], full)
    within = np.arange(len(starts)) - np.repeat(np.cumsum(full) - full, full)
    owner = np.repeat(np.arange(len(lengths), dtype=np.uint64), full)
    short = np.flatnonzero(full == 0)
    whole = (prompt_ids(turns)[short].astype(np.uint64) >> np.uint64(31)) & np.uint64(0xFFFFFFFF)
    keyed = (owner << np.uint64(32)) | runs[starts + within]
    keyed = np.sort(np.concatenate([keyed, (short.astype(np.uint64) << np.uint64(32)) | whole]))
    keyed = keyed[np.concatenate([[True], keyed[1:] != keyed[:-1]])]  # np.unique hashes, ten times slower
    counts = np.bincount((keyed >> np.uint64(32)).astype(np.int64), minlength=len(lengths))
    return Turns((keyed & np.uint64(0xFFFFFFFF)).astype(np.uint32), np.concatenate([[0], np.cumsum(counts)]))


def signatures(sets: Turns) -> np.ndarray:
    """uint32 [N, BANDS · ROWS]: the minima of every set."""
    draws = scramble(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64) * np.uint64(GOLDEN))
    factors = (draws >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    out = np.empty((len(sets.lengths), BANDS * ROWS), np.uint32)
    first = 0
    while first < len(out):
        last = max(first + 1, int(np.searchsorted(sets.bounds, sets.bounds[first] + BLOCK, "right")) - 1)
        block = sets.tokens[sets.bounds[first] : sets.bounds[last]]
        with np.errstate(over="ignore"):
            products = block[:, None] * factors
        out[first:last] = np.minimum.reduceat(products, sets.bounds[first:last] - sets.bounds[first], axis=0)
        first = last
    return out


def candidates(signed: np.ndarray, likeness: float) -> np.ndarray:
    """Pairs [P, 2], earlier turn first, that share a band and whose signatures agree in a share of at least likeness.

    In a bucket every member meets the first and the NEIGHBOURS before it, so a bucket of n costs no n² pairs.
    """
    found = [np.zeros(0, np.int64)]
    count = len(signed)
    for band in range(BANDS):
        part = signed[:, band * ROWS : (band + 1) * ROWS].astype(np.uint64)
        key = np.zeros(count, np.uint64)
        for column in part.T:
            key = scramble(key + column + np.uint64(GOLDEN))
        order = np.argsort(key, kind="stable")
        for earlier, later in _bucket_pairs(key[order], order):
            close = _agreement(signed, earlier, later) >= likeness
            found.append(earlier[close] * count + later[close])
    pairs = np.unique(np.concatenate(found))
    return np.stack([pairs // count, pairs % count], axis=1)


def _bucket_pairs(key: np.ndarray, order: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(earlier, later) turns of every bucket, key sorted: neighbours at each distance, then the bucket's first."""
    begins = np.concatenate([[True], key[1:] != key[:-1]]) if len(key) else np.zeros(0, bool)
    start = np.flatnonzero(begins)[np.cumsum(begins) - 1] if len(key) else np.zeros(0, np.int64)
    place = np.arange(len(key)) - start
    for distance in range(1, NEIGHBOURS + 1):
        at = np.flatnonzero(place >= distance)
        if not len(at):
            return
        yield order[at - distance], order[at]
    far = np.flatnonzero(place > NEIGHBOURS)
    yield order[start[far]], order[far]


def _agreement(signed: np.ndarray, left: np.ndarray, right: np.ndarray, chunk: int = 1 << 16) -> np.ndarray:
    parts = [
        (signed[left[at : at + chunk]] == signed[right[at : at + chunk]]).mean(1) for at in range(0, len(left), chunk)
    ]
    return np.concatenate([np.zeros(0), *parts])


def jaccard(sets: Turns, pairs: np.ndarray, chunk: int = 1 << 15) -> np.ndarray:
    """Jaccard index of the sets of each pair [P, 2], counted."""
    out = [np.zeros(0)]
    sizes = sets.lengths
    for at in range(0, len(pairs), chunk):
        part = pairs[at : at + chunk]
        keys = []
        for side in (0, 1):
            index, owner = spread(sets.bounds, part[:, side])
            keys.append((owner.astype(np.uint64) << np.uint64(32)) | sets.tokens[index].astype(np.uint64))
        both = np.sort(np.concatenate(keys))
        twice = (both[1:][both[1:] == both[:-1]] >> np.uint64(32)).astype(np.int64)
        common = np.bincount(twice, minlength=len(part))
        out.append(common / (sizes[part[:, 0]] + sizes[part[:, 1]] - common))
    return np.concatenate(out)


def near_duplicates(turns: Turns, threshold: float) -> np.ndarray:
    """bool [N]: turns whose Jaccard index with an earlier turn that stays reaches the threshold."""
    drop = np.zeros(len(turns.lengths), bool)
    if len(drop) < 2:
        return drop
    sets = run_sets(turns)
    pairs = candidates(signatures(sets), threshold - SLACK)
    near = pairs[jaccard(sets, pairs) >= threshold]
    for earlier, later in near[np.lexsort((near[:, 0], near[:, 1]))].tolist():
        if not drop[earlier]:
            drop[later] = True
    return drop


def exact_duplicates(ids: np.ndarray) -> np.ndarray:
    """bool [N]: prompts (by id) that came before."""
    drop = np.ones(len(ids), bool)
    drop[np.unique(ids, return_index=True)[1]] = False
    return drop


class Evaluation:
    """Evaluation prompts as hashes: a turn is refused when it equals one or shares `overlap` tokens in a row with one.

    generic: instructions whose runs do not count, on their own or one after another.
    """

    def __init__(self, prompts: list[list[int]], generic: list[list[int]], overlap: int) -> None:
        self.overlap = overlap
        joined = [np.array([*one, *other]) for one in generic for other in ([], *generic)]
        common = [run_hashes(one, overlap) for one in joined]
        runs = [run_hashes(np.array(one, np.int64), overlap) for one in prompts]
        self.runs = np.setdiff1d(_flat(runs), _flat(common))
        self.ids = np.unique(prompt_ids(Turns.of(prompts)))

    def refused(self, turns: Turns) -> np.ndarray:
        """bool [N]: turns that must not be trained on."""
        drop = np.isin(prompt_ids(turns), self.ids)
        hashes = run_hashes(turns.tokens, self.overlap)
        hits = np.flatnonzero(np.isin(hashes, self.runs))
        owner = np.searchsorted(turns.bounds, hits, "right") - 1
        inside = hits + self.overlap <= turns.bounds[owner + 1]
        drop[owner[inside]] = True
        return drop


def _flat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint64), *parts])
