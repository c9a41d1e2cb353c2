"""The difference between uniform anchors and the walk, taken apart: identities, the two limits, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dscale.evaluate.conversations import Conversation
from dscale.evaluate.length_bias import length_bias


def stopped_by(hard: np.ndarray, depth: int) -> Conversation:
    """Blocks stop at hard tokens and only there. hard bool [n]: which answer tokens are."""
    count = len(hard)
    padded = np.append(~hard, np.ones(depth, bool))
    return Conversation(np.array([padded[i : i + depth] for i in range(count)]), None)


def by_chance(rng: np.random.Generator, count: int, depth: int, chance: float) -> Conversation:
    """Drafts match independently of everything."""
    return Conversation(rng.random((count, depth)) < chance, None)


def test_fixed_hard_tokens_by_hand():
    hard = np.array([0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0], bool)
    one = length_bias([stopped_by(hard, 3)])
    # ten full-depth positions; L = min(4, distance to the next hard token's index + 1)
    lengths = [3, 2, 1, 4, 4, 3, 2, 1, 1, 4]
    assert one["uniform"] == pytest.approx(np.mean(lengths))
    # walk: 0 (2 accepted, stop at token 2) → 3 (all) → 7 → 8 → 9
    assert one["re-anchored"] == pytest.approx(np.mean([3, 4, 1, 1, 4]))
    assert one["expected_if_hard_tokens_fixed"] == pytest.approx(one["uniform"])
    assert one["from_length_bias"] == pytest.approx((9 + 16 + 1 + 1 + 4) / 10 - 13 / 5)
    around = {d: cell["expected"] for d, cell in one["around_rejection"].items()}
    assert (around["-1"], around["0"], around["1"]) == (1.0, 3.0, 4.0)  # stopped before positions 3, 8 and 9
    assert one["harmonic"]["conversation"] == pytest.approx(np.mean(lengths))
    assert one["visited_by_previous"]["first of the answer"] == {"blocks": 1, "expected": 3.0}
    assert one["visited_by_previous"]["after a rejection"] == {"blocks": 3, "expected": pytest.approx((4 + 1 + 4) / 3)}
    assert one["visited_by_previous"]["after a wholly accepted block"] == {"blocks": 1, "expected": 1.0}


def test_parts_add_up_and_long_fixed_runs_follow_the_renewal_formula():
    rng = np.random.default_rng(0)
    talks = [stopped_by(rng.random(4000) < 0.2, 60) for _ in range(4)]
    one = length_bias(talks)
    assert one["from_length_bias"] + one["from_inside"] == pytest.approx(one["difference"])
    assert one["uniform"] == pytest.approx(one["expected_if_hard_tokens_fixed"])
    assert one["uniform"] == pytest.approx(one["expected_if_hard_tokens_fixed_renewal"], rel=0.01)
    assert one["from_length_bias"] == pytest.approx(one["step_variance_over_mean"], rel=0.02)


def test_chance_makes_no_difference():
    rng = np.random.default_rng(1)
    one = length_bias([by_chance(rng, 20000, 12, 0.7)])
    assert one["difference"] == pytest.approx(0, abs=0.06)
    assert one["expected_if_memoryless"] == one["re-anchored"]


def test_mixed_ease_makes_uniform_larger():
    """Easy and hard stretches of equal length: a walk stops more often in the hard ones."""
    rng = np.random.default_rng(2)
    match = np.concatenate([rng.random((200, 8)) < (0.95 if i % 2 else 0.2) for i in range(100)])
    one = length_bias([Conversation(match, None)])
    easy, hard = (sum(p**k for k in range(9)) for p in (0.95, 0.2))
    assert one["uniform"] == pytest.approx((easy + hard) / 2, rel=0.03)
    assert one["re-anchored"] == pytest.approx(2 / (1 / easy + 1 / hard), rel=0.05)  # harmonic, not arithmetic
    halves = length_bias([Conversation(match[i : i + 200], None) for i in range(0, len(match), 200)])
    assert halves["harmonic"]["conversation"] == pytest.approx(halves["re-anchored"], rel=0.03)


def test_short_answers_have_no_full_block():
    assert length_bias([by_chance(np.random.default_rng(0), 5, 8, 0.5)]) == {}
