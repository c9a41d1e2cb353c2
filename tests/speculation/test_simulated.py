"""Simulated acceptance: its distribution along a walk, its scores, its independence, its files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dscale import LLM, SamplingParams
from dscale.config import InputError
from dscale.engine.recorder import Recorder
from dscale.speculation.acceptance import accept
from dscale.speculation.budget import allocate_exact
from dscale.speculation.ease import ANCHORS, REGIONS, Ease, fit, lengths, rank_correlation, walk
from dscale.speculation.packing import pack
from dscale.speculation.policies import Draft
from dscale.speculation.simulated import (
    SIMULATED,
    DrawnSimulation,
    SimulatedAcceptance,
    SimulatedDraft,
    Simulation,
    export_trace,
)

DEFAULT = SimulatedAcceptance()


@cache
def simulation() -> Simulation:
    return DEFAULT.on("cpu")


def steps(slots: int | None, requests: int = 512, count: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Full lengths L, rows k [S, N] and scores q [S, N, 16] met by requests that verify whole blocks, or share `slots`
    rows a request."""
    seed, position = torch.arange(requests), torch.full((requests,), 512)
    live, met = torch.ones(requests, dtype=torch.bool), []
    for _ in range(count):
        length, q = simulation().at(seed, position)
        k = torch.full_like(length, 16) if slots is None else allocate_exact(q, slots * requests, live)
        met.append((length, k, q))
        position = position + torch.minimum(length, k - 1) + 1
    return tuple(torch.stack(column) for column in zip(*met, strict=True))  # type: ignore[return-value]


def calibration_error(length: Tensor, q: Tensor) -> float:
    """Expected calibration error of all scores q_1 … q_15, 20 bins of equal width."""
    chance = q[..., 1:].reshape(-1).numpy()
    passed = (torch.arange(1, 16) <= length[..., None]).reshape(-1).numpy()
    place = np.minimum((chance * 20).astype(int), 19)
    total = np.bincount(place, minlength=20)
    gap = np.abs(np.bincount(place, chance, 20) - np.bincount(place, passed, 20))
    return float(gap.sum() / total.sum())


def test_walk_has_the_stated_progress_support_correlation_and_calibration() -> None:
    length, _, q = steps(None)
    assert float((length + 1).float().mean()) == pytest.approx(6.09, abs=0.05)
    assert sorted(set((length + 1).flatten().tolist())) == list(range(1, 17))
    predicted = q[..., 1:].sum(-1)
    assert spearmanr(predicted.flatten(), length.flatten()).statistic == pytest.approx(0.74, abs=0.03)
    assert calibration_error(length, q) < 0.02
    assert bool((q[..., 0] == 1).all())
    assert bool((q.diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("slots", [4, 8])
def test_scores_stay_calibrated_where_a_policy_cuts_blocks(slots: int) -> None:
    length, k, q = steps(slots, count=200)
    assert calibration_error(length, q) < 0.02
    kept = float(torch.minimum(length, k - 1).sum() / length.sum())
    fixed = float(length.clamp(max=slots - 1).sum() / length.sum())
    assert kept > fixed + 0.12  # there is something to predict, and sharing uses it


def test_ease_lasts_along_the_text() -> None:
    length, _, q = steps(None, count=60)
    predicted = q[..., 1:].sum(-1)
    together = np.corrcoef(predicted[:-1].flatten(), predicted[1:].flatten())[0, 1]
    assert 0.1 < together < 0.5
    assert abs(np.corrcoef(predicted[:, :-1].flatten(), predicted[:, 1:].flatten())[0, 1]) < 0.05  # not among requests
    assert len(set(length[0].tolist())) > 5


def test_chain_agrees_with_a_walk_played_out() -> None:
    """The exact sums of ease.py against a simulation of the same table with numpy's own random numbers."""
    survival = Ease(1.0, 2.0, 0.6).survival()
    rng = np.random.default_rng(0)
    walkers = 4000
    place, region = np.zeros(walkers, int), rng.integers(REGIONS, size=walkers)
    tokens, seen = 0, np.zeros(REGIONS)
    for step in range(260):
        row = region * ANCHORS + rng.integers(ANCHORS, size=walkers)
        moved = 1 + (rng.random(walkers)[:, None] < survival[row, 1:]).sum(1)
        if step >= 60:
            tokens += moved.sum()
            seen += np.bincount(region, minlength=REGIONS)
        place += moved
        region = np.where(place >= 32, rng.integers(REGIONS, size=walkers), region)
        place %= 32
    exact = walk(survival)
    assert tokens / (200 * walkers) == pytest.approx(exact.progress, rel=0.005)
    assert seen / seen.sum() == pytest.approx(exact.anchors, rel=0.03)
    assert lengths(survival).sum(1) == pytest.approx(np.ones(len(survival)))


def test_rank_correlation_by_hand() -> None:
    """Two equally likely kinds of anchors: one passes 0 drafts, the other 15, always; then it is certain."""
    rows = np.zeros((REGIONS * ANCHORS, 16))
    rows[:, 0] = 1
    rows[: len(rows) // 2] = 1
    rows[:, 1:] -= np.arange(len(rows))[:, None] * 1e-12  # no two rows alike
    assert rank_correlation(rows, np.full(REGIONS, 1 / REGIONS)) == pytest.approx(np.sqrt(0.75), abs=1e-3)


@pytest.mark.parametrize(("progress", "spearman"), [(3.0, 0.6), (6.09, 0.74), (9.0, 0.5)])
def test_fit_meets_its_targets(progress: float, spearman: float) -> None:
    survival = fit(progress, spearman).survival()
    found = walk(survival)
    assert found.progress == pytest.approx(progress, abs=2e-3)
    assert rank_correlation(survival, found.anchors) == pytest.approx(spearman, abs=1e-3)


@pytest.mark.parametrize(("progress", "spearman"), [(1.0, 0.7), (16.0, 0.7), (6.0, 1.0), (15.9, 0.999)])
def test_what_cannot_be_is_refused(progress: float, spearman: float) -> None:
    with pytest.raises(InputError, match="simulated acceptance"):
        SimulatedAcceptance(progress, spearman).on("cpu")


def test_a_lookup_depends_on_seed_and_position_alone() -> None:
    seed, position = torch.randint(0, 2**62, (40,)), torch.randint(0, 40000, (40,))
    length, q = simulation().at(seed, position)
    order = torch.randperm(40)[:7]
    some, some_q = simulation().at(seed[order], position[order])
    assert some.tolist() == length[order].tolist()
    assert torch.equal(some_q, q[order])
    other = SimulatedAcceptance(seed=1).on("cpu").at(seed, position)[0]
    assert (other != length).any()
    # A golden row: what any machine and version must give.
    assert simulation().at(torch.zeros(12).long(), torch.arange(512, 524))[0].tolist() == GOLDEN


GOLDEN = [1, 1, 0, 0, 6, 0, 2, 6, 0, 0, 0, 0]


def test_tokens_make_just_the_simulated_drafts_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    lanes, drafts, vocab = 50, 15, 7
    k = torch.randint(1, 17, (lanes,), generator=generator)
    length = torch.randint(0, 16, (lanes,), generator=generator)
    packed = pack(k, int(k.sum()) + 5)
    tokens = torch.randint(0, vocab, (lanes, drafts), generator=generator)
    y = torch.randint(0, vocab, (int(k.sum()) + 5,), generator=generator)
    draft = SimulatedDraft(tokens, length=length)
    made = simulation().rewrite(y, draft, packed, vocab)
    outcome = accept(tokens, k, made, packed.starts)
    assert outcome.count.tolist() == torch.minimum(length, k - 1).tolist()
    for lane in range(lanes):
        count = int(outcome.count[lane])
        emitted = outcome.tokens[lane, : count + 1].tolist()
        assert emitted[:count] == tokens[lane, :count].tolist()
        cut_short = int(length[lane]) > count  # the row after the last verified draft speaks of a draft that passes
        if count < drafts:
            assert (emitted[count] == int(tokens[lane, count])) == cut_short
    assert torch.equal(simulation().rewrite(y, Draft(tokens), packed, vocab), y)
    assert bool(((made >= 0) & (made < vocab)).all())


def test_narrow_blocks_and_policies_without_scores() -> None:
    seed, position = torch.arange(6), torch.arange(6) * 9
    plain = Draft(torch.zeros(6, 4, dtype=torch.int64))
    told = simulation().believe(plain, seed, position)
    assert told.survival is None
    scored = simulation().believe(Draft(plain.tokens, torch.ones(6, 5)), seed, position)
    assert torch.equal(scored.survival, simulation().at(seed, position)[1][:, :5])
    empty = Draft.empty(6, torch.device("cpu"))
    assert simulation().believe(empty, seed, position) is empty


def test_a_step_reads_nothing_back() -> None:
    table = simulation()
    assert isinstance(table, DrawnSimulation)
    with FakeTensorMode(allow_non_fake_inputs=True):
        seed, tokens = torch.ones(4, dtype=torch.int64), torch.ones(4, 15, dtype=torch.int64)
        told = table.believe(Draft(tokens, torch.ones(4, 16)), seed, seed)
        k = torch.full((4,), 8)
        made = table.rewrite(torch.ones(32, dtype=torch.int64), told, pack(k, 32), 99)
    assert made.shape == (32,)


def test_exported_trace_replays(tmp_path: Path) -> None:
    file, text = tmp_path / "trace.safetensors", tmp_path / "trace.json"
    export_trace(DEFAULT, file, requests=5, positions=64)
    export_trace(DEFAULT, text, requests=5, positions=64)
    replayed = SimulatedAcceptance.of(str(file)).on("cpu")
    seed, position = torch.arange(5).repeat(64), torch.arange(64).repeat_interleave(5)
    length, q = simulation().at(seed, position)
    again, again_q = replayed.at(seed, position)
    assert again.tolist() == length.tolist()
    assert torch.allclose(again_q, q, atol=1e-3)
    assert replayed.at(seed + 10, position + 64)[0].tolist() == length.tolist()
    record = json.loads(text.read_text())
    assert record["schema"] == "dscale.acceptance/1"
    assert record["about"]["kind"] == SIMULATED
    for seed, row in enumerate(record["requests"]):
        assert row["seed"] == seed
        assert row["accepted"] == simulation().at(torch.full((64,), seed), torch.arange(64))[0].tolist()
        assert np.shape(row["survival"]) == (64, 16)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    for path, words in ((broken, "cannot be read"), (tmp_path / "none.safetensors", "cannot be read")):
        with pytest.raises(InputError, match=words):
            SimulatedAcceptance.of(str(path)).on("cpu")
    with pytest.raises(InputError, match="ends in"):
        export_trace(DEFAULT, tmp_path / "trace.csv", 1, 1)
    with pytest.raises(InputError, match="cannot write"):
        export_trace(DEFAULT, broken / "trace.json", 1, 1)


def engine(policy: str, **options: object) -> LLM:
    return LLM(
        "random:tiny", predictor="random", policy=policy, simulate=DEFAULT, dtype="float32", device="cpu", slots=6.0,
        max_model_len=512, **options,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["full", "fixed:5", "dvl", "confidence", "dspark"])
def test_an_engine_accepts_what_the_trace_says(policy: str) -> None:
    """Every step of every request, in any batch: min(L, k - 1) at its own position; text in step with the drafts."""
    params = [SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True, seed=index) for index in range(6)]
    prompts = [[index + 1] * (10 + 7 * index) for index in range(6)]
    outputs = engine(policy, max_requests=4).generate(prompt_token_ids=prompts, sampling_params=params)
    alone = engine(policy, max_requests=1).generate(prompt_token_ids=prompts[:2], sampling_params=params[:2])
    for index, output in enumerate(outputs):
        assert output.note == SIMULATED
        position = len(prompts[index]) - 1
        records = output.metrics.records
        for record in records[:-1]:
            length = int(simulation().at(torch.tensor([index]), torch.tensor([position]))[0])
            assert record.accepted == min(length, record.slots - 1)
            assert record.emitted == record.accepted + 1
            position += record.emitted
        assert sum(record.emitted for record in records) == 70
    if policy in ("full", "fixed:5"):  # steps do not depend on the batch where lengths do not
        for one, other in zip(alone, outputs, strict=False):
            assert [r.accepted for r in one.metrics.records] == [r.accepted for r in other.metrics.records]


def test_recording_made_up_acceptance_is_refused() -> None:
    with pytest.raises(InputError, match="teaches nothing"):
        engine("full", recorder=Recorder())
    plain = LLM("random:tiny", policy="full", device="cpu", dtype="float32", max_model_len=256)
    assert plain.note is None
