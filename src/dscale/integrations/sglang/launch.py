"""`dscale serve --engine sglang`: the command line of SGLang's server, its start, and the check that DSCALE serves.

The server is a process of its own, with its output. Signals go on to it; its exit code is ours. When it answers, its
/server_info must name the plug-in, version and policy, or it is ended: no server comes up silently as something else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import FrameType
from typing import Any

from dscale.config import InputError, require
from dscale.integrations.sglang.compat import check_version
from dscale.integrations.sglang.plugin import ALGORITHM
from dscale.integrations.sglang.settings import Settings

PASSED = {
    "host": "--host",
    "port": "--port",
    "dtype": "--dtype",
    "max_requests": "--max-running-requests",
    "max_model_len": "--context-length",
    "max_queue": "--max-queued-requests",
    "memory_fraction": "--mem-fraction-static",
}
OURS = ("model", "drafter", "predictor", "policy", "slots", "served_model_name", "api_key", "prefix_caching")
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Launch:
    """command and the variables added to the environment; url answers once the server is up. checked: DSCALE is
    expected there."""

    command: list[str]
    variables: dict[str, str]
    url: str
    checked: bool
    api_key: str = field(default="", repr=False)


def plan(flags: Mapping[str, Any], tp: int, extra: Sequence[str]) -> Launch:
    """From flags of `dscale serve` that were given (None: not given); extra goes to SGLang as it is."""
    given = {name: value for name, value in flags.items() if value is not None}
    unknown = [name for name in given if name not in (*OURS, *PASSED)]
    flag = unknown[0].replace("_", "-") if unknown else ""
    require(not unknown, f"--{flag}: not known with --engine sglang; give SGLang's own flag with --engine-arg")
    require("model" in given, "MODEL: missing; give it as an argument")
    require(tp >= 1, f"--tp: {tp} must be at least 1")
    drafter = given.get("drafter")
    plain = given.get("policy") == "off"
    require(plain or drafter not in (None, "auto", "none"), "--drafter: missing; --engine sglang needs a folder or id")
    host, port = given.get("host", "127.0.0.1"), given.get("port", 8000)
    require(port != 0, "--port: 0 is not known with --engine sglang; give a port")
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", given["model"], "--tp-size", str(tp)]
    for name, theirs in PASSED.items():
        value = {"host": host, "port": port}.get(name, given.get(name))
        command += [] if value is None else [theirs, str(value)]
    if not plain:
        command += ["--speculative-algorithm", ALGORITHM, "--speculative-draft-model-path", str(drafter)]
    keys, names = given.get("api_key") or [], given.get("served_model_name") or []
    require(len(keys) <= 1 and len(names) <= 1, "--api-key, --served-model-name: SGLang takes one of each")
    command += ["--api-key", keys[0]] if keys else []
    command += ["--served-model-name", names[0]] if names else []
    command += ["--disable-radix-cache"] if given.get("prefix_caching") is False else []
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '') else host}:{port}"
    return Launch([*command, *extra], {} if plain else variables(given), url, not plain, keys[0] if keys else "")


def variables(given: Mapping[str, Any]) -> dict[str, str]:
    """DSCALE_* of the settings that flags change, checked together with those that the environment has already."""
    predictor = given.get("predictor")
    found = {"PREDICTOR": "" if predictor in (None, "auto", "none") else predictor}
    if "policy" in given:
        found["POLICY"] = given["policy"]
    elif found["PREDICTOR"]:
        found["POLICY"] = "dvl"
    if "slots" in given:
        whole = float(given["slots"]).is_integer()
        require(whole, f"--slots: {given['slots']} must be a whole number with --engine sglang")
        found["SLOTS"] = str(int(given["slots"]))
    made = {f"DSCALE_{name}": str(value) for name, value in found.items() if value}
    Settings.read({**os.environ, **made})
    return made


def check_installed() -> None:
    """InputError unless a supported SGLang is in this environment."""
    there = find_spec("sglang") is not None
    require(there, "--engine sglang: SGLang is not installed here: pip install 'dscale[sglang]'")
    check_version()


def run(launch: Launch, start_seconds: float = 1800.0, tell: Callable[[str], None] = print) -> int:
    """Start the server, check it, and stay until it ends: its exit code (1 where it was not what was asked for)."""
    process = subprocess.Popen(launch.command, env={**os.environ, **launch.variables})
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        problem = _await(launch, process, asked, start_seconds)
        if problem:
            tell(f"dscale: {problem}")
            process.terminate()
            process.wait()
            return 1
        while process.poll() is None:  # a wait in one piece would keep the handlers of other threads' signals waiting
            time.sleep(POLL_SECONDS)
        return 0 if asked else int(process.returncode)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await(launch: Launch, process: subprocess.Popen[bytes], asked: Sequence[int], seconds: float) -> str:
    """Until the server answers, ends or was told to end; what is wrong with it, or nothing."""
    until = time.monotonic() + seconds
    while process.poll() is None and not asked:
        state = _ask(launch)
        if state is not None:
            return _problem(launch, state)
        if time.monotonic() > until:
            return f"SGLang did not answer at {launch.url} within {seconds:.0f} s"
        time.sleep(POLL_SECONDS)
    return ""


def _ask(launch: Launch) -> dict[str, Any] | None:
    request = urllib.request.Request(f"{launch.url}/server_info")
    if launch.api_key:
        request.add_header("Authorization", f"Bearer {launch.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            record: dict[str, Any] = json.load(answer)
            return record
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise InputError(f"{launch.url}/server_info: refused ({error.code}); is --api-key the server's?") from None
        return None
    except (OSError, ValueError):
        return None


def _problem(launch: Launch, state: Mapping[str, Any]) -> str:
    """Every rank group must say that the plug-in serves it."""
    if not launch.checked:
        return ""
    inner = state.get("internal_states") or [{}]
    missing = [one for one in inner if not one.get("dscale")]
    named = state.get("speculative_algorithm") == ALGORITHM
    return "" if named and not missing else f"{launch.url} serves without DSCALE; it is ended"
