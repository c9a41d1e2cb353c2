"""Drafter configs as released (sizes cut down): three dialects, both anchor layouts, taps, windows, contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from dscale.config import AnchorLayout, InputError
from dscale.models.drafter_config import (
    check_width,
    default_taps,
    fit_problems,
    read_drafter_config,
    write_drafter_config,
)
from tests.conftest import tiny_config, tiny_drafter_config

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 3,
    "layer_types": ["full_attention"] * 3,
    "tie_word_embeddings": False,
}
ZLAB = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 990, "target_layer_ids": [1, 17, 33]},
}
DEEPSPEC = SIZES | {
    "architectures": ["Qwen3DSparkModel"],
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "block_size": 7,
    "mask_token_id": 990,
    "target_layer_ids": [3, 15, 23],
    "num_anchors": 512,
    "num_target_layers": 48,
    "markov_rank": 0,
    "enable_confidence_head": False,
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash"},
    "aux_hidden_state_layer_ids": [2, 18, 34],
    "mask_token_id": 990,
    "block_size": 8,
    "draft_vocab_size": 1000,
    # as written by speculators: only what differs from the defaults of Qwen3Config
    "transformer_layer_config": {
        key: SIZES[key]
        for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rope_theta")
    }
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}


def read(base: dict[str, Any], layout: str | None = None, target_layers: int | None = None, **changes: Any):
    config = {key: value for key, value in (base | changes).items() if value is not None}
    return read_drafter_config(config, "here", layout, target_layers)


def nested(**changes: Any) -> dict[str, Any]:
    return {**ZLAB["dflash_config"], **changes}


def test_zlab_reads_as_released() -> None:
    reading = read(ZLAB)
    config = reading.config
    assert (config.dialect, config.layout, reading.layout_reason) == ("z-lab", AnchorLayout.MASKED, "no flag")
    assert (config.taps, config.mask_token_id, config.block_size, config.width) == ((1, 17, 33), 990, 16, 16)
    assert (config.queries(16), config.queries(8)) == (16, 8)
    assert (config.target_layers, config.causal, config.decoder.qk_norm) == (36, False, True)
    assert (config.decoder.rope.theta, config.decoder.rope.style, config.decoder.head_dim) == (1e6, "neox", 16)


def test_block_size_may_lie_in_dflash_config() -> None:
    assert read(ZLAB, block_size=None, dflash_config=nested(block_size=10)).config.block_size == 10


def test_deepspec_reads_as_released() -> None:
    reading = read(DEEPSPEC)
    config = reading.config
    assert (config.dialect, config.layout) == ("deepspec", AnchorLayout.ANCHOR_FIRST)
    assert reading.layout_reason == "num_anchors is present and no flag"
    assert (config.block_size, config.width, config.queries(8)) == (7, 8, 7)
    assert (config.taps, config.decoder.rope.theta) == ((3, 15, 23), 1e7)


def test_speculators_reads_as_released() -> None:
    config = read(SPECULATORS).config
    assert (config.dialect, config.layout) == ("speculators", AnchorLayout.MASKED)
    assert (config.taps, config.block_size, config.mask_token_id) == ((1, 17, 33), 8, 990)
    assert (config.decoder.rope.theta, config.decoder.norm_eps) == (1e6, 1e-6)
    assert (config.decoder.max_position, config.target_layers) == (32768, None)


@pytest.mark.parametrize("base", [ZLAB, DEEPSPEC, SPECULATORS])
@pytest.mark.parametrize("flag", ["sample_from_anchor", "query_zero_predicts_next"])
@pytest.mark.parametrize("value", [True, False])
def test_flags_tell_the_layout_wherever_they_lie(base: dict[str, Any], flag: str, value: bool) -> None:
    expected = AnchorLayout.ANCHOR_FIRST if value else AnchorLayout.MASKED
    assert read(base, **{flag: value}).config.layout is expected
    inside = {"dflash_config": {**base.get("dflash_config", {}), flag: value}}
    if "dflash_config" in base:
        assert read(base, **inside).config.layout is expected


def test_explicit_layout_beats_every_flag() -> None:
    reading = read(ZLAB, "anchor-first", sample_from_anchor=False, query_zero_predicts_next=True)
    assert (reading.config.layout, reading.layout_reason) == (AnchorLayout.ANCHOR_FIRST, "explicit choice")
    assert read(DEEPSPEC, "1+N").config.layout is AnchorLayout.MASKED


def test_taps_default_to_the_rule() -> None:
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(28, 1) == (14,)
    silent = {"dflash_config": {"mask_token_id": 990}}
    assert read(ZLAB, **silent).config.taps == (1, 17, 33)
    assert read(ZLAB, num_target_layers=None, target_layers=30, **silent).config.taps == (1, 14, 27)
    with pytest.raises(InputError, match="neither target_layer_ids nor num_target_layers"):
        read(ZLAB, num_target_layers=None, **silent)


def test_sliding_layers_are_causal_as_released_unless_told_otherwise() -> None:
    mixed = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 2048}
    config = read(ZLAB, use_sliding_window=True, **mixed).config
    assert config.decoder.windows == (2048, None, None)
    assert (config.decoder.causal_layers, config.causal) == ((True, False, False), False)
    told = read(ZLAB, use_sliding_window=True, is_causal=False, **mixed).config
    assert (told.decoder.windows, told.decoder.causal_layers) == ((2048, None, None), ())
    every = read(ZLAB, use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 3).config
    assert (every.causal, every.decoder.causal_layers) == (True, ())
    swa = read(ZLAB, dflash_config=nested(use_swa=True, swa_window_size=128)).config
    assert (swa.decoder.windows, swa.causal) == ((128, 128, 128), False)
    layer = SPECULATORS["transformer_layer_config"] | mixed | {"use_sliding_window": True}
    free = read(SPECULATORS, transformer_layer_config=layer, sliding_window_non_causal=True).config
    assert (free.decoder.windows, free.causal, free.decoder.causal_layers) == ((2048, None, None), False, ())
    assert read(ZLAB, dflash_config=nested(causal=True)).config.causal


def test_rotation_is_the_drafts_own() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    rope = read(ZLAB, rope_scaling=yarn, is_neox_style=False).config.decoder.rope
    assert (rope.scaling, rope.parameters["factor"], rope.style) == ("yarn", 2.0, "interleaved")


@pytest.mark.parametrize("dialect", ["z-lab", "deepspec"])
@pytest.mark.parametrize("layout", list(AnchorLayout))
def test_written_configs_read_back(dialect: str, layout: AnchorLayout) -> None:
    config = tiny_drafter_config(tiny_config("llama"), layout=layout, dialect=dialect, target_hashes={"x": "y"})
    assert read(write_drafter_config(config, dialect)).config == config


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            ZLAB,
            {"sample_from_anchor": True, "query_zero_predicts_next": False},
            "sample_from_anchor = true contradicts query_zero_predicts_next = false",
        ),
        (
            ZLAB,
            {"sample_from_anchor": True, "dflash_config": nested(sample_from_anchor=False)},
            r"sample_from_anchor = True contradicts dflash_config.sample_from_anchor = False",
        ),
        (ZLAB, {"dflash_config": nested(block_size=8)}, r"block_size = 16 contradicts dflash_config.block_size = 8"),
        (
            ZLAB,
            {"aux_hidden_state_layer_ids": [1, 17, 33]},
            r"target_layer_ids \[1, 17, 33\] contradicts aux_hidden_state_layer_ids",
        ),
        (ZLAB, {"dflash_config": nested(mask_token_id=None)}, "mask_token_id is missing"),
        (ZLAB, {"dflash_config": nested(target_layer_ids=[])}, "target_layer_ids: empty"),
        (ZLAB, {"dflash_config": nested(target_layer_ids=[5, 3, 9])}, "must be ascending"),
        (ZLAB, {"block_size": 1}, "block_size: 1 must be at least 2"),
        (ZLAB, {"rope_theta": None}, "rope_theta is missing"),
        (ZLAB, {"dflash_config": nested(conv_kernel_size=2)}, "conv_kernel_size = 2 is not supported"),
        (ZLAB, {"dflash_config": nested(attention_sink_bias=True)}, "attention_sink_bias = True is not supported"),
        (ZLAB, {"draft_vocab_size": 500}, "draft_vocab_size = 500 differs from vocab_size = 1000"),
        (DEEPSPEC, {"markov_rank": 256}, "markov_rank = 256 is not supported; allowed is 0"),
        (SPECULATORS, {"projector_type": "domino"}, "projector_type = 'domino' is not supported"),
        (SPECULATORS, {"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3' is not supported"),
        (SPECULATORS, {"speculators_model_type": "dspark"}, "dspark without sample_from_anchor; give the layout"),
        (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config is missing"),
        (SIZES, {}, "is not a drafter"),
        (
            ZLAB,
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": True},
            "sliding_window 8 is narrower than block_size 16",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(base, **changes)
    assert "\n" not in str(caught.value)


def test_unknown_layout_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"'left' is not known; allowed are 1\+N, anchor-first"):
        read(ZLAB, "left")


def test_every_misfit_is_listed() -> None:
    target = tiny_config("llama")
    assert fit_problems(tiny_drafter_config(target), target) == []
    drafter = read(ZLAB, num_target_layers=None).config
    names = [problem.split(":")[0] for problem in fit_problems(drafter, target)]
    assert names == ["hidden_size", "vocab_size", "mask_token_id", "target_layer_ids"]


def test_wider_blocks_than_trained_are_refused() -> None:
    config = read(DEEPSPEC).config
    check_width(config, 8)
    check_width(config, 2)
    with pytest.raises(InputError, match="width: 9 is wider than the trained block; allowed are 2 to 8"):
        check_width(config, 9)
