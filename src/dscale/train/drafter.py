"""Train a DFlash drafter on a packed corpus with the frozen target running beside it (dflash.md, training recipe).

One step:  taps of the target over packed rows → anchors drawn in every row → one bidirectional block per anchor through
the drafter → weighted cross-entropy of its slots → gradients averaged over processes → clip → update.

The learning rate follows a cosine over a budget of steps or of seconds; with seconds the first process keeps the
clock and tells the others, so that all take the same steps. A checkpoint carries everything that the next step depends
on.

    python -m dscale.train.drafter TARGET CORPUS OUT --steps 20 --rows 2 --anchors 8            (tiny, CPU)
    torchrun --nproc-per-node 2 -m dscale.train.drafter TARGET CORPUS OUT --seconds 1000        (two GPUs)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, RopeConfig, require
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import save_drafter, target_hashes
from dscale.models.loader import load_target
from dscale.train.anchors import sample_anchors
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.loss import block_loss, chunk_terms, slot_weights
from dscale.train.optimizer import Optimizer
from dscale.train.rows import PackedRows, load_part, take_rows


@dataclass(frozen=True)
class TrainConfig:
    """Sizes and rates of a training run. Exactly one of steps and seconds is the budget that the cosine spans."""

    rows: int = 16  # packed rows per process and step
    anchors: int = 192  # blocks per row
    gamma: float = 7.0
    rate: float = 3e-3
    warmup: int = 200  # steps
    clip: float = 1.0
    optimizer: str = "muon"
    betas: tuple[float, float] = (0.9, 0.95)
    steps: int | None = None
    seconds: float | None = None
    chunks: int = 12  # pieces of the cross-entropy
    attention: str = "auto"  # flex, dense, or auto: flex on CUDA
    compile: bool = True  # on CUDA only
    seed: int = 0
    sync_every: int = 20  # steps between two looks at the clock
    log_every: int = 100

    def __post_init__(self) -> None:
        for name in ("rows", "anchors", "chunks", "sync_every", "log_every"):
            require(getattr(self, name) > 0, f"train.{name}: {getattr(self, name)} must be positive")
        require(self.gamma > 0, f"train.gamma: {self.gamma} must be positive")
        require(
            self.attention in ("auto", "flex", "dense"),
            f"train.attention: {self.attention!r}; allowed are auto, flex, dense",
        )
        require(
            (self.steps is None) != (self.seconds is None), "train.steps, train.seconds: give exactly one of the two"
        )


def drafter_config(target: Target, block_size: int = 16, layers: int = 5, mask_token: int = 16) -> DrafterConfig:
    """A drafter with layers like the target's, evenly spread taps (dflash.md) and norms on queries and keys."""
    own = target.config.decoder
    depth = own.num_layers
    spread = [round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers)] if layers > 1 else [depth // 2]
    decoder = DecoderConfig(
        own.vocab_size, own.hidden_size, own.intermediate_size, layers, own.num_heads, own.num_kv_heads, own.head_dim,
        norm_eps=own.norm_eps, max_position=own.max_position, qk_norm=True, rope=RopeConfig(own.rope.theta),
    )  # fmt: skip
    return DrafterConfig(decoder, block_size, tuple(spread), mask_token, AnchorLayout.MASKED, target_layers=depth)


def initialise(drafter: Drafter, target: Target, seed: int) -> None:
    """Seeded normal weights of deviation 0.02, smaller where a layer adds to the residual; final norm as the "
    "target's."""
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * drafter.config.decoder.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 * (shrink if ("output" in name or "down" in name) else 1.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                parameter.fill_(1.0)
        drafter.stack.norm.weight.copy_(target.stack.norm.weight)


class World:
    """The processes of a run: rank, size and the two collectives that training needs."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.cuda else "cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.cuda else "gloo")

    def sum(self, value: Tensor) -> Tensor:
        """value added up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def from_first(self, value: Tensor) -> Tensor:
        """The first process's value, in place."""
        if self.size > 1:
            dist.broadcast(value, 0)
        return value


class DrafterTrainer:
    """Holds target, drafter, corpus and optimizer of one process and takes steps."""

    def __init__(self, target: Target, drafter: Drafter, rows: PackedRows, config: TrainConfig, world: World) -> None:
        self.target, self.drafter, self.config, self.world = target, drafter, config, world
        device = world.device
        self.ids = torch.from_numpy(rows.ids).to(device)
        self.first = torch.from_numpy(rows.first).to(device)
        self.answer = torch.from_numpy(rows.answer).to(device)
        self.length = self.ids.shape[1]
        require(
            config.rows <= len(self.ids), f"train.rows: {config.rows} is more than the corpus has ({len(self.ids)})"
        )
        use_compile = config.compile and device.type == "cuda"
        shape = ForwardConfig(self.length, config.rows, config.anchors, config.attention, config.compile)
        self.forward = BlockForward(target, drafter, shape)
        self.terms: Callable = torch.compile(chunk_terms, dynamic=False) if use_compile else chunk_terms
        self.optimizer = Optimizer(drafter, config.optimizer, config.betas, use_compile)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.step_index, self.elapsed, self.progress = 0, 0.0, 0.0
        self.history: list[dict[str, float]] = []
        self.random = torch.Generator(device=device)
        self.order: tuple[int, Tensor] | None = None

    # -- one step ---------------------------------------------------------------------------------------------------

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """This step's rows: an own random order of the corpus for every pass over it."""
        c, steps = self.config, len(self.ids) // self.config.rows
        epoch, at = divmod(self.step_index, steps)
        if self.order is None or self.order[0] != epoch:
            self.random.manual_seed(hash((c.seed, self.world.rank, epoch, 1)) % (1 << 62))
            self.order = epoch, torch.randperm(len(self.ids), generator=self.random, device=self.ids.device)
        rows = self.order[1][at * c.rows : (at + 1) * c.rows]
        return self.ids[rows], self.first[rows], self.answer[rows]

    def loss(self) -> tuple[Tensor, Tensor, Tensor]:
        """(this process's share of the loss, right slots by depth [W-1], supervised slots by depth [W-1])."""
        ids, first, answer = self.batch()
        self.random.manual_seed(hash((self.config.seed, self.world.rank, self.step_index, 2)) % (1 << 62))
        keys = torch.rand(ids.shape, generator=self.random, device=ids.device)
        anchors = sample_anchors(answer, first, self.config.anchors, keys)
        hidden, token, supervised = self.forward(ids, first, answer, anchors)
        weight = slot_weights(supervised, self.config.gamma)
        total = self.world.sum(weight.sum())
        head = self.target.head.weight.detach()
        flat = hidden.reshape(-1, hidden.shape[-1])
        loss, right = block_loss(flat, token.flatten(), weight.flatten(), head, total, self.config.chunks, self.terms)
        right = right.view(token.shape) & supervised
        return loss, right.cumprod(-1).sum((0, 1)), supervised.sum((0, 1))

    def update(self, loss: Tensor) -> None:
        """Backward, sum over processes, clip, step."""
        loss.backward()
        flat = self.world.sum(torch.cat([p.grad.flatten() for p in self.parameters]))  # type: ignore[union-attr]
        flat *= (self.config.clip / (flat.norm() + 1e-6)).clamp(max=1.0)
        for parameter, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step(self.rate())
        self.step_index += 1

    def rate(self) -> float:
        """Learning rate of the next update: linear warm-up, then a cosine over the budget to 0."""
        progress = self.progress if self.config.steps is None else self.step_index / self.config.steps
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.config.rate * min(1.0, (self.step_index + 1) / max(1, self.config.warmup)) * cosine

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self, until: float = math.inf, save: Path | None = None, save_every: float = 60.0) -> bool:
        """Train to the end of the budget, or to `until` (time.monotonic seconds); True when the budget is used up."""
        clock = saved = time.monotonic()
        tally: list[Tensor] = []
        while not self.finished():
            if self.step_index % self.config.sync_every == 0:
                now = time.monotonic()
                self.elapsed, clock = self.elapsed + now - clock, now
                if self._agree(now >= until):
                    break
                if save is not None and now - saved > save_every:
                    saved = now
                    self.save(save)
            loss, right, supervised = self.loss()
            self.update(loss)
            tally.append(torch.cat([loss.detach()[None].double(), right.double(), supervised.double()]))
            if self.step_index % self.config.log_every == 0:
                self._log(torch.stack(tally))
                tally.clear()
        self.elapsed += time.monotonic() - clock
        if save is not None:
            self.save(save)
        return self.finished()

    def finished(self) -> bool:
        if self.config.steps is not None:
            return self.step_index >= self.config.steps
        return self.progress >= 1.0

    def _agree(self, stop: bool) -> bool:
        """Take progress and the wish to stop from the first process."""
        told = torch.tensor([self.elapsed, float(stop)], dtype=torch.float64, device=self.world.device)
        elapsed, stopping = self.world.from_first(told).tolist()
        self.elapsed = elapsed
        if self.config.seconds is not None:
            self.progress = elapsed / self.config.seconds
        return bool(stopping)

    def _log(self, tally: Tensor) -> None:
        """tally [steps, 1 + 2·(W-1)] float64: loss, right slots and supervised slots by depth."""
        for parameter in self.parameters:  # rounding must not let the processes drift apart
            self.world.from_first(parameter.data)
        numbers, depth = self.world.sum(tally.sum(0)), tally.shape[1] // 2
        survival = (numbers[1 : 1 + depth] / numbers[1 + depth :].clamp_min(1)).tolist()
        record = {
            "step": self.step_index,
            "seconds": round(self.elapsed, 1),
            "loss": round(float(numbers[0]) / len(tally), 4),
            "uniform_progress": round(1 + sum(survival), 3),
            "first_slot": round(survival[0], 4),
            "rate": self.rate(),
        }
        self.history.append(record)
        if self.world.rank == 0:
            print(json.dumps(record), flush=True)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, besides corpus and config."""
        names = ("step_index", "elapsed", "progress", "history")
        return {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in names},
        }

    def save(self, path: Path) -> None:
        """Write the state (first process only), complete or not at all."""
        if self.world.rank == 0:
            torch.save(self.state(), path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)

    def load(self, path: Path) -> None:
        """Go on where `save` left off."""
        state = torch.load(path, map_location=self.world.device, weights_only=False)
        self.drafter.load_state_dict(state.pop("drafter"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        for name, value in state.items():
            setattr(self, name, value)


def build_drafter(target: Target, config: DrafterConfig, device: torch.device, seed: int) -> Drafter:
    """A new drafter with float32 masters on the device."""
    drafter = Drafter(config)
    initialise(drafter, target, seed)
    return drafter.to(device)


def main() -> None:
    """See the module's text for the two ways to run it. OUT gets state.pt, history.json and the drafter; it resumes."""
    asked = _arguments()
    config = TrainConfig(
        rows=asked.rows,
        anchors=asked.anchors,
        gamma=asked.gamma,
        optimizer=asked.optimizer,
        rate=asked.rate,
        steps=asked.steps,
        seconds=asked.seconds,
        log_every=10 if (asked.steps or 1000) < 100 else 100,
    )
    world = World()
    target = load_target(asked.target, torch.bfloat16 if world.cuda else torch.float32, str(world.device)).model
    drafter = build_drafter(target, drafter_config(target), world.device, config.seed)
    trainer = DrafterTrainer(target, drafter, load_shards(asked.corpus, world), config, world)
    asked.out.mkdir(parents=True, exist_ok=True)
    checkpoint = asked.out / "state.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    trainer.run(save=checkpoint)
    if world.rank == 0:
        (asked.out / "history.json").write_text(json.dumps(trainer.history, indent=1))
        save_drafter(drafter, asked.out / "drafter", target_hashes=target_hashes(target))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a DFlash drafter on a corpus of dscale.train.corpus.")
    parser.add_argument("target")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--anchors", type=int, default=192)
    parser.add_argument("--gamma", type=float, default=7.0)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--rate", type=float, default=3e-3)
    return parser.parse_args()


def load_shards(folder: Path, world: World) -> PackedRows:
    """This process's share of a corpus's training rows."""
    rows = load_part(folder, "train")
    return take_rows(rows, np.arange(world.rank, len(rows), world.size))


if __name__ == "__main__":
    main()
