"""The losslessness certificate (measurement.md §3): does speculation change what the target would have said?

    violation  the emitted token is not the one that the engine without speculation gives after the same prefix
    floor      two replays of the engine without speculation, in batches of different size, do not agree there
    own        the emitted token is not the one that the speculative engine gives when it verifies the block again

Certified against the floor: violations exceed the floor by no more than two standard errors, on accepted drafts and on
all positions; no offset in the block stands out (exact paired test, Holm over offsets); and no accepted draft is beaten
by more than 4 nats, which no rounding explains. Certified exactly: no violation at all, and free-running text equal to
what the engine without speculation writes.

Violations and floor are compared in pairs: of the positions where exactly one of the two holds, b are violations and c
floor; b - c is off by √(b + c) when there is no more to violations than the floor. An engine that changes nothing is
certified at least PASS_RATE of the time.

Text alone cannot show a drafter that is read wrongly (wrong taps, wrong layout): its drafts are refused, and only
speed is lost. So the certificate carries the tokens a step, warns where they are near 1, and where the engine accepts
less than the trainer's own pass over the same text (drafter_agreement.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dscale.config import require
from dscale.evaluate.continuations import FINAL
from dscale.evaluate.drafter_agreement import Agreement

MARGIN = 4.0  # nats
ERRORS = 2.0  # standard errors
HOLM_LEVEL = 0.025  # of the offsets together
PASS_RATE = 0.95  # of clean engines: ERRORS refuses 2.3% of them, the offsets HOLM_LEVEL
ALARM_PROGRESS = 1.1  # tokens a step that no drafter in order stays under
MOST_LISTED = 50  # violations beyond the margin in a record
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Evidence:
    """What was found at P positions, [P] each. own is None where blocks could not be verified again; offset: FINAL, or
    the depth of the accepted draft; margin: nats, NaN unknown; prompt, place: which prompt and which of its tokens;
    boundaries: whether steps are known: without them every position may be an accepted one.

    control: (disagreements, positions) of text by the engine without speculation, scored as the other was; for
    servers, where scoring and decoding may differ by rounding.
    """

    violation: Bools
    floor: Bools
    own: Bools | None
    offset: NDArray[np.int64]
    margin: NDArray[np.float64]
    prompt: NDArray[np.int64]
    place: NDArray[np.int64]
    boundaries: bool = True
    control: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require(len(self.violation) > 0, "certificate: no position was checked; give longer answers")

    @property
    def accepted(self) -> Bools:
        """Positions of accepted drafts; all where steps are unknown."""
        return self.offset != FINAL if self.boundaries else np.ones(len(self.offset), bool)


@dataclass(frozen=True)
class Tally:
    """Violations and floor over some positions. error: standard error of the difference of their rates."""

    positions: int
    violations: int
    floor: int
    error: float
    exceeds: bool

    @classmethod
    def of(cls, evidence: Evidence, inside: Bools) -> Tally:
        """Over the positions inside."""
        count = int(inside.sum())
        more, less = _discordant(evidence, inside)
        spread = math.sqrt(more + less)
        exceeds = more - less > ERRORS * spread
        violations, floor = int(evidence.violation[inside].sum()), int(evidence.floor[inside].sum())
        if exceeds and evidence.control is not None:
            exceeds = _above(violations, count, *evidence.control)
        return cls(count, violations, floor, spread / max(count, 1), exceeds)

    def as_json(self) -> dict[str, Any]:
        """Counts, rates and their standard errors."""
        count = max(self.positions, 1)
        rates = {"violations": self.violations / count, "floor": self.floor / count}
        errors = {name: math.sqrt(rate * (1 - rate) / count) for name, rate in rates.items()}
        return {
            "positions": self.positions,
            "violations": self.violations,
            "violation_rate": rates["violations"],
            "violation_error": errors["violations"],
            "floor": self.floor,
            "floor_rate": rates["floor"],
            "floor_error": errors["floor"],
            "difference_error": self.error,
            "exceeds_floor": self.exceeds,
        }


def _discordant(evidence: Evidence, inside: Bools) -> tuple[int, int]:
    """Positions with a violation and no floor, and the other way round."""
    violation, floor = evidence.violation[inside], evidence.floor[inside]
    return int((violation & ~floor).sum()), int((floor & ~violation).sum())


def _above(count: int, positions: int, other: int, others: int) -> bool:
    """Whether count / positions is above other / others by more than ERRORS standard errors."""
    pooled = (count + other) / (positions + others)
    error = math.sqrt(pooled * (1 - pooled) * (1 / positions + 1 / others))
    return count / positions - other / others > ERRORS * error


@dataclass(frozen=True)
class OffsetRow:
    """One offset in the block (FINAL: tokens no draft proposed). p: one-sided exact probability of so many more
    violations than floor; stands_out: after Holm's correction."""

    offset: int
    positions: int
    violations: int
    floor: int
    p: float
    stands_out: bool = False


def by_offset(evidence: Evidence) -> list[OffsetRow]:
    """Every offset there is; none where steps are unknown."""
    rows = []
    for offset in np.unique(evidence.offset) if evidence.boundaries else ():
        inside = evidence.offset == offset
        more, less = _discordant(evidence, inside)
        found = int(evidence.violation[inside].sum()), int(evidence.floor[inside].sum())
        rows.append(OffsetRow(int(offset), int(inside.sum()), *found, upper_tail(more, more + less)))
    out = holm([row.p for row in rows], HOLM_LEVEL)
    return [OffsetRow(*vars(row).values()) if not flag else _standing(row) for row, flag in zip(rows, out, strict=True)]


def _standing(row: OffsetRow) -> OffsetRow:
    return OffsetRow(row.offset, row.positions, row.violations, row.floor, row.p, True)


def upper_tail(count: int, of: int) -> float:
    """P(X ≥ count) of a fair coin thrown `of` times."""
    return sum(math.comb(of, k) for k in range(count, of + 1)) / 2**of


def holm(p: Sequence[float], level: float) -> list[bool]:
    """Which of these are rejected at a family-wise level."""
    out, order = [False] * len(p), sorted(range(len(p)), key=lambda index: p[index])
    for place, index in enumerate(order):
        if p[index] > level / (len(p) - place):
            break
        out[index] = True
    return out


@dataclass(frozen=True)
class Text:
    """Free-running texts against those without speculation: prompts, equal ones, and the first differing token of each
    other one by prompt."""

    prompts: int
    equal: int
    first_difference: dict[int, int]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> Text:
        """Compare token by token; a text that goes on longer differs where the other ended."""
        found = {}
        for prompt, (one, other) in enumerate(zip(texts, plain, strict=True)):
            if tuple(one) != tuple(other):
                pairs = enumerate(zip(one, other, strict=False))
                found[prompt] = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
        return cls(len(texts), len(texts) - len(found), found)


@dataclass(frozen=True)
class Verdict:
    """Whether the certificate is given, why not, and what else must be known."""

    certified: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def decide(
    evidence: Evidence,
    exact: bool,
    text: Text | None = None,
    progress: float | None = None,
    agreement: Agreement | None = None,
) -> Verdict:
    """The verdict. text: free-running comparison, which decides in exact mode only; progress: tokens a drafted step."""
    reasons = list(_exact_reasons(evidence, text) if exact else _floor_reasons(evidence))
    return Verdict(not reasons, tuple(reasons), tuple(_warnings(evidence, progress, agreement)))


def _exact_reasons(evidence: Evidence, text: Text | None) -> Sequence[str]:
    out = []
    count, accepted = int(evidence.violation.sum()), int((evidence.violation & evidence.accepted).sum())
    if count:
        out.append(
            f"{count} of {len(evidence.violation)} tokens are not the target's, {accepted} of them accepted drafts"
        )
        out += [
            f"worst at offset {row.offset}" for row in by_offset(evidence) if row.stands_out and row.offset != FINAL
        ]
    if text is not None and text.equal < text.prompts:
        prompt, place = next(iter(text.first_difference.items()))
        differing = text.prompts - text.equal
        out.append(
            f"{differing} of {text.prompts} texts differ from those without speculation; "
            f"prompt {prompt} from token {place} on"
        )
    return out


def _floor_reasons(evidence: Evidence) -> Sequence[str]:
    out = []
    scopes = {"accepted drafts": evidence.accepted, "all positions": np.ones(len(evidence.violation), bool)}
    for name, inside in scopes.items():
        tally = Tally.of(evidence, inside)
        if tally.exceeds:
            excess = (tally.violations - tally.floor) / tally.positions
            out.append(
                f"{name}: violations exceed the floor by {excess:.2%}, {ERRORS:g} errors are {ERRORS * tally.error:.2%}"
            )
    for row in by_offset(evidence):
        if row.stands_out:
            place = "tokens that no draft proposed" if row.offset == FINAL else f"offset {row.offset}"
            out.append(f"{place}: {row.violations} violations, floor {row.floor}, of {row.positions} (p = {row.p:.2g})")
    beyond = beyond_margin(evidence)
    if (beyond & evidence.accepted).any():
        out.append(f"{int((beyond & evidence.accepted).sum())} accepted drafts are beaten by more than {MARGIN:g} nats")
    return out


def beyond_margin(evidence: Evidence) -> Bools:
    """Violations that no rounding explains."""
    return evidence.violation & (np.nan_to_num(evidence.margin, nan=0.0) > MARGIN)


def _warnings(evidence: Evidence, progress: float | None, agreement: Agreement | None) -> Sequence[str]:
    out = []
    if agreement is not None and agreement.suspicious:
        out.append(
            f"the engine accepts {agreement.accepted} drafts, the drafter's own pass makes {agreement.expected} right "
            f"({agreement.differing} of {agreement.steps} steps differ): it does not feed the drafter as it was trained"
        )
    if progress is not None and progress < ALARM_PROGRESS:
        out.append(
            f"hardly any draft is accepted ({progress:.2f} tokens a step): the text is safe, but a drafter that is "
            "read wrongly (taps, layout, rotary style) looks just so"
        )
    if not evidence.boundaries:
        out.append("the server does not tell its steps: no offsets, and every position counts as an accepted draft")
    elif not evidence.accepted.any():
        out.append("no draft was accepted, so nothing of speculation was checked")
    return out


def resolution(positions: int, floor: int, exact: bool) -> float:
    """The excess rate of violations that would have been refused; in exact mode the rate at which one violation would
    have been met with 95% probability."""
    if exact:
        return min(1.0, 3.0 / max(positions, 1))
    for excess in range(1, positions + 1):
        if excess > ERRORS * math.sqrt(2 * floor + excess):
            return excess / positions
    return 1.0


def evidence_json(evidence: Evidence, exact: bool) -> dict[str, Any]:
    """What a record tells of the evidence: tallies, offsets, and what lies beyond the margin."""
    accepted = Tally.of(evidence, evidence.accepted)
    beyond = np.flatnonzero(beyond_margin(evidence))
    listed = [
        {
            "prompt": int(evidence.prompt[at]),
            "token": int(evidence.place[at]),
            "offset": int(evidence.offset[at]) if evidence.boundaries else None,
            "accepted": bool(evidence.accepted[at]) if evidence.boundaries else None,
            "nats": float(evidence.margin[at]),
        }
        for at in beyond[:MOST_LISTED]
    ]
    return {
        "all": Tally.of(evidence, np.ones(len(evidence.violation), bool)).as_json(),
        "accepted": accepted.as_json(),
        "own_violations": None if evidence.own is None else int(evidence.own.sum()),
        "control": None if evidence.control is None else list(evidence.control),
        "by_offset": [
            vars(row) | {"offset": "final" if row.offset == FINAL else row.offset} for row in by_offset(evidence)
        ],
        "beyond_margin": {"nats": MARGIN, "count": len(beyond), "listed": listed},
        "resolution": resolution(accepted.positions, accepted.floor, exact),
    }
