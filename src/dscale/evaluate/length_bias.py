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
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
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
        "by_offset": _table(joined["offset"], length, 8),
        "visited_by_previous": _named(joined["previous"][visited], at_visited),
        "jumped_over": _mean(length[~visited]),
    }


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
    }


def _mean(values: np.ndarray) -> dict[str, Any]:
    return {"blocks": len(values), "expected": float(values.mean()) if len(values) else None}


def _table(key: np.ndarray, values: np.ndarray, most: int) -> dict[str, Any]:
    """E[L] by offset 0 … most - 1, and of all further ones."""
    rows = {str(one): _mean(values[key == one]) for one in range(most)}
    return rows | {f"{most}+": _mean(values[key >= most])}


def _named(key: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    return {name: _mean(values[key == index]) for index, name in enumerate(PREVIOUS)}
