"""transformers' own `generate` as an arm: c prompts at a time in one left-padded batch, greedy; at c = 1 also with its
prompt lookup, which is assisted generation that needs no second model.

A batch ends with its longest answer, and the next one starts then: that is what `generate` offers. An answer counts the
tokens up to its end token, and ends with its batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from dscale.config import require, resolve_dtype
from dscale.evaluate.bench_record import RequestRow
from dscale.evaluate.load import Measured, Progress, Watcher
from dscale.evaluate.manifest import BenchRequest, Manifest, token_ids
from dscale.models.aliases import ALIASES, alias_folder
from dscale.models.tokenizer import Tokenizer

SETTINGS = ("model", "dtype", "device", "prompt_lookup_num_tokens", "attn_implementation")


def check_peer_settings(settings: dict[str, Any], arm: str) -> None:
    """InputError for a setting that this arm does not know."""
    for name in settings:
        require(name in SETTINGS, f"arm {arm}: setting {name!r} is not known; allowed are {', '.join(SETTINGS)}")
    require("model" in settings, f"arm {arm}: no model; give one (an alias, a folder, a hub id)")


class Transformers:
    """A transformers model that answers a manifest, c prompts a batch."""

    def __init__(self, settings: dict[str, Any], manifest: Manifest, concurrency: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.manifest, self.concurrency = manifest, concurrency
        self.lookup = settings.get("prompt_lookup_num_tokens")
        require(self.lookup is None or concurrency == 1, "prompt_lookup_num_tokens: works at concurrency 1 only")
        require(manifest.temperature == 0, "transformers arms are greedy; give temperature 0")
        name = settings["model"]
        path = str(alias_folder(name)) if name in ALIASES else name
        options = {"dtype": resolve_dtype(settings.get("dtype", "float32"))}
        if "attn_implementation" in settings:
            options["attn_implementation"] = settings["attn_implementation"]
        self.model = AutoModelForCausalLM.from_pretrained(path, **options).to(settings.get("device", "cpu")).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        own = self.tokenizer.eos_token_id
        self.ends |= {own} if own is not None else set()
        self.calls = 0
        self.model.register_forward_hook(self._count)
        every = (*manifest.warmup, *manifest.requests)
        ids = token_ids(every, Tokenizer(self.tokenizer))
        self._ids = dict(zip((one.id for one in every), ids, strict=True))

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def about(self) -> dict[str, Any]:
        """What the record says of this arm beyond its settings."""
        import transformers

        attention = self.model.config._attn_implementation
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"dtype": dtype, "attention": attention, "transformers": transformers.__version__}

    def warm_up(self) -> None:
        """Answer the warm-up requests, not measured."""
        self._serve(self.manifest.warmup, Watcher())

    def run(self, rate: float | None, seed: int, watcher: Watcher) -> tuple[Measured, dict[str, Any]]:
        """Rows of the measured requests; counters of prompt lookup, else none."""
        require(rate is None, "rate: transformers arms have a closed loop only")
        rows = self._serve(self.manifest.requests, watcher)
        counters: dict[str, Any] = {}
        if self.concurrency == 1:
            steps, tokens = sum(row.steps or 0 for row in rows), sum(row.output_tokens for row in rows)
            counters = {"steps": steps, "tokens": tokens, "accepted": max(tokens - steps, 0)}
        return Measured(tuple(rows), max(row.ended_s for row in rows)), counters

    def _serve(self, asked: Sequence[BenchRequest], watcher: Watcher) -> list[RequestRow]:
        progress, rows = Progress(len(asked)), []
        for start in range(0, len(asked), self.concurrency):
            batch = asked[start : start + self.concurrency]
            progress.running = len(batch)
            watcher.changed(progress)
            sent, calls = time.perf_counter() - progress.began, self.calls
            answers = self._generate(batch)
            ended = time.perf_counter() - progress.began
            steps = self.calls - calls if self.concurrency == 1 else None
            rows += [self._row(*pair, sent, ended, steps) for pair in zip(batch, answers, strict=True)]
            progress.running, progress.done = 0, len(rows)
            progress.tokens = sum(row.output_tokens for row in rows)
            watcher.changed(progress)
        return rows

    def _row(
        self, one: BenchRequest, answer: list[int], sent: float, ended: float, steps: int | None
    ) -> RequestRow:  # fmt: skip
        prompt = len(self._ids[one.id])
        accepted = None if steps is None or self.lookup is None else max(len(answer) - steps, 0)
        return RequestRow(one.id, one.prompt_id, one.workload, sent, None, ended, prompt, len(answer), steps, accepted)

    @torch.inference_mode()
    def _generate(self, batch: Sequence[BenchRequest]) -> list[list[int]]:
        """Answers as token ids, up to and with the end token, at most each request's cap."""
        ids = [self._ids[one.id] for one in batch]
        longest = max(map(len, ids))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else min(self.ends, default=0)
        tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in ids], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=self.model.device)
        options: dict[str, Any] = {"prompt_lookup_num_tokens": self.lookup} if self.lookup else {}
        made = self.model.generate(
            tokens, attention_mask=mask, max_new_tokens=max(one.max_tokens for one in batch), do_sample=False,
            pad_token_id=pad, eos_token_id=sorted(self.ends) or None, **options,
        )  # fmt: skip
        return [self._clipped(row[longest:].tolist(), one.max_tokens) for row, one in zip(made, batch, strict=True)]

    def _clipped(self, answer: list[int], cap: int) -> list[int]:
        end = next((at + 1 for at, token in enumerate(answer) if token in self.ends), len(answer))
        return answer[: min(end, cap)]

    def close(self) -> None:
        """Nothing is left to stop."""
