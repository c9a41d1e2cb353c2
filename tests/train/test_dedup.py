"""Repeated and refused turns, against brute force over sets."""

import numpy as np
import pytest

from dscale.train.dedup import GRAM, Evaluation, Turns, exact_duplicates, near_duplicates, prompt_ids, run_hashes


def grams(turn):
    turn = turn.tolist()
    return {tuple(turn[at : at + GRAM]) for at in range(len(turn) - GRAM + 1)} or {tuple(turn)}


def brute_force(turns, threshold):
    kept, drop = [], []
    for turn in turns:
        own = grams(turn)
        drop.append(any(len(own & other) / len(own | other) >= threshold for other in kept))
        if not drop[-1]:
            kept.append(own)
    return drop


def variations(seed, count):
    """Turns of 3 … 60 tokens, many of them earlier ones with a few tokens replaced, added or cut off."""
    rng = np.random.default_rng(seed)
    turns = []
    for _ in range(count):
        if turns and rng.random() < 0.6:
            turn = turns[rng.integers(len(turns))].copy()
            turn[rng.random(len(turn)) < rng.choice([0.0, 0.01, 0.03, 0.1])] = 7
            turn = np.concatenate([turn, rng.integers(0, 50, rng.integers(0, 6))])[: rng.integers(3, 70)]
        else:
            turn = rng.integers(0, 50, rng.integers(3, 60))
        turns.append(turn)
    return turns


@pytest.mark.parametrize("threshold", [0.8, 0.6])
def test_near_duplicates_are_those_of_brute_force(threshold):
    turns = variations(1, 600)
    want = brute_force(turns, threshold)
    got = near_duplicates(Turns.of(turns), threshold)
    assert 100 < sum(want) < 500
    assert np.mean(got == want) >= (1.0 if threshold == 0.8 else 0.98)  # bands are made for 0.8


def test_the_first_of_two_like_turns_stays_and_a_dropped_one_drops_nothing():
    a = np.arange(100, 140)
    b = np.concatenate([a[:38], [1, 2]])  # like a
    c = np.concatenate([b[2:], [3, 4, 5]])  # like b, not like a
    own = [grams(one) for one in (a, b, c)]
    like = [len(own[i] & own[j]) / len(own[i] | own[j]) for i, j in ((0, 1), (1, 2), (0, 2))]
    assert like[0] >= 0.8 > like[2]
    assert like[1] >= 0.8
    assert near_duplicates(Turns.of([a, b, c]), 0.8).tolist() == [False, True, False]
    assert near_duplicates(Turns.of([b, a, c]), 0.8).tolist() == [False, True, True]
    assert near_duplicates(Turns.of([a]), 0.8).tolist() == [False]


def spelt_out(turn):
    """prompt_ids of one turn in whole numbers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def scramble(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    places = [scramble((at * golden + 1) & mask) for at in range(len(turn))]
    total = sum(scramble((token + 1) ^ place) for token, place in zip(turn, places, strict=True))
    return scramble((total + len(turn)) & mask) >> 1


def test_ids_tell_turns_apart_and_do_not_change_from_run_to_run():
    turns = Turns.of([[1, 2, 3], [1, 2, 3], [3, 2, 1], [1, 2], [], [0], [0, 0]])
    ids = prompt_ids(turns)
    assert ids[0] == ids[1]
    assert len(set(ids.tolist())) == 6
    assert (ids >= 0).all()
    assert ids.tolist() == [spelt_out(turn) for turn in ([1, 2, 3], [1, 2, 3], [3, 2, 1], [1, 2], [], [0], [0, 0])]
    assert exact_duplicates(ids).tolist() == [False, True, False, False, False, False, False]


def test_run_hashes_are_equal_exactly_for_equal_runs():
    a, b = np.arange(20), np.concatenate([[99], np.arange(3, 18), [98]])
    shared = set(run_hashes(a, 13).tolist()) & set(run_hashes(b, 13).tolist())
    assert len(shared) == 3
    assert len(run_hashes(np.arange(12), 13)) == 0


def test_evaluation_prompts_and_what_overlaps_them_are_refused_generic_instructions_not():
    prompt, generic = list(range(10, 40)), list(range(200, 220))
    refused = Evaluation([prompt + generic, [1, 2]], [generic], overlap=13)
    turns = [
        [1, 2],
        [1, 2, 3],
        [5, *prompt[4:17], 6],
        [5, *prompt[4:16], 6],
        [7, *generic],
        [*generic, *generic],
        prompt[:12],  # the next turn begins as this one would go on
        prompt[12:15],
    ]
    assert refused.refused(Turns.of(turns)).tolist() == [True, False, True, False, False, False, False, False]
