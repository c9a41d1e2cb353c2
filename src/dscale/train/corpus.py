"""From scripts to a training corpus: tokenise, let the target talk, drop what must not be in it, pack into rows."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from dscale.config import InputError, require
from dscale.models.loader import load_target
from dscale.models.tokenizer import Tokenizer
from dscale.train.generation import Conversations, GenerationConfig, LaneGenerator, TokenScripts, generate, join
from dscale.train.prompts import HEADERS_AND_SUFFIXES, PromptMix, Script, scripts
from dscale.train.rows import PackedRows, write_rows

MARK = "USERTURN"
OVERLAP = 13  # tokens in a row that an evaluation prompt and a training prompt may not share


@dataclass(frozen=True)
class CorpusConfig:
    """What a corpus is made of. greedy: share of conversations answered at temperature 0, the rest at `temperature`."""

    greedy: float = 0.75
    temperature: float = 0.7
    shortest_turn: int = 4  # tokens
    shortest_answer: int = 8
    heldout: float = 0.02  # share of conversations kept out of training, by a hash of the prompt
    row: int = 1024  # tokens of a packed row

    def __post_init__(self) -> None:
        require(0 <= self.greedy <= 1, f"corpus.greedy: {self.greedy} must lie in [0, 1]")
        require(0 <= self.heldout < 1, f"corpus.heldout: {self.heldout} must lie in [0, 1)")
        require(self.row > 0 and self.row % 128 == 0, f"corpus.row: {self.row} must be a multiple of 128")


def turn_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template puts before and after one user turn, up to where the answer begins."""
    before, mark, after = tokenizer.render([{"role": "user", "content": MARK}]).partition(MARK)
    require(bool(mark), "chat template: it does not contain the user turn; a target with a chat template is needed")
    return before, after


def tokenise(wanted: list[Script], tokenizer: Tokenizer, config: CorpusConfig, longest: int, seed: int) -> TokenScripts:
    """Scripts as tokens; complete turns of more than `longest` tokens are dropped."""
    before, after = turn_frame(tokenizer)
    shared, rng = len(tokenizer.encode(before, add_special=False)), np.random.default_rng(seed)
    heads, tails, complete = [], [], []
    known_tails: dict[str, list[int]] = {}
    for script in wanted:
        text = script.text + script.suffix if script.complete else script.text.rstrip(" ")
        suffix = "" if script.complete else script.suffix
        head = tokenizer.encode(before + text, add_special=False)
        if len(head) > longest:
            continue
        if suffix not in known_tails:
            known_tails[suffix] = tokenizer.encode(suffix + after, add_special=False)
        heads.append(head)
        tails.append(known_tails[suffix])
        complete.append(script.complete)
    temperature = np.where(rng.random(len(heads)) < config.greedy, 0.0, config.temperature).astype(np.float32)
    return TokenScripts(*_padded(heads), *_padded(tails), np.array(complete), temperature, shared)


def _padded(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    out = np.zeros((len(sequences), int(lengths.max())), np.int32)
    for row, sequence in enumerate(sequences):
        out[row, : len(sequence)] = sequence
    return out, lengths


def ngrams(tokens: np.ndarray, size: int = OVERLAP) -> np.ndarray:
    """64-bit hashes of all runs of `size` tokens of a sequence [n] → [n - size + 1]."""
    if len(tokens) < size:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), size)
    powers = np.array([pow(0x9E3779B97F4A7C15, k, 1 << 64) for k in range(size)], np.uint64)
    with np.errstate(over="ignore"):
        return (windows * powers + powers[::-1]).sum(1, dtype=np.uint64)


class Decontamination:
    """Evaluation prompts as hashes: a turn is refused when it equals one or shares OVERLAP tokens in a row with one.

    Runs that belong to the generic instructions (prompts.HEADERS_AND_SUFFIXES) do not count.
    """

    def __init__(self, evaluation: list[str], tokenizer: Tokenizer) -> None:
        turns = [np.array(tokenizer.encode(text, add_special=False)) for text in evaluation]
        generic = [np.array(tokenizer.encode(text, add_special=False)) for text in HEADERS_AND_SUFFIXES]
        runs = np.unique(np.concatenate([ngrams(turn) for turn in turns] or [np.zeros(0, np.uint64)]))
        common = np.concatenate([ngrams(np.concatenate([g, h])) for g in generic for h in (g[:0], *generic)])
        self.runs = np.setdiff1d(runs, common)
        self.exact = {turn.tobytes() for turn in (turn.astype(np.int64) for turn in turns)}
        self.exact |= {
            np.array(tokenizer.encode(_bare(text), add_special=False), np.int64).tobytes() for text in evaluation
        }

    def refuses(self, turn: np.ndarray) -> bool:
        """True when this user turn [n] must not be trained on."""
        if turn.astype(np.int64).tobytes() in self.exact:
            return True
        hashes = ngrams(turn)
        if not len(hashes) or not len(self.runs):
            return False
        found = np.minimum(np.searchsorted(self.runs, hashes), len(self.runs) - 1)
        return bool((self.runs[found] == hashes).any())


def _bare(text: str) -> str:
    for suffix in HEADERS_AND_SUFFIXES:
        text = text.removesuffix(suffix)
    return text


def select(
    talks: Conversations, config: CorpusConfig, tail: int, refused: Decontamination | None
) -> dict[str, np.ndarray]:
    """Which conversations stay: {"train": rows, "heldout": rows}; the rest is empty, repeated or an evaluation prompt.

    tail: tokens of the template between turn and answer.
    """
    seen: set[bytes] = set()
    rows: dict[str, list[int]] = {"train": [], "heldout": []}
    for row in range(len(talks.end)):
        turn = talks.tokens[row, talks.turn[row] : max(talks.turn[row], talks.start[row] - tail)]
        key = turn.tobytes()
        short = len(turn) < config.shortest_turn or talks.end[row] - talks.start[row] < config.shortest_answer
        if short or talks.start[row] == 0 or talks.end[row] > config.row or key in seen:
            continue
        seen.add(key)
        if refused is not None and refused.refuses(turn):
            continue
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") / (1 << 32)
        rows["heldout" if draw < config.heldout else "train"].append(row)
    return {name: np.array(chosen, np.int64) for name, chosen in rows.items()}


def pack(
    talks: Conversations, rows: np.ndarray, length: int, greedy: np.ndarray, seed: int = 0, bins: int = 64
) -> PackedRows:
    """Conversations into rows of `length` tokens: best fit over `bins` open rows, in random order.

    greedy bool: which of `talks` were answered at temperature 0. The prompt's id is the script's number.
    """
    order = np.random.default_rng(seed).permutation(rows)
    room = np.full(bins, length, np.int64)
    open_rows: list[list[int]] = [[] for _ in range(bins)]
    filled: list[list[int]] = []
    for row in order:
        need = int(talks.end[row])
        left = np.where(room >= need, room, length + 1)
        at = int(left.argmin())
        if left[at] > length:
            at = int(room.argmin())
            filled.append(open_rows[at])
            open_rows[at], room[at] = [], length
        open_rows[at].append(int(row))
        room[at] -= need
    filled += [row for row in open_rows if row]
    return _lay_out(talks, filled, length, greedy)


def _lay_out(talks: Conversations, filled: list[list[int]], length: int, greedy: np.ndarray) -> PackedRows:
    ids = np.zeros((len(filled), length), np.int32)
    first = np.tile(np.arange(length, dtype=np.int32), (len(filled), 1))
    answer = np.zeros((len(filled), length), bool)
    for row, members in enumerate(filled):
        at = 0
        for member in members:
            end, start = int(talks.end[member]), int(talks.start[member])
            ids[row, at : at + end] = talks.tokens[member, :end]
            first[row, at : at + end] = at
            answer[row, at + start : at + end] = True
            at += end
    order = np.array([member for members in filled for member in members], np.int64)
    return PackedRows(ids, first, answer, talks.script[order], greedy[order])


def read_prompts(path: Path) -> list[str]:
    """First user turns of a .jsonl file of prompts ({"turns": [...]})."""
    try:
        return [json.loads(line)["turns"][0] for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path}: not a prompt file ({error}); expected lines of {{'turns': [...]}}") from None


def build(
    generator: LaneGenerator, wanted: TokenScripts, config: CorpusConfig, refused: Decontamination | None,
    deadline: float | None = None,
) -> tuple[dict[str, PackedRows], Conversations, dict[str, np.ndarray], dict[str, float]]:  # fmt: skip
    """Generate, select and pack. Returns the rows of train and heldout, the conversations, the selection and "
    "figures."""
    started = time.monotonic()
    talks = join(list(generate(generator, wanted, deadline, keep_cut=32)))
    generated = time.monotonic()
    chosen = select(talks, config, int(wanted.tail_length.min()), refused)
    greedy = wanted.temperature[talks.script] == 0
    packed = {name: pack(talks, rows, config.row, greedy) for name, rows in chosen.items() if len(rows)}
    figures = {
        "seconds_generating": generated - started,
        "seconds_packing": time.monotonic() - generated,
        "conversations_made": float(len(talks.end)),
        "answer_tokens_made": float((talks.end - talks.start).sum()),
        "conversations_train": float(len(chosen["train"])),
        "conversations_heldout": float(len(chosen["heldout"])),
        "answer_tokens_train": float(packed["train"].answer.sum()) if "train" in packed else 0.0,
        "rows_train": float(len(packed["train"].ids)) if "train" in packed else 0.0,
    }
    return packed, talks, chosen, figures


def main() -> None:
    """python -m dscale.train.corpus TARGET OUT --conversations 64 --lanes 16: a corpus on this machine."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--answer-cap", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="prompt files that must not be trained on")
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    loaded = load_target(asked.target, torch.bfloat16 if cuda else torch.float32, "cuda" if cuda else "cpu")
    config, mix = CorpusConfig(), PromptMix(seed=asked.seed)
    lane = GenerationConfig(lanes=asked.lanes, answer_cap=asked.answer_cap)
    wanted = list(itertools.islice(scripts(mix), asked.conversations))
    tokens = tokenise(wanted, loaded.tokenizer, config, lane.max_length - lane.answer_cap, asked.seed)
    refused = Decontamination([text for path in asked.exclude for text in read_prompts(path)], loaded.tokenizer)
    generator = LaneGenerator(loaded.model, lane, tokens.tail.shape[1], loaded.config.eos_token_ids[0])
    packed, _, _, figures = build(generator, tokens, config, refused)
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, rows in packed.items():
        write_rows(asked.out, f"{name}-0.safetensors", rows, name)
    manifest = {"target": asked.target, "mix": asdict(mix), "corpus": asdict(config), "generation": asdict(lane)}
    (asked.out / "manifest.json").write_text(json.dumps(manifest | {"figures": figures}, indent=2))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
