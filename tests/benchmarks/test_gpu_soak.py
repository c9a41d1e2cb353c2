"""The soak in miniature on a CPU, and that it notices what it is there to notice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dscale.engine.engine import Engine
from dscale.engine.pages import PagePool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
MINIATURE = [
    "--model", "random:tiny", "--device", "cpu", "--dtype", "float32", "--lanes", "6", "--prompt-tokens", "60",
    "--output-tokens", "40", "--arrivals", "0.5", "--aborts", "0.05", "--recheck", "12",
]  # fmt: skip


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    import gpu_soak

    return gpu_soak


def test_two_hundred_steps(soak: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    record = soak.main([*MINIATURE, "--steps", "200", "--out", str(out)])
    assert json.loads(out.read_text()) == record
    assert record["problems"] == []
    assert record["complete"]
    assert record["steps"] >= 200
    counts = record["counts"]
    assert counts["added"] == counts["finished"] + counts["aborted"]
    assert min(counts["finished"], counts["aborted"], record["preemptions"], record["prefix_hits"]) > 0
    assert [turn["policy"] for turn in record["turns"]] == soak.POLICIES.split(",") * soak.TURNS
    assert record["recheck"]["texts"] == 12
    assert record["recheck"]["must_be_equal"]


def test_a_lost_page_is_found(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda pool, pages: release(pool, list(pages)[:-1]))
    monkeypatch.setattr(soak, "STUCK", 50)
    record = soak.main([*MINIATURE, "--steps", "30"])
    assert any("pages: requests hold" in one for one in record["problems"])
    assert any("exist" in one for one in record["problems"])
    assert any("RuntimeError: stuck" in one for one in record["problems"])


def test_a_wrong_token_is_found(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Engine._append

    def forged(engine: Engine, request, tokens):
        changed = request.id.startswith("soak") and len(tokens) == 1 and tokens[0] not in request.end_ids
        return append(engine, request, [5] if changed else tokens)

    monkeypatch.setattr(Engine, "_append", forged)
    record = soak.main([*MINIATURE, "--steps", "60"])
    assert any("texts differ from those of off" in one for one in record["problems"])


def test_growth_is_found(soak: ModuleType) -> None:
    def turns(*allocated: int, rss: int = 0) -> list[dict]:
        return [{"policy": "dvl", "allocated": one << 20, "rss": rss * n} for n, one in enumerate(allocated)]

    assert soak.memory_problems(turns(100, 180, 181)) == []
    assert "dvl: 20.0 MiB more" in soak.memory_problems(turns(100, 180, 200))[0]
    assert "resident memory grew by 400 MiB" in soak.memory_problems(turns(1, 1, 1, rss=400 << 20))[0]


def test_time_is_kept(soak: ModuleType) -> None:
    record = soak.main([*MINIATURE, "--steps", "100000", "--seconds", "1"])
    assert not record["complete"]
    assert record["problems"] == []
