"""Why uniform anchors give another E[L] than the walk: the difference taken apart, exactly.

L(p) = prefix + 1 at position p, over full-depth positions. The steps of the walk cut the positions into runs: step i
visits p_i and jumps over the n_i - 1 positions after it. With N = Σ n_i,

    uniform      Σ_i Σ_{j<n_i} L(p_i + j) / N
    re-anchored  mean of L(p_i) over steps
    difference = [Σ_i n_i L(p_i) / N - mean L(p_i)]        length bias: long steps hold many positions
               + [Σ_i Σ_j (L(p_i + j) - L(p_i)) / N]       inside: positions jumped over against the one visited

Where n_i = L(p_i) the length bias is Var(L) / E(L) of the visited blocks. What `inside` should be depends on what stops
a block. Two limits, both computed from the walk alone:

    memoryless       drafts fail by chance, alike at every position: L is geometric, inside = -Var/E, no difference
    fixed hard token a token that stopped the walk stops every block that reaches it, and nothing else does:
                     L(p) = min(W, distance to the next such token); for a renewal process E = (E L² / E L + 1) / 2

Two more views of where the text is hard. `around_rejection`: mean L at distance d from the tokens that stopped the
walk, which are its next anchors (d = 0). `harmonic`: a walk spends one step per L positions, so over stretches of
constant ease its mean is the harmonic mean of theirs, where uniform anchors take the arithmetic one; given for
stretches of one conversation each, and of 64 and 32 positions. What the harmonic mean leaves of the difference lies
within the stretches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dscale.evaluate.conversations import Conversation


def length_bias(conversations: list[Conversation]) -> dict[str, Any]:
    """The parts above over these conversations, and E[L] by where an anchor lies. Empty where no block is whole."""
    parts = [part for part in map(_positions, conversations) if len(part["length"])]
    if not parts:
        return {}
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0] if key != "stops"}
    length, visited = joined["length"].astype(float), joined["offset"] == 0
    own = joined["own"].astype(float)
    at_visited = length[visited]
    uniform, walked, weighted = length.mean(), at_visited.mean(), own.mean()
    return {
        "positions": len(length),
        "steps": int(visited.sum()),
        "uniform": uniform,
        "re-anchored": walked,
        "difference": uniform - walked,
        "from_length_bias": weighted - walked,
        "from_inside": uniform - weighted,
        "step_variance": at_visited.var(),
        "step_variance_over_mean": at_visited.var() / walked,
        "expected_if_memoryless": walked,
        "expected_if_hard_tokens_fixed": joined["fixed"].mean(),
        "expected_if_hard_tokens_fixed_renewal": (np.mean(at_visited**2) / walked + 1) / 2,
        "harmonic": {"conversation": _harmonic(parts, None), "64": _harmonic(parts, 64), "32": _harmonic(parts, 32)},
        "around_rejection": _around(parts),
        "by_offset": _table(joined["offset"], length, 8),
        "visited_by_previous": _named(joined["previous"][visited], at_visited),
        "jumped_over": _mean(length[~visited]),
    }


def _harmonic(parts: list[dict[str, np.ndarray]], stretch: int | None) -> float:
    """Positions over the sum of (positions / mean L) of stretches; a conversation's last one may be shorter."""
    pieces = [piece for part in parts for piece in _cut(part["length"], stretch)]
    return sum(map(len, pieces)) / sum(len(piece) / piece.mean() for piece in pieces)


def _cut(length: np.ndarray, stretch: int | None) -> list[np.ndarray]:
    if stretch is None or len(length) <= stretch:
        return [length]
    return np.array_split(length, len(length) // stretch)


def _around(parts: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Mean L at every distance of AROUND from the tokens that stopped the walk."""
    found: dict[str, Any] = {}
    for distance in AROUND:
        at = [part["length"][_inside(part["stops"] + distance, len(part["length"]))] for part in parts]
        found[str(distance)] = _mean(np.concatenate(at))
    return found


def _inside(at: np.ndarray, count: int) -> np.ndarray:
    return at[(at >= 0) & (at < count)]


AROUND = (-8, -4, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 16)
PREVIOUS = ("first of the answer", "after a rejection", "after a wholly accepted block")


def _positions(talk: Conversation) -> dict[str, np.ndarray]:
    """Per full-depth position: its L, offset in its step, the L of its step, the L if hard tokens were fixed, and for
    visited ones how the previous block ended (index of PREVIOUS)."""
    accepted, visited, depth = talk.accepted, talk.walk(), talk.match.shape[1]
    count = max(0, talk.tokens - depth + 1)  # positions with at least D tokens after them
    step = np.searchsorted(visited, np.arange(count), side="right") - 1
    stopped = visited[accepted[visited] < np.minimum(depth, talk.tokens - visited)]
    hard = np.append(stopped + accepted[stopped] + 1, talk.tokens + depth + 1)  # block position of the failing token
    at = np.arange(count)
    following = hard[np.searchsorted(hard, at, side="right")]
    previous = np.zeros(len(visited), np.int64)
    previous[1:] = np.where(accepted[visited[:-1]] < depth, 1, 2)
    return {
        "length": accepted[:count] + 1,
        "offset": at - visited[step],
        "own": accepted[visited[step]] + 1,
        "fixed": np.minimum(depth + 1, following - at),
        "previous": previous[step],
        "stops": hard[:-1],
    }


def _mean(values: np.ndarray) -> dict[str, Any]:
    return {"blocks": len(values), "expected": float(values.mean()) if len(values) else None}


def _table(key: np.ndarray, values: np.ndarray, most: int) -> dict[str, Any]:
    """E[L] by offset 0 … most - 1, and of all further ones."""
    rows = {str(one): _mean(values[key == one]) for one in range(most)}
    return rows | {f"{most}+": _mean(values[key >= most])}


def _named(key: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    return {name: _mean(values[key == index]) for index, name in enumerate(PREVIOUS)}
