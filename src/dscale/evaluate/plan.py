"""A benchmark's plan: arms, how often, at which concurrency, and in which order.

    name = "peers"                      # a TOML file; docs/bench.md explains every key
    prompts = ["gsm8k.jsonl"]           # or manifest = "FILE"
    concurrency = [1, 8]
    boots = 2

    [[arms]]
    name = "vllm"
    command = ["${VLLM_PYTHON}", "{here}/vllm_server.py", "--port", "{port}", "--max-num-seqs", "{concurrency}"]

    [[arms]]
    name = "auto"
    settings = {model = "smollm2-135m", policy = "auto"}

An arm is a server that is started (`command`), one that runs already (`base_url`), or an engine in a process of ours
(`settings`). Arms take turns: A B B A over the boots, or over boots × runs where they stay up `together`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dscale.config import InputError, require
from dscale.evaluate.bench_record import ArmInfo
from dscale.evaluate.inprocess import check_settings
from dscale.evaluate.manifest import Wanted
from dscale.evaluate.peers import check_peer_settings

ENGINES = ("dscale", "vllm", "sglang", "transformers", "server")
VARIABLE = re.compile(r"\$\{(\w+)\}")
PLACES = ("port", "concurrency", "here", "python", "target", "drafter")


@dataclass(frozen=True)
class Arm:
    """One configuration. command: a server to start, {port} in it; base_url: one that runs; settings: in process.

    engine: dscale, vllm, sglang, transformers or server. model: its name at the server, default the first it lists;
    body: added to every request; env: of its process; concurrency: the only ones it runs at. policy, width and slots
    are for the record. The rest is as in ArmInfo.
    """

    name: str
    engine: str = ""
    command: tuple[str, ...] = ()
    base_url: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    tokenizer: str | None = None
    concurrency: tuple[int, ...] = ()
    policy: str | None = None
    width: int | None = None
    slots: float | None = None
    baseline: bool = False
    autoregressive: bool = False
    family: str | None = None

    def __post_init__(self) -> None:
        where = f"arm {self.name}"
        kinds = [name for name in ("command", "base_url", "settings") if getattr(self, name)]
        require(len(kinds) == 1, f"{where}: has {' and '.join(kinds) or 'nothing'}; give command, base_url or settings")
        known = not self.base_url or self.base_url.startswith(("http://", "https://"))
        require(known, f"{where}: base_url {self.base_url!r} must begin with http:// or https://")
        engine = self.engine or ("dscale" if self.settings else "server")
        object.__setattr__(self, "engine", engine)
        require(engine in ENGINES, f"{where}: engine {engine!r}; allowed are {', '.join(ENGINES)}")
        require(all(one >= 1 for one in self.concurrency), f"{where}: concurrency must be 1 or more")
        if self.settings:
            known = engine in ("dscale", "transformers")
            require(known, f"{where}: engine {engine!r} has no settings; allowed are dscale and transformers")
            check = check_settings if engine == "dscale" else check_peer_settings
            check(self.settings, self.name)
            require(not self.body, f"{where}: body is for servers")
        if self.command:
            held = any("{port}" in word for word in self.command)
            require(held, f"{where}: no {{port}} in its command, so it could not be found")

    @property
    def per_concurrency(self) -> bool:
        """Whether each concurrency needs a process of its own: c is then its cap on running requests."""
        return bool(self.settings) or any("{concurrency}" in word for word in self.command)

    def info(self) -> ArmInfo:
        """What the record says of it: places and variables stay unfilled, so that no path of a machine gets in."""
        told = {name: getattr(self, name) for name in ("body", "env", "model", "concurrency") if getattr(self, name)}
        started = {"command": list(self.command)} if self.command else {"base_url": self.base_url}
        settings = dict(self.settings) if self.settings else started
        policy = self.policy or (self.settings.get("policy", "auto") if self.engine == "dscale" else None)
        return ArmInfo(
            self.name,
            self.engine,
            policy if self.settings or self.policy else None,
            self.width or self.settings.get("width"),
            self.slots or self.settings.get("slots"),
            self.baseline,
            self.autoregressive or policy == "off",
            self.family,
            settings | {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()},
        )


@dataclass(frozen=True)
class Plan:
    """What is run. boots: processes of each arm and concurrency; runs: of each boot; rate: requests a second of an open
    loop; together: the processes of a boot stay up side by side and take turns; start_seconds: until a server must
    answer; target and drafter: models whose folders stand for {target} and {drafter}; here: the plan's folder."""

    arms: tuple[Arm, ...]
    name: str = "bench"
    prompts: tuple[str, ...] = ("built-in",)
    manifest: str | None = None
    wanted: Wanted = field(default_factory=Wanted)
    concurrency: tuple[int, ...] = (1,)
    boots: int = 1
    runs: int = 1
    rate: float | None = None
    together: bool = False
    start_seconds: float = 300.0
    target: str | None = None
    drafter: str | None = None
    here: Path = Path()

    def __post_init__(self) -> None:
        require(len(self.arms) > 0, "plan: no arms; give at least one [[arms]]")
        names = [arm.name for arm in self.arms]
        for name in names:
            require(names.count(name) == 1, f"plan: two arms are called {name!r}")
        require(len(self.concurrency) > 0, "plan: concurrency is empty")
        for name, values in (("concurrency", self.concurrency), ("boots", (self.boots,)), ("runs", (self.runs,))):
            require(all(isinstance(one, int) and one >= 1 for one in values), f"plan: {name} must be 1 or more")
        require(self.rate is None or self.rate > 0, f"plan: rate {self.rate} must be positive, in requests a second")
        running = [arm.name for arm in self.arms if arm.base_url]
        require(self.boots == 1 or not running, f"plan: {running[:1]} runs already, so it has one boot; set boots = 1")

    def only(self, names: Sequence[str]) -> Plan:
        """The plan with these arms."""
        known = [arm.name for arm in self.arms]
        for name in names:
            require(name in known, f"--arms: {name!r} is not in the plan; it has {', '.join(known)}")
        return replace(self, arms=tuple(arm for arm in self.arms if arm.name in names)) if names else self

    @property
    def side_by_side(self) -> bool:
        """Whether all arms are up at the same time, so that they can take turns run by run."""
        return self.together or any(arm.base_url for arm in self.arms)

    def concurrencies(self, arm: Arm) -> tuple[int, ...]:
        """Those of the plan that the arm runs at."""
        return tuple(c for c in self.concurrency if not arm.concurrency or c in arm.concurrency)


Process = tuple[str, int, int]  # arm, boot, and the concurrency where each needs a process of its own


@dataclass(frozen=True)
class Turn:
    """One run: which arm, in which boot, at which concurrency."""

    arm: Arm
    concurrency: int
    boot: int
    run: int

    @property
    def process(self) -> Process:
        """Turns with the same value are served by one process."""
        return self.arm.name, self.boot, self.concurrency if self.arm.per_concurrency else 0

    def group(self, plan: Plan) -> object:
        """Turns with the same value are made without stopping what was started."""
        return (self.boot, self.concurrency) if plan.side_by_side else self.process


def turns(plan: Plan) -> Iterator[Turn]:
    """All runs in the order they are made; arms alternate A B B A."""
    return _side_by_side(plan) if plan.side_by_side else _one_by_one(plan)


def _side_by_side(plan: Plan) -> Iterator[Turn]:
    for boot in range(plan.boots):
        for concurrency in plan.concurrency:
            for run in range(plan.runs):
                for arm in _alternating(plan, boot * plan.runs + run):
                    if concurrency in plan.concurrencies(arm):
                        yield Turn(arm, concurrency, boot, run)


def _one_by_one(plan: Plan) -> Iterator[Turn]:
    """Turns of one process follow each other; where every process serves one concurrency, arms are close in time."""
    split = all(arm.per_concurrency for arm in plan.arms)
    groups = [(one,) for one in plan.concurrency] if split else [plan.concurrency]
    for boot in range(plan.boots):
        for group in groups:
            for arm in _alternating(plan, boot):
                for concurrency in group:
                    for run in range(plan.runs if concurrency in plan.concurrencies(arm) else 0):
                        yield Turn(arm, concurrency, boot, run)


def _alternating(plan: Plan, round: int) -> Sequence[Arm]:
    return plan.arms if round % 2 == 0 else plan.arms[::-1]


def blocked(plan: Plan) -> str | None:
    """What is wrong with the plan's order, or None: with one boot, an arm's runs follow each other."""
    if not plan.side_by_side and plan.boots == 1 and len(plan.arms) > 1 and plan.runs > 1:
        return "one boot: the runs of an arm follow each other, so drift of the machine is not averaged out"
    return None


def read_plan(path: Path) -> Plan:
    """A plan from its TOML file; InputError names the key that is wrong. Paths in it are relative to its folder."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a plan ({getattr(error, 'strerror', None) or error})") from None
    rows = content.pop("arms", [])
    require(isinstance(rows, list), f"{path}: arms are [[arms]] tables")
    arms = [Arm(**typed(Arm, row, f"{path} arm {number}")) for number, row in enumerate(rows, 1)]
    if "num_prompts" in content:
        content["requests"] = content.pop("num_prompts")
    own = {one.name for one in fields(Wanted)}
    wanted = typed(Wanted, {key: value for key, value in content.items() if key in own}, str(path))
    given = typed(Plan, {key: value for key, value in content.items() if key not in own}, str(path))
    here = path.resolve().parent
    if "prompts" in given:
        given["prompts"] = tuple(_from(here, filled_variables(one, str(path))) for one in given["prompts"])
    if "manifest" in given:
        given["manifest"] = _from(here, filled_variables(given["manifest"], str(path)))
    return Plan(**given | {"arms": tuple(arms), "wanted": Wanted(**wanted), "here": here})


def typed(cls: type, row: Any, where: str) -> dict[str, Any]:
    """A TOML table as the fields of a dataclass; InputError for a key that is none or a value of another type."""
    hints = get_type_hints(cls)
    known = [name for name in hints if name not in ("arms", "wanted", "here")]
    require(isinstance(row, dict), f"{where}: is no table")
    for key in row:
        require(key in known, f"{where}: key {key!r} is not known; allowed are {', '.join(known)}")
    require("name" in row or cls is not Arm, f"{where}: has no name")
    return {key: _as(hints[key], value, f"{where}: {key}") for key, value in row.items()}


def _as(hint: Any, value: Any, where: str) -> Any:
    """A TOML value as a field of this type."""
    for option in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        kind, inner = get_origin(option), get_args(option)
        if kind is tuple and isinstance(value, list) and all(type(one) is inner[0] for one in value):
            return tuple(value)
        if (
            kind is dict
            and isinstance(value, dict)
            and (inner[1] is Any or all(type(v) is str for v in value.values()))
        ):
            return value
        if option is float and type(value) is int:
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    wanted = str(hint).removeprefix("<class '").removesuffix("'>")
    raise InputError(f"{where}: {value!r} has the wrong type; it must be {wanted}")


def _from(here: Path, name: str) -> str:
    """A file beside the plan by its path; anything else as it is."""
    file, _, given = name.rpartition("=") if "=" in name else (name, "", "")
    if not (here / file).is_file():
        return name
    return str(here / file) + (f"={given}" if given else "")


def filled_variables(text: str, where: str) -> str:
    """${NAME} by the environment's value; InputError where it has none."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1])
        require(found is not None, f"{where}: environment variable {match[1]} is not set")
        return str(found)

    return VARIABLE.sub(value, text)


def filled(text: str, places: dict[str, str], where: str) -> str:
    """{port}, {concurrency} and the other places, and ${NAME}, by their values. Other braces stay as they are."""
    for name in PLACES:
        mark = "{" + name + "}"
        if mark in text:
            require(name in places, f"{where}: {mark} has no value; set {name} in the plan")
            text = text.replace(mark, places[name])
    return filled_variables(text, where)
