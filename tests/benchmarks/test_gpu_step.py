"""The step benchmark in miniature on a CPU, and its roofline by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.fp8 import fp8_drafter, fp8_head
from dscale.models.shapes import SHAPES, drafter_shape

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    import gpu_step

    return gpu_step


MINIATURE = [
    "--model", "random:tiny", "--device", "cpu", "--dtype", "float32", "--concurrency", "3", "--steps", "12",
    "--burst", "6", "--warm", "2", "--profile", "3", "--context", "50",
]  # fmt: skip


def test_miniature(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    record = bench.main([*MINIATURE, "--out", str(out)])
    assert record["skipped"] == []
    assert out.is_file()
    full, dvl, off = record["rows"]
    assert (full["rows"], dvl["rows"], off["rows"]) == (48, 24, 3)
    assert set(full["phases"]) == {"draft", "verify"}
    assert set(off["phases"]) == {"verify"}
    for row in record["rows"]:
        assert row["note"] == "simulated acceptance"
        assert row["steps"] >= 12
        assert row["times_floor"] == pytest.approx(row["interval_ms"] / row["floor_ms"])
        assert row["whole_floor_ms"] <= row["floor_ms"] * (1 + 1e-9)
        assert row["groups_ms"]
    assert 52 < full["context"] < 50 + 16 * 8
    assert "simulated acceptance" in capsys.readouterr().out


def test_gaps_between_kernels(bench: ModuleType) -> None:
    """Kernels of two streams may overlap, and one may lie within another."""
    assert bench.gap_share([(0, 4), (2, 5), (8, 9), (8, 10), (3, 4)]) == pytest.approx(0.3)
    assert bench.gap_share([(5, 6)]) == 0


def test_floor_of_qwen3_8b_by_hand(bench: ModuleType) -> None:
    """32 requests, 1,000 tokens, 8 rows each: weights 2 · 6.95e9 + head 1.24e9 bytes, keys and values 147,456 bytes a
    token; FLOPs 2 · 256 · 7.57e9 and attention."""
    config = SHAPES["qwen3-8b"]
    with torch.device("meta"):
        target, drafter = Target(config).bfloat16(), Drafter(drafter_shape(config)).bfloat16()
        drafter.prepare()
    cache = torch.empty(0, dtype=torch.bfloat16)
    models = SimpleNamespace(target=target, drafter=drafter, reader=None, target_cache=cache, draft_cache=cache)
    llm = SimpleNamespace(engine=SimpleNamespace(worker=SimpleNamespace(models=models)))
    found = bench.phases(llm, 32, 16, 256, 1000)
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    head = 151936 * 4096
    assert found["verify"].bytes == 2 * (36 * layer + head) + 147456 * (32 * 1000 + 256)
    attention = 4 * 256 * 1008 * 36 * 32 * 128
    assert found["verify"].flops == pytest.approx(2 * 256 * (36 * layer + head) + attention)
    projection = 5 * 4096 * 4096 + 5 * 2 * 1024 * 4096
    caches = 5 * 2 * 1024 * 2 * (32 * 1000 + 512 + 256)
    assert found["draft"].bytes == 2 * (5 * layer + head + projection) + caches
    assert "draft" not in bench.phases(llm, 32, 1, 32, 1000)
    models.draft_cache = cache.to(torch.float8_e4m3fn)
    assert bench.phases(llm, 32, 16, 256, 1000)["draft"].bytes == found["draft"].bytes - caches / 2
    models.draft_cache = cache
    with torch.device("meta"):
        models.drafter, models.reader = fp8_drafter(drafter), fp8_head(target)
    rounded = bench.phases(llm, 32, 16, 256, 1000)
    assert rounded["verify"] == found["verify"]
    assert rounded["draft"].bytes == pytest.approx(5 * layer + head + projection + caches, rel=2e-3)  # and scales
    spared = 2 * (512 * 5 * layer + 480 * head + 256 * projection) / 2  # in eight bits twice as many a second
    assert found["draft"].flops - rounded["draft"].flops == pytest.approx(spared, rel=2e-3)
    machine = bench.Machine(bandwidth=4e12, rate=7e14)
    assert bench.Work(8e9, 7e11).floor(machine) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_gemm>", "matrix products"),
        ("decode_kernel", "attention"),
        ("_norm_row", "norm"),
        ("_exact", "allocate"),
        ("_pack", "pack"),
        ("_predict", "predict"),
        ("_drawn", "simulation"),
        ("_tile_groups", "vocabulary"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernel_groups(bench: ModuleType, kernel: str, group: str) -> None:
    assert bench.group_of(kernel) == group
