"""`dscale generate` with a schema or a regular expression, on the real model, and how it refuses them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from tests.cli.test_commands import call

pytest.importorskip("xgrammar")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}


def generate(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    fixed = ("generate", "-m", "smollm2-135m", "--policy", "off", "--dtype", "float32", "--max-tokens", "40")
    return call(monkeypatch, capsys, *fixed, *arguments)


def test_answers_follow_a_schema_file_or_a_regex(monkeypatch, capsys, tmp_path: Path, smollm2_folder: Path) -> None:
    file = tmp_path / "city.json"
    file.write_text(json.dumps(SCHEMA))
    code, out, _ = generate(monkeypatch, capsys, "--json-schema", file, "What is the capital of France?")
    assert code == 0
    jsonschema.validate(json.loads(out), SCHEMA)
    code, out, _ = generate(monkeypatch, capsys, "--regex", "(Rome|Oslo), [0-9]{2}", "Name a city and a number.")
    assert code == 0
    assert re.fullmatch("(Rome|Oslo), [0-9]{2}", out.rstrip("\n"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regex", "a("], "regex: Regex parsing error at position 3"),
        (["--json-schema", "missing.json"], "--json-schema missing.json: cannot be read"),
        (["--json-schema", "missing.json", "--regex", "a"], "either --json-schema or --regex"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(monkeypatch, capsys, smollm2_folder, arguments, message) -> None:
    code, out, err = generate(monkeypatch, capsys, *arguments, "Hello")
    assert code == 2
    assert out == ""
    assert message in " ".join(err.split())
    assert "Traceback" not in err
