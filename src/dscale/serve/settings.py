"""Everything `dscale serve` can be told, from flags, DSCALE_* variables, a TOML file and defaults, in this order."""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dscale.config import EngineConfig, InputError, SpeculationConfig, require
from dscale.serve.messages import RefitOptions

SECRET = ("api_key",)
ENGINE = (
    "dtype", "device", "max_requests", "max_model_len", "max_prefill_tokens", "num_pages", "memory_fraction",
    "prefix_caching", "tensor_parallel", "deterministic", "draft_weights", "kv_cache_dtype", "draft_kv_cache_dtype",
    "graph_kinds",
)  # fmt: skip
SPECULATION = ("drafter", "predictor", "policy", "width", "slots", "layout")


@dataclass(frozen=True)
class ServerSettings:
    """What is served, and how. Names are those of the flags with _ for -.

    max_queue: sequences that may wait beyond the max_requests that run. max_body: bytes. Times in seconds.
    max_per_client: open requests of one API key (without keys: of one address). seed None: a new one at every start.
    stream_interval: between two events of a stream, at least; 0 makes one of every step, None spaces the events of all
    streams (engine_process.py).
    stall_seconds: for which the engine may be silent while requests wait before the server calls itself unhealthy.
    refit: fit predictor and calibration to live traffic; refit_min_records new records and refit_every seconds between
    two fits, refit_keep records in memory, refit_dir keeps the last accepted predictor.
    """

    model: str
    drafter: str = "auto"
    predictor: str = "auto"
    policy: str = "auto"
    width: int | None = None
    slots: float = 8.0
    layout: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_requests: int = 16
    max_model_len: int | None = None
    max_prefill_tokens: int = 512
    num_pages: int | None = None
    memory_fraction: float = 0.3
    prefix_caching: bool = True
    tensor_parallel: int = 1
    deterministic: bool = False
    draft_weights: str = "auto"
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    graph_kinds: str = "both"
    seed: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 256
    max_per_client: int | None = None
    max_body: int = 4 << 20
    body_timeout: float = 30.0
    request_timeout: float = 600.0
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    stream_interval: float | None = None
    cors_origin: tuple[str, ...] = ()
    log_prompts: bool = False
    refit: bool = False
    refit_every: float = 300.0
    refit_min_records: int = 2000
    refit_keep: int = 50_000
    refit_dir: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.model), "model: empty; give a folder, hub id, GGUF file, alias or bundle")
        require(0 <= self.port <= 65535, f"port: {self.port} must lie in [0, 65535]")
        require(self.max_queue >= 0, f"max_queue: {self.max_queue} must be 0 or positive")
        require(self.max_body >= 1024, f"max_body: {self.max_body} bytes must be at least 1024")
        for name in ("request_timeout", "body_timeout", "stall_seconds", "refit_every"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"{name}: {value} must be positive")
        good = math.isfinite(self.drain_seconds) and self.drain_seconds >= 0
        require(good, f"drain_seconds: {self.drain_seconds} must be 0 or positive")
        interval = self.stream_interval
        good = interval is None or (math.isfinite(interval) and interval >= 0)
        require(good, f"stream_interval: {interval} must be 0 or positive")
        most = self.max_per_client
        require(most is None or most >= 1, f"max_per_client: {most} must be at least 1")
        least, keep = self.refit_min_records, self.refit_keep
        require(least >= 100, f"refit_min_records: {least} must be at least 100")
        require(keep >= 100, f"refit_keep: {keep} must be at least 100")
        require(not self.refit or least <= keep, f"refit_min_records: {least} must be at most refit_keep, {keep}")
        size = self.tensor_parallel
        require(
            not self.refit or size <= 1, f"refit: not with tensor_parallel {size}: ranks cannot record; give up one"
        )
        good = all(len(key) >= 8 and key.isascii() and key.isprintable() for key in self.api_key)
        require(good, "api_key: each must have at least 8 printable ASCII characters")
        require(all(self.served_model_name), "served_model_name: empty; give a name")
        for origin in self.cors_origin:
            known = origin == "*" or origin.startswith(("http://", "https://"))
            require(known, f"cors_origin: {origin!r} must be * or begin with http:// or https://")
        self.speculation, self.engine  # noqa: B018 – both check themselves

    @property
    def speculation(self) -> SpeculationConfig:
        """Policy, width, slots and layout, checked."""
        return SpeculationConfig(self.policy, self.width, self.slots, self.layout)

    @property
    def engine(self) -> EngineConfig:
        """The engine's configuration, checked."""
        return EngineConfig(**{name: getattr(self, name) for name in ENGINE})

    def llm_options(self) -> dict[str, Any]:
        """Arguments of dscale.LLM after the model."""
        return {name: getattr(self, name) for name in (*SPECULATION, *ENGINE)}

    @property
    def refits(self) -> RefitOptions | None:
        """When to refit, or None."""
        known = RefitOptions(self.refit_every, self.refit_min_records, self.refit_keep, self.refit_dir)
        return known if self.refit else None

    @property
    def capacity(self) -> int:
        """Sequences that may be open at once."""
        return self.max_requests + self.max_queue

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the model answers; the first one is shown."""
        return self.served_model_name or (self.model,)

    def shown(self) -> dict[str, Any]:
        """All settings for a log, keys only counted."""
        known = asdict(self)
        return known | {name: len(known[name]) for name in SECRET}


def resolve_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ, file: Path | None = None
) -> ServerSettings:
    """Settings from flags (None: not given), environment and file; InputError names the source of what is wrong."""
    path = file or (Path(environment["DSCALE_CONFIG"]) if environment.get("DSCALE_CONFIG") else None)
    values = {} if path is None else read_file(path)
    values |= read_environment(environment)
    values |= {name: value for name, value in flags.items() if value is not None}
    require(
        "model" in values, "MODEL: missing; give it as an argument, as DSCALE_MODEL or as model in the --config file"
    )
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return ServerSettings(**values)


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings from DSCALE_NAME variables; lists are parted by commas, empty ones are not set."""
    found: dict[str, Any] = {}
    for name, kind in kinds().items():
        text = environment.get(f"DSCALE_{name.upper()}", "")
        if text:
            found[name] = _from_text(f"DSCALE_{name.upper()}", text, kind, name in SECRET)
    return found


def read_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML file whose keys are the flags' names, with - or _."""
    import tomllib

    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config {path}: not TOML ({error})") from None
    known, found = kinds(), {}
    for given, value in record.items():
        name = given.replace("-", "_")
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        require(name in known, f"--config {path}: unknown key {given!r}; {hint}")
        found[name] = _from_toml(f"--config {path}: {given}", value, known[name], name in SECRET)
    return found


def kinds() -> dict[str, type]:
    """Type of every setting: str, int, float, bool or tuple (of texts)."""
    hints = typing.get_type_hints(ServerSettings)
    return {one.name: _kind(hints[one.name]) for one in fields(ServerSettings)}


def _kind(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    return typing.get_origin(hint) or hint


def _from_text(where: str, text: str, kind: type, secret: bool) -> Any:
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        require(text.lower() in words, f"{where}: {text!r} is neither true nor false")
        return words[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{where}: {'the value' if secret else repr(text)} is not {_named(kind)}") from None


def _from_toml(where: str, value: Any, kind: type, secret: bool) -> Any:
    if kind is tuple:
        value = [value] if isinstance(value, str) else value
        good = isinstance(value, list) and all(isinstance(one, str) for one in value)
        require(good, f"{where}: must be text or a list of texts")
        return tuple(value)
    good = isinstance(value, kind) and not (kind is not bool and isinstance(value, bool))
    good = good or (kind is float and isinstance(value, int) and not isinstance(value, bool))
    require(good, f"{where}: {'the value' if secret else repr(value)} is not {_named(kind)}")
    return kind(value)


def _named(kind: type) -> str:
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
