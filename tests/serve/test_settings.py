"""Where settings come from and which source wins."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dscale.config import InputError
from dscale.serve.settings import ServerSettings, kinds, resolve_settings


def written(tmp_path, text: str):
    path = tmp_path / "server.toml"
    path.write_text(text)
    return path


def test_flag_over_environment_over_file_over_default(tmp_path):
    file = written(tmp_path, 'model = "from-file"\nport = 1\nslots = 4\nmax-queue = 7\napi_key = "file-key-1"\n')
    environment = {"DSCALE_PORT": "2", "DSCALE_SLOTS": "5.5", "DSCALE_API_KEY": "first-key, second-key"}
    got = resolve_settings({"port": 3, "model": None}, environment, file)
    assert (got.model, got.port, got.slots, got.max_queue, got.host) == ("from-file", 3, 5.5, 7, "127.0.0.1")
    assert got.api_key == ("first-key", "second-key")
    assert resolve_settings({}, {**environment, "DSCALE_CONFIG": str(file)}, None).port == 2


@pytest.mark.parametrize("one", fields(ServerSettings), ids=lambda one: one.name)
def test_every_setting_can_come_from_file_and_environment(tmp_path, one):
    kind = kinds()[one.name]
    values = {"policy": "full", "dtype": "float32", "layout": "1+N", "cors_origin": ("http://a.example",)}
    values |= {"draft_weights": "fp8", "kv_cache_dtype": "fp8", "draft_kv_cache_dtype": "fp8_e4m3"}
    values["graph_kinds"] = "greedy"
    samples = {str: "x", int: 1234, float: 0.25, bool: True, tuple: ("some-text-1", "other-text")}
    value = values.get(one.name, {"slots": 2.5}.get(one.name, samples[kind]))
    text = {str: lambda: f'"{value}"', bool: lambda: str(value).lower(), tuple: lambda: str(list(value))}
    line = f"{one.name.replace('_', '-')} = {text.get(kind, lambda: value)()}\n"
    model = "" if one.name == "model" else 'model = "m"\n'
    assert getattr(resolve_settings({}, {}, written(tmp_path, model + line)), one.name) == value
    environment = {"DSCALE_MODEL": "m", f"DSCALE_{one.name.upper()}": ",".join(value) if kind is tuple else str(value)}
    assert getattr(resolve_settings({}, environment), one.name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port =", "not TOML"),
        ("prot = 1", "unknown key 'prot'; did you mean port?"),
        ("port = '1'", "port: '1' is not a whole number"),
        ("port = true", "port: True is not a whole number"),
        ("slots = 'many'", "slots: 'many' is not a number"),
        ("log_prompts = 1", "log_prompts: 1 is not true or false"),
        ("api_key = 12345678901", "must be text or a list of texts"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        resolve_settings({"model": "m"}, {}, written(tmp_path, text))
    with pytest.raises(InputError, match="cannot be read"):
        resolve_settings({"model": "m"}, {}, tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "MODEL: missing"),
        ({"model": ""}, "model: empty"),
        ({"model": "m", "port": 70000}, "port: 70000"),
        ({"model": "m", "max_queue": -1}, "max_queue: -1"),
        ({"model": "m", "request_timeout": float("nan")}, "request_timeout: nan"),
        ({"model": "m", "drain_seconds": -1.0}, "drain_seconds: -1.0"),
        ({"model": "m", "api_key": ["short"]}, "api_key: each must have at least 8"),
        ({"model": "m", "cors_origin": ["a.example"]}, "cors_origin: 'a.example'"),
        ({"model": "m", "policy": "best"}, "policy: 'best'"),
        ({"model": "m", "max_requests": 0}, "max_requests: 0"),
        ({"model": "m", "memory_fraction": 2.0}, "memory_fraction: 2.0"),
        ({"model": "m", "max_per_client": 0}, "max_per_client: 0"),
        ({"model": "m", "graph_kinds": "all"}, "graph_kinds: 'all'; allowed are greedy, sampled, both"),
        ({"model": "m", "draft_weights": "int4"}, "draft_weights: 'int4'; allowed are auto, fp8"),
        ({"model": "m", "kv_cache_dtype": "int8"}, "kv_cache_dtype: 'int8'; allowed are auto, fp8, fp8_e4m3"),
        (
            {"model": "m", "refit": True, "tensor_parallel": 2},
            "^refit: not with tensor_parallel 2: ranks cannot record",
        ),
    ],
)
def test_settings_that_make_no_sense(flags, message):
    with pytest.raises(InputError, match=message):
        resolve_settings(flags, {})


def test_keys_are_never_shown():
    settings = ServerSettings("m", api_key=("top-secret-key",))
    assert "top-secret" not in repr(settings)
    assert settings.shown()["api_key"] == 1
    with pytest.raises(InputError) as caught:
        resolve_settings({"model": "m"}, {"DSCALE_API_KEY": "secret"})
    assert "secret" not in str(caught.value).replace("api_key", "")
