"""Three ways over one answer: by hand, and against the engine on tiny pairs that really accept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dscale.config import AnchorLayout, InputError
from dscale.evaluate.acceptance_curves import full_depth, variable_depth
from dscale.evaluate.conversations import (
    Answered,
    Conversation,
    check_offline,
    count_ways,
    match_rows,
    one_per_row,
)
from dscale.evaluate.drafter import EvaluateConfig, Pair, answer, engine_for, match_answered, narrowed, padded
from dscale.models.drafter import Drafter
from dscale.models.loader import LoadedTarget
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.rows import join_rows
from tests.engine.pairs import tiny_drafter, tiny_target


def conversation(*accepted: int, depth: int = 3, served: list[int] | None = None) -> Conversation:
    """A conversation whose block i accepts accepted[i] drafts where the text goes that far."""
    match = np.arange(depth) < np.array(accepted)[:, None]
    return Conversation(match, None if served is None else np.array(served))


def test_walk_and_counts_by_hand():
    talk = conversation(1, 3, 0, 2, 3, 3, 1, served=[1, 0, 2, 1])
    assert talk.walk().tolist() == [0, 2, 3, 6]  # 0 → 2 → 3 → 6 → 8, past the seven tokens
    assert talk.served_anchors().tolist() == [0, 2, 3, 6]
    assert talk.accepted.tolist() == [1, 3, 0, 2, 3, 2, 1]  # the last two have two tokens and one left
    assert not talk.differing().any()
    ways = {name: counts.total() for name, counts in count_ways([talk], 3).items()}
    assert full_depth(ways["uniform"]).blocks.tolist() == [5, 5, 5]
    assert full_depth(ways["uniform"]).survival.tolist() == [4 / 5, 3 / 5, 2 / 5]
    for name in ("re-anchored", "served"):
        assert full_depth(ways[name]).survival.tolist() == [2 / 3, 1 / 3, 0]
        assert variable_depth(ways[name]).blocks.tolist() == [4, 3, 3]
        assert variable_depth(ways[name]).survival.tolist() == [3 / 4, 1 / 3, 0]


def test_differing_steps_are_counted_at_the_engines_own_anchors():
    talk = conversation(1, 3, 0, 2, 3, 3, 1, served=[0, 3, 2])
    assert talk.served_anchors().tolist() == [0, 1, 5]
    assert talk.differing().tolist() == [True, False, False]


def pair_of(layout: AnchorLayout, ends: tuple[int, ...], family: str = "llama") -> Pair:
    """A tiny pair without windows, whose random drafts agree now and then (five tokens)."""
    target = tiny_target(family)
    config = replace(target.config, eos_token_ids=ends)
    target.model.config = config
    windowed = tiny_drafter(target, layout)
    plain = replace(windowed.config, decoder=replace(windowed.config.decoder, windows=()))
    drafter = Drafter(plain).eval().requires_grad_(False)
    drafter.load_state_dict({k: v for k, v in windowed.state_dict().items() if "context_projection" not in k})
    drafter.prepare()
    return Pair(LoadedTarget(target.model, config, None, "tiny"), drafter, "0" * 64)  # type: ignore[arg-type]


def prompts(count: int) -> list[tuple[int, list[int]]]:
    rng = np.random.default_rng(2)
    return [(i, rng.integers(0, 5, int(rng.integers(3, 12))).tolist()) for i in range(count)]


@pytest.mark.parametrize("layout", list(AnchorLayout))
@pytest.mark.parametrize("ends", [(), (4,)])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_reanchored_equals_served_exactly(layout: AnchorLayout, ends: tuple[int, ...], family: str):
    pair, config = pair_of(layout, ends, family), EvaluateConfig(max_tokens=60, batch=3, device="cpu")
    talks = answer(engine_for(pair, config, 72), prompts(6), 60)
    matches = match_answered(pair, config, talks, 72)
    found = [Conversation(match, np.array(talk.steps)) for match, talk in zip(matches, talks, strict=True)]
    steps = [talk.steps for talk in talks]
    assert [one.accepted[one.walk()].tolist() for one in found] == steps
    assert not any(one.differing().any() for one in found)
    assert sum(map(sum, (s or [] for s in steps))) > 10  # drafts are accepted, not only rejected
    assert {talk.reason for talk in talks} <= ({"length"} if not ends else {"stop", "length"})
    ways = {name: counts.total() for name, counts in count_ways(found, matches[0].shape[1]).items()}
    for cohort in (full_depth, variable_depth):
        np.testing.assert_array_equal(cohort(ways["re-anchored"]).survival, cohort(ways["served"]).survival)
        np.testing.assert_array_equal(cohort(ways["re-anchored"]).hazard, cohort(ways["served"]).hazard)


def test_narrower_blocks_are_served_and_matched_alike():
    pair, config = pair_of(AnchorLayout.MASKED, ()), EvaluateConfig(max_tokens=20, batch=3, device="cpu")
    pair = narrowed(pair, 4)
    talks = answer(engine_for(pair, config, 32), prompts(3), 20)
    matches = match_answered(pair, config, talks, 32)
    assert {match.shape[1] for match in matches} == {3}
    found = [Conversation(match, np.array(talk.steps)) for match, talk in zip(matches, talks, strict=True)]
    assert [one.accepted[one.walk()].tolist() for one in found] == [talk.steps for talk in talks]
    with pytest.raises(InputError, match="width: 9 is wider"):
        narrowed(pair_of(AnchorLayout.MASKED, ()), 9)


def test_packed_rows_match_as_single_ones():
    pair, config = pair_of(AnchorLayout.MASKED, ()), EvaluateConfig(max_tokens=12, batch=3, device="cpu")
    talks = answer(engine_for(pair, config, 24), prompts(4), 12)
    single = match_answered(pair, config, talks, 24)
    forward = BlockForward(pair.target.model, pair.drafter, ForwardConfig(32, 3, 5))
    rows = padded(join_rows([one_per_row(talks[:2], 28), one_per_row(talks[2:], 28)]), forward)
    for a, b in zip(single, match_rows(forward, rows), strict=True):
        np.testing.assert_array_equal(a, b)


def test_windows_and_causal_blocks_are_refused():
    target = tiny_target("qwen3")
    with pytest.raises(InputError, match="target: layer 1 attends over a window of 24 tokens"):
        check_offline(target.model, tiny_drafter(target), 25)
    with pytest.raises(InputError, match="drafter: layer 1 attends over a window of 16"):
        check_offline(target.model, tiny_drafter(target), 24)
    check_offline(target.model, tiny_drafter(target), 16)
    drafter = tiny_drafter(target)
    drafter.config = replace(drafter.config, causal=True)
    with pytest.raises(InputError, match="causally"):
        check_offline(target.model, drafter, 16)


def test_rows_of_conversations():
    rows = one_per_row([Answered([7, 8], [9], None), Answered([5], [6, 4, 3], None)], 5)
    assert rows.ids.tolist() == [[7, 8, 9, 0, 0], [5, 6, 4, 3, 0]]
    assert rows.first.tolist() == [[0, 0, 0, 3, 4], [0, 0, 0, 0, 4]]
    assert rows.answer.astype(int).tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 1, 0]]
    assert torch.from_numpy(rows.first).dtype == torch.int32
