"""Rows of the device state: what a request's row holds once it was admitted, whoever had the row before."""

from __future__ import annotations

import pytest

from dscale.config import SamplingParams
from dscale.speculation.state import DeviceState

PLAIN = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)


def row_of(state: DeviceState, row: int) -> tuple:
    values = (state.seed, state.temperature, state.top_k, state.top_p, state.min_p)
    ends = [end for end in state.end_ids[row].tolist() if end != -1]
    return (*(one[row].item() for one in values), ends)


@pytest.mark.parametrize("before", [(PLAIN, (3, 4)), (WARM, (3, 4)), (WARM, (3, 4, 5)), (WARM, ())])
def test_a_row_is_the_last_requests_own(before: tuple[SamplingParams, tuple[int, ...]]) -> None:
    state = DeviceState(max_requests=3, max_pages=2)
    state.admit(1, before[0], 11, before[1])
    state.admit(2, PLAIN, 5, (9,))
    state.admit(1, WARM, 12, (3, 4))
    assert row_of(state, 1) == (12, 0.5, 7, 0.25, 0.125, [3, 4])
    assert row_of(state, 2) == (5, 0.0, 0, 1.0, 0.0, [9])
    state.admit(1, PLAIN, 13, ())
    assert row_of(state, 1) == (13, 0.0, 0, 1.0, 0.0, [])
