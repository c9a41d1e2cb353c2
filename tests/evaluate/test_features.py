"""Taps through the paged path against transformers, and the verdicts on planted errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dscale.config import InputError
from dscale.evaluate import features
from dscale.evaluate.features import (
    ALIGNED,
    OFF_BY_ONE,
    UNCLEAR,
    FeatureCheck,
    Observed,
    engine_taps,
    judge,
    reference_taps,
)
from dscale.models.checkpoint import SafetensorsCheckpoint
from dscale.models.loader import build_target, folder_config
from tests.models.test_families import oracle

TAPS = (1, 2)
CHANGES = {"llama": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 16}}


def saved(family: str, folder: Path) -> Path:
    """A random transformers model of four layers in a folder."""
    oracle(family, CHANGES[family]).save_pretrained(folder)
    return folder


def rows(count: int = 3, length: int = 50) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(96, (length - 7 * i,), generator=generator).tolist() for i in range(count)]


def observe(folder: Path) -> tuple[list[Observed], list[Observed], list[int]]:
    """The engine's and transformers' observations of the same rows."""
    ids = rows()
    prompts = [30, 25, 7]
    target = build_target(folder_config(folder), SafetensorsCheckpoint(folder), torch.float32, "cpu")
    ours = engine_taps(target, ids, prompts, TAPS, chunk=11, width=6)
    return ours, reference_taps(features._reference(folder), ids, TAPS, "cpu"), prompts


@pytest.fixture(scope="module")
def observed(tmp_path_factory) -> tuple[list[Observed], list[Observed], list[int]]:
    return observe(saved("qwen3", tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize("family", CHANGES)
def test_paged_taps_equal_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    ours, theirs, prompts = observe(saved(family, tmp_path))
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine.top) == len(other.top)
        for tap in TAPS:
            torch.testing.assert_close(mine.layers[tap], other.layers[tap], rtol=1e-4, atol=1e-4)
    record = judge(ours, theirs, prompts, TAPS)
    assert record["verdict"] == ALIGNED
    assert [one["tap"] for one in record["taps"]] == [1, 2]
    for one in record["taps"]:
        assert one["score"] == pytest.approx(1.0, abs=1e-6)
        assert one["paths"]["prefill"]["rows"] == 29 + 24 + 6
        assert one["paths"]["decode"]["rows"] == (50 - 31) + (43 - 26) + (36 - 8)
    assert record["top1"]["score"] == 1.0


@pytest.mark.parametrize("side", [-1, 1])
def test_taps_of_a_neighbouring_layer_are_told(observed, side: int) -> None:
    ours, theirs, prompts = observed
    planted = [
        replace(mine, layers={1: other.layers[1 + side], 2: mine.layers[2]})
        for mine, other in zip(ours, theirs, strict=True)
    ]
    record = judge(planted, theirs, prompts, TAPS)
    wrong, right = record["taps"]
    assert (wrong["verdict"], wrong["place"]) == (OFF_BY_ONE, f"layer {side:+d}")
    assert right["verdict"] == ALIGNED
    assert record["verdict"] == OFF_BY_ONE


@pytest.mark.parametrize("side", [-1, 1])
def test_rows_of_a_neighbouring_token_are_told(observed, side: int) -> None:
    ours, theirs, prompts = observed

    def moved(values: Tensor) -> Tensor:
        return values.roll(-side, 0)  # row t holds what belongs to t + side

    planted = [Observed({tap: moved(one.layers[tap]) for tap in TAPS}, moved(one.top)) for one in ours]
    record = judge(planted, theirs, prompts, TAPS)
    for one in [*record["taps"], record["top1"]]:
        assert (one["verdict"], one["place"]) == (OFF_BY_ONE, f"token {side:+d}")


def test_an_error_on_decode_rows_alone_is_found(observed) -> None:
    ours, theirs, prompts = observed
    planted = []
    for mine, other, prompt in zip(ours, theirs, prompts, strict=True):
        mixed = torch.cat([mine.layers[1][:prompt], other.layers[2][prompt:]])
        planted.append(replace(mine, layers={1: mixed, 2: mine.layers[2]}))
    first = judge(planted, theirs, prompts, TAPS)["taps"][0]
    assert first["paths"]["prefill"]["verdict"] == ALIGNED
    assert first["paths"]["decode"]["verdict"] == first["verdict"] == OFF_BY_ONE


def test_noise_is_unclear(observed) -> None:
    ours, theirs, prompts = observed
    torch.manual_seed(0)
    noise = [replace(one, layers={tap: torch.randn_like(one.layers[tap]) for tap in TAPS}) for one in ours]
    record = judge(noise, theirs, prompts, TAPS)
    assert [one["verdict"] for one in record["taps"]] == [UNCLEAR, UNCLEAR]
    assert record["verdict"] == UNCLEAR
    assert record["top1"]["verdict"] == ALIGNED


def test_coarse_noise_is_unclear_although_its_place_is_right(observed) -> None:
    ours, theirs, prompts = observed
    torch.manual_seed(0)
    blurred = [
        replace(
            one,
            layers={tap: one.layers[tap] + one.layers[tap].std() * torch.randn_like(one.layers[tap]) for tap in TAPS},
        )
        for one in ours
    ]
    first = judge(blurred, theirs, prompts, TAPS)["taps"][0]
    assert first["verdict"] == UNCLEAR
    assert first["paths"]["prefill"]["score"] < features.NEAR


def test_taps_that_are_not_there(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    opened = features.open_target(str(folder))
    with pytest.raises(InputError, match=r"taps: 3 of \[1, 3\]; allowed are layers 0 to 2"):
        features.chosen_taps(FeatureCheck(str(folder), taps=(1, 3)), opened)
    with pytest.raises(InputError, match="ascending"):
        features.chosen_taps(FeatureCheck(str(folder), taps=(2, 1)), opened)
    assert features.chosen_taps(FeatureCheck(str(folder)), opened) == (2,)
