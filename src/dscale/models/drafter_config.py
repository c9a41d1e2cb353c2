"""Drafter configs in the three dialects in use: z-lab, DeepSpec and speculators. Nothing is told by class name.

    z-lab        `dflash_config` holds the block and the taps; the decoder's sizes lie on top
    DeepSpec     everything lies on top; `num_anchors` tells it apart
    speculators  `transformer_layer_config` holds the decoder's sizes; `aux_hidden_state_layer_ids` are taps + 1

A key that occurs twice must say the same twice. Anything that would make a different network than the plain drafter of
dscale.models.drafter (Markov heads, attention sinks, convolutions, a smaller draft vocabulary …) is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, InputError, TargetConfig, require
from dscale.models.families import SLIDING, decoder_config, hf_sizes, layer_windows, rope_config

ANCHOR_FLAGS = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
# Key → the values under which the plain drafter still computes what the checkpoint means.
PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "markov_rank": (0,),
    "projector_type": ("dflash",),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "input_embedding_scale": (1.0,),
    "use_aux_hidden_state": (True,),
    "has_embed_tokens": (False,),
    "has_lm_head": (False,),
    "quantization_config": ({},),
}


@dataclass(frozen=True)
class DrafterReading:
    """A drafter's config and how its anchor layout was told (a key, a rule, or an explicit choice)."""

    config: DrafterConfig
    layout_reason: str


@dataclass(frozen=True)
class _Keys:
    """Values of a config that may lie on top or in dflash_config."""

    top: Mapping[str, Any]
    nested: Mapping[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """The value of a key, None where absent; InputError when it occurs twice with different values."""
        outer, inner = self.top.get(key), self.nested.get(key)
        require(
            outer is None or inner is None or outer == inner,
            f"{self.where}: {key} = {outer!r} contradicts dflash_config.{key} = {inner!r}",
        )
        return outer if inner is None else inner

    def need(self, key: str) -> Any:
        """The value of a required key."""
        value = self.get(key)
        require(value is not None, f"{self.where}: {key} is missing (on top or in dflash_config)")
        return value


def read_drafter_config(
    config: Mapping[str, Any],
    where: str = "config.json",
    layout: str | None = None,
    target_layers: int | None = None,
) -> DrafterReading:
    """A drafter config from the contents of its config.json.

    layout overrides what the checkpoint says (a value of AnchorLayout). target_layers serves the default tap rule when
    the config names neither its taps nor the target's size. InputError for contradictions and unsupported parts.
    """
    keys = _Keys(config, config.get("dflash_config") or {}, where)
    dialect = _dialect(config, where)
    _refuse_other_networks(keys)
    sizes = _speculators_sizes(config, where) if dialect == "speculators" else config
    decoder, causal = _decoder(keys, sizes, dialect)
    chosen, reason = _layout(keys, dialect, layout)
    told_layers = keys.get("num_target_layers")
    block = int(keys.need("block_size"))
    seen_back = [window for window in decoder.windows if window is not None]
    require(
        all(window >= block for window in seen_back),
        f"{where}: sliding_window {min(seen_back, default=0)} is narrower than block_size {block}; not supported",
    )
    made = DrafterConfig(
        decoder=decoder,
        block_size=block,
        taps=_taps(keys, decoder.num_layers, told_layers or target_layers),
        mask_token_id=int(keys.need("mask_token_id")),
        layout=chosen,
        dialect=dialect,
        causal=causal,
        target_layers=int(told_layers) if told_layers else None,
        target_hashes=dict((config.get("dscale") or {}).get("target_hashes") or {}),
    )
    return DrafterReading(made, reason)


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    """True when a config.json describes a drafter of any dialect rather than a target."""
    marks = ("dflash_config", "target_layer_ids", "speculators_config", "speculators_model_type", "mask_token_id")
    return any(config.get(mark) is not None for mark in marks)


def _dialect(config: Mapping[str, Any], where: str) -> str:
    if any(key in config for key in ("transformer_layer_config", "speculators_config", "speculators_model_type")):
        method = config.get("speculators_model_type", "dflash")
        require(
            method in ("dflash", "dspark"),
            f"{where}: speculators_model_type {method!r} is not supported; allowed are dflash, headless dspark",
        )
        return "speculators"
    if config.get("dflash_config") is None and config.get("num_anchors") is not None:
        return "deepspec"
    require(
        is_drafter_config(config) and config.get("block_size", config.get("dflash_config")) is not None,
        f"{where}: is not a drafter; expected dflash_config, flat target_layer_ids and block_size, or speculators keys",
    )
    return "z-lab"


def _refuse_other_networks(keys: _Keys) -> None:
    for key, plain in PLAIN_VALUES.items():
        value = keys.get(key)
        require(
            value is None or value in plain,
            f"{keys.where}: {key} = {value!r} is not supported; allowed is {plain[0]!r}",
        )
    sizes = keys.top.get("transformer_layer_config") or keys.top
    for key, own in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        value = keys.get(key)
        require(
            value is None or sizes.get(own) is None or value == sizes[own],
            f"{keys.where}: {key} = {value!r} differs from {own} = {sizes.get(own)!r}; allowed are equal sizes",
        )


def _speculators_sizes(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The decoder's sizes. speculators writes only what differs from transformers' defaults, so those are filled in."""
    layer = config.get("transformer_layer_config")
    require(isinstance(layer, Mapping), f"{where}: transformer_layer_config is missing")
    assert isinstance(layer, Mapping)
    from transformers import AutoConfig

    try:
        filled = AutoConfig.for_model(**{"model_type": "qwen3", **layer}).to_dict()
    except Exception as error:  # unknown model types and values of the wrong type
        raise InputError(f"{where}: transformer_layer_config ({' '.join(str(error).split())[:200]})") from None
    outer = {key: config[key] for key in WINDOW_KEYS if config.get(key) is not None}
    return filled | outer


WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


def _decoder(keys: _Keys, sizes: Mapping[str, Any], dialect: str) -> tuple[DecoderConfig, bool]:
    """Decoder sizes, windows and causality. A drafter has qwen3's layers whatever its target is."""
    base = dict(sizes)
    if base.get("head_dim") is None and base.get("model_type") == "llama":
        base["head_dim"] = int(base["hidden_size"]) // int(base["num_attention_heads"])
    rope = base.get("rope_parameters") or {}
    told = base.get("rope_theta") or rope.get("rope_theta") or any("rope_theta" in str(v) for v in rope.values())
    require(bool(told), f"{keys.where}: rope_theta is missing; a drafter's rotation cannot be guessed")
    windows = _windows(keys, base)
    base |= {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
    decoder = decoder_config(base, "qwen3", keys.where)
    style = "neox" if keys.get("is_neox_style") in (None, True) else "interleaved"
    causal_layers = _causal_layers(keys, windows, decoder.num_layers, dialect)
    mixed = any(causal_layers) and not all(causal_layers)
    decoder = replace(
        decoder,
        windows=windows,
        rope=rope_config(base, keys.where, style),
        causal_layers=causal_layers if mixed else (),
    )
    return decoder, all(causal_layers)


def _windows(keys: _Keys, sizes: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows by layer_types; without sliding layers there, `use_swa` makes every layer slide."""
    size = keys.nested.get("swa_window_size") or sizes.get("sliding_window")
    types = sizes.get("layer_types")
    layers = int(sizes["num_hidden_layers"])
    if keys.get("use_swa") and SLIDING not in (types or ()):
        require(size is not None, f"{keys.where}: use_swa needs swa_window_size or sliding_window")
        return (int(size or 0),) * layers
    return layer_windows({**sizes, "sliding_window": size}, keys.where)


def _causal_layers(keys: _Keys, windows: tuple[int | None, ...], layers: int, dialect: str) -> tuple[bool, ...]:
    """Which draft layers are causal inside the block: an explicit key for all, else the sliding ones (as released)."""
    explicit = keys.get("is_causal")
    explicit = keys.get("causal") if explicit is None else explicit
    if explicit is not None:
        return (bool(explicit),) * layers
    if keys.get("sliding_window_non_causal") or keys.get("use_swa"):
        return (False,) * layers
    return tuple(window is not None for window in windows) if windows else (False,) * layers


def _layout(keys: _Keys, dialect: str, chosen: str | None) -> tuple[AnchorLayout, str]:
    """The anchor layout and how it was told. An explicit choice wins; flags that disagree are an error."""
    flags = {key: bool(keys.get(key)) for key in ANCHOR_FLAGS if keys.get(key) is not None}
    if chosen is not None:
        allowed = ", ".join(layout.value for layout in AnchorLayout)
        require(chosen in list(AnchorLayout), f"layout: {chosen!r} is not known; allowed are {allowed}")
        return AnchorLayout(chosen), "explicit choice"
    if len(set(flags.values())) > 1:
        yes, no = (next(key for key, value in flags.items() if value is wanted) for wanted in (True, False))
        raise InputError(f"{keys.where}: {yes} = true contradicts {no} = false; give the layout explicitly")
    if flags:
        key, value = next(iter(flags.items()))
        return (AnchorLayout.ANCHOR_FIRST if value else AnchorLayout.MASKED), f"{key} = {str(value).lower()}"
    if dialect == "speculators":
        method = keys.top.get("speculators_model_type", "dflash")
        require(method == "dflash", f"{keys.where}: {method} without sample_from_anchor; give the layout explicitly")
        return AnchorLayout.MASKED, "speculators dflash without sample_from_anchor"
    if keys.get("num_anchors") is not None:
        return AnchorLayout.ANCHOR_FIRST, "num_anchors is present and no flag"
    return AnchorLayout.MASKED, "no flag"


def _taps(keys: _Keys, draft_layers: int, target_layers: int | None) -> tuple[int, ...]:
    """Target layers whose output is read: listed, listed one too high (speculators, EAGLE), or the default spread."""
    listed = keys.get("target_layer_ids")
    for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        raised = keys.get(key)
        if raised is None:
            continue
        lowered = [int(layer) - 1 for layer in raised]
        require(
            listed is None or list(listed) == lowered,
            f"{keys.where}: target_layer_ids {listed} contradicts {key} {raised} (those are layers + 1)",
        )
        listed = lowered
    if listed is not None:
        return tuple(int(layer) for layer in listed)
    require(
        target_layers is not None,
        f"{keys.where}: neither target_layer_ids nor num_target_layers is given; one of them is needed",
    )
    assert target_layers is not None
    return default_taps(int(target_layers), draft_layers)


def default_taps(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The tap rule of dflash.md: round(1 + i·(L-4)/(L_d-1)), and L // 2 for a single draft layer."""
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers))


def fit_problems(drafter: DrafterConfig, target: TargetConfig) -> list[str]:
    """Why a drafter cannot serve a target, one line each; empty when it fits."""
    d, t = drafter.decoder, target.decoder
    problems = []
    if d.hidden_size != t.hidden_size:
        problems.append(f"hidden_size: drafter {d.hidden_size}, target {t.hidden_size}; they must be equal")
    if d.vocab_size != t.vocab_size:
        problems.append(f"vocab_size: drafter {d.vocab_size}, target {t.vocab_size}; they must be equal")
    if drafter.mask_token_id >= t.vocab_size:
        problems.append(f"mask_token_id: {drafter.mask_token_id} is outside the vocabulary of {t.vocab_size}")
    if drafter.target_layers not in (None, t.num_layers):
        problems.append(f"num_target_layers: drafter expects {drafter.target_layers}, target has {t.num_layers}")
    if drafter.taps[-1] >= t.num_layers:
        problems.append(f"target_layer_ids: {drafter.taps[-1]} is past the target's last layer {t.num_layers - 1}")
    elif drafter.taps[-1] == t.num_layers - 1:
        problems.append(f"target_layer_ids: {drafter.taps[-1]} is the target's last layer; allowed are earlier layers")
    return problems


def check_fits(drafter: DrafterConfig, target: TargetConfig, where: str = "drafter") -> None:
    """InputError with the first reason why the drafter cannot serve the target."""
    problems = fit_problems(drafter, target)
    require(not problems, f"{where}: does not fit the target: {problems[0] if problems else ''}")


def check_width(config: DrafterConfig, width: int) -> None:
    """InputError when a block would be wider than trained (narrower ones work)."""
    require(
        2 <= width <= config.width,
        f"width: {width} is wider than the trained block; allowed are 2 to {config.width}"
        if width > config.width
        else f"width: {width}; allowed are 2 to {config.width}",
    )


def write_drafter_config(config: DrafterConfig, dialect: str) -> dict[str, Any]:
    """The config.json of a drafter in the z-lab or DeepSpec dialect. The layout is always written out."""
    require(dialect in ("z-lab", "deepspec"), f"dialect: {dialect!r} cannot be written; allowed are z-lab, deepspec")
    d = config.decoder
    as_released = tuple(window is not None for window in d.windows)
    require(
        d.causal_layers in ((), as_released),
        f"causal_layers: {d.causal_layers} cannot be written; allowed is causal exactly where layers slide",
    )
    anchor_first = config.layout is AnchorLayout.ANCHOR_FIRST
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "sample_from_anchor": anchor_first,
    }
    written: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if dialect == "z-lab" else "Qwen3DSparkModel"],
        "model_type": "qwen3",
        **hf_sizes(d),
        "attention_bias": d.qkv_bias,
        "rope_theta": d.rope.theta,
        "is_neox_style": d.rope.style == "neox",
        "tie_word_embeddings": False,
        "num_target_layers": config.target_layers,
    }
    if any(window is not None for window in d.windows):
        written["sliding_window"] = next(window for window in d.windows if window is not None)
        written["layer_types"] = ["full_attention" if window is None else SLIDING for window in d.windows]
        written["use_sliding_window"] = True
    if not d.causal_layers:
        written["is_causal"] = config.causal
    if dialect == "z-lab":
        written["dflash_config"] = own
    else:
        written |= own | {"num_anchors": 512, "markov_rank": 0, "enable_confidence_head": False}
    if config.target_hashes:
        written["dscale"] = {"target_hashes": dict(config.target_hashes)}
    return written
