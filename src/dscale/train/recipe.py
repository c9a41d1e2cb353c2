"""How a drafter is trained: network, loss, optimizer, budget. One frozen record, checked when it is made."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from dscale.config import AnchorLayout, require

SCHEDULES, OPTIMIZERS, DISTANCES = ("cosine", "wsd"), ("muon", "adamw"), ("l1", "kl")
BUDGETS = ("steps", "epochs", "seconds")
# Say how a run is watched or carried out, not what comes out of it: another value may go on in the same folder.
UNBOUND = ("save_seconds", "log_every", "sync_every")


@dataclass(frozen=True)
class TrainConfig:
    """Recipe of a training run. Exactly one of steps, epochs and seconds is the budget that the schedule spans.

    A step takes rows · accumulate packed rows per process. Network fields left None: W = 16, 5 layers, layout 1+N and
    mask token 16 for a new drafter, those of the folder when init is a folder.
    """

    init: str = "random"  # random, target, target:FIRST-LAST, target:L,L,… or the folder of a drafter
    width: int | None = None  # W, anchor included
    layers: int | None = None
    layout: str | None = None
    mask_token: int | None = None
    rows: int = 16  # packed rows of one forward pass
    anchors: int = 192  # blocks per row
    accumulate: int = 1  # forward passes per update
    gamma: float | None = None  # decay of the slot weights; None follows the width
    distil: float = 0.0  # A in (1-A)·CE + A·distance(p_draft, p_target)
    distance: str = "l1"
    optimizer: str = "muon"
    rate: float = 3e-3
    schedule: str = "cosine"
    warmup: float = 0.04  # share of the budget
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    evaluate_every: int = 500  # steps between two walks over validation rows; 0 leaves them out
    evaluate_rows: int = 64
    chunks: int = 12  # pieces of the cross-entropy
    attention: str = "auto"  # flex, dense, or auto: flex on CUDA
    compile: bool = True  # on CUDA only
    dialect: str = "z-lab"  # of the drafters written
    seed: int = 0
    sync_every: int = 20  # steps between two looks at the clock
    log_every: int = 100  # steps
    save_seconds: float = 60.0  # between two checkpoints

    def __post_init__(self) -> None:
        for name in ("rows", "anchors", "accumulate", "evaluate_rows", "chunks", "sync_every", "log_every"):
            require(getattr(self, name) > 0, f"train.{name}: {getattr(self, name)} must be positive")
        for name in ("rate", "clip", "gamma", "layers", *BUDGETS):
            value = getattr(self, name)
            require(value is None or value > 0, f"train.{name}: {value} must be positive")
        require(self.width is None or self.width >= 2, f"train.width: {self.width} must be at least 2")
        require(self.evaluate_every >= 0, f"train.evaluate_every: {self.evaluate_every} must be 0 (never) or more")
        require(0 <= self.distil <= 1, f"train.distil: {self.distil} must lie in [0, 1]")
        require(0 <= self.warmup < 1, f"train.warmup: {self.warmup} must lie in [0, 1)")
        layouts = tuple(layout.value for layout in AnchorLayout)
        choices: dict[str, tuple[str | None, ...]] = {
            "schedule": SCHEDULES,
            "optimizer": OPTIMIZERS,
            "distance": DISTANCES,
            "attention": ("auto", "flex", "dense"),
            "dialect": ("z-lab", "deepspec"),
            "layout": (None, *layouts),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            shown = ", ".join(one for one in allowed if one)
            require(value in allowed, f"train.{name}: {value!r}; allowed are {shown}")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        require(len(given) == 1, f"train.{', train.'.join(BUDGETS)}: give exactly one of them, not {len(given)}")

    def outcome(self) -> dict[str, Any]:
        """The fields that decide what comes out."""
        return {name: value for name, value in asdict(self).items() if name not in UNBOUND}

    def decay(self, width: int) -> float:
        """γ: as given, else 7, 5 or 4 for W from 16, from 10 and below (dflash.md)."""
        return self.gamma or (7.0 if width >= 16 else 5.0 if width >= 10 else 4.0)


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "steps": 10, "rows": 2, "anchors": 8, "width": 8, "layers": 2, "optimizer": "adamw", "rate": 1e-3,
        "evaluate_every": 10, "evaluate_rows": 2, "log_every": 5, "sync_every": 1, "chunks": 1,
    },
    "full": {"epochs": 8.0, "rows": 16, "anchors": 192, "rate": 3e-3, "gamma": 5.0, "distil": 0.9},
}  # fmt: skip


def recipe(preset: str, **given: Any) -> TrainConfig:
    """A preset with what was given (not None) over it.

    A budget that is given replaces the preset's, a width its γ, a drafter to go on from its network.
    """
    require(preset in PRESETS, f"preset: {preset!r}; allowed are {', '.join(PRESETS)}")
    flags = {name: value for name, value in given.items() if value is not None}
    base = dict(PRESETS[preset])
    if any(name in flags for name in BUDGETS):
        base = {name: value for name, value in base.items() if name not in BUDGETS}
    if "width" in flags:
        base.pop("gamma", None)
    if not starts_new(flags.get("init", "random")):
        base = {name: value for name, value in base.items() if name not in ("width", "layers")}
    return TrainConfig(**(base | flags))


def starts_new(init: str) -> bool:
    """True for random weights or target layers, False for the folder of an earlier drafter."""
    return init.partition(":")[0] in ("random", "target")


def mixed(*numbers: int) -> int:
    """A seed of 62 bits from several numbers, the same in every process and Python."""
    digest = hashlib.sha256("/".join(str(number) for number in numbers).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
