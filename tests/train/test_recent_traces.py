"""Recent traffic in bounded memory."""

from __future__ import annotations

import numpy as np

from dscale.engine.recorder import RequestTrace
from dscale.speculation.features import feature_size
from dscale.train.recent_traces import RecentTraces
from dscale.train.traces import join_traces, prompt_id

GROUPS = ("confidence", "context")


def request(steps: int, prompt: tuple[int, ...], width: int = 4) -> RequestTrace:
    return RequestTrace(
        id="r", prompt=prompt, output=(1,) * steps,
        features=np.full((steps, feature_size(width, GROUPS)), prompt[0], np.float16),
        drafts=np.zeros((steps, width - 1), np.int32), accepted=np.zeros(steps, np.int16),
        slots=np.full(steps, width, np.int16), position=np.arange(steps, dtype=np.int32),
    )  # fmt: skip


def test_the_oldest_requests_go_first_and_whole():
    recent = RecentTraces(GROUPS, most=10)
    for number, steps in enumerate((4, 3, 3, 2)):
        recent.add(request(steps, (number, 7)))
    assert (len(recent), recent.fresh, recent.prompts) == (8, 12, 3)
    kept = join_traces(recent.take())
    assert kept.request.tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert set(kept.prompt.tolist()) == {prompt_id((number, 7)) for number in (1, 2, 3)}
    assert kept.features[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert (recent.fresh, len(recent)) == (0, 8)


def test_of_a_request_longer_than_all_memory_its_end_is_kept():
    recent = RecentTraces(GROUPS, most=5)
    recent.add(request(2, (1,)))
    recent.add(request(9, (2,)))
    (only,) = recent.take()
    assert only.position.tolist() == [4, 5, 6, 7, 8]
    assert len(recent) == 5


def test_the_same_prompt_twice_is_one_prompt():
    recent = RecentTraces(GROUPS, most=50)
    for _ in range(3):
        recent.add(request(2, (3, 4)))
    recent.add(request(2, (3, 5)))
    assert recent.prompts == 2
