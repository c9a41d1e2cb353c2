"""Would this server start? Everything that can be told from settings and configs, without reading weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.engine.crew import devices_for
from dscale.engine.placement import resolve_device
from dscale.layers.ranks import Ranks
from dscale.models.drafter_checkpoint import drafter_hash
from dscale.models.inspection import inspect_checkpoint
from dscale.models.loader import OpenedTarget, open_target, own_drafter, own_predictor
from dscale.models.shares import Share
from dscale.serve.settings import ServerSettings
from dscale.speculation.predictor import read_config


def check_settings(settings: ServerSettings) -> dict[str, Any]:
    """What would be served; InputError in one line for the first thing that would not work."""
    device, size = resolve_device(settings.device), settings.tensor_parallel
    devices_for(size, device)
    opened = open_target(settings.model)
    Share.must(opened.config.decoder, Ranks(0, size), settings.model)
    source = str(opened.bundle.target) if opened.bundle else settings.model
    _sound(settings.model, inspect_checkpoint(source))
    limit = opened.config.decoder.max_position
    length = settings.max_model_len or limit
    require(length <= limit, f"max_model_len: {length} is over the model's context length {limit}")
    drafter = _drafter(settings, opened, source)
    predictor = _predictor(settings, opened, drafter)
    if settings.refit:
        drafts = drafter is not None and settings.policy != "off" and settings.width != 1
        require(drafts, "refit: nothing is drafted, so there is nothing to refit; give --drafter and another policy")
    return {
        "model": settings.model,
        "family": opened.config.family,
        "context_length": length,
        "chat": opened.tokenizer().has_chat_template,
        "drafter": None if drafter is None else str(drafter),
        "predictor": None if predictor is None else str(predictor),
        "policy": settings.policy if drafter is not None else "off",
        "refit": settings.refit,
        "address": f"{settings.host}:{settings.port}",
        "api_keys": len(settings.api_key),
    }


def _sound(name: str, record: dict[str, Any]) -> dict[str, Any]:
    if record.get("problems"):
        raise InputError(f"{name}: {record['problems'][0]}")
    return record


def _drafter(settings: ServerSettings, opened: OpenedTarget, target: str) -> str | Path | None:
    if settings.policy == "off":
        return None
    own = own_drafter(opened.bundle, opened.alias)
    drafter = own if settings.drafter == "auto" else None if settings.drafter == "none" else settings.drafter
    if drafter is None:
        require(settings.policy == "auto", f"policy: {settings.policy!r} needs a drafter; give one with --drafter")
        return None
    record = _sound(str(drafter), inspect_checkpoint(str(drafter), target, settings.layout))
    require(record["kind"] == "drafter", f"drafter: {drafter} is a {record['kind']}")
    return drafter


def _predictor(settings: ServerSettings, opened: OpenedTarget, drafter: str | Path | None) -> str | Path | None:
    if drafter is None or settings.predictor == "none":
        return None
    bound = drafter_hash(drafter)
    if settings.predictor == "auto":
        own = own_predictor(opened.bundle, opened.alias)
        found = own if own is not None and read_config(own).drafter_hash == bound else None
        needs = settings.policy.startswith("dvl") and found is None
        require(not needs, f"policy: {settings.policy!r} needs a predictor; give one with --predictor")
        return found
    config = read_config(Path(settings.predictor))
    require(config.drafter_hash == bound, f"predictor: {settings.predictor} was fitted for another drafter")
    return settings.predictor
