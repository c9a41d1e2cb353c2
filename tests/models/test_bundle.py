"""A bundle stands where a target does and brings its drafter and predictor."""

import json
from pathlib import Path

import pytest
import torch

from dscale.config import InputError
from dscale.engine.llm import LLM
from dscale.models.bundle import read_bundle
from dscale.models.drafter_checkpoint import drafter_hash, random_drafter, save_drafter
from dscale.models.loader import load_target
from dscale.speculation.predictor import Predictor, PredictorConfig
from tests.cli.test_commands import folders as folders
from tests.conftest import tiny_drafter_config


@pytest.fixture
def bundle(folders: dict[str, Path], tmp_path: Path) -> Path:
    target = load_target(str(folders["target"]), torch.float32)
    save_drafter(random_drafter(tiny_drafter_config(target.config), seed=7), tmp_path / "b" / "drafter")
    width = 6
    Predictor(PredictorConfig(width, drafter_hash(tmp_path / "b" / "drafter"))).save(tmp_path / "b" / "predictor")
    record = {"schema": "dscale.bundle/1", "target": str(folders["target"]), "drafter": "drafter"}
    (tmp_path / "b" / "bundle.json").write_text(json.dumps(record | {"predictor": "predictor"}))
    return tmp_path / "b"


def test_a_bundle_brings_its_own_drafter_and_predictor(bundle: Path) -> None:
    llm = LLM(str(bundle), policy="dvl", max_model_len=96, dtype="float32")
    assert llm.policy == "dvl"
    assert llm.loaded.own_drafter == bundle / "drafter"
    assert llm.loaded.own_predictor == bundle / "predictor"


def test_what_is_missing_in_a_bundle_is_named(bundle: Path) -> None:
    record = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps(record | {"drafter": "gone"}))
    with pytest.raises(InputError, match=r"bundle\.json: drafter: .*gone is not a folder"):
        read_bundle(str(bundle))
    (bundle / "bundle.json").write_text(json.dumps(record | {"schema": "other/1"}))
    with pytest.raises(InputError, match="other/1"):
        read_bundle(str(bundle))
