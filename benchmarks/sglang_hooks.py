"""A plug-in for SGLang that makes it measurable beside our engine; sglang_h200.py installs it. Nothing of it serves.

Loaded through the entry point group `sglang.srt.plugins` in every process of SGLang. SGLANG_BENCH_NATIVE=1 lets norms,
rotary embeddings and activations run as PyTorch's operations: SGLang's kernels for them know no float32.
SGLANG_BENCH_TORCH_NCCL=1 lets all ranks speak through torch.distributed, where SGLang's own binding of NCCL fails.
The rest is done when SGLANG_BENCH names a file:
    dummy weights   are drawn as those of our `random:` shapes (models/shapes.py), not from ±1e-3
    DFLASH          accepts what DSCALE_SIMULATE says (speculation/simulated.py): by the request's sampling_seed and the
                    absolute position of its anchor, as our engine and DSCALE do, so that all meet one trace
    every step      adds a line to that file: {"t", "mode": D or E, "requests", "tokens", "graph"}; of several ranks
                    the first one writes
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any, TextIO

import torch
from torch import Tensor

from dscale.models.shapes import HEAD_SCALE
from dscale.speculation.packing import Packed, pack
from dscale.speculation.simulated import SimulatedDraft, Simulation

LOG, NATIVE, TORCH_NCCL = "SGLANG_BENCH", "SGLANG_BENCH_NATIVE", "SGLANG_BENCH_TORCH_NCCL"


def register() -> None:
    """Entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(NATIVE):
        operation = "sglang.srt.layers.utils.multi_platform.MultiPlatformOp.dispatch_forward"
        HookRegistry.register(operation, native, HookType.REPLACE)
        HookRegistry.register("sglang.jit_kernel.kvcache.can_use_store_cache", never, HookType.REPLACE)
    if os.environ.get(TORCH_NCCL):
        group = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
        HookRegistry.register(group, by_torch, HookType.AROUND)
    if not os.environ.get(LOG):
        return
    from dscale.integrations.sglang.settings import Settings

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", fill, HookType.REPLACE)
    processor = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    log = StepLog()
    HookRegistry.register(f"{processor}.process_batch_result_decode", log.decoded, HookType.AROUND)
    HookRegistry.register(f"{processor}.process_batch_result_prefill", log.prefilled, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", log.launched, HookType.AROUND)
    simulated = Settings.read().simulated
    if simulated is not None:
        hooks = DFlashSimulation(simulated)
        worker = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation"
        HookRegistry.register(worker, hooks.around_step, HookType.AROUND)
        kernel = "sglang.srt.speculative.triton_ops.dflash_accept_bonus._compute_dflash_accept_bonus_triton_unchecked"
        HookRegistry.register(kernel, hooks.before_accept, HookType.BEFORE)
        plain = "sglang.srt.speculative.dflash_utils.compute_dflash_correct_drafts_and_bonus"
        HookRegistry.register(plain, hooks.before_accept, HookType.BEFORE)


def native(operation: Any) -> Any:
    """An operation as PyTorch computes it."""
    return operation.forward_native


def never(size: int) -> bool:
    """Keys and values are written by PyTorch too: SGLang's kernel is compiled anew for every row size."""
    return False


def by_torch(original: Any, *given: Any, **named: Any) -> Any:
    """A group of ranks without SGLang's own binding of NCCL."""
    return original(*given, **named | {"use_pynccl": False})


def fill(model: torch.nn.Module, low: float = 0.0, high: float = 0.0, seed: int = 1234) -> None:
    """Random weights of the scale of models/shapes.py; low and high are SGLang's and not used."""
    layers = sum(name.endswith("down_proj.weight") for name, _ in model.named_parameters())
    for index, (name, value) in enumerate(model.state_dict().items()):
        if not torch.is_floating_point(value) or "cos_sin" in name or "inv_freq" in name:
            continue
        if value.dim() == 1:
            value.fill_(1.0 if "norm" in name else 0.0)
            continue
        scale = 1.0 / math.sqrt(value.shape[-1])
        if "embed" in name or "lm_head" in name:
            scale *= HEAD_SCALE
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(2 * layers)
        value.normal_(0.0, scale, generator=torch.Generator(value.device).manual_seed(seed + index))


class DFlashSimulation:
    """Changes the target's tokens before SGLang's own acceptance sees them."""

    def __init__(self, simulated: Any) -> None:
        self.simulated = simulated
        self.simulation: Simulation | None = None
        self.requests: Any = None
        self.positions = torch.zeros(0, dtype=torch.int64)
        self._packed: dict[tuple[int, int], Packed] = {}

    def around_step(self, original: Any, worker: Any, batch: Any, *given: Any, **named: Any) -> Any:
        """Remember whose step it is."""
        from dscale.integrations.sglang.verify import Requests

        if self.simulation is None:
            self.simulation = self.simulated.on(worker.device)
            self.requests = Requests(int(worker.model_runner.model_config.vocab_size), worker.device)
        if not batch.forward_mode.is_extend():
            self.requests.update(batch)
            self.positions = batch.seq_lens
        return original(worker, batch, *given, **named)

    def before_accept(self, candidates: Tensor, **named: Tensor) -> None:
        """candidates [N, W] are [anchor | drafts]; the target's tokens [N, W] are changed in place."""
        tokens = named["target_top1"] if "target_top1" in named else named["target_predict"]
        assert self.simulation is not None
        length, _ = self.simulation.at(self.requests.seeds, self.positions)
        draft = SimulatedDraft(candidates[:, 1:], length=length)
        changed = self.simulation.rewrite(tokens.flatten(), draft, self._uniform(tokens), self.requests.vocab)
        tokens.copy_(changed.view_as(tokens))

    def _uniform(self, tokens: Tensor) -> Packed:
        count, width = tokens.shape
        if (count, width) not in self._packed:
            k = torch.full((count,), width, dtype=torch.int64, device=tokens.device)
            self._packed[count, width] = pack(k, count * width)
        return self._packed[count, width]


class StepLog:
    """One line a step, written as the host learns of its outcome."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._launched: dict[int, float] = {}
        self._first: bool | None = None

    def launched(self, original: Any, scheduler: Any, batch: Any, *given: Any, **named: Any) -> Any:
        """When the step was started, and whether a graph ran."""
        at = time.time()
        result = original(scheduler, batch, *given, **named)
        self._launched[id(result)] = at
        return result

    def decoded(self, original: Any, processor: Any, batch: Any, result: Any) -> Any:
        """A decode step's outcome."""
        return self._around(original, processor, batch, result, "D")

    def prefilled(self, original: Any, processor: Any, batch: Any, result: Any) -> Any:
        """A prompt step's outcome."""
        return self._around(original, processor, batch, result, "E")

    def _around(self, original: Any, processor: Any, batch: Any, result: Any, mode: str) -> Any:
        """Tokens that a step added to answers, surplus past their length not counted."""
        requests = list(batch.reqs)
        before = sum(_length(request) for request in requests)
        made = original(processor, batch, result)
        row = {
            "t": time.time(),
            "started": self._launched.pop(id(result), None),
            "mode": mode,
            "requests": len(requests),
            "tokens": sum(_length(request) for request in requests) - before,
            "graph": bool(getattr(result, "can_run_cuda_graph", False)),
        }
        if not self._writes():
            return made
        if self._file is None:
            self._file = open(os.environ[LOG], "a", buffering=1)  # noqa: SIM115 – open as long as the process
        self._file.write(json.dumps(row) + "\n")
        return made

    def _writes(self) -> bool:
        """Whether this process is the first rank: all of them learn of every step."""
        if self._first is None:
            from sglang.srt.distributed import get_tp_group

            self._first = get_tp_group().rank_in_group == 0
        return self._first


def _length(request: Any) -> int:
    most = request.sampling_params.max_new_tokens
    return min(len(request.output_ids), most) if most is not None else len(request.output_ids)
