"""What the plug-in can be told: DSCALE_* variables, or one TOML file named by DSCALE_CONFIG; a variable wins.

SGLang has no hook for flags of a plug-in, and its processes inherit the environment, so this is how they all learn the
same. Names are those of `dscale serve` where it has them.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dscale.config import ATTENTION_LAYOUTS, InputError, SpeculationConfig, require
from dscale.speculation.simulated import SimulatedAcceptance

POLICIES = "full, fixed:W, dvl, dvl:exact, dvl:seeded or confidence"
PREFIX = "DSCALE_"


@dataclass(frozen=True)
class Settings:
    """policy and slots as of `dscale serve`; slots is a whole number here, rows a request in every captured graph.

    predictor: a folder, or "random" for what it costs without what it knows. attention_layout: packed, or narrow and
    wide of the paper (kernels/attention.py). simulate: mean progress or a trace's path (speculation/simulated.py);
    empty: acceptance is what it is. graphs: 1 captures decode steps whole where the device captures, 0 does not; 2, on
    a CPU, runs the steps that would be captured (for tests). ahead: 1 lets the host prepare the next step while the
    device runs one, 0 waits as SGLang does. check_ranks: 1 compares every step among the ranks
    (ranks.py).
    """

    policy: str = "full"
    slots: int = 8
    predictor: str = ""
    attention_layout: str = "packed"
    simulate: str = ""
    graphs: int = 1
    ahead: int = 1
    check_ranks: int = 0

    def __post_init__(self) -> None:
        SpeculationConfig(self.policy, slots=self.slots)
        known = self.kind in ("full", "fixed", "dvl", "confidence")
        require(known, f"policy: {self.policy!r} does not run on SGLang; allowed are {POLICIES}")
        layouts = ", ".join(ATTENTION_LAYOUTS)
        good = self.attention_layout in ATTENTION_LAYOUTS
        require(good, f"attention_layout: {self.attention_layout!r}; allowed are {layouts}")
        for name, most in (("graphs", 2), ("ahead", 1), ("check_ranks", 1)):
            value = getattr(self, name)
            require(0 <= value <= most, f"{name}: {value}; allowed are whole numbers from 0 to {most}")
        needs = self.kind == "dvl" and not self.predictor
        require(not needs, "policy 'dvl' needs a predictor: set DSCALE_PREDICTOR to its folder, or use confidence")

    @property
    def kind(self) -> str:
        """The policy without its argument."""
        return self.policy.partition(":")[0]

    def rows(self, width: int) -> int:
        """Rows a request that a step verifies, for blocks of `width`."""
        if self.kind == "full":
            return width
        wanted = int(self.policy.partition(":")[2]) if self.kind == "fixed" else self.slots
        where = f"policy {self.policy!r}" if self.kind == "fixed" else f"slots: {self.slots}"
        require(wanted <= width, f"{where}: a block of this drafter has {width} rows")
        return wanted

    @property
    def simulated(self) -> SimulatedAcceptance | None:
        """What to simulate, or None."""
        if not self.simulate:
            return None
        try:
            return SimulatedAcceptance.of(float(self.simulate))
        except ValueError:
            return SimulatedAcceptance.of(self.simulate)

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """From the environment and the file it names; InputError says what is wrong, where."""
        given: dict[str, Any] = {}
        if environment.get(PREFIX + "CONFIG"):
            given = _read_file(Path(environment[PREFIX + "CONFIG"]))
        for one in fields(cls):
            name = PREFIX + one.name.upper()
            if environment.get(name):
                given[one.name] = _parse(name, environment[name], type(one.default))
        return cls(**given)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"DSCALE_CONFIG {path}: cannot be read as TOML ({error})") from None
    kinds = {one.name: type(one.default) for one in fields(Settings)}
    found = {}
    for key, value in record.items():
        name = key.replace("-", "_")
        require(name in kinds, f"DSCALE_CONFIG {path}: unknown key {key!r}; known are {', '.join(kinds)}")
        found[name] = _parse(f"DSCALE_CONFIG {path}: {key}", str(value), kinds[name])
    return found


def _parse(where: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{where}: {text!r} is not a whole number") from None
