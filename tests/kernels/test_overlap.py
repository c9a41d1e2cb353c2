"""Where kernels overlap, and what is compiled for Hopper then; the chip's own test is tests/gpu/test_overlap.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed")

import triton

from dscale.kernels.triton import activation, fp8, norm, overlap, rotary

CUDA = torch.device("cuda", 0)
ON = {"OVERLAP": True, "launch_pdl": True}
OFF = {"OVERLAP": False}  # an option that older chips do not know is not passed
STEPS = re.compile(r"\b(griddepcontrol\.\w+|prefetch\.global|ld\.global|st\.global|atom|red\.global|bra|ret)\b")
WAIT, LET = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def compiled_elsewhere(OVERLAP):
    """Stands for a function that is compiled, not interpreted."""


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A Hopper GPU, kernels compiled for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(overlap, "wait_for_earlier", triton.JITFunction(compiled_elsewhere))
    monkeypatch.delenv("DSCALE_OVERLAP", raising=False)
    overlap.launch.cache_clear()
    yield monkeypatch
    overlap.launch.cache_clear()


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), OFF), ((8, 9), OFF), ((9, 0), ON), ((10, 0), ON), ((12, 1), ON)]
)
def test_from_hopper_on(chip: pytest.MonkeyPatch, capability: tuple[int, int], expected: dict[str, bool]) -> None:
    chip.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert overlap.launch(CUDA) == expected


def test_off_on_a_cpu(chip: pytest.MonkeyPatch) -> None:
    assert overlap.launch(torch.device("cpu")) == OFF


def test_off_in_the_interpreter(chip: pytest.MonkeyPatch) -> None:
    chip.setattr(overlap, "wait_for_earlier", compiled_elsewhere)
    assert overlap.launch(CUDA) == OFF


@pytest.mark.parametrize(("value", "expected"), [("0", OFF), ("1", ON)])
def test_the_environment_turns_it_off(chip: pytest.MonkeyPatch, value: str, expected: dict[str, bool]) -> None:
    chip.setenv("DSCALE_OVERLAP", value)
    assert overlap.launch(CUDA) == expected


def test_off_on_chips_of_others(chip: pytest.MonkeyPatch) -> None:
    chip.setattr(torch.version, "hip", "7.0")
    assert overlap.launch(CUDA) == OFF


def test_off_where_triton_has_no_such_instructions(chip: pytest.MonkeyPatch) -> None:
    chip.setattr(overlap, "gdc_wait", None)
    assert overlap.launch(CUDA) == OFF


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Name and PTX (on, off) of every kernel, by a process whose triton compiles."""
    program = Path(__file__).with_name("overlap_ptx.py")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    made = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    if found is None:
        pytest.skip("this triton does not compile for CUDA")
    return found


def steps(ptx: str) -> list[str]:
    """What it does with memory of the device, other kernels, and its own path, in order."""
    return STEPS.findall(ptx)


def test_nothing_but_weights_of_norms_is_fetched_before_the_wait(kernels: list[dict[str, str]]) -> None:
    for kernel in kernels:
        weights = 2 if "'NORM': True" in kernel["name"] else int("_norm_row" in kernel["name"])
        made = steps(kernel["on"])
        assert made[: weights + 2] == ["prefetch.global"] * weights + [WAIT, LET], kernel["name"]
        assert {"ld.global", "st.global"} <= set(made[weights + 2 :]), kernel["name"]


def test_off_is_the_kernel_without_it(kernels: list[dict[str, str]]) -> None:
    for kernel in kernels:
        on, off = steps(kernel["on"]), steps(kernel["off"])
        assert off == [step for step in on if step not in (WAIT, LET, "prefetch.global")], kernel["name"]
        assert on != off, kernel["name"]


def test_every_kernel_of_a_layer_overlaps(kernels: list[dict[str, str]]) -> None:
    """What is launched with a grid in these files, not what those call."""
    seen = {kernel["name"].split()[0] for kernel in kernels}
    written = {
        name
        for module in (activation, fp8, norm, rotary)
        for name in re.findall(r"(\w+)\[", Path(str(module.__file__)).read_text())
        if name in vars(module) and hasattr(vars(module)[name], "arg_names")
    }
    assert written == seen
