"""What the plug-in does differently on SGLang 0.5.14 and 0.5.16, on stand-ins for their objects: no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dscale.config import InputError
from dscale.integrations.sglang import compat
from dscale.integrations.sglang.plugin import prepare

ANCHORS, LENGTHS = torch.tensor([5, 6]), torch.tensor([9, 12])


@pytest.fixture(params=compat.SUPPORTED)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the supported versions, as if it were installed."""
    return installed(request.param, monkeypatch)


def installed(found: str, monkeypatch: pytest.MonkeyPatch) -> str:
    compat.newer.cache_clear()
    monkeypatch.setattr(compat.metadata, "version", lambda name: {"sglang": found}[name])
    return found


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    compat.newer.cache_clear()


def test_supported_versions_are_told_apart(version: str) -> None:
    compat.check_version()
    assert compat.newer() == (version == "0.5.16")


@pytest.mark.parametrize("found", ["0.5.13", "0.5.15", "0.5.17", "0.5.14.post1", "0.6.0"])
def test_others_are_refused_with_the_reason(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(found, monkeypatch)
    with pytest.raises(InputError) as caught:
        compat.check_version()
    assert str(caught.value) == (
        f"DSCALE: SGLang {found} is not supported (its workers and spec infos differ between versions); "
        "supported are 0.5.14 and 0.5.16"
    )


class Arguments(SimpleNamespace):
    """Server arguments that are resolved by declarations."""

    def override(self, source: str, **fields: Any) -> None:
        self.declared = {source: fields}


def test_server_arguments_are_set_or_declared(version: str) -> None:
    arguments = Arguments(declared={}, attention_backend="fa3")
    compat.assign(arguments, attention_backend="dscale", decode_attention_backend="dscale")
    fields = {"attention_backend": "dscale", "decode_attention_backend": "dscale"}
    if version == "0.5.16":
        assert arguments.declared == {"dscale": fields}
    else:
        assert vars(arguments) == {"declared": {}, **fields}


class Worker:
    """SGLang's worker of either version: what passes to the next step keeps the names it was made with."""

    def _make_next_draft_input_decode(self, **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**fields)


def test_anchors_come_back_from_what_is_carried(version: str) -> None:
    ended: list[str] = []

    def done() -> str:
        ended.append("event")
        return "event"

    carried = compat.carry(Worker(), ANCHORS, LENGTHS, done)
    assert compat.anchors(carried) is ANCHORS
    assert carried.new_seq_lens is LENGTHS
    if version == "0.5.16":
        assert not ended  # no scheduler waits for it
        assert carried.bonus_tokens is ANCHORS
    else:
        assert carried.verify_done == "event"
        assert carried.verified_id is ANCHORS


@pytest.mark.parametrize("known", [True, False])
def test_planned_lengths_hold_the_block_that_comes(version: str, known: bool) -> None:
    """What the host knows may lag a step: a bound is a block longer, or what is reserved; 0.5.14 carries it along."""
    old = version == "0.5.14"
    names = ("planning", "reserved") if old else ("unknown", "reserved")
    carried = SimpleNamespace()
    for name, length in zip(names, (LENGTHS + 8, LENGTHS + 16), strict=True):
        setattr(carried, f"{name}_seq_lens_cpu", length)
        setattr(carried, f"{name}_seq_lens_sum", int(length.sum()))
    batch = SimpleNamespace(spec_info=carried, seq_lens_cpu=LENGTHS if known else None, seq_lens=LENGTHS)
    lengths, total = compat.planned(batch, 8)
    assert lengths.tolist() == ([17, 20] if old or known else [25, 28])
    assert total == lengths.sum()


def test_planned_lengths_are_those_of_the_device_where_nothing_else_is_known(version: str) -> None:
    carried = SimpleNamespace(planning_seq_lens_cpu=None, reserved_seq_lens_cpu=None)
    batch = SimpleNamespace(spec_info=carried, seq_lens_cpu=None, seq_lens=LENGTHS)
    lengths, total = compat.planned(batch, 8)
    assert lengths.tolist() == [9, 12]
    assert total == 21


def test_positions_in_three_dimensions_are_told_by_the_runner_or_its_model() -> None:
    plain = SimpleNamespace(model_is_mrope=False)
    assert not compat.three_dimensional(SimpleNamespace(model_is_mrope=False, model_config=SimpleNamespace()))
    assert not compat.three_dimensional(SimpleNamespace(model_config=plain))
    assert compat.three_dimensional(SimpleNamespace(model_is_mrope=True, model_config=SimpleNamespace()))
    assert compat.three_dimensional(SimpleNamespace(model_config=SimpleNamespace(model_is_mrope=True)))


def test_a_scheduler_that_never_waits_cannot_be_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("0.5.16", monkeypatch)
    monkeypatch.setenv("DSCALE_AHEAD", "0")
    with pytest.raises(InputError, match=r"ahead: 0; the scheduler of SGLang 0\.5\.16 never waits .* allowed is 1"):
        prepare(SimpleNamespace())  # type: ignore[arg-type]
