"""`dscale check features` as a user runs it."""

from __future__ import annotations

import importlib.util
import json

import pytest
from gguf import GGMLQuantizationType

from dscale.models.checkpoint import tensors_of
from dscale.models.decoder import Target
from dscale.models.families import target_pieces
from dscale.models.loader import random_target
from tests.cli.test_commands import dscale, folders, refused  # noqa: F401 (fixtures)
from tests.conftest import tiny_config
from tests.models.gguf_files import add_byte_level_tokenizer, write_gguf

Q8_0 = GGMLQuantizationType.Q8_0


def test_aligned_target_exits_with_zero(dscale, folders) -> None:  # noqa: F811
    code, out, _ = dscale("check", "features", folders["target"], "--drafter", folders["drafter"], "--json")
    record = json.loads(out)
    assert code == 0
    assert record["schema"] == "dscale.check_features/1"
    assert record["verdict"] == "ALIGNED"
    assert [one["tap"] for one in record["taps"]] == [1, 2, 3]
    assert record["top1"]["score"] > 0.99


def test_shifted_taps_exit_with_one(dscale, folders, monkeypatch) -> None:  # noqa: F811
    plain = Target.forward
    monkeypatch.setattr(
        Target, "forward", lambda self, ids, attend, taps=(): plain(self, ids, attend, tuple(t + 1 for t in taps))
    )
    code, out, _ = dscale("check", "features", folders["target"], "--taps", "1,2", "--dtype", "float32")
    assert code == 1
    assert out.count("OFF_BY_ONE") == 3
    assert "layer +1" in out


def test_prompts_file(dscale, folders, tmp_path) -> None:  # noqa: F811
    file = tmp_path / "in.jsonl"
    words = " ".join(f"w{i}" for i in range(30))
    file.write_text(
        json.dumps({"prompt": words}) + "\n" + json.dumps({"messages": [{"role": "user", "content": words}]})
    )
    code, out, _ = dscale("check", "features", folders["target"], "--prompts", file, "--json", "--length", 20)
    record = json.loads(out)
    assert (code, record["texts"], record["tokens"]) == (0, 3, 60)  # and the row of random tokens


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--taps", "1,x"), ("--taps: '1,x'", "layer numbers")),
        (("--taps", "4"), ("taps: 4 of [4]", "0 to 3")),
        (("--length", "3"), ("length: 3", "at least 12")),
        (("--prompts", "no/such/file"), ("no/such/file", "cannot be read")),
    ],
)
def test_bad_options(dscale, folders, arguments, parts) -> None:  # noqa: F811
    refused(dscale("check", "features", folders["target"], *arguments), *parts)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_file(dscale, tmp_path, family) -> None:  # noqa: F811
    """Quantised blocks written by the gguf package; transformers reads such files itself where it can."""
    target = random_target(
        tiny_config(family, vocab_size=264, intermediate_size=64, tie_embeddings=False, eos_token_ids=(1,)), seed=3
    )
    pieces = target_pieces(target.config)
    tensors = dict(tensors_of(target, pieces, target.config.decoder))
    file = write_gguf(tmp_path / "tiny.gguf", target.config, tensors, Q8_0, metadata=add_byte_level_tokenizer)
    code, out, _ = dscale("check", "features", file, "--length", 40, "--dtype", "float32", "--json")
    record = json.loads(out)
    assert (code, record["verdict"]) == (0, "ALIGNED")
    own_reader = importlib.util.find_spec("accelerate") is not None  # transformers wants it for GGUF files
    assert record["reference"].endswith(
        "reading the GGUF file" if own_reader else "reading our conversion of the GGUF file"
    )
    assert all(one["score"] > 0.99999 for one in record["taps"])
