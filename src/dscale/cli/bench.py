"""`dscale bench`: measure a server, several, or our engine; a record of every request."""

from __future__ import annotations

import json as json_text
import os
import shlex
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dscale.cli import options as o
from dscale.config import require

if TYPE_CHECKING:
    from dscale.evaluate.bench_record import BenchRecord
    from dscale.evaluate.manifest import Manifest
    from dscale.evaluate.plan import Arm, Plan


def bench(
    base_url: Annotated[
        list[str] | None, typer.Option(help="Address of a running server, or NAME=ADDRESS; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Its name at the server, or a model for our engine in process.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="In process: policies, such as off,full,auto; each is an arm.")
    ] = None,
    drafter: o.Drafter = "auto",
    predictor: o.Predictor = "auto",
    slots: o.Slots = 8.0,
    width: o.Width = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    draft_weights: o.DraftWeights = "auto",
    plan: Annotated[Path | None, typer.Option(help="TOML file with arms, boots and runs (docs/bench.md).")] = None,
    arms: Annotated[list[str] | None, typer.Option("--arm", help="Only this arm of the plan; repeatable.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="FILE.jsonl[=NAME], gsm8k, humaneval, mbpp, mt-bench, hub:NAME, built-in; repeatable."),
    ] = None,
    manifest: Annotated[Path | None, typer.Option(help="Frozen requests, from --save-manifest.")] = None,
    save_manifest: Annotated[Path | None, typer.Option(help="Write the requests to this file and end.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Requests of a run (512); prompts repeat if fewer.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Requests before, not measured (32).")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer (256).")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy, and the default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of requests, arrivals and built-in prompts.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests at a time, such as 1,4,8.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, arriving at random.")] = None,
    runs: Annotated[int | None, typer.Option(help="Passes over the requests, of every boot.")] = None,
    boots: Annotated[int | None, typer.Option(help="Processes of each arm, one after the other.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Its folder: clip counts at the end token, where a server counts on.")
    ] = None,
    api_key_variable: Annotated[str | None, typer.Option(help="Environment variable that holds the key.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The record, JSON or .json.gz; an interrupted one is gone on with.")
    ] = None,
    json: o.AsJson = False,
) -> None:
    """Measure throughput and latency of servers, or of our engine in process, and keep a record.

    Example: dscale bench --base-url http://127.0.0.1:8000 --concurrency 1,4,8 --num-prompts 64 --out bench.json
    """
    loop = {"requests": num_prompts, "warmup": warmup, "max_tokens": max_tokens, "temperature": temperature,
            "seed": seed}  # fmt: skip
    engine = {"drafter": drafter, "predictor": predictor, "slots": slots, "width": width, "dtype": dtype,
              "device": device, "draft_weights": draft_weights}  # fmt: skip
    if plan is None:
        made = _plan_of(base_url, model, policy, tokenizer, engine)
    else:
        require(not (base_url or model or policy), "--plan: has its own arms; leave out --base-url, --model, --policy")
        made = _read_plan(plan, arms or [])
    made = _with_options(made, prompts, manifest, loop, concurrency, rate, runs, boots)
    work = _manifest(made, manifest is not None, loop)
    if save_manifest is not None:
        work.save(save_manifest)
        print(json_text.dumps(work.summary()) if json else f"{save_manifest}: {work.summary()}")
        return
    require(out is None or not out.is_dir(), f"--out {out}: is a folder; give a file, such as bench.json")
    record = _go(made, work, out, _token(api_key_variable))
    _tell(record, out, json)


def _plan_of(
    base_url: list[str] | None, model: str | None, policy: str | None, tokenizer: str | None, engine: dict[str, Any]
) -> Plan:
    """A plan whose arms are the addresses, or one engine in process for each policy; the first is the baseline."""
    from dscale.evaluate.plan import Arm, Plan

    if base_url:
        require(policy is None, "--policy: is for our engine in process; a server has its own")
        arms = [_address(one, model, tokenizer) for one in base_url]
        return Plan((replace(arms[0], baseline=len(arms) > 1), *arms[1:]))
    require(model is not None, "nothing to measure: give --base-url ADDRESS, --model MODEL, or --plan FILE")
    chosen = {key: value for key, value in engine.items() if value is not None}
    made = [(name, {"model": model, "policy": name} | chosen) for name in (policy or "auto").split(",")]
    arms = [Arm(name, settings=settings) for name, settings in made]
    return Plan((replace(arms[0], baseline=len(arms) > 1), *arms[1:]), together=len(made) > 1)


def _address(given: str, model: str | None, tokenizer: str | None) -> Arm:
    from dscale.evaluate.plan import Arm

    name, found, address = given.partition("=")
    if not found or "://" in name:
        name, address = given.removeprefix("http://").removeprefix("https://").rstrip("/"), given
    known = address.startswith(("http://", "https://"))
    require(known, f"--base-url {given}: must begin with http:// or https://, or be NAME=http://…")
    return Arm(name, base_url=address, model=model, tokenizer=tokenizer)


def _read_plan(path: Path, arms: list[str]) -> Plan:
    from dscale.evaluate.plan import read_plan

    return read_plan(path).only(arms)


def _with_options(
    plan: Plan, prompts: list[str] | None, manifest: Path | None, loop: dict[str, Any], concurrency: str | None,
    rate: float | None, runs: int | None, boots: int | None,
) -> Plan:  # fmt: skip
    """The plan with what was given on the command line in the place of its own."""
    from dscale.cli.evaluate_policies import read_numbers

    require(not (prompts and manifest), "--prompts and --manifest: give one of them")
    given: dict[str, Any] = {
        "rate": rate,
        "runs": runs,
        "boots": boots,
        "manifest": str(manifest) if manifest else None,
    }
    given["concurrency"] = read_numbers("concurrency", concurrency)
    made = replace(plan, **{key: value for key, value in given.items() if value is not None})
    if prompts:
        made = replace(made, prompts=tuple(prompts), manifest=None)
    return replace(made, wanted=replace(made.wanted, **{key: one for key, one in loop.items() if one is not None}))


def _manifest(plan: Plan, named: bool, loop: dict[str, Any]) -> Manifest:
    """The plan's manifest; a frozen one may only be shortened."""
    from dscale.evaluate.bench import manifest_for

    if plan.manifest is not None:
        fixed = [name for name in ("warmup", "max_tokens", "temperature") if loop[name] is not None]
        require(not fixed, f"--{'/'.join(fixed).replace('_', '-')}: the manifest has its own")
    found = manifest_for(plan)
    return found.first(loop["requests"]) if plan.manifest is not None and loop["requests"] else found


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    found = os.environ.get(variable)
    require(bool(found), f"--api-key-variable: environment variable {variable} is not set")
    return found


def _go(plan: Plan, manifest: Manifest, out: Path | None, token: str | None) -> BenchRecord:
    """Run it, with what it can show told before. SIGTERM stops what was started, as Ctrl-C does."""
    import tempfile

    from dscale.cli.bench_view import LiveView
    from dscale.evaluate.arm_start import Starter
    from dscale.evaluate.bench import Bench, new_record, take_up
    from dscale.evaluate.statistics import detectable, minimum_detectable_effect

    record = new_record(plan, manifest, shlex.join(["dscale", *sys.argv[1:]]))
    record = record if out is None else take_up(record, out)
    logs = Path(tempfile.mkdtemp(prefix="dscale-bench-")) if out is None else out.with_name(out.name + ".logs")
    prompts = manifest.summary()["distinct"]
    if prompts > 1 and len(plan.arms) > 1:
        effect = minimum_detectable_effect(prompts, plan.boots)
        o.errors.print(detectable(prompts, plan.boots, effect), highlight=False, markup=False)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    with LiveView() as view:
        return Bench(Starter(plan, manifest, logs, token), record, out, view).go()


def _tell(record: BenchRecord, out: Path | None, json: bool) -> None:
    """Throughput, or what failed; exit code 1 then. Arms that could not be measured were told of already."""
    from rich.console import Console

    from dscale.cli.bench_view import print_failures, to_table
    from dscale.evaluate.bench import NOT_UP
    from dscale.evaluate.bench_summary import cells, failures

    failed = failures(record)
    lost = [note for note in record.notes if NOT_UP in note]
    if failed or lost:
        told = [{"arm": run.arm, "concurrency": run.concurrency, "id": row.id, "error": row.error}
                for run, row in failed]  # fmt: skip
        if json:
            print(json_text.dumps({"failed": told, "notes": record.notes, "out": str(out) if out else None}))
        if failed:
            print_failures(failed)
        raise typer.Exit(1)
    found = cells(record)
    if json:
        shown = [asdict(cell) for cell in found]
        print(json_text.dumps({"cells": shown, "manifest": record.manifest, "notes": record.notes,
                               "simulated": record.simulated, "out": str(out) if out else None}))  # fmt: skip
        return
    console = Console(width=10_000)  # a terminal may break lines: no figure is cut, in a file neither
    console.print(to_table(found))
    if record.simulated:
        console.print("simulated acceptance: the text means nothing")
    if out is not None:
        console.print(f"the record is in {out}", highlight=False, markup=False, soft_wrap=True)
