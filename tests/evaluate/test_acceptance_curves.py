"""The evaluator's arithmetic against hand-computed cases and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.config import InputError
from dscale.evaluate.acceptance_curves import (
    count_blocks,
    full_depth,
    interval,
    prefixes,
    resamples,
    variable_depth,
)


def blocks(*rows: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of 1 (matches), 0 (fails) and . (beyond the text)."""
    table = np.array([list(row) for row in rows])
    return table == "1", table != "."


def test_independent_drafts_equal_the_proxy():
    match, valid = blocks("11", "10", "01", "00")  # each depth 1/2, independent
    one = full_depth(count_blocks(match, valid).total())
    assert one.marginal.tolist() == [0.5, 0.5]
    assert one.survival.tolist() == [0.5, 0.25]
    assert one.hazard.tolist() == [0.5, 0.5]
    assert one.expected == one.proxy == 1.75


def test_positive_correlation_makes_the_proxy_too_small():
    match, valid = blocks("111", "000")
    one = full_depth(count_blocks(match, valid).total())
    assert one.survival.tolist() == [0.5, 0.5, 0.5]
    assert one.hazard.tolist() == [0.5, 0.0, 0.0]
    assert one.expected == 2.5
    assert one.proxy == 1 + 0.5 + 0.25 + 0.125


def test_negative_correlation_makes_the_proxy_too_large():
    match, valid = blocks("10", "01")
    one = full_depth(count_blocks(match, valid).total())
    assert one.survival.tolist() == [0.5, 0.0]
    assert one.hazard.tolist() == [0.5, 1.0]
    assert one.expected == 1.5
    assert one.proxy == 1.75


def test_mixture_of_an_easy_and_a_hard_workload():
    easy, hard = ["1111"] * 3, ["0000", "1000", "0111"]
    match, valid = blocks(*easy, *hard)
    counts = count_blocks(match, valid, np.array([0, 0, 0, 1, 1, 1]), 2)
    both = full_depth(counts)
    assert both.expected.tolist() == [5.0, 1 + 1 / 3]
    pooled = full_depth(counts.total())
    assert pooled.expected == pytest.approx((3 * 5 + 3 * (1 + 1 / 3)) / 6)
    assert pooled.survival.tolist() == pytest.approx([4 / 6, 3 / 6, 3 / 6, 3 / 6])
    assert pooled.marginal.tolist() == pytest.approx([4 / 6] * 4)


def test_truncated_and_fully_masked_blocks():
    match, valid = blocks("110", "11.", "0..", "...", "1..")
    counts = count_blocks(match, valid).total()
    full, every = full_depth(counts), variable_depth(counts)
    assert full.blocks.tolist() == [1, 1, 1]
    assert full.survival.tolist() == [1, 1, 0]
    assert full.expected == 3
    assert every.blocks.tolist() == [4, 2, 1]  # the masked block is in none
    assert every.survival.tolist() == [3 / 4, 1, 0]
    assert every.hazard.tolist() == [1 / 4, 0, 1]
    assert every.expected == 1 + 3 / 4 + 1
    assert prefixes(match, valid).tolist() == [2, 2, 0, 0, 1]


def test_nothing_but_masked_blocks_is_no_number():
    match, valid = blocks("..", "..")
    for curves in (full_depth(count_blocks(match, valid).total()), variable_depth(count_blocks(match, valid).total())):
        assert math.isnan(curves.expected)
        assert np.isnan(curves.survival).all()


def test_a_match_beyond_the_text_counts_nowhere():
    match, valid = np.ones((1, 3), bool), np.array([[True, False, False]])
    counts = count_blocks(match, valid).total()
    assert counts.reach.tolist() == [1, 0, 0]
    assert counts.match.tolist() == [1, 0, 0]


def test_weights_count_blocks_several_times():
    match, valid = blocks("11", "00", "10")
    weighted = count_blocks(match, valid, weight=np.array([2, 1, 0])).total()
    repeated = count_blocks(*blocks("11", "11", "00")).total()
    assert full_depth(weighted).survival.tolist() == full_depth(repeated).survival.tolist() == [2 / 3, 2 / 3]


def test_valid_has_to_be_a_prefix():
    with pytest.raises(InputError, match="prefix"):
        count_blocks(np.ones((1, 3), bool), np.array([[True, False, True]]))
    with pytest.raises(InputError, match="shape"):
        count_blocks(np.ones((1, 3), bool), np.ones((1, 2), bool))


def by_hand(match: list[list[bool]], length: list[int], depth: int) -> dict[str, list[float]]:
    """All curves by walking every block draft by draft."""
    out: dict[str, list[float]] = {"full": [], "hazard": [], "marginal": [], "variable": [], "variable_hazard": []}
    whole = [row for row, n in zip(match, length, strict=True) if n == depth]
    for k in range(1, depth + 1):
        reached = sum(all(row[:k]) for row in whole)
        at_risk = sum(all(row[: k - 1]) for row in whole)
        out["full"].append(reached / len(whole) if whole else math.nan)
        out["hazard"].append(1 - reached / at_risk if at_risk else math.nan)
        out["marginal"].append(sum(row[k - 1] for row in whole) / len(whole) if whole else math.nan)
        seen = [row for row, n in zip(match, length, strict=True) if n >= k]
        reached, at_risk = sum(all(row[:k]) for row in seen), sum(all(row[: k - 1]) for row in seen)
        out["variable"].append(reached / len(seen) if seen else math.nan)
        out["variable_hazard"].append(1 - reached / at_risk if at_risk else math.nan)
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_random_blocks_against_brute_force(depth: int, count: int, seed: int):
    rng = np.random.default_rng(seed)
    match, length = rng.random((count, depth)) < 0.7, rng.integers(0, depth + 1, count)
    valid = np.arange(depth) < length[:, None]
    counts = count_blocks(match, valid, rng.integers(0, 3, count), 3).total()
    want = by_hand(match.tolist(), length.tolist(), depth)
    full, every = full_depth(counts), variable_depth(counts)
    np.testing.assert_allclose(full.survival, want["full"])
    np.testing.assert_allclose(full.hazard, want["hazard"])
    np.testing.assert_allclose(full.marginal, want["marginal"])
    np.testing.assert_allclose(every.survival, want["variable"])
    np.testing.assert_allclose(every.hazard, want["variable_hazard"])
    whole = [sum(1 for _ in iter_prefix(row)) + 1 for row, n in zip(match.tolist(), length, strict=True) if n == depth]
    np.testing.assert_allclose(full.expected, np.mean(whole) if whole else math.nan)


def iter_prefix(row: list[bool]):
    for one in row:
        if not one:
            return
        yield one


def test_resamples_keep_groups_and_cover_the_truth():
    group = np.array([0] * 30 + [1] * 10)
    weights = resamples(group, 500, seed=3)
    assert (weights[:, :30].sum(1) == 30).all()
    assert (weights[:, 30:].sum(1) == 10).all()
    match = np.zeros((40, 1), bool)
    match[::2] = True
    counts = count_blocks(match, np.ones((40, 1), bool), np.arange(40), 40)
    low, high = interval(full_depth(counts.weighted(weights)).expected)
    width = 2 * 1.96 * math.sqrt(0.25 / 40)
    assert low < 1.5 < high
    assert high - low == pytest.approx(width, rel=0.2)
