"""The folder that keeps the last accepted predictor."""

from __future__ import annotations

import json

import pytest
import torch

from dscale.config import InputError
from dscale.speculation.predictor import Predictor, PredictorConfig
from dscale.train import artifacts
from dscale.train.refit_folder import RefitFolder, weights_hash


def predictor(seed: int) -> Predictor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Predictor(PredictorConfig(4, "d", ("confidence",), 8)).requires_grad_(False)


def folder_at(path, drafter="d", base=0) -> RefitFolder:
    return RefitFolder(path / "refits", drafter, weights_hash(predictor(base)))


def test_the_last_one_is_kept_alone_and_read_back(tmp_path):
    folder = folder_at(tmp_path)
    assert folder.read() is None
    for version in (1, 2):
        folder.keep(version, predictor(version), {"new": {"log_loss": 0.1}})
    version, found = folder_at(tmp_path).read()
    assert version == 2
    assert weights_hash(found) == weights_hash(predictor(2)) != weights_hash(predictor(1))
    assert sorted(one.name for one in folder.path.iterdir()) == ["manifest.json", "predictor-2"]
    assert weights_hash(Predictor.load(folder.path / "predictor-2", "d")) == weights_hash(found)


def test_another_base_begins_anew_and_another_drafter_is_refused(tmp_path):
    folder_at(tmp_path).keep(1, predictor(1), {})
    assert folder_at(tmp_path, base=5).read() is None
    with pytest.raises(InputError, match="refits of drafter d, but the drafter here is e; give another folder"):
        folder_at(tmp_path, drafter="e").read()


def test_damage_is_told_in_one_line(tmp_path):
    folder = folder_at(tmp_path)
    folder.keep(1, predictor(1), {})
    predictor(2).save(folder.path / "predictor-1")
    with pytest.raises(InputError, match=r"not what manifest\.json lists; delete .*refits and start again"):
        folder.read()
    (folder.path / "manifest.json").write_text(json.dumps({"schema": "other"}))
    with pytest.raises(InputError, match=r"schema 'other', expected 'dscale\.refit/1'"):
        folder.read()


def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch):
    folder = folder_at(tmp_path)
    folder.keep(1, predictor(1), {})

    def refuse(self, where):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Predictor, "save", refuse)
    with pytest.raises(InputError, match=r"predictor-2: cannot be written \(No space left on device\)"):
        folder.keep(2, predictor(2), {})
    monkeypatch.undo()
    assert folder.read()[0] == 1

    def refuse_json(path, data):
        raise InputError(f"{path}: cannot be written")

    monkeypatch.setattr(artifacts, "write_bytes", refuse_json)
    with pytest.raises(InputError, match=r"manifest\.json: cannot be written"):
        folder.keep(2, predictor(2), {})
    assert folder.read()[0] == 1
