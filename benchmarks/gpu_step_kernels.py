"""Kernels of a decode step other than attention on a CUDA GPU: right first, then microseconds beside plain torch.

    python benchmarks/gpu_step_kernels.py --out record.json         under 80 s

Shapes of Qwen3-8B (hidden 4096, 32/8 heads of 128, inner 12288, vocabulary 151936, 36 layers, 5 draft layers), blocks
of 16, N = 8, 32, 64 lanes with 8 verification rows each. Every kernel is first compared with plain torch in float32 on
random inputs, then timed by CUDA graph replay: a graph calls it on input set after input set (128 MB in all where at
most 8 sets make that up) and the median of its replays counts. floor = bytes that must move over the bandwidth of a
large copy in the same run; what is smaller than the L2 may beat it. Every case stands alone: what fails is reported
and the rest goes on; past --seconds the rest is skipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_measure import (
    DEVICE,
    Call,
    copy_bandwidth,
    microseconds,
    plain,
    plain_torch,
    relative,
    share_different,
    tensors,
)
from torch import Tensor

from dscale.evaluate.record_file import write_record
from dscale.kernels import activation, norm, rotary, top_logits
from dscale.speculation import acceptance, budget, packing, sampling
from dscale.speculation.features import FeatureProjections
from dscale.speculation.predictor import Predictor, PredictorConfig
from dscale.speculation.survival import predicted_survival

HIDDEN, HEADS, KV, SIZE, INNER, VOCAB, LAYERS, DRAFT_LAYERS = 4096, 32, 8, 128, 12288, 151936, 36, 5
WIDTH, PAGE = 16, 16
SETS, WORKING_SET = 8, 128 << 20


@dataclass
class Case:
    """One kernel at one size. make() draws inputs and returns (fast call, plain call); wrong(fast result, plain result)
    is an error and must stay within `bound`; bytes must move; plain may be too large to time."""

    name: str
    lanes: int
    bytes: float
    make: Callable[[], tuple[Call, Call]]
    wrong: Callable[[Any, Any], float]
    bound: float
    time_plain: bool = True


@dataclass
class Bench:
    """What a run has measured; problems holds one line for each case that failed."""

    deadline: float
    bandwidth: float = 1.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def row_cases(n: int) -> list[Case]:
    """Norm, gate, rotary with cache write, context of all draft layers: M = 8·N rows."""
    m = 8 * n
    shape = rotary.HeadShape(HEADS, KV, SIZE)
    pages = m * 4

    def normed() -> tuple[Call, Call]:
        x, residual, weight = random(m, HIDDEN), random(m, HIDDEN), random(HIDDEN)
        total = x + residual
        return lambda: norm.add_rms_norm(x, residual, weight, 1e-6), lambda: (
            norm.rms_norm_torch(total.float(), weight.float(), 1e-6),
            x + residual,
        )

    def gated() -> tuple[Call, Call]:
        x = random(m, 2 * INNER)
        return lambda: activation.silu_mul(x), lambda: activation.silu_mul_torch(x.float())

    def rotated() -> tuple[Call, Call]:
        qkv, angles, norms = random(m, (HEADS + 2 * KV) * SIZE), random(m, SIZE, dtype=torch.float32), random(2, SIZE)
        slots = torch.randperm(pages * PAGE, device=DEVICE)[:m]
        caches, wide = random(2, pages, KV, PAGE, SIZE), torch.zeros(2, pages, KV, PAGE, SIZE, device=DEVICE)

        def fast() -> Any:
            q = rotary.split_rotate_write(qkv, angles, shape, *caches, slots, *norms)
            return q, caches[:, slots // PAGE, :, slots % PAGE] if check else q

        def reference() -> Any:
            q, k, v = rotary.split_rotate(qkv.float(), angles, shape, *norms.float())
            rotary.write_cache(k, v, *wide, slots)
            return q, wide[:, slots // PAGE, :, slots % PAGE] if check else q

        return fast, reference

    def context() -> tuple[Call, Call]:
        kv, angles = random(m, DRAFT_LAYERS, 2, KV, SIZE), random(m, SIZE, dtype=torch.float32)
        norms, slots = list(random(DRAFT_LAYERS, SIZE)), torch.randperm(pages * PAGE, device=DEVICE)[:m]
        cache = random(DRAFT_LAYERS, 2, pages, KV, PAGE, SIZE)
        wide = torch.zeros(DRAFT_LAYERS, 2, pages, KV, PAGE, SIZE, device=DEVICE)

        def fast() -> Any:
            rotary.write_context(kv, angles, shape, cache, slots, norms)
            return cache[:, :, slots // PAGE, :, slots % PAGE] if check else cache

        def reference() -> Any:
            rotary.write_context_torch(kv.float(), angles, shape, wide, slots, [one.float() for one in norms])
            return wide[:, :, slots // PAGE, :, slots % PAGE] if check else wide

        return fast, reference

    heads = HEADS + 2 * KV
    return [
        Case("add + norm", n, m * HIDDEN * 8, normed, relative, 1e-2),
        Case("silu · mul", n, m * INNER * 6, gated, relative, 1e-2),
        Case("norm, rotary, write", n, m * heads * SIZE * 4, rotated, relative, 1e-2),
        Case("draft context write", n, m * DRAFT_LAYERS * 2 * KV * SIZE * 4, context, relative, 1e-2),
    ]


check = True  # cases return what they wrote while they are compared, and only then


def logits_like_a_models(rows: int) -> Tensor:
    """bf16 [rows, V]: a broad mass, and 200 likelier tokens that fall off steeply."""
    logits = torch.randn(rows, VOCAB, device=DEVICE) * 2
    places = torch.randint(0, VOCAB, (rows, 200), device=DEVICE)
    steep = 22 - torch.arange(200, device=DEVICE).add(1.0).log() * 3 + torch.randn(rows, 200, device=DEVICE)
    return logits.scatter_(1, places, steep).bfloat16()


def vocabulary_cases(n: int) -> list[Case]:
    """Top logits of the 15·N draft rows; argmax and sampling of the 8·N verified rows."""
    m, d = 8 * n, 15 * n

    def top() -> tuple[Call, Call]:
        logits = logits_like_a_models(d)

        def fast() -> Any:
            found = top_logits.top_logits(logits)
            return found.values, found.log_sum_exp, found.entropy

        def reference() -> Any:
            values, _, log_sum_exp, entropy = top_logits.top_logits_torch(logits)
            return values, log_sum_exp, entropy

        return fast, reference

    def best() -> tuple[Call, Call]:
        logits = logits_like_a_models(m)
        return lambda: top_logits.argmax(logits), plain(top_logits.argmax, logits)

    def drawn(flat: bool = False, **fields: float) -> Callable[[], tuple[Call, Call]]:
        def make() -> tuple[Call, Call]:
            logits = random(m, VOCAB) if flat else logits_like_a_models(m)
            given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
            columns = {k: torch.full((m,), float(v), device=DEVICE) for k, v in given.items()}
            columns["top_k"] = columns["top_k"].long()
            columns |= {k: torch.randint(0, 1 << 30, (m,), device=DEVICE) for k in ("seed", "position")}
            rows = sampling.RowParams(**columns)

            def reference() -> Tensor:
                with plain_torch():
                    return sampling.draw_on_device(logits, rows, top_logits.argmax(logits))

            return lambda: sampling.draw(logits, rows, all_greedy=False), reference

        return make

    size, some = VOCAB * 2, 1e-2  # a drawn token may differ where rounding decides between two
    return [
        Case("top 16, sums", n, d * size, top, relative, 1e-5),
        Case("argmax", n, m * size, best, share_different, 0.5),  # torch's order among equals is its own
        Case("draw, greedy rows", n, m * size, drawn(temperature=0.0), share_different, 0.5, time_plain=False),
        Case("draw, T=1", n, m * size, drawn(), share_different, some, time_plain=False),
        Case("draw, top_p .95", n, m * size, drawn(top_p=0.95), share_different, some, time_plain=n == 8),
        Case("draw, top_k 50, top_p .9", n, m * size, drawn(top_k=50, top_p=0.9), share_different, some, False),
        Case("draw, min_p .05", n, m * size, drawn(min_p=0.05), share_different, some, False),
        Case("draw, top_p .95, flat", n, m * size, drawn(True, top_p=0.95), share_different, some, False),
    ]


def decision_cases(n: int) -> list[Case]:
    """Predictor, allocators, packing, acceptance for N lanes of 16."""
    m, drafts = 8 * n, WIDTH - 1
    live = torch.ones(n, dtype=torch.bool, device=DEVICE)

    def survival(levels: int = 0) -> Tensor:
        chances = torch.rand(n, drafts, device=DEVICE).cummin(-1).values
        chances = (chances * levels).round() / levels if levels else chances
        return torch.cat([torch.ones(n, 1, device=DEVICE), chances], dim=1)

    def allocated(function: Callable[..., Tensor], levels: int) -> Callable[[], tuple[Call, Call]]:
        def make() -> tuple[Call, Call]:
            q = survival(levels)
            return lambda: function(q, m, live), plain(function, q, m, live)

        return make

    def predicted() -> tuple[Call, Call]:
        predictor = Predictor(PredictorConfig(WIDTH, "made up")).to(DEVICE).requires_grad_(False)
        projections = FeatureProjections(0, random(HIDDEN, 96, dtype=torch.float32) / HIDDEN**0.5)
        top = top_logits.top_logits(logits_like_a_models(n * drafts).view(n, drafts, VOCAB))
        arguments = (predictor, top, random(n, drafts, HIDDEN), live, live, projections)
        return lambda: predicted_survival(*arguments), plain(predicted_survival, *arguments)

    def blocks() -> tuple[Tensor, ...]:
        with plain_torch():
            k = budget.allocate_exact(survival(), m, live)
        anchor, context = torch.randint(0, VOCAB, (n,), device=DEVICE), torch.randint(0, 4000, (n,), device=DEVICE)
        return k, anchor, torch.randint(0, 3, (n, drafts), device=DEVICE), context

    def packed() -> tuple[Call, Call]:
        k, anchor, tokens, context = blocks()
        table = torch.randint(0, 1 << 20, (n + 1, 256), device=DEVICE, dtype=torch.int32)
        arguments = (k, m, anchor, tokens, context, table, torch.randperm(n, device=DEVICE))
        return lambda: packing.pack_rows(*arguments), plain(packing.pack_rows, *arguments)

    def accepted() -> tuple[Call, Call]:
        k, _, tokens, _ = blocks()
        y, ends = torch.randint(0, 3, (m,), device=DEVICE), torch.full((n, 16), -1, device=DEVICE)
        ends[:, 3] = 2
        with plain_torch():
            starts = packing.pack(k, m).starts
        arguments = (tokens, k, y, starts, ends, torch.randint(1, 30, (n,), device=DEVICE))
        return lambda: acceptance.accept_clipped(*arguments), plain(acceptance.accept_clipped, *arguments)

    small = 0.0
    return [
        Case("predictor", n, 64 * 1735 * 4, predicted, relative, 1e-4),
        Case("allocate, exact", n, small, allocated(budget.allocate_exact, 0), share_different, 0.0),
        Case("allocate, exact, ties", n, small, allocated(budget.allocate_exact, 8), share_different, 0.0),
        Case("allocate, seeded", n, small, allocated(budget.allocate_seeded, 0), share_different, 0.0),
        Case("pack", n, small, packed, share_different, 0.0),
        Case("accept, clip", n, small, accepted, share_different, 0.0),
    ]


def run(bench: Bench, case: Case) -> None:
    """Compare, then time, one case."""
    global check
    row: dict[str, Any] = {"kernel": case.name, "lanes": case.lanes}
    check = True
    fast, reference = case.make()
    row["error"] = case.wrong(fast(), reference())
    row["ok"] = row["error"] <= case.bound
    check = False
    sets = max(1, min(SETS, int(WORKING_SET // max(case.bytes, 1))))
    pairs = [(fast, reference), *(case.make() for _ in range(sets - 1))]
    row["us"] = microseconds([one for one, _ in pairs])
    if case.bytes:
        row["floor_us"] = case.bytes / bench.bandwidth * 1e6
    bench.rows.append(row)
    if case.time_plain:
        row["torch_us"] = microseconds([other for _, other in pairs])


def attempt(bench: Bench, name: str, action: Call) -> None:
    """Run an action unless time is up; a failure is kept as a line."""
    if time.monotonic() > bench.deadline:
        bench.problems.append(f"{name}: skipped, time is up")
        return
    try:
        action()
    except Exception as problem:  # the other cases still count
        bench.problems.append(f"{name}: {type(problem).__name__}: {str(problem).splitlines()[0][:200]}")


def alone(bench: Bench) -> None:
    """A row's bits do not depend on the other rows: top logits, draws, norms."""
    logits = logits_like_a_models(300)
    columns = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0, "seed": 0, "position": 0}
    kinds = {"top_k": torch.int64, "seed": torch.int64, "position": torch.int64}
    every = {k: torch.full((300,), v, dtype=kinds.get(k, torch.float32), device=DEVICE) for k, v in columns.items()}
    every["seed"] = torch.arange(300, device=DEVICE)
    rows = sampling.RowParams(**every)
    some = torch.tensor([3, 77, 299], device=DEVICE)
    x, weight = random(300, HIDDEN), random(HIDDEN)
    pairs = [
        (tensors(top_logits.top_logits(logits)), tensors(top_logits.top_logits(logits[some]))),
        ([sampling.draw(logits, rows, False)], [sampling.draw(logits[some], rows.at(some), False)]),
        ([norm.rms_norm(x, weight, 1e-6)], [norm.rms_norm(x[some], weight, 1e-6)]),
    ]
    same = all(torch.equal(a[some], b) for whole, part in pairs for a, b in zip(whole, part, strict=True))
    bench.rows.append({"kernel": "a row alone has the same bits", "lanes": 0, "error": float(not same), "ok": same})


def compiled(bench: Bench, n: int) -> None:
    """torch.compile of the torch versions, where it makes one kernel of them; times are added to their rows."""
    m = 8 * n
    x, residual, weight, gate_up = random(m, HIDDEN), random(m, HIDDEN), random(HIDDEN), random(m, 2 * INNER)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm.rms_norm_torch(total, weight, 1e-6), total

    for name, function, arguments in (
        ("add + norm", add_norm, (x, residual, weight)),
        ("silu · mul", activation.silu_mul_torch, (gate_up,)),
    ):
        made = torch.compile(function)
        found = microseconds([lambda made=made, arguments=arguments: made(*arguments)])
        for row in bench.rows:
            if row["kernel"] == name and row["lanes"] == n:
                row["compiled_us"] = found


def table(bench: Bench) -> str:
    """A line a kernel and size."""
    lines = [f"{'kernel':30} {'N':>3} {'error':>8} {'us':>8} {'floor':>7} {'torch':>9} {'compiled':>9}"]
    for row in sorted(bench.rows, key=lambda row: row["lanes"]):
        numbers = [f"{row[k]:.1f}" if k in row else "-" for k in ("us", "floor_us", "torch_us", "compiled_us")]
        mark = "" if row["ok"] else "  WRONG"
        lines.append(
            f"{row['kernel']:30} {row['lanes']:3d} {row['error']:8.1e} {numbers[0]:>8} {numbers[1]:>7}"
            f" {numbers[2]:>9} {numbers[3]:>9}{mark}"
        )
    for n in sorted({row["lanes"] for row in bench.rows if row["lanes"]}):
        own = {row["kernel"]: row.get("us", float("nan")) for row in bench.rows if row["lanes"] == n}
        layers = sum(own.get(k, float("nan")) for k in ("add + norm", "silu · mul", "norm, rotary, write"))
        layers = LAYERS * (layers + own.get("add + norm", float("nan")))
        decide = sum(own.get(k, float("nan")) for k in ("predictor", "allocate, exact", "pack"))
        lines.append(f"N = {n}: {LAYERS} layers {layers:.0f} us; predictor + allocation + packing {decide:.1f} us")
    return "\n".join([*lines, *bench.problems])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON record")
    parser.add_argument("--seconds", type=float, default=75.0, help="what has not begun by then is skipped")
    options = parser.parse_args()
    torch.manual_seed(int(time.time()))
    bench = Bench(deadline=time.monotonic() + options.seconds)
    bench.bandwidth = copy_bandwidth()
    attempt(bench, "rows alone", lambda: alone(bench))
    for n in (32, 8, 64):
        for case in [*row_cases(n), *decision_cases(n), *vocabulary_cases(n)]:
            attempt(bench, f"{case.name}, N = {n}", lambda case=case: run(bench, case))
    attempt(bench, "torch.compile, N = 32", lambda: compiled(bench, 32))
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **{k: v for k, v in asdict(bench).items() if k != "deadline"},
    }
    if options.out is not None:
        write_record(options.out, record)
    print(table(bench))


if __name__ == "__main__":
    main()
