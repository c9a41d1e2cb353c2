"""Training of a DFlash drafter on packed rows with the frozen target beside it (dflash.md, training recipe).

One step:  taps of the target over packed rows → anchors drawn in every row → one bidirectional block per anchor through
the drafter → weighted loss of its slots → gradients added up over passes and processes → clip → update.

Rows and anchors of a step are drawn for all its passes and processes together, so that it does not matter how a batch
is split among them. The learning rate follows its schedule over a budget of steps, or of seconds: then the first
process keeps the clock and tells the others, so that all take the same steps. A checkpoint carries everything that the
next step depends on. The command around it is in drafter_run.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dscale.config import require
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.train.anchors import Anchors, block_labels, sample_anchors
from dscale.train.artifacts import Report, silent
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.loss import block_loss, loss_terms, slot_weights
from dscale.train.optimizer import Optimizer
from dscale.train.recipe import TrainConfig, mixed
from dscale.train.rows import PackedRows
from dscale.train.world import World

WARMUP_STEPS = 200  # when the budget is in seconds, so that compiling does not eat the warm-up
DECAY_SHARE = 0.2  # last part of the budget in which a wsd schedule falls to 0
Record = dict[str, Any]
States = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class Batch(NamedTuple):
    """Packed rows of one pass: their numbers [R] in the corpus, ids, first and answer [R, L], and their anchors."""

    rows: Tensor
    ids: Tensor
    first: Tensor
    answer: Tensor
    anchors: Anchors


class DrafterTrainer:
    """Holds target, drafter, rows and optimizer of one process and takes steps.

    states (rows [R], ids, first [R, L]) → (taps [R·L, T·H], last hidden [R·L, H] or None) replaces the target's own
    pass, for a cache. evaluate() → validation progress, called by `run` every config.evaluate_every steps.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rows: PackedRows,
        config: TrainConfig,
        world: World,
        states: States | None = None,
    ) -> None:
        self.target, self.drafter, self.config, self.world = target, drafter, config, world
        device = world.device
        self.ids, self.first, self.answer = (
            torch.from_numpy(part).to(device) for part in (rows.ids, rows.first, rows.answer)
        )
        self.length = self.ids.shape[1]
        self.passes = config.accumulate * world.size
        self.per_epoch = len(self.ids) // (config.rows * self.passes)
        asked = f"{config.rows} rows · {config.accumulate} passes · {world.size} processes"
        require(self.per_epoch > 0, f"train.rows: {asked} a step, but the corpus has {len(self.ids)} training rows")
        require(config.anchors <= self.length, f"train.anchors: {config.anchors} a row of {self.length} tokens")
        use_compile = config.compile and device.type == "cuda"
        shape = ForwardConfig(self.length, config.rows, config.anchors, config.attention, config.compile)
        self.forward = BlockForward(target, drafter, shape)
        self.states = states or self._online
        self.gamma = config.decay(self.forward.width)
        self.terms = loss_terms(config.distil, config.distance, use_compile)
        self.optimizer = Optimizer(drafter, config.optimizer, config.betas, use_compile)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.total = config.steps if config.steps else None
        if config.epochs:
            self.total = max(1, round(config.epochs * self.per_epoch))
        self.step_index, self.elapsed, self.progress = 0, 0.0, 0.0
        self.history: list[Record] = []
        self.tally = torch.zeros(2 + 2 * (self.forward.width - 1), dtype=torch.float64, device=device)
        self.best: dict[str, Tensor] = {}
        self.best_progress = -math.inf
        self.random = torch.Generator(device=device)
        self.order: tuple[int, Tensor] | None = None

    # -- one step ---------------------------------------------------------------------------------------------------

    def batches(self) -> list[Batch]:
        """This process's passes of this step: every pass over the corpus has an order of its own."""
        c, device = self.config, self.ids.device
        epoch, at = divmod(self.step_index, self.per_epoch)
        if self.order is None or self.order[0] != epoch:
            self.random.manual_seed(mixed(c.seed, 1, epoch))
            self.order = epoch, torch.randperm(len(self.ids), generator=self.random, device=device)
        size = c.rows * self.passes
        chosen = self.order[1][at * size : (at + 1) * size]
        self.random.manual_seed(mixed(c.seed, 2, self.step_index))
        keys = torch.rand((size, self.length), generator=self.random, device=device)
        made = []
        for index in range(self.world.rank, self.passes, self.world.size):
            part = slice(index * c.rows, (index + 1) * c.rows)
            rows = chosen[part]
            ids, first, answer = self.ids[rows], self.first[rows], self.answer[rows]
            made.append(Batch(rows, ids, first, answer, sample_anchors(answer, first, c.anchors, keys[part])))
        return made

    def _online(self, rows: Tensor, ids: Tensor, first: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.config.distil:
            return self.forward.target_states(ids, first)
        return self.forward.taps(ids, first), None

    def weights(self, batches: list[Batch]) -> Tensor:
        """The sum of slot weights of the whole step, over all passes and processes."""
        total = torch.zeros((), device=self.ids.device)
        for batch in batches:
            labels = block_labels(batch.ids, batch.answer, batch.first, batch.anchors, self.forward.width)
            total += slot_weights(labels.supervised, self.gamma).sum()
        return self.world.sum(total)

    def loss(self, batch: Batch, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(this pass's share of the loss, right slots by depth [W-1], supervised slots by depth [W-1])."""
        labels = block_labels(batch.ids, batch.answer, batch.first, batch.anchors, self.forward.width)
        taps, last = self.states(batch.rows, batch.ids, batch.first)
        hidden = self.forward.hidden(batch.ids, batch.first, batch.anchors, taps).flatten(0, 2)
        truth = None if last is None or not self.config.distil else predicting(last, batch, self.forward.width)
        weight = slot_weights(labels.supervised, self.gamma).flatten()
        head = self.target.head.weight.detach()
        loss, right = block_loss(
            hidden, labels.token.flatten(), weight, head, total, self.config.chunks, self.terms, truth
        )
        right = right.view(labels.token.shape) & labels.supervised
        return loss, right.cumprod(-1).sum((0, 1)), labels.supervised.sum((0, 1))

    def step(self) -> Tensor:
        """One update. Returns this process's share of the loss."""
        batches = self.batches()
        total = self.weights(batches)
        whole = torch.zeros((), device=self.ids.device)
        for batch in batches:
            loss, right, supervised = self.loss(batch, total)
            loss.backward()
            whole += loss.detach()
            self.tally[2:] += torch.cat([right, supervised])
        self.tally[0] += 1
        self.tally[1] += whole
        self.update()
        return whole

    def update(self) -> None:
        """Sum the gradients over processes, clip, step."""
        flat = self.world.sum(torch.cat([p.grad.flatten() for p in self.parameters]))  # type: ignore[union-attr]
        flat *= (self.config.clip / (flat.norm() + 1e-6)).clamp(max=1.0)
        for parameter, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step(self.rate())
        self.step_index += 1

    def rate(self) -> float:
        """Learning rate of the next update: linear warm-up, then the schedule down to 0 at the end of the budget."""
        done = min(1.0, self.step_index / self.total if self.total else self.progress)
        warm = max(1, round(self.config.warmup * self.total) if self.total else WARMUP_STEPS)
        if self.config.schedule == "wsd":
            factor = min(1.0, (1 - done) / DECAY_SHARE)
        else:
            factor = 0.5 * (1 + math.cos(math.pi * done))
        return self.config.rate * min(1.0, (self.step_index + 1) / warm) * factor

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(
        self,
        evaluate: Callable[[], float] | None = None,
        save: Callable[[], None] | None = None,
        told: Callable[[Record], None] | None = None,
        report: Report = silent,
    ) -> None:
        """Train to the end of the budget. evaluate: validation progress now, the same on every process; save: write
        the state; told: gets every record of the history as it is made (first process only)."""
        c = self.config
        clock = saved = time.monotonic()
        while not self.finished():
            if self.step_index % c.sync_every == 0:
                now = time.monotonic()
                self.elapsed, clock = self.elapsed + now - clock, now
                self._agree()
                if save is not None and now - saved > c.save_seconds:
                    saved = now
                    save()
            if self.finished():
                break
            self.step()
            report("training", self.step_index if self.total else self.elapsed, self.total or c.seconds)
            if self.step_index % c.log_every == 0 or self.step_index == self.total:
                self._note(self._measured(), told)
            due = c.evaluate_every > 0 and self.step_index % c.evaluate_every == 0
            if evaluate is not None and due and self.step_index != self.total:
                self._evaluated(evaluate(), told)
        if save is not None:
            save()
        if evaluate is not None and not self._walked_now():
            self._evaluated(evaluate(), told)
        self.elapsed += time.monotonic() - clock

    def finished(self) -> bool:
        """True when the budget is used up."""
        return self.step_index >= self.total if self.total else self.progress >= 1.0

    def _walked_now(self) -> bool:
        return any(record["step"] == self.step_index and "validation_progress" in record for record in self.history)

    def _agree(self) -> None:
        """Take the time from the first process."""
        told = torch.tensor([self.elapsed], dtype=torch.float64, device=self.world.device)
        self.elapsed = float(self.world.from_first(told))
        if self.config.seconds is not None:
            self.progress = self.elapsed / self.config.seconds

    def _measured(self) -> Record:
        """The tally [steps, loss, right slots and supervised slots by depth] since the last record, as a record."""
        for parameter in self.parameters:  # rounding must not let the processes drift apart
            self.world.from_first(parameter.data)
        steps, numbers = int(self.tally[0]), self.world.sum(self.tally[1:].clone())
        self.tally.zero_()
        right, supervised = numbers[1:].chunk(2)
        survival = (right / supervised.clamp_min(1)).tolist()
        return {
            "step": self.step_index,
            "loss": round(float(numbers[0]) / steps, 4),
            "uniform_progress": round(1 + sum(survival), 3),
            "first_slot": round(survival[0], 4),
            "rate": self.rate(),
        }

    def _evaluated(self, progress: float, told: Callable[[Record], None] | None) -> None:
        """Record the validation progress; keep the weights in bfloat16 when it is the best so far."""
        if progress > self.best_progress:
            self.best_progress = progress
            state = self.drafter.state_dict()
            self.best = {name: value.detach().to("cpu", torch.bfloat16).clone() for name, value in state.items()}
        self._note({"step": self.step_index, "validation_progress": round(progress, 4)}, told)

    def _note(self, record: Record, told: Callable[[Record], None] | None) -> None:
        self.history.append(record)
        if told is not None and self.world.first:
            told(record)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    HELD = ("step_index", "elapsed", "progress", "history", "best_progress")

    def state(self) -> dict[str, Any]:
        """All that the next step depends on, besides corpus and config."""
        return {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "tally": self.tally,
            **{name: getattr(self, name) for name in self.HELD},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best = {name: value.cpu() for name, value in state["best"].items()}
        self.tally.copy_(state["tally"])
        for name in self.HELD:
            setattr(self, name, state[name])


def predicting(last: Tensor, batch: Batch, width: int) -> Tensor:
    """The target's hidden rows that predict every slot: last [R·L, H] → [R·A·(W-1), H].

    Slot k holds the token at p + k, which the target predicts at p + k - 1. Slots past the row get its last position;
    they carry no weight.
    """
    rows, length = batch.ids.shape
    ahead = batch.anchors.position[:, :, None] + torch.arange(width - 1, device=last.device)
    start = torch.arange(rows, device=last.device)[:, None, None] * length
    return last[(ahead.clamp(max=length - 1) + start).flatten()]
