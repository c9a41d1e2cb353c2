"""Feature-export fidelity (dflash.md): are the taps that the engine makes those that transformers would make?

The target reads texts the way it serves them: several requests side by side, prompts in chunks over scattered pages,
then decode steps of one row and of whole blocks whose drafts are accepted in part. What each committed token left in
the taps is compared with `hidden_states[l + 1]` of transformers in float32 at five places: where it belongs, one layer
and one token to either side. A tap is

    ALIGNED     most rows lie nearest to their own place, and close to it
    OFF_BY_ONE  most rows lie nearest to the same neighbouring place, and close to that
    UNCLEAR     neither

and the same is asked of the top-1 token of `lm_head(last hidden)`, one token to either side. Prefill and decode rows
are judged apart: an error in one of them would be thinned out by the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dscale.config import PAGE_SIZE, InputError, require, resolve_dtype
from dscale.engine.pages import pages_for
from dscale.engine.placement import default_dtype, pack_weights, resolve_device
from dscale.kernels.attention import RaggedBatch
from dscale.kernels.top_logits import argmax
from dscale.layers.attention import PagedAttention
from dscale.models.aliases import convert
from dscale.models.decoder import Target
from dscale.models.drafter_checkpoint import read_drafter
from dscale.models.drafter_config import default_taps
from dscale.models.loader import OpenedTarget, build_target, open_target
from dscale.speculation.packing import gather, pack
from dscale.speculation.state import DeviceState, Models
from dscale.train.artifacts import Report, silent

SCHEMA = "dscale.check_features/1"
ALIGNED, OFF_BY_ONE, UNCLEAR = "ALIGNED", "OFF_BY_ONE", "UNCLEAR"
PLACES = {"none": (0, 0), "layer -1": (-1, 0), "layer +1": (1, 0), "token -1": (0, -1), "token +1": (0, 1)}
PATHS = ("prefill", "decode")
NEAR = 0.99  # cosine that counts as close; bfloat16 gives 0.999
MOST = 0.9  # share of rows that counts as most
TOP1, TOP1_COARSE = 0.98, 0.85  # top-1 agreement that counts as the same, in float32 and in coarser arithmetic
TIE = 1e-3  # of a row's norm: places no further apart than this are the same place
MIN_TOKENS = 12
TEXTS = (
    "The tide comes in twice a day because the moon pulls the water on the near side of the earth more strongly than "
    "the ground beneath it, and the ground more strongly than the water on the far side. A harbour that faces a narrow "
    "bay may see the water rise by more than ten metres, while an island in the open ocean hardly notices.",
    "def moving_average(values, window):\n    total, out = 0.0, []\n    for index, value in enumerate(values):\n"
    "        total += value\n        if index >= window:\n            total -= values[index - window]\n"
    "        out.append(total / min(index + 1, window))\n    return out\n",
    "Question: A train leaves at 9:40 and travels 126 km at 84 km/h. When does it arrive?\nAnswer: 126 / 84 = 1.5, so "
    "the journey takes one hour and a half. 9:40 plus 1:30 is 11:10. The train arrives at 11:10.",
)
Text = str | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class FeatureCheck:
    """What to check. taps: () takes the drafter's, else the default rule for five draft layers.

    length: tokens read of a text; chunk: tokens of a prefill chunk; width: rows of a decode block. prefill is the share
    of a text that is its prompt.
    """

    target: str
    taps: tuple[int, ...] = ()
    drafter: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    length: int = 160
    chunk: int = 40
    width: int = 8
    prefill: float = 0.6

    def __post_init__(self) -> None:
        require(self.length >= MIN_TOKENS, f"length: {self.length} must be at least {MIN_TOKENS}")
        require(self.chunk >= 1 and self.width >= 2, f"chunk, width: {self.chunk}, {self.width}; at least 1 and 2")
        require(0 < self.prefill < 1, f"prefill: {self.prefill} must lie in (0, 1)")
        require(not (self.taps and self.drafter), "--taps: leave it out with --drafter, which has its own taps")


@dataclass(frozen=True)
class Observed:
    """What one model left of one text of S tokens: layers {l: [S, H] float32}, l = -1 the embedding; top-1 ids [S]."""

    layers: dict[int, Tensor]
    top: Tensor


def run(config: FeatureCheck, texts: Sequence[Text] = TEXTS, report: Report = silent) -> dict[str, Any]:
    """Check a target's taps and return the record (schema SCHEMA); InputError when there is nothing to compare."""
    opened = open_target(config.target)
    taps = chosen_taps(config, opened)
    ids = token_rows(config, opened, texts)
    device = resolve_device(config.device)
    dtype = default_dtype(device) if config.dtype == "auto" else resolve_dtype(config.dtype)
    report("engine", 0, 1)
    target = build_target(opened.config, opened.tensors, dtype, device)
    prompts = [max(1, int(config.prefill * len(row))) for row in ids]
    ours = engine_taps(target, ids, prompts, taps, config.chunk, config.width)
    report("engine", 1, 1)
    del target
    model, reference = reference_model(opened)
    theirs = reference_taps(model, ids, taps, device, report)
    record = judge(ours, theirs, prompts, taps, TOP1 if dtype == torch.float32 else TOP1_COARSE)
    return {
        "schema": SCHEMA,
        "target": config.target,
        "drafter": config.drafter,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "reference": reference,
        "texts": len(ids),
        "tokens": sum(len(row) for row in ids),
        **record,
    }


def chosen_taps(config: FeatureCheck, opened: OpenedTarget) -> tuple[int, ...]:
    """The taps asked for, the drafter's, or the default rule's; InputError when a layer is not there."""
    layers = opened.config.decoder.num_layers
    taps = config.taps or (read_drafter(config.drafter, None, layers).config.taps if config.drafter else ())
    taps = taps or tuple(sorted(set(default_taps(layers, min(5, max(1, layers - 3))))))
    for tap in taps:
        require(0 <= tap < layers - 1, f"taps: {tap} of {list(taps)}; allowed are layers 0 to {layers - 2}")
    require(list(taps) == sorted(set(taps)), f"taps: {list(taps)} must be ascending layer numbers")
    return taps


def token_rows(config: FeatureCheck, opened: OpenedTarget, texts: Sequence[Text]) -> list[list[int]]:
    """Token ids of the texts and of one row of random tokens, which no tokenizer can make uniform, each cut to length.
    InputError when a text is too short."""
    length = min(config.length, opened.config.decoder.max_position - config.width - 1)
    tokenizer = opened.tokenizer()
    rows = []
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text) if isinstance(text, str) else tokenizer.chat(text)
        require(len(ids) >= MIN_TOKENS, f"text {number}: has {len(ids)} tokens; at least {MIN_TOKENS} are needed")
        rows.append(list(ids)[:length])
    generator = torch.Generator().manual_seed(0)
    rows.append(torch.randint(opened.config.decoder.vocab_size, (length,), generator=generator).tolist())
    return rows


class _Lanes:
    """Requests in a paged cache, side by side: feeds rows to the target and keeps what was committed."""

    def __init__(self, target: Target, ids: list[list[int]], taps: tuple[int, ...], spare: int) -> None:
        self.target, self.ids, self.taps = target, ids, taps
        self.device = target.embedding.device
        pages = pages_for(max(map(len, ids)) + spare + 1)
        self.models = Models.allocate(target, None, pages * len(ids) + 1, pages * PAGE_SIZE)
        self.state = DeviceState(len(ids), pages, self.device)
        scattered = (torch.randperm(pages * len(ids), generator=torch.Generator().manual_seed(1)) + 1).view(
            len(ids), -1
        )
        for lane, row in enumerate(scattered.tolist()):
            self.state.set_pages(lane, row)
        self.done = [0] * len(ids)
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ids]

    @torch.inference_mode()
    def feed(self, rows: dict[int, list[int]], commit: dict[int, int]) -> None:
        """One ragged pass over tokens per lane, of which the first commit[lane] are committed."""
        lanes = sorted(rows)
        counts = torch.tensor([len(rows[lane]) for lane in lanes], device=self.device)
        widest = int(counts.max())
        block = torch.tensor([rows[lane] + [0] * (widest - len(rows[lane])) for lane in lanes], device=self.device)
        hidden, taps = self._pass(torch.tensor(lanes, device=self.device), counts, block)
        top = argmax(self.target.logits(hidden))
        for lane, part, best in zip(lanes, taps.split(counts.tolist()), top.split(counts.tolist()), strict=True):
            self.kept[lane].append((part[: commit[lane]].float().cpu(), best[: commit[lane]].cpu()))
            self.done[lane] += commit[lane]

    def _pass(self, lanes: Tensor, counts: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
        context = torch.tensor([self.done[lane] for lane in lanes.tolist()], device=self.device)
        packed = pack(counts, int(counts.sum()))
        positions = context[:, None] + torch.arange(block.shape[1], device=self.device)
        inside = positions.clamp(max=self.state.page_table.shape[1] * PAGE_SIZE - 1)  # columns past a lane's own rows
        batch = RaggedBatch(
            positions=gather(packed, positions, 0),
            slots=gather(packed, self.state.slots(lanes[:, None], inside), 0),
            page_table=self.state.page_table,
            lanes=lanes,
            starts=packed.starts,
            contexts=context,
            max_rows=block.shape[1],
            max_context=int((context + counts).max()),
        )
        attend = PagedAttention(self.target.config.decoder, self.models.target_cache, self.models.target_table, batch)
        hidden, taps = self.target(gather(packed, block, 0), attend, self.taps)
        assert taps is not None
        return hidden, taps

    def observed(self) -> list[Observed]:
        """Everything committed, per lane."""
        out = []
        for kept in self.kept:
            taps, top = torch.cat([one[0] for one in kept]), torch.cat([one[1] for one in kept])
            out.append(Observed(dict(zip(self.taps, taps.chunk(len(self.taps), dim=1), strict=True)), top))
        return out


def engine_taps(
    target: Target, ids: list[list[int]], prompts: list[int], taps: tuple[int, ...], chunk: int, width: int
) -> list[Observed]:
    """Taps of texts as serving makes them. prompts: tokens of each that are prefilled; the rest is decoded, in steps of
    one row and in blocks of which none, some or all drafts are right (wrong ones are written and overwritten)."""
    pack_weights(target, None)
    lanes = _Lanes(target, ids, taps, spare=width)
    vocabulary = target.config.decoder.vocab_size
    while short := [i for i, done in enumerate(lanes.done) if done < prompts[i]]:
        ends = {i: min(prompts[i], lanes.done[i] + chunk + i) for i in short}  # + i: chunks of several lengths
        rows = {i: ids[i][lanes.done[i] : ends[i]] for i in short}
        lanes.feed(rows, {i: len(row) for i, row in rows.items()})
    step = 0
    while left := [i for i, done in enumerate(lanes.done) if done < len(ids[i])]:
        rows, commit = {}, {}
        for i in left:
            size = (1, width, width, width)[(step + i) % 4]
            right = (1, 1, 1 + width // 3, width)[(step + i) % 4]
            right = min(right, len(ids[i]) - lanes.done[i])
            told = ids[i][lanes.done[i] : lanes.done[i] + size]
            told += [0] * (size - len(told))
            rows[i] = told[:right] + [(token + 1) % vocabulary for token in told[right:]]
            commit[i] = right
        lanes.feed(rows, commit)
        step += 1
    return lanes.observed()


def reference_model(opened: OpenedTarget) -> tuple[Any, str]:
    """transformers' model in float32 of the same checkpoint, and how it was read. A GGUF file that transformers cannot
    read itself goes through our conversion to a folder; its dequantisation is then not checked."""
    if opened.path.is_dir():
        return _reference(opened.path), "transformers"
    try:
        return _reference(opened.path.parent, gguf_file=opened.path.name), "transformers, reading the GGUF file"
    except InputError:
        pass
    with tempfile.TemporaryDirectory(prefix="dscale-") as work:
        folder = Path(work) / "converted"
        try:
            convert(opened.path, folder, "")
        except OSError as error:
            raise InputError(f"{folder}: the GGUF file cannot be converted for transformers ({error})") from None
        return _reference(folder), "transformers, reading our conversion of the GGUF file"


@torch.inference_mode()
def reference_taps(
    model: Any, ids: list[list[int]], taps: tuple[int, ...], device: str, report: Report = silent
) -> list[Observed]:
    """transformers' own hidden states in float32 around every tap: layers l - 1, l and l + 1, one text at a time."""
    model = model.to(device).eval()
    wanted = sorted({layer + side for layer in taps for side in (-1, 0, 1)})
    out = []
    for number, row in enumerate(ids):
        made = model(torch.tensor([row], device=device), output_hidden_states=True, use_cache=False)
        layers = {layer: made.hidden_states[layer + 1][0].float().cpu() for layer in wanted}
        out.append(Observed(layers, made.logits[0].argmax(-1).cpu()))
        report("transformers", number + 1, len(ids))
    return out


def _reference(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except Exception as error:  # transformers raises many kinds
        raise InputError(f"{folder}: transformers cannot read it ({' '.join(str(error).split())[:200]})") from None
    finally:
        if shown:
            logging.enable_progress_bar()


def judge(
    ours: Sequence[Observed],
    theirs: Sequence[Observed],
    prompts: Sequence[int],
    taps: tuple[int, ...],
    top1: float = TOP1,
) -> dict[str, Any]:
    """Verdicts of every tap, of the top-1 tokens and of all together.

    prompts: rows of each text that were prefilled; top1: share of equal top-1 tokens that counts as the same.
    """
    judged = []
    for tap in taps:
        paths = {path: _tap_path(ours, theirs, prompts, tap, path) for path in PATHS}
        judged.append({"tap": tap, **_worst(paths), "paths": {name: asdict(one) for name, one in paths.items()}})
    heads = {path: _head_path(ours, theirs, prompts, path, top1) for path in PATHS}
    head = {**_worst(heads), "paths": {name: asdict(one) for name, one in heads.items()}}
    verdicts = [one["verdict"] for one in [*judged, head]]
    overall = next((kind for kind in (OFF_BY_ONE, UNCLEAR) if kind in verdicts), ALIGNED)
    return {"taps": judged, "top1": head, "verdict": overall}


@dataclass(frozen=True)
class Judged:
    """One tap (or the head) on one path. place: where it lies; agreement by place; cosine (top-1: agreement) there."""

    verdict: str
    place: str
    rows: int
    score: float  # at its own place: mean cosine, or top-1 agreement
    agreement: dict[str, float]


def _worst(paths: dict[str, Judged]) -> dict[str, Any]:
    order = (OFF_BY_ONE, UNCLEAR, ALIGNED)
    worst = min(paths.values(), key=lambda one: order.index(one.verdict))
    rows = sum(one.rows for one in paths.values())
    score = sum(one.score * one.rows for one in paths.values()) / max(rows, 1)
    return {"verdict": worst.verdict, "place": worst.place, "score": score}


def _rows_of(path: str, prompt: int, length: int) -> slice:
    """Rows of one text on a path, without the first and the last, which have no neighbour on one side."""
    return slice(1, prompt) if path == "prefill" else slice(prompt, length - 1)


def _tap_path(
    ours: Sequence[Observed], theirs: Sequence[Observed], prompts: Sequence[int], tap: int, path: str
) -> Judged:
    cosines: dict[str, list[Tensor]] = {name: [] for name in PLACES}
    distances: dict[str, list[Tensor]] = {name: [] for name in PLACES}
    norms = []
    for mine, other, prompt in zip(ours, theirs, prompts, strict=True):
        at = _rows_of(path, prompt, len(mine.top))
        rows = mine.layers[tap][at].double()
        norms.append(rows.norm(dim=-1))
        for name, (layer, token) in PLACES.items():
            there = other.layers[tap + layer][at.start + token : at.stop + token].double()
            cosines[name].append(functional.cosine_similarity(rows, there, dim=-1))
            distances[name].append((rows - there).norm(dim=-1))
    distance = torch.stack([torch.cat(parts) for parts in distances.values()])
    tied = distance <= distance.min(0).values + TIE * torch.cat(norms)
    agreement = {name: float(share) for name, share in zip(PLACES, tied.double().mean(1), strict=True)}
    cosine = {name: float(torch.cat(parts).mean()) for name, parts in cosines.items()}
    verdict, place = _verdict(agreement, {name: cosine[name] >= NEAR for name in PLACES}, MOST)
    return Judged(verdict, place, distance.shape[1], cosine["none"], agreement)


def _head_path(
    ours: Sequence[Observed], theirs: Sequence[Observed], prompts: Sequence[int], path: str, most: float
) -> Judged:
    places = {name: token for name, (layer, token) in PLACES.items() if layer == 0}
    same: dict[str, list[Tensor]] = {name: [] for name in places}
    for mine, other, prompt in zip(ours, theirs, prompts, strict=True):
        at = _rows_of(path, prompt, len(mine.top))
        for name, token in places.items():
            same[name].append((mine.top[at] == other.top[at.start + token : at.stop + token]).double())
    agreement = {name: float(torch.cat(parts).mean()) for name, parts in same.items()}
    verdict, place = _verdict(agreement, dict.fromkeys(places, True), most)
    return Judged(verdict, place, len(torch.cat(same["none"])), agreement["none"], agreement)


def _verdict(agreement: dict[str, float], near: dict[str, bool], most: float) -> tuple[str, str]:
    """(verdict, place): its own place wins a tie."""
    place = max(agreement, key=lambda name: (agreement[name], name == "none"))
    if agreement[place] < most or not near[place]:
        return UNCLEAR, "none"
    return (ALIGNED if place == "none" else OFF_BY_ONE), place
