"""The certificate: planted bugs are caught, clean engines pass, and the decision does what it states."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import dscale.speculation.acceptance as acceptance
from dscale.config import InputError
from dscale.engine.llm import LLM
from dscale.engine.request import StepRecord
from dscale.engine.worker import Worker
from dscale.evaluate.certificate import (
    FINAL,
    PASS_RATE,
    Evidence,
    Text,
    by_offset,
    decide,
    holm,
    resolution,
    upper_tail,
)
from dscale.evaluate.certificate_record import Certificate, CertificateRecord, read_certificates
from dscale.evaluate.certification import Certifier
from dscale.evaluate.continuations import Continuation, capture, sampling_of
from dscale.evaluate.scoring import teacher_force
from dscale.models.drafter_checkpoint import load_drafter
from dscale.models.loader import LoadedTarget
from dscale.speculation.state import Models
from tests.conftest import SMOLLM2_PROMPTS
from tests.engine.pairs import make_llm, tiny_drafter, tiny_target

LONG = 100
GREEDY, SEEDED = sampling_of(0.0, LONG, 0), sampling_of(0.8, LONG, 11)
PROMPTS = [[(i * i + j * (1 + i % 3)) % 5 for j in range(20 + i)] for i in range(16)]


@cache
def pair(vocabulary: int = 5) -> tuple[LoadedTarget, object]:
    target = tiny_target("llama", vocabulary)
    return target, tiny_drafter(target)


def engine(policy: str, vocabulary: int = 5) -> LLM:
    target, drafter = pair(vocabulary)
    return make_llm(target, policy, drafter if policy != "off" else None, max_requests=16, num_pages=180)


def certify(policy: str = "full", params=GREEDY, exact: bool = True) -> Certificate:
    return Certifier(engine(policy), engine("off"), PROMPTS, exact).certificate(policy, params)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["off", "full", "fixed:3", "confidence", "auto"])
def test_a_clean_engine_is_certified_exactly(policy: str, params) -> None:
    found = certify(policy, params)
    assert found.verdict.certified
    assert found.evidence["all"]["violations"] == found.evidence["own_violations"] == 0
    assert found.evidence["all"]["positions"] == 16 * LONG == found.scope.positions
    assert found.text == Text(16, 16, {})
    assert (found.scope.accepted == 0) == (policy == "off")


def too_many_at_three(drafts, k, y, starts, accept=acceptance.accept):
    """`accept`, but a block refused at its third draft keeps that draft."""
    out = accept(drafts, k, y, starts)
    count, tokens, anchor = out.count.clone(), out.tokens.clone(), out.next_anchor.clone()
    for lane in range(len(count)):
        if count[lane] == 2 and k[lane] > 3:
            count[lane], tokens[lane, 2], tokens[lane, 3] = 3, drafts[lane, 2], y[starts[lane] + 3]
            anchor[lane] = tokens[lane, 3]
    return acceptance.Accepted(count, torch.where(k > 0, count + 1, 0), tokens, anchor)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_one_token_too_many_at_offset_three_is_caught(monkeypatch: pytest.MonkeyPatch, params) -> None:
    monkeypatch.setattr(acceptance, "accept", too_many_at_three)
    found = certify("full", params)
    assert not found.verdict.certified
    rows = {row["offset"]: row for row in found.evidence["by_offset"]}
    wrong = rows[3]["violations"]
    assert wrong >= 3
    assert found.evidence["all"]["violations"] == wrong  # and nowhere else: every other token follows its prefix
    assert found.evidence["own_violations"] == wrong  # verification itself had refused them
    assert f"{wrong} of 1600 tokens are not the target's, {wrong} of them accepted drafts" in found.verdict.reasons
    assert found.text.equal < found.text.prompts


def test_one_token_too_many_is_caught_against_a_floor_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "accept", too_many_at_three)
    certifier = Certifier(engine("full"), engine("off"), PROMPTS * 3, False)  # each with three seeds
    found = certifier.certificate("full", SEEDED)
    assert not found.verdict.certified
    assert any("violations exceed the floor" in reason for reason in found.verdict.reasons)
    assert any(reason.startswith("offset 3: ") for reason in found.verdict.reasons)
    assert [row["offset"] for row in found.evidence["by_offset"] if row["stands_out"]] == [3]


@pytest.mark.parametrize("exact", [True, False])
def test_a_swapped_cache_page_is_caught(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """From the fourth step on two of sixteen requests read each other's first page."""
    launch, calls = Worker.launch, []

    def swapping(self, requests):
        calls.append(len(requests))
        if len(calls) == 4:
            first, second = requests[0].row, requests[1].row
            pages = self.state.page_table[[first, second], 0].clone()
            self.state.page_table[[second, first], 0] = pages
        return launch(self, requests)

    prompts = [[(7 * i * i + 5 * j * (1 + i % 3)) % 64 for j in range(36 + i)] for i in range(16)]
    certifier = Certifier(engine("full", 64), engine("off", 64), prompts, exact)
    certifier._plain_texts(GREEDY)  # the engine without speculation is in order
    monkeypatch.setattr(Worker, "launch", swapping)
    found = certifier.certificate("full", GREEDY)
    assert not found.verdict.certified
    assert set(found.text.first_difference) <= {0, 1}
    assert found.evidence["own_violations"] == found.evidence["all"]["violations"] > 5


def taps_off_by_one(models: Models) -> tuple[int, ...]:
    """The layers after those that the drafter reads."""
    return tuple(tap + 1 for tap in models.drafter.config.taps) if models.drafter is not None else ()


def test_taps_that_are_off_by_one_change_no_text_but_are_noticed(
    monkeypatch: pytest.MonkeyPatch, smollm2: LoadedTarget
) -> None:
    """The drafter then guesses worse, and everything wrong is refused: only acceptance tells."""
    assert smollm2.own_drafter is not None
    drafter = load_drafter(smollm2.own_drafter, smollm2.model, torch.float32, "cpu", None)
    ids = [smollm2.tokenizer.chat([{"role": "user", "content": one}]) for one in SMOLLM2_PROMPTS[:2]]
    options = {"dtype": "float32", "device": "cpu", "max_requests": 2, "max_model_len": 160}

    def made() -> Certificate:
        llm = LLM(smollm2, drafter=drafter, predictor=None, policy="full", **options)
        return Certifier(llm, LLM(smollm2, policy="off", **options), ids, True).certificate(
            "full", sampling_of(0, 40, 0)
        )

    clean = made()
    monkeypatch.setattr(Models, "taps", property(taps_off_by_one))
    off_by_one = made()
    for found in (clean, off_by_one):
        assert found.verdict.certified
        assert found.text.equal == 2
    assert clean.drafter.differing == 0
    assert clean.verdict.warnings == ()
    assert off_by_one.mean_accepted_length < clean.mean_accepted_length
    assert any("does not feed the drafter as it was trained" in line for line in off_by_one.verdict.warnings)


def test_acceptance_near_one_is_warned_of() -> None:
    found = decide(drawn(np.random.default_rng(0), 100, 0.0), True, None, 1.02)
    assert found.certified
    assert "hardly any draft is accepted (1.02 tokens a step)" in found.warnings[0]


def test_teacher_forcing_says_what_belongs_at_a_wrong_token() -> None:
    plain = engine("off")
    given = capture(plain, PROMPTS[:3], GREEDY)
    altered = list(given[1].tokens)
    altered[7] = (altered[7] + 1) % 5
    spoiled = [given[0], replace(given[1], tokens=tuple(altered), steps=None), given[2]]
    scores = teacher_force(plain, spoiled, together=2)
    assert not scores[0].wrong.any()
    assert not scores[2].wrong.any()
    assert np.flatnonzero(scores[1].wrong[:8]).tolist() == [7]
    assert scores[1].choice[7] == given[1].tokens[7]
    assert scores[1].margin[7] > 0
    assert (scores[1].margin[:7] == 0).all()
    assert plain.engine.scheduler.pool.held == 0
    again = teacher_force(plain, capture(plain, [list(PROMPTS[1]) + altered[:8]], sampling_of(0, 32, 0)))
    assert not again[0].wrong.any()


def test_blocks_need_steps() -> None:
    given = replace(capture(engine("off"), PROMPTS[:1], GREEDY)[0], steps=None)
    with pytest.raises(InputError, match="comes without its steps"):
        teacher_force(engine("full"), [given], blocks=True)


def test_offsets_follow_the_steps() -> None:
    steps = (StepRecord(3, 2, 8, 7), StepRecord(1, 0, 8, 7), StepRecord(2, 2, 8, 7))  # the last was cut at the end
    given = Continuation((1,), (5, 6, 7, 8, 9, 9), GREEDY, steps)
    assert given.offsets.tolist() == [1, 2, FINAL, FINAL, 1, 2]
    assert (replace(given, steps=None).offsets == FINAL).all()


def drawn(rng: np.random.Generator, count: int, rate: float, extra: dict[int, float] | None = None) -> Evidence:
    """Violations and floor of one rate, more violations at some offsets."""
    offset = np.minimum(rng.geometric(0.35, count) - 1, 15)
    violation, floor = rng.random((2, count)) < rate
    for where, more in (extra or {}).items():
        violation |= (offset == where) & (rng.random(count) < more)
    place = np.arange(count)
    return Evidence(violation, floor, None, offset, np.full(count, 0.1), place // 100, place % 100)


def test_clean_engines_pass_at_the_stated_rate() -> None:
    for rate in (0.002, 0.01, 0.03):
        rng = np.random.default_rng(1)
        passed = sum(decide(drawn(rng, 4000, rate), False).certified for _ in range(200))
        assert passed >= PASS_RATE * 200


def test_what_is_added_at_one_offset_or_everywhere_is_refused() -> None:
    rng = np.random.default_rng(2)
    one = [decide(drawn(rng, 4000, 0.01, {3: 0.15}), False) for _ in range(50)]
    assert sum(not found.certified for found in one) >= 49
    assert all(any("offset 3" in reason for reason in found.reasons) for found in one if not found.certified)
    spread = dict.fromkeys(range(16), 0.01)
    assert sum(not decide(drawn(rng, 20_000, 0.01, spread), False).certified for _ in range(50)) >= 49


def test_an_accepted_draft_beaten_by_nats_is_refused_alone() -> None:
    found = drawn(np.random.default_rng(3), 2000, 0.0)
    at = int(np.flatnonzero(found.offset == 2)[0])
    found.violation[at] = True
    assert decide(found, False).certified
    found.margin[at] = 5.0
    assert decide(found, False).reasons == ("1 accepted drafts are beaten by more than 4 nats",)


def test_the_control_of_a_server_is_part_of_its_floor() -> None:
    """Scoring by prefill and decoding round differently; a server without speculation shows by how much."""
    found = replace(drawn(np.random.default_rng(4), 3000, 0.0), boundaries=False)
    found.violation[:30] = True
    assert not decide(found, False).certified
    assert decide(replace(found, control=(28, 3000)), False).certified
    assert not decide(replace(found, control=(5, 3000)), False).certified
    assert "does not tell its steps" in decide(found, False).warnings[0]
    assert by_offset(found) == []


def test_tests_by_hand() -> None:
    assert upper_tail(5, 5) == 1 / 32
    assert upper_tail(3, 4) == 5 / 16
    assert upper_tail(0, 0) == 1.0
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert resolution(1000, 0, False) == 5 / 1000  # 5 > 2·√5, 4 = 2·√4
    assert resolution(3000, 0, True) == 1 / 1000
    assert Text.of([[1, 2], [1, 2, 3], [4]], [[1, 2], [1, 2], [5]]) == Text(3, 1, {1: 2, 2: 0})


def test_a_record_comes_back_as_it_was_and_others_are_refused(tmp_path: Path) -> None:
    record = CertificateRecord({"dscale": "0"}, {}, "dscale certify", "tiny", True, {}, (certify(),))
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(record.as_json()))
    assert read_certificates(path) == record
    assert read_certificates(path).certified
    for change, message in (
        ({"kind": "bench"}, "no record"),
        ({"schema": 9}, "schema 9"),
        ({"certificates": [{}]}, "damag"),
    ):
        path.write_text(json.dumps(record.as_json() | change))
        with pytest.raises(InputError, match=message):
            read_certificates(path)
