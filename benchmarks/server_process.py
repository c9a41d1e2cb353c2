"""`dscale serve` as a process of its own, for benchmarks: started on a free port, watched, ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 300.0


class Server:
    """A running `dscale serve MODEL`. rows: its log so far; other: lines of stderr that are no JSON."""

    def __init__(self, model: str, arguments: Sequence[object] = (), **environment: str) -> None:
        command = [sys.executable, "-m", "dscale", "serve", model, "--port", "0", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.rows: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._serving.wait(START_SECONDS)
        found = [row for row in self.rows if row.get("event") == "serving"]
        if not found:
            self.close()
            sys.exit(f"dscale serve did not start: {self.rows[-1:]} {self.other[-5:]}")
        self.about = found[0]
        self.url: str = found[0]["url"]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.rows.append(json.loads(line))
            except ValueError:
                self.other.append(line.rstrip())
                continue
            if self.rows[-1].get("event") == "serving":
                self._serving.set()
        self._serving.set()

    @property
    def engine_pid(self) -> int:
        """Process id of the engine, the only child."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def memory(self) -> tuple[float, float]:
        """Resident MiB of the HTTP process and of the engine's."""
        return resident(self.process.pid), resident(self.engine_pid)

    def metrics(self) -> dict[str, float]:
        """Every series of /metrics; labels other than the model's stay in the name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return parsed(response.read().decode())

    def idle_metrics(self, seconds: float = 60.0) -> dict[str, float]:
        """/metrics once nothing runs or waits any more, or what they are after so long."""
        deadline = time.monotonic() + seconds
        while True:
            now = self.metrics()
            busy = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                return now
            time.sleep(0.2)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 120.0) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.ended(seconds)

    def ended(self, seconds: float = 120.0) -> int:
        """The exit code, once it has ended."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def close(self) -> None:
        """End it if it still runs; its engine follows."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def resident(pid: int) -> float:
    """Resident memory of a process in MiB; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found.group(1)) / 1024 if found else 0.0


def parsed(text: str) -> dict[str, float]:
    """Series of Prometheus' text format by name."""
    series = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            series[re.sub(r'model_name="[^"]*",?|\{model_name="[^"]*"\}', "", name).replace("{}", "")] = float(value)
    return series
