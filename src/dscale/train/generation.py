"""Conversations written by the target: what comes out, and the engine as the generator that serves every target.

Two generators make the same text from the same scripts (token for token in float32): EngineGenerator here, on any
device and for any family, and LaneGenerator (lanes.py), thousands of lanes in lockstep on CUDA. Both sample with the
noise of speculation/noise.py, keyed by (seed of the script, position, token id).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from dscale.config import SamplingParams, require
from dscale.engine.llm import LLM
from dscale.engine.outputs import RequestOutput
from dscale.models.loader import LoadedTarget
from dscale.train.dedup import Turns
from dscale.train.scripts import TokenScripts

Progress = Callable[[int], None]  # answer tokens that were just finished


@dataclass(frozen=True)
class GenerationConfig:
    """How conversations are decoded. max_length, turn_cap and answer_cap in tokens; min_p cuts unlikely tokens off.

    lanes: of LaneGenerator, requests: of the engine, conversations at a time. policy: of the engine with a drafter.
    """

    max_length: int = 672
    turn_cap: int = 160
    answer_cap: int = 384
    turn_temperature: float = 1.0
    min_p: float = 0.02
    lanes: int = 64
    requests: int = 32
    policy: str = "full"
    collect_every: int = 24  # steps between two looks at which lanes are done

    def __post_init__(self) -> None:
        for name in ("lanes", "requests", "max_length", "turn_cap", "answer_cap", "collect_every"):
            require(getattr(self, name) > 0, f"generation.{name}: {getattr(self, name)} must be positive")
        require(0 < self.min_p < 1, f"generation.min_p: {self.min_p} must lie in (0, 1)")
        require(
            self.turn_temperature >= 0, f"generation.turn_temperature: {self.turn_temperature} must not be negative"
        )


@dataclass(frozen=True)
class Conversations:
    """N finished conversations in order of (script, answer), one after another.

    tokens int32 [T]; conversation i is tokens[bounds[i] : bounds[i + 1]], bounds int64 [N + 1]. Within it, turn …
    turn_end - 1 is what the user said (from the first user turn to the last, template between them included) and
    start … the answer, its end token included where the target gave one; int32 [N]. script int64, answer int32,
    temperature float32, ended bool (False: cut at the cap), all [N].
    """

    tokens: np.ndarray
    bounds: np.ndarray
    turn: np.ndarray
    turn_end: np.ndarray
    start: np.ndarray
    script: np.ndarray
    answer: np.ndarray
    temperature: np.ndarray
    ended: np.ndarray

    def __len__(self) -> int:
        return len(self.turn)

    @property
    def end(self) -> np.ndarray:
        """Tokens of each conversation."""
        return np.diff(self.bounds)

    @property
    def turns(self) -> Turns:
        """What the user said in each."""
        lengths = (self.turn_end - self.turn).astype(np.int64)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        index = np.repeat(self.bounds[:-1] + self.turn - bounds[:-1], lengths) + np.arange(bounds[-1])
        return Turns(self.tokens[index], bounds)

    def arrays(self) -> dict[str, np.ndarray]:
        """By name, flags as bytes."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return held | {"ended": self.ended.astype(np.uint8)}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray]) -> Conversations:
        """What `arrays` gave."""
        return cls(**(arrays | {"ended": arrays["ended"].astype(bool)}))


def assemble(
    scripts: TokenScripts, texts: Sequence[np.ndarray], start: np.ndarray, ends: Sequence[int]
) -> Conversations:
    """Conversations out of whole token sequences, one per row of scripts, and where their answers start [N]."""
    joined = Turns.of(list(texts))
    last = joined.tokens[joined.bounds[1:] - 1]
    return Conversations(
        tokens=joined.tokens,
        bounds=joined.bounds,
        turn=scripts.turn,
        turn_end=(start - scripts.closing).astype(np.int32),
        start=start.astype(np.int32),
        script=scripts.script,
        answer=scripts.answer,
        temperature=scripts.temperature,
        ended=np.isin(last, list(ends)),
    )


def join(parts: Sequence[Conversations]) -> Conversations:
    """One Conversations out of many, in order."""
    held = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(Conversations)
        if field.name != "bounds"
    }
    lengths = np.concatenate([part.end for part in parts])
    return Conversations(bounds=np.concatenate([[0], np.cumsum(lengths)]), **held)


class Generator(Protocol):
    """Answers scripts."""

    def answer(self, scripts: TokenScripts, progress: Progress) -> Conversations:
        """All conversations of the scripts, in their order."""
        ...


class EngineGenerator:
    """The serving engine, target alone or with a drafter: turns are sampled first, then everything is answered."""

    def __init__(
        self, loaded: LoadedTarget, config: GenerationConfig, ends: tuple[int, ...], drafter: str | None = None
    ) -> None:
        policy = "off" if drafter is None else config.policy
        self.config, self.ends = config, ends
        self.llm = LLM(
            loaded, drafter=drafter, predictor="auto" if drafter else None, policy=policy, device=_device_of(loaded),
            dtype=str(loaded.model.embedding.dtype).removeprefix("torch."), max_requests=config.requests,
            max_model_len=config.max_length, max_prefill_tokens=1024,
            prefix_caching=False,  # so that a part comes out the same whatever was made before it
        )  # fmt: skip
        self.llm.engine.tokenizer = None  # nothing here is read as text

    def answer(self, scripts: TokenScripts, progress: Progress) -> Conversations:
        """See Generator."""
        turns = self._turns(scripts)
        prompts = []
        for row in range(len(scripts)):
            head = scripts.head[row, : scripts.head_length[row]].tolist()
            tail = scripts.tail[row, : scripts.tail_length[row]].tolist()
            prompts.append(head + turns.get(int(scripts.script[row]), []) + tail)
        wanted = zip(scripts.temperature.tolist(), scripts.seed.tolist(), strict=True)
        params = [self._params(warmth, seed, self.config.answer_cap) for warmth, seed in wanted]

        def finished(index: int, output: RequestOutput) -> None:
            progress(len(output.outputs[0].token_ids))

        answers = [one.outputs[0].token_ids for one in self._generate(prompts, params, finished)]
        texts = [np.array(prompt + answer, np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
        return assemble(scripts, texts, np.array([len(prompt) for prompt in prompts], np.int32), self.ends)

    def _turns(self, scripts: TokenScripts) -> dict[int, list[int]]:
        """The sampled rest of every unfinished user turn, by number of the script."""
        first = np.unique(scripts.script, return_index=True)[1]
        open_rows = [int(row) for row in first if not scripts.complete[row]]
        heads = [scripts.head[row, : scripts.head_length[row]].tolist() for row in open_rows]
        warmth, cap = self.config.turn_temperature, self.config.turn_cap
        params = [self._params(warmth, int(scripts.turn_seed[row]), cap) for row in open_rows]
        out: dict[int, list[int]] = {}
        for row, output in zip(open_rows, self._generate(heads, params, None), strict=True):
            ids = output.outputs[0].token_ids
            out[int(scripts.script[row])] = ids[:-1] if ids and ids[-1] in self.ends else ids
        return out

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams], on_finish: Any) -> list[RequestOutput]:
        return self.llm.generate(prompt_token_ids=prompts, sampling_params=params, on_finish=on_finish)

    def _params(self, temperature: float, seed: int, cap: int) -> SamplingParams:
        min_p = self.config.min_p if temperature > 0 else 0.0
        return SamplingParams(
            temperature=temperature, min_p=min_p, seed=seed, max_tokens=cap, stop_token_ids=list(self.ends)
        )


def _device_of(loaded: LoadedTarget) -> str:
    return str(loaded.model.embedding.device)
