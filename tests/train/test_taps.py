"""The tap cache: the same bits as the target's own pass, filled once, whole or refused."""

import shutil
from collections import namedtuple

import pytest
import torch

from dscale.config import InputError
from dscale.train import taps
from dscale.train.artifacts import Stage
from dscale.train.taps import TAPS, open_cache, row_bytes
from dscale.train.world import World

from .test_drafter import trainer
from .tiny import tiny_rows

BOUND = {"target_hashes": {"a": "b"}, "corpus": "c"}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(taps, "SHARD_BYTES", 4 * 128 * 24 * 3 * 4)  # four rows with hidden


def cached(run, folder, hidden=True, bound=BOUND):
    return open_cache(folder, run.forward, tiny_rows(), bound, hidden, World())


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_training_from_the_cache_equals_training_online(tmp_path, share):
    online, offline = trainer(distil=share), trainer(distil=share)
    offline.states = cached(offline, tmp_path / "cache", share > 0)
    for _ in range(4):
        assert torch.equal(online.step(), offline.step())
    for ours, theirs in zip(online.parameters, offline.parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_size_told_is_size_on_disk(tmp_path, capsys):
    run = trainer()
    cached(run, tmp_path / "cache")
    stage = Stage.load(tmp_path / "cache", TAPS, complete=True)
    expected = row_bytes(run.forward, True) * 6
    assert expected == 6 * 128 * 3 * 24 * 4
    assert stage.summary == {"rows": 6, "bytes": expected}
    assert [shard.counts["rows"] for shard in stage.of("train")] == [4, 2]
    assert 0 <= sum(shard.size for shard in stage.shards) - expected < 400  # two headers
    assert "GB more, the disk has" in capsys.readouterr().err


def test_a_lost_shard_is_made_again_and_a_corrupt_one_told(tmp_path):
    run, folder = trainer(), tmp_path / "cache"
    cached(run, folder)
    file = folder / "taps-00001.safetensors"
    good = file.read_bytes()
    file.unlink()
    cached(run, folder)
    assert file.read_bytes() == good
    file.write_bytes(good[:-1] + b"\1")
    with pytest.raises(InputError, match=r"taps-00001\.safetensors: corrupt"):
        cached(run, folder)


def test_another_corpus_or_a_full_disk_is_refused(tmp_path, monkeypatch):
    run = trainer()
    cached(run, tmp_path / "cache")
    with pytest.raises(InputError, match="was made with corpus c, now it is d"):
        cached(run, tmp_path / "cache", bound=BOUND | {"corpus": "d"})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
    with pytest.raises(InputError, match=r"the tap cache needs 0\.00 GB more, the disk has 0\.00 GB free"):
        cached(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()
