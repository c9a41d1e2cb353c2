"""How far an engine repeats itself: the same prompts twice on the same boot (measurement.md §4).

Two runs of a prompt agree up to a common prefix; what follows the first disagreement says nothing more, because the
texts then differ anyway. So every position up to and with the first disagreement is at risk, and

    hazard = first disagreements / positions at risk

estimates the chance that a token comes out otherwise, given equal text before it. No gate between two engines may be
tighter than this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any

from dscale.config import InputError, require
from dscale.evaluate.certificate_record import read_kind

KIND = "reproducibility"
SCHEMA = 1
LEVEL = 0.95


@dataclass(frozen=True)
class ArmHazard:
    """Of one arm: sequences compared, those that diverged, positions at risk, the hazard and the share of sequences
    that diverged, each with a 95% interval. first: where each diverging prompt did; temperature: 0 is greedy."""

    arm: str
    temperature: float
    sequences: int
    diverged: int
    at_risk: int
    hazard: float
    hazard_interval: tuple[float, float]
    share: float
    share_interval: tuple[float, float]
    first: dict[int, int]

    @classmethod
    def of(
        cls, arm: str, temperature: float, runs: Sequence[Sequence[Sequence[int]]], ended: Sequence[Sequence[bool]]
    ) -> ArmHazard:
        """From two runs of all prompts: token ids, and whether a text ended by itself, which is as good as a token."""
        first: dict[int, int] = {}
        risk = 0
        for prompt, (one, other) in enumerate(zip(*runs, strict=True)):
            texts = [tuple(text) + (None,) * stop[prompt] for text, stop in zip((one, other), ended, strict=True)]
            shared = common_prefix(*texts)
            length = min(map(len, texts))
            risk += min(shared + 1, length)
            if shared < length:
                first[prompt] = shared
        count = len(runs[0])
        require(risk > 0, f"{arm}: no tokens to compare; give longer answers")
        rates = wilson(len(first), risk), wilson(len(first), count)
        return cls(
            arm, temperature, count, len(first), risk, len(first) / risk, rates[0], len(first) / count, rates[1], first
        )

    def __str__(self) -> str:
        low, high = self.hazard_interval
        return (
            f"{self.arm}: {self.diverged} of {self.sequences} sequences diverge; hazard {self.hazard:.2e} a token "
            f"({low:.1e} … {high:.1e}) over {self.at_risk:,} positions"
        )


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Positions before the first disagreement."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def wilson(count: int, of: int) -> tuple[float, float]:
    """95% interval of a rate (Wilson's score interval): its upper end says something also where nothing was seen."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    rate, scale = count / of, 1 + z * z / of
    centre = (rate + z * z / (2 * of)) / scale
    half = z * math.sqrt(rate * (1 - rate) / of + z * z / (4 * of * of)) / scale
    return max(0.0, centre - half) if count else 0.0, min(1.0, centre + half) if count < of else 1.0


@dataclass(frozen=True)
class ReproducibilityRecord:
    """What `dscale reproduce` writes. Schema 1; prompts and server as of CertificateRecord."""

    versions: dict[str, str]
    machine: dict[str, Any]
    command: str
    model: str
    dtype: str | None
    prompts: dict[str, Any]
    arms: tuple[ArmHazard, ...]
    server: str = ""
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        arms = {"arms": [asdict(arm) for arm in self.arms], "notes": list(self.notes)}
        return {"kind": KIND, "schema": SCHEMA} | plain | arms


def read_reproducibility(path: Path) -> ReproducibilityRecord:
    """A record from its file. InputError in one line for another kind, another schema, or a file that is none."""
    content = read_kind(path, KIND, SCHEMA, "dscale reproduce")
    try:
        own = {entry.name: content[entry.name] for entry in fields(ReproducibilityRecord)}
        arms = tuple(_arm(one) for one in content["arms"])
        return ReproducibilityRecord(**own | {"arms": arms, "notes": tuple(content["notes"])})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: damaged record of `dscale reproduce`: {error}") from None


def _arm(content: dict[str, Any]) -> ArmHazard:
    intervals = {name: tuple(content[name]) for name in ("hazard_interval", "share_interval")}
    return ArmHazard(**content | intervals | {"first": {int(at): place for at, place in content["first"].items()}})
