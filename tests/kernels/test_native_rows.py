"""CPU kernels that work row by row (linear, norms, SiLU gate, logits) against the plain torch versions."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from dscale.config import InputError
from dscale.kernels import native
from dscale.kernels.activation import silu_mul_torch
from dscale.kernels.linear import linear_torch
from dscale.kernels.norm import rms_norm_torch
from dscale.layers.linear import Linear

needs_native = pytest.mark.skipif(not native.status().startswith("loaded"), reason=native.status())
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative 1e-5 in float32; one rounding step of 8 bits in bfloat16."""
    scale = float(want.abs().max())
    bound = {"rtol": 1e-5, "atol": 2e-6 * scale} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2e-3 * scale}
    torch.testing.assert_close(got.float(), want.float(), **bound)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "depth"), [(96, 64), (33, 48), (1, 2), (7, 5), (200, 577), (64, 1)])
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 50, 300])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_matches_torch(dtype: torch.dtype, outs: int, depth: int, rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(outs, depth).to(dtype), torch.randn(rows, depth).to(dtype)
    bias = torch.randn(outs).to(dtype) if biased else None
    packed = native.pack(weight)
    assert packed is not None
    got = native.linear(x, packed, bias)
    want = linear_torch(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == dtype
    close(got, want, dtype)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows_do_not_depend_on_their_number(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = native.pack(torch.randn(100, 1536).to(dtype))
    assert packed is not None
    x = torch.randn(260, 1536).to(dtype)
    together = native.linear(x, packed, None)
    for rows in (1, 2, 5, 12, 13, 16, 31, 64, 129):
        assert torch.equal(native.linear(x[-rows:], packed, None), together[-rows:]), rows


@needs_native
@pytest.mark.parametrize("threads", [2, 5])
def test_many_short_loops_on_more_threads_than_cores(threads: int) -> None:
    """Every panel is computed once, whichever thread takes it and however late it wakes."""
    torch.manual_seed(1)
    packed = native.pack(torch.randn(400, 256))
    assert packed is not None
    x = torch.randn(7, 256)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = native.linear(x, packed, None)
        torch.set_num_threads(threads)
        assert all(torch.equal(native.linear(x, packed, None), want) for _ in range(300))
    finally:
        torch.set_num_threads(before)


@needs_native
def test_linear_refuses_another_width_or_dtype() -> None:
    packed = native.pack(torch.randn(8, 16))
    assert packed is not None
    with pytest.raises(InputError, match=r"15 features of torch\.float32"):
        native.linear(torch.randn(2, 15), packed, None)
    with pytest.raises(InputError, match="bfloat16"):
        native.linear(torch.randn(2, 16).bfloat16(), packed, None)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 64, 19, 3])
@pytest.mark.parametrize("rows", [1, 9, 120])
def test_norms_and_gate_match_torch(dtype: torch.dtype, size: int, rows: int) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(2, rows, size).to(dtype) * 3
    weight = torch.randn(size).to(dtype)
    close(native.rms_norm(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5), dtype)
    close(native.rms_norm(x, weight.float() + 0.001, 1e-5), rms_norm_torch(x, weight.float() + 0.001, 1e-5), dtype)
    normed, total = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, rms_norm_torch(x + residual, weight, 1e-5), dtype)
    gate_up = torch.randn(rows, 2 * size).to(dtype) * 4
    close(native.silu_mul(gate_up), silu_mul_torch(gate_up.double()), dtype)
    assert torch.equal(native.silu_mul(gate_up[-1:]), native.silu_mul(gate_up)[-1:])
    assert torch.equal(native.rms_norm(x[-1:], weight, 1e-5), native.rms_norm(x, weight, 1e-5)[-1:])


@needs_native
def test_slices_of_wider_rows_are_taken() -> None:
    x = torch.randn(5, 40)[:, 8:24]
    close(native.rms_norm(x, torch.ones(16), 1e-6), rms_norm_torch(x, torch.ones(16), 1e-6), torch.float32)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 5003])
def test_top_logits_match_torch(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    logits = (torch.randn(6, size) * 5).to(dtype)
    values, ids, log_sum, entropy = native.top_logits(logits)
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :16])
    assert torch.equal(ids, order.indices[:, :16])
    wide = logits.double()
    torch.testing.assert_close(log_sum.double(), wide.logsumexp(-1), rtol=1e-5, atol=1e-5)
    plain = torch.distributions.Categorical(logits=wide).entropy()
    torch.testing.assert_close(entropy.double(), plain, rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 70, 3001])
def test_argmax_takes_the_first_of_equals(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randint(-9, 9, (20, size)).to(dtype)
    want = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(native.argmax(logits), want)


def test_not_usable_with_gradients_or_other_types() -> None:
    assert not native.usable(torch.zeros(2, dtype=torch.float64))
    with torch.enable_grad():
        assert not native.usable(torch.zeros(2))
        assert native.pack(torch.zeros(2, 2)) is None or native.status().startswith("loaded")


def in_fresh_process(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "DSCALE_CACHE": str(folder), **environment}
    command = [sys.executable, "-c", "import torch; torch.set_grad_enabled(False)\n" + code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


SHOW = "from dscale.kernels import native; x = torch.ones(2, 4); print(native.usable(x), native.status())"


def test_switched_off_by_the_environment(tmp_path: Path) -> None:
    run = in_fresh_process(SHOW, tmp_path, DSCALE_NATIVE="0")
    assert run.stdout.strip() == "False not loaded: DSCALE_NATIVE=0"
    assert run.stderr == ""


def test_failing_compiler_gives_one_warning_and_torch(tmp_path: Path) -> None:
    code = SHOW + "\nfrom dscale.kernels.norm import rms_norm; print(rms_norm(x, x[0], 0.0).tolist())"
    run = in_fresh_process(code, tmp_path, CXX="false")
    assert run.stdout.splitlines()[0].startswith("False not loaded: false")
    assert run.stdout.splitlines()[1] == str([[1.0] * 4] * 2)
    assert run.stderr.count("CPU kernels run in torch") == 1
    assert "Traceback" not in run.stderr


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    run = in_fresh_process(SHOW, tmp_path, CXX="no-such-compiler")
    assert "no C++ compiler found (no-such-compiler)" in run.stdout


@needs_native
def test_one_thread_pool_for_torch_and_the_kernels() -> None:
    """The kernels' threads are those of the runtime that torch loaded: no second OpenMP library is mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    native.rms_norm(torch.ones(4, 8), torch.ones(8), 1e-6)
    functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    names = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if "omp" in line and ".so" in line}
    runtimes = [name for name in names if name.startswith(("libgomp", "libomp", "libiomp"))]
    assert len(runtimes) <= 1


@needs_native
def test_a_copied_layer_is_not_packed() -> None:
    """Its weight may be converted or trained; the packed copy of the original would then be stale."""
    layer = Linear(6, 4)
    layer.weight.normal_()
    layer.pack()
    assert layer.packed is not None
    copied = copy.deepcopy(layer).to(torch.bfloat16)
    assert copied.packed is None
    assert copied(torch.ones(1, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
