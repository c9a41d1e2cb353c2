"""`dscale inspect`: records of targets and drafters, and the problems they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dscale.cli.main import app
from dscale.config import InputError
from dscale.models.drafter_checkpoint import drafter_hash, save_drafter, target_hashes
from dscale.models.inspection import inspect_checkpoint
from tests.models.test_loader import save_target


def test_target_record(tiny_target, tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    record = inspect_checkpoint(str(save_target(target, tmp_path)))
    assert (record["kind"], record["family"], record["layers"], record["head_dim"]) == ("target", "qwen3", 5, 16)
    assert record["parameters"] == sum(parameter.numel() for parameter in target.parameters())
    assert record["stored_types"] == {"F32": len(load_file(tmp_path / "model.safetensors"))}
    assert (record["tied_head"], record["chat_template"], record["problems"]) == (False, False, [])


def test_drafter_record_and_fit(tiny_pair, tmp_path: Path) -> None:
    pair = tiny_pair("llama")
    folder = save_drafter(pair.drafter, tmp_path / "d", "deepspec", target_hashes(pair.target))
    alone = inspect_checkpoint(str(folder))
    assert (alone["dialect"], alone["anchor_layout"], alone["fits"]) == ("deepspec", "1+N", None)
    assert alone["layout_told_by"] == "sample_from_anchor = false"
    assert (alone["taps"], alone["width"], alone["hash"]) == ([1, 2, 3], 6, drafter_hash(folder))
    own = inspect_checkpoint(str(folder), str(save_target(pair.target, tmp_path / "t")), "anchor-first")
    assert (own["fits"], own["problems"], own["anchor_layout"], own["width"]) == (True, [], "anchor-first", 7)


def test_problems_of_a_drafter_are_all_named(tiny_pair, tiny_target, tmp_path: Path) -> None:
    pair = tiny_pair("llama")
    folder = save_drafter(pair.drafter, tmp_path / "d", target_hashes=target_hashes(pair.target))
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors | {"lm_head.weight": torch.zeros(64, 32)}, folder / "model.safetensors")
    other = save_target(tiny_target("qwen2", seed=5, num_layers=4), tmp_path / "t")
    record = inspect_checkpoint(str(folder), str(other))
    assert record["fits"] is False
    assert record["hash"] is None
    expected = [
        "tensor fc.weight is missing",
        "num_target_layers: drafter expects 5, target has 4",
        "target_layer_ids: 3 is the target's last layer; allowed are earlier layers",
        "was trained on other target weights: model.layers.0.self_attn.q_proj.weight differs",
        "was trained on other target weights: model.norm.weight differs",
        "its copy lm_head.weight differs from the target's lm_head.weight",
    ]
    assert record["problems"] == expected


def test_command_prints_a_table_or_json(tiny_pair, tmp_path: Path) -> None:
    folder = str(save_drafter(tiny_pair("llama").drafter, tmp_path))
    shown = CliRunner().invoke(app, ["inspect", folder])
    assert shown.exit_code == 0
    assert "anchor layout" in shown.stdout
    assert "no problems found" in shown.stdout
    record = json.loads(CliRunner().invoke(app, ["inspect", folder, "--json"]).stdout)
    assert record == inspect_checkpoint(folder)


def test_unreadable_configs_end_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(InputError, match="'mamba' is not supported"):
        inspect_checkpoint(str(tmp_path))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, InputError)
