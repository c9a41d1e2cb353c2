"""Target families: what a Hugging Face config says, as a TargetConfig. Families differ by config keys, not by code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dscale.config import FAMILIES, DecoderConfig, InputError, RopeConfig, TargetConfig, require
from dscale.models.checkpoint import Pieces, decoder_pieces

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
ALLOWED = ", ".join(FAMILIES)
SLIDING, FULL = "sliding_attention", "full_attention"
# Keys whose presence (and a truthy value) means a network that the dense decoder is not.
FOREIGN_KEYS = {
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "latent attention",
    "ssm_cfg": "state-space layers",
    "vision_config": "an image encoder",
    "quantization_config": "quantised safetensors weights",
}


def family_of(config: Mapping[str, Any], where: str) -> str:
    """The family a config declares by model_type or architectures; InputError names what it is instead."""
    model_type = config.get("model_type")
    architecture = (config.get("architectures") or [None])[0]
    family = model_type or ARCHITECTURES.get(architecture or "")
    named = f"model_type {model_type!r}" if model_type else f"architectures {architecture!r}"
    if family not in FAMILIES:
        raise InputError(f"{where}: {named} is not supported; allowed are the dense families {ALLOWED}")
    if architecture in ARCHITECTURES and ARCHITECTURES[architecture] != family:
        raise InputError(f"{where}: model_type {model_type!r} contradicts architectures {architecture!r}")
    for key, meaning in FOREIGN_KEYS.items():
        require(not config.get(key), f"{where}: {key} means {meaning}, which is not supported; allowed are {ALLOWED}")
    return family


def need(config: Mapping[str, Any], key: str, where: str) -> Any:
    """A required config value; InputError naming the key when it is absent."""
    require(config.get(key) is not None, f"{where}: {key} is missing")
    return config[key]


def rope_config(config: Mapping[str, Any], where: str, style: str = "neox", theta: float = 10000.0) -> RopeConfig:
    """Rotary settings from either form: rope_theta with rope_scaling, or rope_parameters (transformers 5).

    theta is used where the config names none. InputError where the two forms disagree.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in new.values()):
        new = _same_for_all_layers(new, where)
    if new and old and dict(new) != dict(old) and _kind(new) != _kind(old):
        raise InputError(f"{where}: rope_parameters ({_kind(new)}) contradicts rope_scaling ({_kind(old)})")
    given = {key: value for key, value in (("rope_parameters", new), ("", config)) if value.get("rope_theta")}
    thetas = {float(value["rope_theta"]) for value in given.values()}
    require(len(thetas) < 2, f"{where}: rope_theta {sorted(thetas)} differs between the top and rope_parameters")
    parameters = dict(new or old)
    require(
        float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) == 1.0,
        f"{where}: partial_rotary_factor below 1 is not supported; allowed is rotation of whole heads",
    )
    scaling = _kind(parameters)
    if scaling in ("llama3", "yarn"):
        # transformers takes the config's own context length where the scaling names no original one
        original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        parameters.setdefault("original_max_position_embeddings", original)
    for key in {"linear": ("factor",), "yarn": ("factor",), "llama3": LLAMA3_KEYS}.get(scaling, ()):
        require(parameters.get(key) is not None, f"{where}: rope scaling {scaling} needs {key}")
    for key in ("rope_theta", "rope_type", "type"):
        parameters.pop(key, None)
    parameters = parameters if scaling != "default" else {}
    return RopeConfig(thetas.pop() if thetas else theta, scaling, parameters, style)


LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _kind(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _same_for_all_layers(nested: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    forms = [value for value in nested.values() if isinstance(value, Mapping)]
    same = all(form == forms[0] for form in forms)
    require(same, f"{where}: rope_parameters differ between layer types; allowed is one rotation for all layers")
    return forms[0]


def layer_windows(config: Mapping[str, Any], where: str) -> tuple[int | None, ...]:
    """Sliding window of every layer in tokens; () where all layers attend fully."""
    layers, window = int(need(config, "num_hidden_layers", where)), config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", layers) if config.get("use_sliding_window") else layers
        types = [SLIDING if window is not None and index >= first else FULL for index in range(layers)]
    require(len(types) == layers, f"{where}: layer_types has {len(types)} entries for {layers} layers")
    for kind in types:
        require(kind in (SLIDING, FULL), f"{where}: layer_types entry {kind!r}; allowed are {SLIDING}, {FULL}")
    if SLIDING not in types or (window is None and config.get("use_sliding_window") is False):
        return ()
    require(window is not None, f"{where}: layer_types has {SLIDING} but sliding_window is missing")
    return tuple(int(window) if kind == SLIDING else None for kind in types)  # type: ignore[arg-type]


def decoder_config(config: Mapping[str, Any], family: str, where: str) -> DecoderConfig:
    """Decoder sizes from a Hugging Face config of one of the families (also the body of a drafter, family qwen3)."""
    hidden, heads = int(need(config, "hidden_size", where)), int(need(config, "num_attention_heads", where))
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    require(activation in ("silu", "swish"), f"{where}: hidden_act {activation!r} is not supported; allowed is silu")
    default_head = 128 if family == "qwen3" else hidden // heads
    bias = bool(config.get("attention_bias", False))
    max_position = int(need(config, "max_position_embeddings", where))
    rope = rope_config(config, where)
    if rope.scaling == "yarn":
        original = float(rope.parameters["original_max_position_embeddings"])
        max_position = max(max_position, int(original * float(rope.parameters["factor"])))
    return DecoderConfig(
        vocab_size=int(need(config, "vocab_size", where)),
        hidden_size=hidden,
        intermediate_size=int(need(config, "intermediate_size", where)),
        num_layers=int(need(config, "num_hidden_layers", where)),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or default_head),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=max_position,
        qkv_bias=True if family == "qwen2" else bias,
        output_bias=False if family == "qwen2" else bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if family == "llama" else False,
        qk_norm=family == "qwen3",
        rope=rope,
        windows=() if family == "llama" else layer_windows(config, where),
    )


def target_config(
    config: Mapping[str, Any], where: str = "config.json", generation: Mapping[str, Any] | None = None
) -> TargetConfig:
    """A TargetConfig from the contents of config.json and, where there is one, generation_config.json.

    where names the source in errors. End tokens are those of both files. InputError for any other architecture.
    """
    family = family_of(config, where)
    ends = [*_token_ids(config.get("eos_token_id")), *_token_ids((generation or {}).get("eos_token_id"))]
    bos = _token_ids(config.get("bos_token_id"))
    return TargetConfig(
        family=family,
        decoder=decoder_config(config, family, where),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=bos[0] if bos else None,
    )


def _token_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else [int(value)]


def target_pieces(config: TargetConfig, prefix: str = "model.") -> Pieces:
    """Parameters of a Target and the Hugging Face tensors they are stacked from. A tied head has none of its own."""
    pieces: Pieces = {"embedding": (f"{prefix}embed_tokens.weight",)}
    pieces |= decoder_pieces(config.decoder, prefix)
    if not config.tie_embeddings:
        pieces["head.weight"] = ("lm_head.weight",)
    return pieces


def hf_sizes(d: DecoderConfig) -> dict[str, Any]:
    """Sizes, norm and rotary keys of a decoder as transformers 5 spells them, shared by target and drafter configs."""
    return {
        "vocab_size": d.vocab_size,
        "hidden_size": d.hidden_size,
        "intermediate_size": d.intermediate_size,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_kv_heads,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": d.norm_eps,
        "max_position_embeddings": d.max_position,
        "rope_parameters": {"rope_type": d.rope.scaling, "rope_theta": d.rope.theta, **d.rope.parameters},
    }


def to_hf_config(config: TargetConfig) -> dict[str, Any]:
    """The config.json (transformers 5 form) that describes this target, for writing a checkpoint."""
    d = config.decoder
    written: dict[str, Any] = {
        "architectures": [{family: name for name, family in ARCHITECTURES.items()}[config.family]],
        "model_type": config.family,
        **hf_sizes(d),
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) != 1 else config.eos_token_ids[0],
        "bos_token_id": config.bos_token_id,
    }
    if config.family != "qwen2":
        written["attention_bias"] = d.qkv_bias
    if config.family == "llama":
        written["mlp_bias"] = d.mlp_bias
    if any(window is not None for window in d.windows):
        written["use_sliding_window"] = True
        written["sliding_window"] = next(window for window in d.windows if window is not None)
        written["layer_types"] = [FULL if window is None else SLIDING for window in d.windows]
    return written
