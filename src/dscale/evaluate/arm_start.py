"""Bring the arm of a turn up: fill its command's places, start it, wait until it answers."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dscale.config import require
from dscale.evaluate.arm_process import (
    Served,
    ServedByChild,
    ServedByServer,
    ServerProcess,
    free_port,
    served_model,
)
from dscale.evaluate.load import Server
from dscale.evaluate.manifest import Manifest
from dscale.evaluate.plan import Plan, Turn, filled
from dscale.models.aliases import ALIASES, alias_folder, shipped_drafter
from dscale.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Starter:
    """What all arms of a plan are started with. token: bearer token of servers; logs: folder of the arms' output."""

    plan: Plan
    manifest: Manifest
    logs: Path
    token: str | None = None

    def up(self, turn: Turn) -> Served:
        """The arm, answering; its `close` stops it. ArmGone when it does not come up, InputError for bad settings."""
        arm, where = turn.arm, f"arm {turn.arm.name}"
        log = self.logs / f"{re.sub(r'[^A-Za-z0-9.]+', '-', arm.name)}-c{turn.concurrency}-boot{turn.boot}.log"
        places = self._places(turn)
        env = {key: filled(value, places, where) for key, value in arm.env.items()}
        if arm.settings:
            return ServedByChild(arm.engine, arm.settings, self.manifest, turn.concurrency, log, env)
        if arm.base_url:
            return self._served(turn, arm.base_url.rstrip("/").removesuffix("/v1"), None)
        places["port"] = str(free_port())
        base_url = f"http://127.0.0.1:{places['port']}"
        process = ServerProcess([filled(word, places, where) for word in arm.command], env, log)
        with ExitStack() as undo:
            undo.callback(process.stop)
            process.wait_until_up(base_url, self.plan.start_seconds)
            served = self._served(turn, base_url, process)
            undo.pop_all()
        return served

    def _served(self, turn: Turn, base_url: str, process: ServerProcess | None) -> ServedByServer:
        arm = turn.arm
        tokenizer = Tokenizer.from_folder(Path(arm.tokenizer)) if arm.tokenizer else None
        model = arm.model or served_model(base_url, self.token)
        return ServedByServer(Server(base_url, model, arm.body, self.token, tokenizer), self.manifest, process)

    def _places(self, turn: Turn) -> dict[str, str]:
        """What stands for {concurrency}, {here}, {python}, {target} and {drafter} in a command."""
        plan = self.plan
        made = {"concurrency": str(turn.concurrency), "python": sys.executable, "here": str(plan.here)}
        if plan.target is not None:
            made["target"] = str(alias_folder(plan.target)) if plan.target in ALIASES else plan.target
        if plan.drafter is not None:
            made["drafter"] = self._drafter()
        return made

    def _drafter(self) -> str:
        given = str(self.plan.drafter)
        if given != "auto":
            return given
        folder = shipped_drafter(self.plan.target)
        require(folder is not None, f"plan: no drafter ships for target {self.plan.target!r}; name its folder")
        return str(folder)
