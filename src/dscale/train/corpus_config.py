"""What a corpus is made of, and how: every setting of `dscale corpus`, and its presets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dscale.config import require
from dscale.train.generation import GenerationConfig
from dscale.train.scripts import Draws
from dscale.train.sources import SourceConfig

GENERATORS = ("auto", "engine", "lanes")


@dataclass(frozen=True)
class CorpusConfig:
    """What a corpus is made of and how. Lengths in tokens, shares in [0, 1].

    answers: per prompt, at most one of them greedy. greedy: share of answers at temperature 0, the others at
    `temperature`. longest_prompt: template, context and user turn. keep_unfinished: answers cut at answer_cap stay.
    near: Jaccard index at which a prompt repeats another; 1 keeps all but equal ones. part: scripts of one raw file.
    """

    sources: SourceConfig = field(default_factory=SourceConfig)
    exclude: tuple[str, ...] = ()  # prompt files that must not be trained on
    thinking: bool = False
    answers: int = 1
    greedy: float = 0.75
    temperature: float = 0.7
    turn_temperature: float = 1.0
    min_p: float = 0.02
    turn_cap: int = 160
    answer_cap: int = 384
    shortest_turn: int = 4
    longest_prompt: int = 288
    shortest_answer: int = 8
    keep_unfinished: bool = True
    near: float = 0.8
    validation: float = 0.02
    holdout: float = 0.02
    row: int = 1024
    seed: int = 0
    generator: str = "auto"
    drafter: str | None = None
    policy: str = "full"
    lanes: int = 4096
    requests: int | None = None  # None: 32, on CUDA 256
    part: int | None = None  # None: 256, on CUDA 32768
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("greedy", "validation", "holdout"):
            require(0 <= getattr(self, name) <= 1, f"corpus.{name}: {getattr(self, name)} must lie in [0, 1]")
        require(self.validation + self.holdout < 1, "corpus.validation, corpus.holdout: they leave nothing to train on")
        require(0 < self.near <= 1, f"corpus.near: {self.near} must lie in (0, 1]")
        require(self.temperature > 0, f"corpus.temperature: {self.temperature} must be positive; see corpus.greedy")
        require(self.row > 0 and self.row % 128 == 0, f"corpus.row: {self.row} must be a multiple of 128")
        for name in ("answers", "part", "shortest_turn", "shortest_answer", "longest_prompt", "answer_cap"):
            value = getattr(self, name)
            require(value is None or value > 0, f"corpus.{name}: {value} must be positive")
        longest = self.longest_prompt + self.answer_cap
        require(longest <= self.row, f"corpus.row: {self.row} is under longest_prompt + answer_cap = {longest}")
        require(
            self.generator in GENERATORS, f"corpus.generator: {self.generator!r}; allowed are {', '.join(GENERATORS)}"
        )
        self.generation(1 << 20)

    def generation(self, limit: int) -> GenerationConfig:
        """The generators' part, for a target with a context of `limit` tokens."""
        return GenerationConfig(
            max_length=min(self.longest_prompt + self.answer_cap, limit), turn_cap=self.turn_cap,
            answer_cap=self.answer_cap, turn_temperature=self.turn_temperature, min_p=self.min_p, lanes=self.lanes,
            requests=32 if self.requests is None else self.requests, policy=self.policy,
        )  # fmt: skip

    def sized(self, cuda: bool) -> CorpusConfig:
        """With the sizes that are left to the device filled in."""
        requests = self.requests or (256 if cuda else 32)
        return replace(self, requests=requests, part=self.part or (32768 if cuda else 256))

    @property
    def draws(self) -> Draws:
        """Seeds and temperatures."""
        return Draws(self.seed, self.answers, self.greedy, self.temperature)


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "conversations": 24, "turn_cap": 16, "answer_cap": 24, "longest_prompt": 200, "row": 256, "shortest_turn": 2,
        "shortest_answer": 2, "validation": 0.2, "holdout": 0.25, "part": 12,
    },
    "full": {"conversations": 250_000},
}  # fmt: skip
