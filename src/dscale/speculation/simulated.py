"""Simulated acceptance: real kernels, made-up outcomes (measurement.md §7).

Weights of a size whose drafter is not at hand are drawn at random; what they draft is never accepted. So the number of
accepted drafts is looked up instead, by (request seed, absolute position of the anchor): L drafts would pass if the
whole block were verified, min(L, k - 1) pass when k rows are. The scores q that allocation reads are looked up beside
it, so it has something to predict. Draft, scorer, target, head and sampling all run; then, at row j of a request,

    y = draft j + 1                         for j < L
    y ≠ draft j + 1 (another token)         for j = L

replaces the token drawn, so acceptance itself, the caches and the text that follows are the engine's own. The text
means nothing. L depends on seed and position alone: it is the same in any batch, under any policy, on any machine.
Whatever such a run gives out says SIMULATED.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dscale.config import InputError, require
from dscale.kernels import triton
from dscale.speculation.ease import ANCHORS, PERSISTENCE, REGION, REGIONS, WIDTH, Ease, fit
from dscale.speculation.noise import MASK, random_bits
from dscale.speculation.packing import Packed
from dscale.speculation.policies import Draft

SIMULATED = "simulated acceptance"
SCHEMA = "dscale.acceptance/1"
SALT = 0x2545F4914F6CDD1D  # sets these random numbers apart from those of sampling
LENGTH, ANCHOR, PLACE = 0, 1, 2  # ids under which `random_bits` is asked for the length and the two classes


@dataclass(frozen=True)
class SimulatedAcceptance:
    """What to simulate. progress: tokens a step when whole blocks of 16 are verified; spearman: of predicted with
    accepted length; persistence: see ease.py; trace: a file written by `export_trace` to replay instead of all that.
    """

    progress: float = 6.09
    spearman: float = 0.74
    seed: int = 0
    persistence: float = PERSISTENCE
    trace: str | None = None

    @classmethod
    def of(cls, given: SimulatedAcceptance | float | str) -> SimulatedAcceptance:
        """From a mean progress, the path of a trace, or such an object."""
        if isinstance(given, SimulatedAcceptance):
            return given
        return cls(trace=given) if isinstance(given, str) else cls(progress=float(given))

    def on(self, device: torch.device | str) -> Simulation:
        """The lookup on a device."""
        if self.trace is not None:
            return RecordedSimulation.read(Path(self.trace), device)
        return DrawnSimulation(self, device)

    def about(self) -> dict[str, Any]:
        """What a record says of it."""
        if self.trace:
            return {"kind": SIMULATED, "trace": self.trace}
        ease = fit(self.progress, self.spearman, self.persistence)
        drawn = {key: value for key, value in asdict(self).items() if key != "trace"}
        return {"kind": SIMULATED, **drawn, "centre": ease.centre, "spread": ease.spread}


@dataclass
class SimulatedDraft(Draft):
    """A draft whose acceptance is known: length [N] int64, drafts that pass when the whole block is verified."""

    length: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


class Simulation(ABC):
    """Accepted lengths and survival scores by (seed, position). Nothing is read on the host."""

    @abstractmethod
    def at(self, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """For anchors at `position` [N] of requests of `seed` [N], int64: lengths [N] int64 and q [N, 16] float32."""

    def believe(self, draft: Draft, seed: Tensor, position: Tensor) -> Draft:
        """The draft with its length, and with q in place of what its scorer made of it (where it has one)."""
        drafts = draft.tokens.shape[1]
        if drafts == 0:
            return draft
        length, q = self.at(seed, position)
        survival = q[:, : drafts + 1] if draft.survival is not None else None
        return SimulatedDraft(draft.tokens, survival, draft.top, ranked=draft.ranked, length=length)

    def rewrite(self, y: Tensor, draft: Draft, packed: Packed, vocab: int) -> Tensor:
        """The target's tokens y [M] int64, changed so that just the drafts of the simulated length pass."""
        if not isinstance(draft, SimulatedDraft):
            return y
        if triton.usable(y):
            from dscale.kernels.triton import simulate

            return simulate.rewrite(y, draft.tokens, draft.length, packed.lane_of_row, packed.column_of_row, vocab)
        column, lane = packed.column_of_row, packed.lane_of_row
        drafts = draft.tokens.shape[1]
        own = draft.tokens[lane, column.clamp(max=drafts - 1)]
        other = torch.where(y == own, (own + 1) % vocab, y)
        return torch.where(column < drafts, torch.where(column < draft.length[lane], own, other), y)


class DrawnSimulation(Simulation):
    """Lengths and scores from the model of ease.py by counter-based noise: integers and one table, so exact."""

    def __init__(self, config: SimulatedAcceptance, device: torch.device | str) -> None:
        self.ease: Ease = fit(config.progress, config.spearman, config.persistence)
        self.salt = (SALT + config.seed) & MASK
        self.survival = torch.from_numpy(self.ease.survival()).float().to(device)
        # Made once: a constant moved to the device inside a step could not be captured.
        self._ids = torch.tensor([[LENGTH, ANCHOR, PLACE]], device=device)

    def at(self, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        if triton.usable(seed):
            from dscale.kernels.triton import simulate

            sizes = (REGION, REGIONS, ANCHORS)
            return simulate.drawn(seed, position, self.survival, self.salt, sizes, (LENGTH, ANCHOR, PLACE))
        salted = seed ^ self.salt
        own = random_bits(salted, position, self._ids[:, :2])
        place = random_bits(salted, position // REGION, self._ids[:, 2:])
        anchor = own[:, 1] >> (63 - (ANCHORS - 1).bit_length())
        region = place[:, 0] >> (63 - (REGIONS - 1).bit_length())
        q = self.survival[region * ANCHORS + anchor]
        chance = (own[:, :1] >> 39).float() * 2.0**-24  # 24 bits: exact in float32
        return (chance < q[:, 1:]).sum(-1), q


class RecordedSimulation(Simulation):
    """Lengths and scores from tables [requests, positions]: request `seed` mod requests, position mod positions."""

    def __init__(self, accepted: Tensor, survival: Tensor) -> None:
        self.accepted, self.survival = accepted, survival

    @classmethod
    def read(cls, path: Path, device: torch.device | str) -> RecordedSimulation:
        """A file written by `export_trace`; InputError when it is not one."""
        try:
            with safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot be read as an acceptance trace ({error})") from None
        require(about.get("schema") == SCHEMA, f"{path}: schema {about.get('schema')!r}, expected {SCHEMA!r}")
        accepted, survival = tables.get("accepted"), tables.get("survival")
        fits = accepted is not None and survival is not None and survival.shape == (*accepted.shape, WIDTH)
        require(fits, f"{path}: needs accepted [requests, positions] and survival [requests, positions, {WIDTH}]")
        assert accepted is not None
        assert survival is not None
        return cls(accepted.to(device), survival.to(device))

    def at(self, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        requests, positions = self.accepted.shape
        row, column = seed % requests, position % positions
        return self.accepted[row, column].long(), self.survival[row, column].float()


def export_trace(config: SimulatedAcceptance, path: Path, requests: int, positions: int) -> None:
    """Write lengths and scores of request seeds 0 … requests-1 at positions 0 … positions-1, for another engine.

    .safetensors: accepted int8 [requests, positions], survival float16 [requests, positions, 16], the parameters as
    metadata. .json: {"schema", "about", "requests": [{"seed", "accepted": […], "survival": [[…]]}]}, scores to four
    digits.
    """
    require(path.suffix in (".safetensors", ".json"), f"{path}: a trace ends in .safetensors or .json")
    simulation = config.on("cpu")
    places = torch.arange(positions)
    rows = [simulation.at(torch.full_like(places, seed), places) for seed in range(requests)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, config.about(), [length for length, _ in rows], [q for _, q in rows])
    except OSError as error:
        raise InputError(f"{path}: cannot write the trace ({error})") from None


def _write(path: Path, about: dict[str, Any], accepted: Sequence[Tensor], survival: Sequence[Tensor]) -> None:
    if path.suffix == ".safetensors":
        tables = {
            "accepted": torch.stack(list(accepted)).to(torch.int8),
            "survival": torch.stack(list(survival)).half(),
        }
        save_file(tables, path, metadata={"schema": SCHEMA, "about": json.dumps(about)})
        return
    requests = [
        {"seed": seed, "accepted": length.tolist(), "survival": [[round(x, 4) for x in row] for row in q.tolist()]}
        for seed, (length, q) in enumerate(zip(accepted, survival, strict=True))
    ]
    path.write_text(json.dumps({"schema": SCHEMA, "about": about, "requests": requests}) + "\n")
