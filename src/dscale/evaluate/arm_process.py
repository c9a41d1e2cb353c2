"""The two kinds of process that serve an arm: a server in a process group of its own, and an engine of ours.

Both are `Served`: they warm up, run the manifest, and are closed. Their output goes to a log beside the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import httpx

from dscale.config import InputError, require
from dscale.evaluate.bench_record import RequestRow
from dscale.evaluate.counters import Scrape, scrape
from dscale.evaluate.load import Measured, Progress, Server, Watcher, closed_loop, open_loop
from dscale.evaluate.manifest import Manifest

STOP_SECONDS = 30.0  # from SIGTERM to SIGKILL
SETTLE_SECONDS = 5.0  # most that a server gets to bring its counters up to date
TOLD = ("policy", "width", "slots", "dtype", "device", "family", "max_requests")  # of /dscale/about, for the record
SNAPSHOT_SECONDS = 0.3  # ours refreshes them up to ten times a second


class ArmGone(Exception):
    """A server or process that should serve cannot be reached, or ended. The message is one line."""


class Served(Protocol):
    """An arm that is up."""

    def about(self) -> dict[str, Any]:
        """What it says of itself: policy, width, dtype, versions; as far as known."""

    def warm_up(self, concurrency: int) -> None:
        """Answer the manifest's warm-up requests."""

    def run(self, concurrency: int, rate: float | None, seed: int, watcher: Watcher) -> tuple[Measured, dict[str, Any]]:
        """Answer the manifest's requests; rows, and differences of counters. ArmGone when it ended meanwhile."""

    def alive(self) -> bool:
        """Whether it would answer another request."""

    def close(self) -> None:
        """Stop what was started for it."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A command in a session of its own, so that all its processes can be stopped together."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as file:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | env,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise InputError(f"{command[0]}: cannot be started ({error.strerror or error})") from None

    def wait_until_up(self, base_url: str, seconds: float) -> None:
        """Return once /health or /v1/models answers 200. ArmGone when the process ends or the time is over."""
        until = time.monotonic() + seconds
        with httpx.Client(base_url=base_url, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < until:
                code = self.process.poll()
                if code is not None:
                    raise ArmGone(f"the server ended with code {code} before it answered; its log: {self.log}")
                if _answers(client, "/health") or _answers(client, "/v1/models"):
                    return
                time.sleep(0.25)
        raise ArmGone(f"the server did not answer within {seconds:g} s; its log: {self.log}")

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL to what is left of it."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, which)  # its id is the group's: start_new_session


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.HTTPError:
        return False


class ServedByServer:
    """An OpenAI-compatible server, one that runs already or one that was started for this arm."""

    def __init__(self, server: Server, manifest: Manifest, process: ServerProcess | None = None) -> None:
        self.server, self.manifest, self.process = server, manifest, process

    def about(self) -> dict[str, Any]:
        """Engine and policy as its metrics show them, and its version where it tells one."""
        return asyncio.run(self._about())

    async def _about(self) -> dict[str, Any]:
        async with self.server.client() as client:
            seen = await scrape(client)
            made: dict[str, Any] = {"engine": seen.engine, "policy": seen.policy}
            with contextlib.suppress(httpx.HTTPError, ValueError):
                told = (await client.get("/dscale/about", timeout=10.0)) if seen.engine == "dscale" else None
                if told is not None and told.status_code == 200:
                    made |= {key: value for key, value in told.json().items() if key in TOLD}
            with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
                made["version"] = (await client.get("/version", timeout=10.0)).json().get("version")
        return {key: value for key, value in made.items() if value is not None}

    def warm_up(self, concurrency: int) -> None:
        """Answer the warm-up requests, not measured. ArmGone when the server cannot be reached."""
        if self.manifest.warmup:
            asked, temperature = self.manifest.warmup, self.manifest.temperature
            made = asyncio.run(closed_loop(self.server, asked, concurrency, temperature, Watcher()))
            failed = [row for row in made.rows if row.error is not None]
            if failed:
                raise ArmGone(f"{len(failed)} of {len(made.rows)} warm-up requests failed, first: {failed[0].error}")

    def run(self, concurrency: int, rate: float | None, seed: int, watcher: Watcher) -> tuple[Measured, dict[str, Any]]:
        """Rows, and differences of the server's counters."""
        return asyncio.run(self._run(concurrency, rate, seed, watcher))

    async def _run(
        self, concurrency: int, rate: float | None, seed: int, watcher: Watcher
    ) -> tuple[Measured, dict[str, Any]]:
        asked, temperature = self.manifest.requests, self.manifest.temperature
        before = await self._settled()
        if rate is None:
            measured = await closed_loop(self.server, asked, concurrency, temperature, watcher)
        else:
            measured = await open_loop(self.server, asked, rate, temperature, seed, watcher)
        after = await self._settled()
        return measured, after.since(before)

    async def _settled(self) -> Scrape:
        """The counters once nothing runs any more."""
        until = time.monotonic() + SETTLE_SECONDS
        async with self.server.client() as client:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            found = await scrape(client)
            while found.running and time.monotonic() < until:
                await asyncio.sleep(SNAPSHOT_SECONDS)
                found = await scrape(client)
        return found

    def alive(self) -> bool:
        """Whether it still answers."""
        if self.process is not None and self.process.process.poll() is not None:
            return False
        with httpx.Client(base_url=self.server.base_url, timeout=10.0, trust_env=False) as client:
            return _answers(client, "/health") or _answers(client, "/v1/models")

    def close(self) -> None:
        """Stop the process that was started for it."""
        if self.process is not None:
            self.process.stop()


def served_model(base_url: str, token: str | None = None) -> str:
    """The first model that a server lists. ArmGone when it cannot be reached or lists none."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=10.0, trust_env=False)
        if response.status_code != 200:
            raise ArmGone(f"{base_url}/v1/models answers HTTP {response.status_code}")
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ArmGone(f"{base_url}: no server answers there ({reason})") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ArmGone(f"{base_url}/v1/models lists no model") from None


class ServedByChild:
    """An engine in a process of its own (arm_child.py), spoken to in lines of JSON.

    It serves the concurrency that it was started for.
    """

    def __init__(self, engine: str, settings: dict[str, Any], manifest: Manifest, concurrency: int, log: Path,
                 env: dict[str, str] | None = None) -> None:  # fmt: skip
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dscale.evaluate.arm_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=file, text=True, env=os.environ | (env or {}), start_new_session=True,
            )  # fmt: skip
        try:
            self._say({"engine": engine, "settings": settings, "manifest": manifest.as_json(), "c": concurrency})
            self._about = self._hear(Watcher())["about"]
        except BaseException:
            self.close()
            raise

    def about(self) -> dict[str, Any]:
        """What the engine said of itself when it was ready."""
        return dict(self._about)

    def warm_up(self, concurrency: int) -> None:
        """Answer the warm-up requests, not measured."""
        self._say({"warm_up": True})
        self._hear(Watcher())

    def run(self, concurrency: int, rate: float | None, seed: int, watcher: Watcher) -> tuple[Measured, dict[str, Any]]:
        """Rows, and the engine's counters over them."""
        self._say({"run": {"rate": rate, "seed": seed}})
        found = self._hear(watcher)
        return Measured(tuple(RequestRow(**row) for row in found["rows"]), found["window_s"]), found["counters"]

    def _say(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is nothing to hear either, and that says why
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

    def _hear(self, watcher: Watcher) -> dict[str, Any]:
        """The next answer. Progress is told on the way."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            if "progress" in found:
                watcher.changed(Progress(**found["progress"]))
                continue
            require("bad_input" not in found, str(found.get("bad_input")))
            return found
        raise ArmGone(f"its process ended with code {self.process.wait()}; its log: {self.log}")

    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    def close(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
