"""What a corpus is asked to answer: prompt files, data sets, and the made-up turns of prompts.py, one list each.

prompt files   JSONL; a row has `prompt` (text), `messages` (the earlier turns are context, the last user turn is
               answered) or `turns` (a list of user turns; the first is answered)
data sets      NAME[:split[:column]] through the `datasets` package: a hub name, or a local file or folder
made up        openers that the target completes, templates, reasoning-gym, or the default mix of all
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.train.prompts import OPENERS, TEMPLATES, PromptMix, Script, gym_at_hand, only, scripts

COLUMNS = ("messages", "conversations", "turns", "prompt", "question", "instruction", "text")  # tried in this order
ROW = "expected `prompt` (text), `messages` (role and content) or `turns` (texts)"
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
DATASET = re.compile(r"^(?P<name>[^:]+)(?::(?P<split>[^:\[\]]+(?:\[[^\]]*\])?)(?::(?P<column>[^:]+))?)?$")


@dataclass(frozen=True)
class Source:
    """Scripts of one source and what the manifest says of it: kind, name, count, sha256 of the file or the scripts."""

    scripts: list[Script]
    record: dict[str, Any]


@dataclass(frozen=True)
class SourceConfig:
    """What to read and how much to make up. Counts are conversations' scripts; names and paths as given."""

    prompts: tuple[str, ...] = ()
    dataset: tuple[str, ...] = ()
    synthesise: int = 0
    templates: int = 0
    gym: int = 0
    conversations: int = 0
    system: str | None = None

    def __post_init__(self) -> None:
        for name in ("synthesise", "templates", "gym", "conversations"):
            require(getattr(self, name) >= 0, f"corpus.{name}: {getattr(self, name)} must be 0 or more")

    @property
    def empty(self) -> bool:
        """True when nothing is asked for."""
        return not (self.prompts or self.dataset or self.synthesise or self.templates or self.gym or self.conversations)


def gather(config: SourceConfig, seed: int) -> list[Source]:
    """All sources in the order of the fields of SourceConfig, each deterministic in seed; InputError in one line."""
    made = [prompt_file(Path(path)) for path in config.prompts]
    made += [dataset_source(spec) for spec in config.dataset]
    if config.synthesise:
        made.append(made_up("synthesise", only(OPENERS, seed), config.synthesise))
    if config.templates:
        made.append(made_up("templates", only(TEMPLATES, seed), config.templates))
    if config.gym:
        made.append(made_up("gym", only(("gym",), seed), config.gym))
    if config.conversations:
        made.append(made_up("mix", default_mix(seed), config.conversations))
    require(
        any(source.scripts for source in made),
        "corpus: nothing to answer; give --prompts, --dataset, --synthesise, --templates, --gym or --conversations",
    )
    if config.system is None:
        return made
    return [Source([with_system(one, config.system) for one in source.scripts], source.record) for source in made]


def default_mix(seed: int) -> PromptMix:
    """The default proportions; without reasoning-gym its share goes to the others."""
    return PromptMix(seed=seed) if gym_at_hand() else PromptMix(seed=seed, gym=0.0)


def made_up(kind: str, mix: PromptMix, count: int) -> Source:
    """The first `count` scripts of a mix."""
    made = list(itertools.islice(scripts(mix), count))
    shares = {name: value for name, value in asdict(mix).items() if name != "gym_families"}
    return Source(made, {"kind": kind, "count": count, "sha256": script_hash(made), "mix": shares})


def script_hash(made: Iterable[Script]) -> str:
    """SHA-256 over scripts."""
    digest = hashlib.sha256()
    for one in made:
        digest.update(repr((one.text, one.complete, one.suffix, one.source, one.context)).encode())
    return digest.hexdigest()


def with_system(script: Script, system: str) -> Script:
    """The script under this system message, unless it has its own."""
    if script.context and script.context[0][0] == "system":
        return script
    return replace(script, context=(("system", system), *script.context))


def read_lines(path: Path) -> tuple[list[tuple[str, Any]], str]:
    """((file and line, row) of a JSONL file, SHA-256 of the file); InputError names file and line."""
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((f"{path} line {number}", json.loads(line)))
            except ValueError:
                raise InputError(f"{path} line {number}: not JSON; {ROW}") from None
    require(bool(rows), f"{path}: holds no rows; {ROW}")
    return rows, hashlib.sha256(data).hexdigest()


def prompt_file(path: Path) -> Source:
    """Scripts of a JSONL file."""
    rows, digest = read_lines(path)
    made = [script_of(where, row, path.name) for where, row in rows]
    return Source(made, {"kind": "prompts", "name": path.name, "count": len(made), "sha256": digest})


def script_of(where: str, row: Any, source: str) -> Script:
    """The script of one row."""
    require(isinstance(row, dict), f"{where}: not an object; {ROW}")
    given = [name for name in ("prompt", "messages", "turns") if row.get(name) is not None]
    require(len(given) == 1, f"{where}: has {' and '.join(given) or 'none of its columns'}; {ROW}")
    return script_from(where, row[given[0]], given[0], source)


def script_from(where: str, value: Any, column: str, source: str) -> Script:
    """The script of a text, a list of user turns or a list of messages."""
    if isinstance(value, str):
        require(bool(value.strip()), f"{where}: `{column}` is empty")
        return Script(value, True, "", source)
    require(isinstance(value, list) and bool(value), f"{where}: `{column}` is not text or a filled list; {ROW}")
    if all(isinstance(one, str) for one in value):
        require(bool(value[0].strip()), f"{where}: the first of `{column}` is empty")
        return Script(value[0], True, "", source)
    spoken = [message_of(where, column, one) for one in value]
    last = max((at for at, (role, _) in enumerate(spoken) if role == "user"), default=-1)
    require(last >= 0, f"{where}: `{column}` has no user turn to answer")
    require(bool(spoken[last][1].strip()), f"{where}: the last user turn of `{column}` is empty")
    return Script(spoken[last][1], True, "", source, tuple(spoken[:last]))


def message_of(where: str, column: str, message: Any) -> tuple[str, str]:
    """(role, content) of {"role", "content"} or {"from", "value"}."""
    if isinstance(message, dict):
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return SPEAKERS.get(role, role), content
    raise InputError(f"{where}: a message of `{column}` has no `role` and `content` as texts")


def user_texts(path: Path) -> tuple[list[str], str]:
    """Every user turn of a prompt file, and the file's SHA-256: what must not be trained on."""
    rows, digest = read_lines(path)
    texts: list[str] = []
    for where, row in rows:
        if isinstance(row, dict) and isinstance(row.get("turns"), list):
            texts += [str(turn) for turn in row["turns"]]
            continue
        script = script_of(where, row, path.name)
        texts += [content for role, content in script.context if role == "user"] + [script.text]
    return texts, digest


def dataset_source(spec: str) -> Source:
    """Scripts of a data set named NAME[:split[:column]]; split is `train` unless given."""
    match = DATASET.match(spec)
    require(match is not None, f"--dataset {spec}: expected NAME[:split[:column]]")
    assert match is not None
    name, split, column = match["name"], match["split"] or "train", match["column"]
    rows = open_dataset(name, split, spec)
    known = list(rows.column_names)
    column = column or next((one for one in COLUMNS if one in known), None)
    require(column in known, f"--dataset {spec}: no column {column or 'of prompts'}; it has {', '.join(known)}")
    label = Path(name).name
    made = [
        script_from(f"--dataset {spec} row {number}", value, str(column), label)
        for number, value in enumerate(rows[column])
    ]
    record = {"kind": "dataset", "name": label, "split": split, "column": column}
    return Source(made, record | {"count": len(made), "sha256": script_hash(made)})


def open_dataset(name: str, split: str, spec: str) -> Any:
    """A `datasets.Dataset`: of a local file, of a folder (saved by `save_to_disk`, or of files), or of the hub."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"--dataset {spec}: needs the datasets package; pip install datasets") from None
    path = Path(name)
    try:
        if path.is_file():
            require(
                path.suffix in FORMATS, f"--dataset {spec}: {path.suffix!r} files; allowed are {', '.join(FORMATS)}"
            )
            return datasets.load_dataset(FORMATS[path.suffix], data_files=str(path), split=split)
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(path))
            return saved[split] if isinstance(saved, dict) else saved
        return datasets.load_dataset(str(path) if path.exists() else name, split=split)
    except InputError:
        raise
    except Exception as error:  # network, parsing and lookup errors of several libraries
        raise InputError(f"--dataset {spec}: cannot be read ({' '.join(str(error).split())[:200]})") from None
