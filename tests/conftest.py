"""Tiny random models of every family, drafter pairs, and the real SmolLM2 where it can be had."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # torch reads it when it is imported; workers side by side have a core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, InputError, RopeConfig, TargetConfig
from dscale.models.aliases import ALIASES, alias_folder, cached_alias
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import random_drafter
from dscale.models.loader import LoadedTarget, load_target, random_target

if not torch.cuda.is_available():  # Triton kernels then run in its interpreter, asked for before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

TINY_VOCABULARY = 64
SMOLLM2_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell altogether?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a cat.",
)


def tiny_config(family: str, **changes: Any) -> TargetConfig:
    """A TargetConfig with three small layers; changes go to the decoder, or to the TargetConfig by name."""
    top = {key: changes.pop(key) for key in ("tie_embeddings", "eos_token_ids", "bos_token_id") if key in changes}
    decoder = DecoderConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8 if family != "qwen3" else 16,
        max_position=256,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=RopeConfig(theta=10000.0),
    )
    return TargetConfig(family, replace(decoder, **changes), **{"tie_embeddings": family == "llama", **top})


def tiny_drafter_config(target: TargetConfig, **changes: Any) -> DrafterConfig:
    """A two-layer drafter that fits a tiny target; changes go to the drafter's config."""
    decoder = replace(
        target.decoder,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        windows=(),
    )
    config = DrafterConfig(
        decoder=decoder,
        block_size=6,
        taps=(1, 2, 3),
        mask_token_id=TINY_VOCABULARY - 1,
        layout=AnchorLayout.MASKED,
        target_layers=target.decoder.num_layers,
    )
    return replace(config, **changes)


@dataclass(frozen=True)
class TinyPair:
    """A target and a drafter that fits it."""

    target: Target
    drafter: Drafter


@pytest.fixture(params=("llama", "qwen2", "qwen3"))
def family(request: pytest.FixtureRequest) -> str:
    """Every family in turn."""
    return request.param


@pytest.fixture
def tiny_target() -> Callable[..., Target]:
    """Builds a seeded random float32 target: tiny_target("qwen3", seed=1, num_layers=4, …)."""

    def build(family: str = "llama", seed: int = 0, **changes: Any) -> Target:
        return random_target(tiny_config(family, **changes), seed)

    return build


@pytest.fixture
def tiny_pair() -> Callable[..., TinyPair]:
    """Builds a seeded random target and drafter: tiny_pair("llama", seed=1, layout=AnchorLayout.ANCHOR_FIRST, …)."""

    def build(family: str = "llama", seed: int = 0, **changes: Any) -> TinyPair:
        target = random_target(tiny_config(family), seed)
        return TinyPair(target, random_drafter(tiny_drafter_config(target.config, **changes), seed + 1))

    return build


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The converted SmolLM2-135M-Instruct from the cache, else fetched, else the test is skipped with the reason."""
    folder = cached_alias("smollm2-135m")
    if folder is not None:
        return folder
    if os.environ.get("DSCALE_OFFLINE"):
        pytest.skip("SmolLM2 is not in the cache and DSCALE_OFFLINE is set")
    try:
        return alias_folder("smollm2-135m")
    except InputError as error:
        pytest.skip(f"SmolLM2 is not in the cache and could not be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> LoadedTarget:
    """SmolLM2-135M-Instruct in float32, with its tokenizer."""
    return load_target("smollm2-135m", torch.float32)


@dataclass(frozen=True)
class GreedyReference:
    """One prompt as chat token ids, and 200 tokens of transformers' greedy answer, past end tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@pytest.fixture(scope="session")
def smollm2_greedy() -> list[GreedyReference]:
    """Five prompts answered by transformers over the alias's weights, float32, greedy, 200 tokens.

    Recorded by tests/models/make_smollm2_greedy.py: the oracle takes minutes for what the engine does in seconds.
    """
    record = json.loads((Path(__file__).parent / "models" / "smollm2_greedy.json").read_text())
    assert record["sha256"] == ALIASES["smollm2-135m"].sha256
    return [GreedyReference(tuple(one["prompt"]), tuple(one["tokens"])) for one in record["answers"]]


def browser_path() -> str | None:
    """CHROMIUM, else one on the path; None: playwright's own, if it was downloaded."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium to look at pages with: {str(error).splitlines()[0]}")
        yield started
        started.close()
