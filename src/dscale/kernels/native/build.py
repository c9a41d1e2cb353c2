"""Compile the C++ sources beside this file with the system's compiler, once, into the user's cache; load the result.

The library starts its threads through the OpenMP runtime that torch has already loaded, so there is one thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dscale.config import cache_folder

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")
TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
ARCHITECTURES = ("x86_64", "amd64")
TIMEOUT_SECONDS = 300


class NotBuilt(Exception):
    """Why there is no library, in one line."""


def load() -> tuple[ctypes.CDLL, str]:
    """The library, compiled if the cache lacks it, and one line that describes it. Raises NotBuilt."""
    wish = os.environ.get("DSCALE_NATIVE", "")
    if wish == "0":
        raise NotBuilt("DSCALE_NATIVE=0")
    if platform.machine().lower() not in ARCHITECTURES and wish != "1":
        raise NotBuilt(f"not tuned for {platform.machine()} (DSCALE_NATIVE=1 compiles them all the same)")
    compiler = _compiler()
    try:
        path = _compiled(compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotBuilt(f"{' '.join(compiler)}: {error}") from error
    runtime = _openmp_runtime()
    if runtime is not None:
        library.dscale_set_launch.argtypes = [ctypes.c_void_p]
        library.dscale_set_launch(runtime[0])
    return library, f"loaded {path}, threads by {runtime[1] if runtime else 'none: one thread'}"


def _compiler() -> list[str]:
    """$CXX, or the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    candidates = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    raise NotBuilt(f"no C++ compiler found ({', '.join(command[0] for command in candidates if command)})")


def _compiled(compiler: list[str]) -> Path:
    path = cache_folder() / f"kernels-{_key(compiler)}.so"
    if path.exists():
        return path
    logging.getLogger("dscale").info("compiling the CPU kernels, once")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        failures = [_compile(compiler, tuning, Path(folder), path) for tuning in TUNINGS if not path.exists()]
    if path.exists():
        return path
    raise NotBuilt(f"{' '.join(compiler)} failed: {failures[0]}")


def _compile(compiler: list[str], tuning: Sequence[str], folder: Path, path: Path) -> str:
    """Compile all sources at once and link them to path; the first error, or nothing."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    commands = [
        [*compiler, *FLAGS, *tuning, "-c", str(source), "-o", made]
        for source, made in zip(sources, objects, strict=True)
    ]
    draft = folder / path.name
    link = [*compiler, *FLAGS, *tuning, "-shared", *objects, "-o", str(draft)]
    with ThreadPoolExecutor() as pool:
        failures = [failure for failure in pool.map(_run, commands) if failure]
    failure = failures[0] if failures else _run(link)
    if not failure:
        os.replace(draft, path)  # whole or not at all, whichever process comes first
    return failure


def _run(command: list[str]) -> str:
    """The first error of a command, or nothing."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    return "" if run.returncode == 0 else _first_error(run.stderr)


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _key(compiler: list[str]) -> str:
    """Changes with the sources, the flags, the compiler and the processor."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256("\0".join([*compiler, version, *FLAGS, platform.machine(), _processor()]).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "".join(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE)[:2])


def _openmp_runtime() -> tuple[int, str] | None:
    """Address of GOMP_parallel in the runtime torch has loaded, and that runtime's file name."""
    for name in [*_loaded_runtimes(), None]:
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        address = ctypes.cast(function, ctypes.c_void_p).value
        if address is not None:
            return address, Path(name).name if name else "the process"
    return None


def _loaded_runtimes() -> list[str]:
    import torch  # loads its runtime

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        folder = Path(torch.__file__).parent / "lib"
        return [str(path) for path in sorted(folder.glob("lib*omp*")) if sys.platform == "darwin"]
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    found = [name for name in files if re.match(r"lib[gi]?omp\d*[-.]", Path(name).name)]
    beside_torch = str(Path(torch.__file__).parent.parent)
    return sorted(found, key=lambda name: (not name.startswith(beside_torch), name))
