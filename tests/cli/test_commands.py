"""The commands, run as a user runs them, on a tiny model in a folder: what they print, and how they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from dscale.cli import options
from dscale.cli.main import run
from dscale.models.drafter_checkpoint import drafter_hash, random_drafter, save_drafter
from dscale.models.loader import load_target
from dscale.speculation.predictor import Predictor, PredictorConfig
from tests.conftest import tiny_config, tiny_drafter_config

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny llama target with tokenizer and chat template, a drafter that fits it, and a predictor for the drafter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = tiny_config("llama").decoder
    hf = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, max_position_embeddings=128,
        tie_word_embeddings=True, eos_token_id=0, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(hf).save_pretrained(root / "target")
    words = ["<eos>", "<bos>", "<unk>", "user", "assistant", *(f"w{i}" for i in range(config.vocab_size - 5))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "target")
    target = load_target(str(root / "target"), torch.float32)
    drafter = random_drafter(tiny_drafter_config(target.config), seed=1)
    save_drafter(drafter, root / "drafter")
    width = drafter.config.width
    Predictor(PredictorConfig(width, drafter_hash(root / "drafter"))).save(root / "predictor")
    Predictor(PredictorConfig(width, "0" * 64)).save(root / "stranger")
    return {name: root / name for name in ("target", "drafter", "predictor", "stranger")}


def call(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one `dscale` call."""
    monkeypatch.setattr(sys, "argv", ["dscale", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def dscale(monkeypatch, capsys):
    return lambda *arguments: call(monkeypatch, capsys, *arguments)


@pytest.fixture
def pair(folders) -> list[object]:
    """The options that name the tiny pair."""
    return ["-m", folders["target"], "-d", folders["drafter"], "-p", folders["predictor"], "--dtype", "float32"]


@pytest.mark.parametrize("policy", ["full", "fixed:3", "dvl", "dvl:seeded", "confidence", "dspark", "auto"])
def test_every_policy_prints_the_text_of_off(dscale, pair, policy):
    code, want, _ = dscale("generate", *pair, "--policy", "off", "--max-tokens", 24, "w1 w2 w3")
    assert code == 0
    assert want.strip()
    code, got, _ = dscale("generate", *pair, "--policy", policy, "--max-tokens", 24, "w1 w2 w3")
    assert code == 0
    assert got == want


def test_summary_has_the_names_scripts_rely_on(dscale, pair):
    code, out, _ = dscale("generate", *pair, "--policy", "full", "--max-tokens", 8, "--json", "w1")
    record = json.loads(out)
    assert code == 0
    assert record["tokens_per_s"] > 0
    assert 1 <= record["mean_progress"] <= 6
    assert record["slots_per_request"] == 6
    assert {"dscale", "torch", "transformers", "python"} <= set(record["versions"])


def test_simulated_acceptance_is_written_on_everything(dscale, pair, tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "w1 w2"}))
    arguments = ["generate", *pair, "--policy", "full", "--simulate-acceptance", "6.09", "--max-tokens", 40]
    code, text, errors = dscale(*arguments, "w1")
    assert code == 0
    assert text.startswith("[simulated acceptance] ")
    assert "simulated acceptance" in errors
    code, printed, _ = dscale(*arguments, "--prompts", prompts, "--out", out, "--json")
    assert code == 0
    assert json.loads(printed)["note"] == "simulated acceptance"
    assert json.loads(printed)["mean_progress"] > 2  # the random pair alone stays near 1
    assert json.loads(out.read_text())["note"] == "simulated acceptance"
    code, _, errors = dscale(*arguments[:-3], tmp_path / "missing", "w1")
    assert code == 2
    assert "missing: cannot be read as an acceptance trace" in errors


def test_random_models_want_token_ids(dscale):
    code, _, errors = dscale("generate", "-m", "random:tiny", "text")
    assert code == 2
    assert "random:tiny: has no tokenizer; prompts must be token ids" in errors
    assert "Traceback" not in errors


def test_prompts_file_resumes_where_it_was_interrupted(dscale, pair, tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"prompt": "w1 w2"},
        {"id": "b", "messages": [{"role": "user", "content": "w3"}]},
        {"prompt": "w4", "id": 7},
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["generate", *pair, "--policy", "full", "--prompts", prompts, "--out", out, "--max-tokens", 6, "--json"]
    code, printed, _ = dscale(*arguments)
    assert code == 0
    whole = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert set(whole) == {"0", "b", "7"}
    for row in whole.values():
        assert set(row) == {"id", "text", "token_ids", "finish_reason", "usage"}
        assert row["usage"]["completion_tokens"] == len(row["token_ids"])
    assert json.loads(printed)["skipped"] == 0
    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:10])  # killed while writing the second row
    code, printed, _ = dscale(*arguments)
    assert code == 0
    assert json.loads(printed)["skipped"] == 1
    assert {row["id"]: row for row in map(json.loads, out.read_text().splitlines())} == whole


def test_seed_decides_the_sampled_text(dscale, pair):
    texts = [
        dscale("generate", *pair, "--temperature", 1.0, "--seed", seed, "--policy", policy, "--max-tokens", 16, "w1")[1]
        for seed, policy in ((1, "off"), (1, "dvl"), (2, "dvl"))
    ]
    assert texts[0] == texts[1] != texts[2]


def refused(result: tuple[int, str, str], *parts: str) -> None:
    """One line on stderr that has all parts, nothing on stdout, exit code 2."""
    code, out, err = result
    lines = [line for line in err.splitlines() if not line.startswith("drafter ")]
    assert code == 2
    assert out == ""
    assert len(lines) == 1, err
    assert all(part in lines[0] for part in parts), lines[0]


def test_deterministic_reaches_the_engine(dscale, pair):
    refused(dscale("generate", *pair, "--deterministic", "--tp", 2, "w1"), "deterministic: not with tensor_parallel 2")
    code, out, _ = dscale("generate", *pair, "--deterministic", "--max-tokens", 4, "w1")  # on a CPU it always is
    assert code == 0
    assert out == dscale("generate", *pair, "--max-tokens", 4, "w1")[1]


@pytest.mark.parametrize(("temperature", "kind"), [(0, "greedy"), (0.7, "sampled")])
def test_steps_of_the_temperature_asked_for_are_captured(monkeypatch, dscale, pair, temperature, kind):
    made, build = [], options.build_llm
    monkeypatch.setattr(options, "build_llm", lambda *given, **named: made.append(build(*given, **named)) or made[-1])
    assert dscale("generate", *pair, "--temperature", temperature, "--max-tokens", 2, "w1")[0] == 0
    monkeypatch.setattr("builtins.input", lambda *_: "")
    assert dscale("chat", *pair, "--temperature", temperature)[0] == 0
    assert [one.config.graph_kinds for one in made] == [kind, kind]


def test_draft_weights_reach_the_engine(dscale, pair):
    refused(dscale("generate", *pair, "--draft-weights", "int4", "w1"), "draft_weights: 'int4'", "auto, fp8")
    code, out, _ = dscale("generate", *pair, "--draft-weights", "fp8", "--max-tokens", 4, "w1")
    assert code == 0
    assert out == dscale("generate", *pair, "--max-tokens", 4, "w1")[1]


def test_cache_dtypes_reach_the_engine(dscale, pair):
    refused(dscale("generate", *pair, "--kv-cache-dtype", "int8", "w1"), "kv_cache_dtype: 'int8'", "auto, fp8")
    plain, rounded, draft = (
        dscale("generate", *pair, *options, "--max-tokens", 12, "w1")[:2]
        for options in ((), ("--kv-cache-dtype", "fp8"), ("--draft-kv-cache-dtype", "fp8_e4m3"))
    )
    off = dscale("generate", *pair, "--policy", "off", "--kv-cache-dtype", "fp8", "--max-tokens", 12, "w1")[:2]
    assert rounded == off
    assert draft == plain
    assert plain[0] == rounded[0] == 0


def test_missing_model(dscale):
    refused(dscale("generate", "-m", "no/such/thing/here", "w1"), "no/such/thing/here", "smollm2-135m")


def test_wrong_architecture(dscale, folders, tmp_path):
    config = json.loads((folders["target"] / "config.json").read_text()) | {
        "model_type": "mamba",
        "architectures": ["M"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(dscale("generate", "-m", tmp_path, "w1"), "mamba", "llama")


def test_truncated_safetensors(dscale, folders, tmp_path):
    for file in folders["target"].iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    refused(dscale("generate", "-m", tmp_path, "w1"), "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": 64}, ("hidden", "64", "32")),
        ({"vocab_size": 70}, ("vocab", "70", "64")),
        ({"dflash_config": {"target_layer_ids": [1, 2, 9]}}, ("target_layer_ids: 9", "last layer 4")),
        (
            {"dflash_config": {"sample_from_anchor": False, "query_zero_predicts_next": True}},
            ("sample_from_anchor", "query_zero_predicts_next"),
        ),
    ],
)
def test_drafter_that_does_not_fit(dscale, folders, tmp_path, changes, parts):
    config = json.loads((folders["drafter"] / "config.json").read_text())
    nested = {"dflash_config": config["dflash_config"] | changes.get("dflash_config", {})}
    (tmp_path / "config.json").write_text(json.dumps(config | changes | nested))
    for file in folders["drafter"].glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    refused(dscale("generate", "-m", folders["target"], "-d", tmp_path, "--policy", "full", "w1"), *parts)


def test_wider_block_than_trained(dscale, pair):
    refused(dscale("generate", *pair, "--policy", "full", "--width", 9, "w1"), "width: 9", "at most 6")


def test_predictor_of_another_drafter(dscale, pair, folders):
    refused(dscale("generate", *pair, "-p", folders["stranger"], "--policy", "dvl", "w1"), "stranger", "0" * 64)


def test_prompt_over_the_context_length(dscale, pair):
    refused(dscale("generate", *pair, "w1 " * 200), "context length is 128")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("",), ("prompt 0", "empty")),
        (("--raw", ""), ("prompt 0", "empty")),
        (("--temperature", "-1", "w1"), ("temperature: -1", "0 or positive")),
        (("--policy", "fast", "w1"), ("policy: 'fast'", "off, full")),
        (("--policy", "fixed:9", "w1"), ("fixed:9", "fixed:6")),
        (("--dtype", "int3", "w1"), ("dtype: 'int3'", "bfloat16")),
        (("--max-tokens", "0", "w1"), ("max_tokens: 0", "at least 1")),
        (("--device", "tpu", "w1"), ("device: 'tpu'", "cpu")),
        (("--slots", "0.5", "w1"), ("slots: 0.5", "at least 1")),
        (("-d", "none", "--policy", "full", "w1"), ("'full' needs a drafter",)),
        (("-p", "none", "--policy", "dvl", "w1"), ("'dvl' needs a predictor",)),
        ((), ("either a prompt or --prompts",)),
    ],
)
def test_bad_options(dscale, pair, arguments, parts):
    refused(dscale("generate", *pair, *arguments), *parts)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("not json", "line 1: not JSON"),
        ('{"prompt": "w1"}\n[]', "line 2: not an object"),
        ('{"text": "w1"}', "line 1: has to have one of"),
        ('{"prompt": 3}', "`prompt` must be text"),
        ('{"messages": []}', "`messages` must be a list"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}', "id '1' appears twice"),
        ("", "holds no rows"),
    ],
)
def test_bad_prompts_file_writes_nothing(dscale, pair, tmp_path, text, part):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(text)
    refused(dscale("generate", *pair, "--prompts", prompts, "--out", out), part)
    assert not out.exists()


def test_foreign_output_file_is_left_alone(dscale, pair, tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    prompts.write_text('{"prompt": "w1"}')
    out.write_text("my notes\n")
    refused(dscale("generate", *pair, "--prompts", prompts, "--out", out), "not an output of this command")
    assert out.read_text() == "my notes\n"


def test_help_shows_an_example(dscale):
    for command in ("demo", "generate", "chat", "inspect"):
        code, out, _ = dscale(command, "--help")
        assert code == 0
        assert f"Example: dscale {command}" in out


def test_chat_answers_line_by_line_and_starts_over(dscale, pair, monkeypatch):
    lines = iter(["w1 w2", "/new", "w1 w2", ""])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    code, out, _ = dscale("chat", *pair, "--max-tokens", 8)
    first, second = out.splitlines()
    assert code == 0
    assert first == second != ""


def test_demo_compares_three_policies(dscale, folders):
    pair = ["-m", folders["target"], "-d", folders["drafter"], "-p", folders["predictor"], "--dtype", "float32"]
    code, out, _ = dscale("demo", *pair, "--max-tokens", 12, "--slots", 3, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["same_text"] is True
    assert [arm["policy"] for arm in record["arms"]] == ["off", "full", "dvl"]
    assert [arm["slots_per_request"] for arm in record["arms"]] == [1, 6, 3]
    assert all(arm["tokens_per_s"] > 0 and arm["speedup"] > 0 for arm in record["arms"])
    assert record["arms"][0]["mean_progress"] == 1
    code, out, _ = dscale("demo", *pair, "--max-tokens", 12, "--slots", 3)
    assert code == 0
    assert "same text: yes" in out
