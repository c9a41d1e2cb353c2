"""`dscale generate`: answer one prompt, or a file of them.

dscale generate -m smollm2-135m "Why is the sky blue?"
dscale generate -m smollm2-135m --prompts in.jsonl --out out.jsonl --json
dscale generate -m smollm2-135m --json-schema city.json "Describe Paris."
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from dscale.cli import options as o
from dscale.config import Grammar, InputError, SamplingParams, require
from dscale.versions import versions

if TYPE_CHECKING:
    from dscale.engine.llm import LLM
    from dscale.engine.outputs import RequestOutput
    from dscale.engine.recorder import Recorder


@dataclass(frozen=True)
class Row:
    """One line of a prompts file: an id, and a prompt or a list of messages."""

    id: str
    prompt: str | None
    messages: list[dict[str, Any]] | None


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; leave out with --prompts.")] = None,
    model: o.Model = "smollm2-135m",
    drafter: o.Drafter = "auto",
    predictor: o.Predictor = "auto",
    policy: o.PolicyName = "auto",
    width: o.Width = None,
    slots: o.Slots = 8.0,
    layout: o.Layout = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    graphs: o.Graphs = True,
    deterministic: o.Deterministic = False,
    draft_weights: o.DraftWeights = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    draft_kv_cache_dtype: o.DraftCacheDtype = "auto",
    tp: o.TensorParallel = 1,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL rows with `prompt` or `messages`, optional `id`.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL of answers; rows already there are not made again.")] = None,
    max_requests: Annotated[int, typer.Option(help="Most requests decoded together.")] = 16,
    record: Annotated[Path | None, typer.Option(help="Folder for traces of what is verified, for dscale fit.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="JSON schema file; answers are JSON that it admits.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that each answer matches whole.")] = None,
    simulate: o.Simulate = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text as it is.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Answer a prompt, or a file of prompts.

    Example: dscale generate -m smollm2-135m "Why is the sky blue?"
    """
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens,
        grammar=read_grammar(json_schema, regex),
    )  # fmt: skip
    require((prompt is None) != (prompts is None), "generate: give either a prompt or --prompts FILE, not both or none")
    require(out is None or prompts is not None, "--out: goes with --prompts FILE")
    rows = [Row("0", prompt, None)] if prompts is None else read_prompts(prompts)
    done = finished_ids(out) if out is not None else set()
    pending = [row for row in rows if row.id not in done]
    together = min(max_requests, max(len(pending), 1))  # what is never used together needs no cache
    recorder = new_recorder() if record is not None else None
    llm = o.build_llm(
        model, drafter=drafter, predictor=predictor, policy=policy, width=width, slots=slots, layout=layout,
        dtype=dtype, device=device, max_requests=together, recorder=recorder, graphs=graphs,
        temperatures=[temperature],
        simulate=o.simulated(simulate), tensor_parallel=tp, deterministic=deterministic,
        draft_weights=draft_weights, kv_cache_dtype=kv_cache_dtype, draft_kv_cache_dtype=draft_kv_cache_dtype,
    )  # fmt: skip
    ids = [token_ids(llm, row, raw) for row in pending]
    with recording(llm, recorder, record):
        summary = answer(llm, pending, ids, params, out, quiet=as_json)
    if as_json:
        print(json.dumps({"model": model, "skipped": len(rows) - len(pending), **summary}))


def read_grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """What every answer has to be, if anything was asked for."""
    require(json_schema is None or regex is None, "generate: give either --json-schema or --regex, not both")
    if regex is not None:
        return Grammar("regex", regex)
    if json_schema is None:
        return None
    try:
        return Grammar.json_schema(json_schema.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--json-schema {json_schema}: cannot be read ({reason})") from None


def new_recorder() -> Recorder:
    """A recorder of the default feature groups."""
    from dscale.engine.recorder import Recorder

    return Recorder()


@contextmanager
def recording(llm: LLM, recorder: Recorder | None, folder: Path | None) -> Iterator[None]:
    """Traces of what is verified meanwhile, added to the folder; nothing without a recorder."""
    if recorder is None or folder is None:
        yield
        return
    from dscale.train.live_traces import LiveTraces

    live = LiveTraces.attach(recorder, llm, folder)
    try:
        yield
    finally:
        live.close()


def read_prompts(path: Path) -> list[Row]:
    """Rows of a prompts file; InputError names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    rows = [_read_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    require(len(rows) > 0, f"--prompts {path}: holds no rows")
    seen: set[str] = set()
    for row in rows:
        require(row.id not in seen, f"--prompts {path}: id {row.id!r} appears twice; ids must be unique")
        seen.add(row.id)
    return rows


def _read_row(path: Path, number: int, line: str) -> Row:
    where = f"--prompts {path} line {number}"
    try:
        record = json.loads(line)
    except ValueError:
        raise InputError(f"{where}: not JSON; each line is one object with `prompt` or `messages`") from None
    require(isinstance(record, dict), f"{where}: not an object; each line has `prompt` or `messages`")
    prompt, messages = record.get("prompt"), record.get("messages")
    require((prompt is None) != (messages is None), f"{where}: has to have one of `prompt` and `messages`")
    require(prompt is None or isinstance(prompt, str), f"{where}: `prompt` must be text")
    good = messages is None or (isinstance(messages, list) and all(isinstance(one, dict) for one in messages))
    require(good and messages != [], f"{where}: `messages` must be a list of objects with `role` and `content`")
    return Row(str(record.get("id", number - 1)), prompt, messages)


def finished_ids(out: Path) -> set[str]:
    """Ids already answered in the output file. A last line cut off by an interruption is removed."""
    if not out.exists():
        require(out.parent.is_dir(), f"--out {out}: folder {out.parent} does not exist")
        return set()
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        ids = {str(json.loads(line)["id"]) for line in whole.splitlines() if line.strip()}
    except (ValueError, KeyError, TypeError):
        raise InputError(f"--out {out}: exists and is not an output of this command; give another file") from None
    if len(whole) < len(data):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return ids


def token_ids(llm: LLM, row: Row, raw: bool) -> list[int]:
    """Token ids of a row: through the chat template where the model has one, unless raw."""
    tokenizer = llm.loaded.tokenizer
    messages = row.messages
    if messages is None and tokenizer.has_chat_template and not raw:
        require(bool(row.prompt), f"prompt {row.id}: is empty; give at least one character")
        messages = [{"role": "user", "content": row.prompt}]
    if messages is None:
        require(bool(row.prompt), f"prompt {row.id}: is empty; give at least one character")
        return tokenizer.encode(row.prompt or "")
    require(tokenizer.has_chat_template, f"prompt {row.id}: has `messages`, but the model has no chat template")
    return tokenizer.chat(messages)


def answer(
    llm: LLM, rows: list[Row], ids: list[list[int]], params: SamplingParams, out: Path | None, quiet: bool
) -> dict[str, Any]:
    """Answer all rows, each written as soon as it is done; returns the summary."""
    file = out.open("a", encoding="utf-8") if out is not None else None
    began = time.perf_counter()
    with o.progress_bar() as bar:
        task = bar.add_task("answering", total=len(rows))

        def finished(index: int, output: RequestOutput) -> None:
            bar.advance(task)
            if file is not None:
                _write(file, rows[index].id, output)

        outputs = llm.generate(sampling_params=params, prompt_token_ids=ids, on_finish=finished)
    seconds = time.perf_counter() - began
    if file is not None:
        file.close()
    elif not quiet:
        for output in outputs:
            print(f"[{output.note}] {output.outputs[0].text}" if output.note else output.outputs[0].text)
    return summarise(llm, outputs, seconds)


def _write(file: TextIO, id: str, output: RequestOutput) -> None:
    one = output.outputs[0]
    usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(one.token_ids)}
    if one.metrics is not None:
        usage |= {"accepted_draft_tokens": one.metrics.accepted, "verified_slots": one.metrics.slots}
    row: dict[str, Any] = {"id": id, "text": one.text, "token_ids": one.token_ids}
    row |= {"finish_reason": one.finish_reason, "usage": usage} | ({"note": output.note} if output.note else {})
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def summarise(llm: LLM, outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
    """Tokens per second and what each decode step made of its slots."""
    tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    metrics = [one.metrics for output in outputs for one in output.outputs if one.metrics is not None]
    steps = sum(one.steps for one in metrics)
    return {
        **({"note": llm.note} if llm.note else {}),
        "policy": llm.policy,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "requests": len(outputs),
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "mean_progress": tokens / steps if steps else 0.0,
        "slots_per_request": sum(one.slots for one in metrics) / steps if steps else 0.0,
        "versions": versions(),
    }
