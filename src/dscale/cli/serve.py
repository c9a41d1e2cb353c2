"""`dscale serve`: the OpenAI-compatible server.

dscale serve smollm2-135m --port 8000
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dscale.config import InputError, require

if TYPE_CHECKING:
    import asyncio


NO_SETTINGS = ("config", "check", "engine", "engine_arg")  # of the command alone


def serve(
    model: Annotated[
        str | None, typer.Argument(help="Folder, hub id, GGUF file, alias (smollm2-135m) or bundle.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option("-d", "--drafter", help="Drafter folder; auto (default) or none.")
    ] = None,
    predictor: Annotated[str | None, typer.Option("-p", "--predictor", help="Predictor folder; auto or none.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="off, full, fixed:W, dvl, dvl:seeded, confidence, dspark, auto.")
    ] = None,
    slots: Annotated[float | None, typer.Option(help="Rows verified per request by dvl and confidence.")] = None,
    width: Annotated[int | None, typer.Option(help="Block width W, anchor included.")] = None,
    layout: Annotated[str | None, typer.Option(help="Anchor layout of the drafter: 1+N or anchor-first.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", "--tp", help="Processes, each with a GPU, that share the model.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="On a GPU: the text of `off` in bfloat16 too, whatever the batch.",
        ),
    ] = None,
    draft_weights: Annotated[
        str | None, typer.Option(help="auto, or fp8: drafts at eight bits; faster on newer GPUs, slower on a CPU.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto, or fp8: half the memory, keys and values rounded; slower on a CPU.")
    ] = None,
    draft_kv_cache_dtype: Annotated[
        str | None, typer.Option(help="The same for the drafter's cache; costs drafts, not text.")
    ] = None,
    graph_kinds: Annotated[
        str | None, typer.Option(help="On a GPU: steps captured at the start: greedy, sampled, or both (default).")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(help="Most sequences decoded together (16).")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.")] = None,
    max_prefill_tokens: Annotated[int | None, typer.Option(help="Prompt tokens of one step (512).")] = None,
    num_pages: Annotated[int | None, typer.Option(help="Cache pages of 16 tokens; default from free memory.")] = None,
    memory_fraction: Annotated[float | None, typer.Option(help="Share of free memory for the cache (0.3).")] = None,
    prefix_caching: Annotated[bool | None, typer.Option("--prefix-caching/--no-prefix-caching")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests that give none; default: a new one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (8000); 0 takes a free one.")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name clients use; may be repeated.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Key clients must send; may be repeated.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Most sequences that wait (256); beyond: 503.")] = None,
    max_per_client: Annotated[
        int | None, typer.Option(help="Most open requests of a key or address; beyond: 429.")
    ] = None,
    max_body: Annotated[int | None, typer.Option(help="Most bytes of a body (4194304); beyond: 413.")] = None,
    body_timeout: Annotated[float | None, typer.Option(help="Seconds a body may take to arrive (30).")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds a request may take (600).")] = None,
    drain_seconds: Annotated[float | None, typer.Option(help="Seconds running requests get at a stop (30).")] = None,
    stall_seconds: Annotated[
        float | None, typer.Option(help="Seconds the engine may be silent before /health fails (60).")
    ] = None,
    stream_interval: Annotated[
        float | None,
        typer.Option(
            help="Seconds between two events of a stream; 0: one a step (default: 3,000 a second in all; on a CPU 100)."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin allowed to call from browsers; repeatable.")
    ] = None,
    log_prompts: Annotated[
        bool | None, typer.Option("--log-prompts/--no-log-prompts", help="Log prompt texts.")
    ] = None,
    refit: Annotated[
        bool | None, typer.Option("--refit/--no-refit", help="Fit predictor and calibration to live traffic.")
    ] = None,
    refit_every: Annotated[float | None, typer.Option(help="Seconds between two refits, at least (300).")] = None,
    refit_min_records: Annotated[int | None, typer.Option(help="New records that a refit waits for (2000).")] = None,
    refit_keep: Annotated[int | None, typer.Option(help="Most records in memory (50000).")] = None,
    refit_dir: Annotated[str | None, typer.Option(help="Folder that keeps the last accepted predictor.")] = None,
    engine: Annotated[str, typer.Option(help="dscale, or sglang: SGLang with this project's plug-in.")] = "dscale",
    engine_arg: Annotated[list[str] | None, typer.Option(help="Passed on to SGLang as it is; repeatable.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these flags.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Say whether the server would start, and exit.")] = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API, metrics, and a page at /.

    A flag wins over its environment variable DSCALE_FLAG_NAME, that over the --config file, that over the default.

    Example: dscale serve smollm2-135m --port 8000
    """
    given = {name: value for name, value in locals().items() if name not in NO_SETTINGS}
    flags = {name: value or None if isinstance(value, list) else value for name, value in given.items()}
    if engine != "dscale":
        _run_sglang(engine, flags, engine_arg or [], config, check)
    require(not engine_arg, "--engine-arg: only --engine sglang has it")
    _need_packages()
    from dscale.serve.settings import resolve_settings

    settings = resolve_settings(flags, file=config)
    if check:
        from dscale.serve.check import check_settings
        from dscale.serve.run import bind

        record = check_settings(settings)
        bind(settings.host, settings.port).close()
        print(json.dumps(record))
        return
    _run(settings)


def _run_sglang(engine: str, flags: dict[str, Any], extra: list[str], config: Path | None, check: bool) -> NoReturn:
    """Start SGLang with the plug-in; with check only say how."""
    require(engine == "sglang", f"--engine: {engine!r} is not known; allowed are dscale, sglang")
    from dscale.integrations.sglang import launch

    if config is not None:
        os.environ["DSCALE_CONFIG"] = str(config)
    tp = flags.pop("tensor_parallel")
    planned = launch.plan(flags, 1 if tp is None else tp, extra)
    launch.check_installed()
    if check:
        command = ["***" if part and part == planned.api_key else part for part in planned.command]
        print(json.dumps({"command": command, "environment": planned.variables}))
        raise typer.Exit(0)
    raise typer.Exit(launch.run(planned))


def _run(settings: object) -> None:
    import asyncio

    from dscale.serve.logs import start_logs
    from dscale.serve.run import run_server
    from dscale.serve.settings import ServerSettings

    assert isinstance(settings, ServerSettings)
    start_logs()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        raise typer.Exit(runner.run(run_server(settings)))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which takes less of the machine from the engine, where it is installed."""
    try:
        import uvloop
    except ImportError:  # it does not exist for every system
        return None
    return uvloop.new_event_loop


def _need_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise InputError(
            f"serve: needs {', '.join(missing)}; install dscale with its serve extra: pip install 'dscale[serve]'"
        )
