"""The client on a real engine process with the tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dscale.config import InputError, SamplingParams
from dscale.engine.llm import LLM
from dscale.serve.client import Client, join
from dscale.serve.messages import Delta, EngineDied, Refusal, Submit, Switch

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutines on one loop, so that a client outlives a test."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def options(folders: dict[str, Path]) -> dict[str, Any]:
    """LLM arguments of the tiny pair."""
    return {
        "model": str(folders["target"]), "drafter": str(folders["drafter"]), "predictor": str(folders["predictor"]),
        "policy": "dvl", "slots": 3.0, "dtype": "float32", "device": "cpu", "max_requests": 16, "num_pages": 160,
        "prefix_caching": False,
    }  # fmt: skip


@pytest.fixture(scope="module")
def client(run: Run, options: dict[str, Any]) -> Iterator[Client]:
    """One engine process for all tests that leave it whole."""
    client = run(Client.start(**options))
    yield client
    assert run(client.stop(5.0)) == 0


def prompt(index: int) -> tuple[int, ...]:
    return tuple(5 + (index * 7 + step) % 50 for step in range(3 + index))


def endless(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 90, "ignore_eos": True, **more})


async def answer(client: Client, id: str, ids: tuple[int, ...], params: SamplingParams, pause: float = 0.0) -> Delta:
    """All deltas of a request as one."""
    whole: Delta | None = None
    async with aclosing(client.generate(Submit(id, ids, params, params.seed or 0))) as deltas:
        async for delta in deltas:
            whole = delta if whole is None else join(whole, delta)
            await asyncio.sleep(pause)
    assert whole is not None
    return whole


async def quiet(client: Client) -> None:
    """Waits until nothing runs any more, by the engine's own account."""
    async with asyncio.timeout(10):
        while client.snapshot.running or client.snapshot.waiting or client.snapshot.pages_used:
            await asyncio.sleep(0.02)


def test_sixteen_at_once_equal_the_offline_engine(run: Run, client: Client, options: dict[str, Any]):
    params = [endless(temperature=float(i % 2), top_k=20 * (i % 3), seed=i, max_tokens=40 + i) for i in range(16)]
    params[3] = endless(stop=("w9 ", "w1"), seed=3)
    llm = LLM(**options)
    want = llm.generate(sampling_params=params, prompt_token_ids=[prompt(i) for i in range(16)])

    async def all_at_once() -> list[Delta]:
        return await asyncio.gather(*(answer(client, f"r{i}", prompt(i), one) for i, one in enumerate(params)))

    got = run(all_at_once())
    for one, other in zip(got, want, strict=True):
        assert one.token_ids == other.outputs[0].token_ids
        assert one.text == other.outputs[0].text
        assert one.finish_reason == other.outputs[0].finish_reason
    run(quiet(client))


def test_closing_and_cancelling_abort_and_free_the_pages(run: Run, client: Client):
    async def leave() -> None:
        async with aclosing(client.generate(Submit("close", prompt(0), endless(), 0))) as deltas:
            await anext(deltas)
        cancelled = asyncio.create_task(answer(client, "cancel", prompt(1), endless()))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await quiet(client)

    run(leave())
    assert client.snapshot.pages_used == 0


def test_a_slow_reader_gets_joined_deltas_and_the_whole_text(run: Run, client: Client):
    quick = run(answer(client, "quick", prompt(2), endless()))
    run(quiet(client))
    reads, before = 0, client.snapshot.counters["emitted"]

    async def finished() -> None:
        async with asyncio.timeout(10):
            while client.snapshot.counters["emitted"] < before + len(quick.token_ids):
                await asyncio.sleep(0.02)

    async def slowly() -> Delta:
        nonlocal reads
        whole: Delta | None = None
        async with aclosing(client.generate(Submit("slow", prompt(2), endless(), 0))) as deltas:
            async for delta in deltas:
                reads += 1
                whole = delta if whole is None else join(whole, delta)
                await finished()  # by the engine's own account
        assert whole is not None
        return whole

    slow = run(slowly())
    assert (slow.text, slow.token_ids, slow.steps) == (quick.text, quick.token_ids, quick.steps)
    assert slow.usage == quick.usage
    assert reads < len(quick.steps)


def test_refusals_and_switches_reach_who_asked(run: Run, client: Client):
    with pytest.raises(Refusal, match="empty") as refused:
        run(answer(client, "bad", (), endless()))
    assert refused.value.kind == "invalid"
    with pytest.raises(Refusal, match="not known"):
        run(client.switch(Switch("sometimes")))
    assert run(client.switch(Switch("full"))) == "full"
    assert {step.slots for step in run(answer(client, "full", prompt(3), endless())).steps} == {6}
    assert run(client.switch(Switch("dvl", slots=3.0))) == "dvl"
    assert (client.about["policy"], client.about["slots"]) == ("dvl", 3)


def test_a_switch_is_told_though_who_asked_left(run: Run, client: Client):
    async def leave() -> tuple[str, float]:
        asked = asyncio.create_task(client.switch(Switch("full", slots=2.0)))
        await asyncio.sleep(0)  # it is sent
        asked.cancel()
        while client.silence:
            await asyncio.sleep(0.01)
        return client.about["policy"], client.about["slots"]

    assert run(leave()) == ("full", 2)
    assert run(client.switch(Switch("dvl", slots=3.0))) == "dvl"


def test_snapshots_come_while_it_runs_at_most_ten_a_second(run: Run, client: Client):
    async def watch() -> list[float]:
        times: list[float] = []
        work = asyncio.gather(*(answer(client, f"w{i}", prompt(i), endless()) for i in range(8)))
        async with aclosing(client.snapshots()) as snapshots:
            async for snapshot in snapshots:
                times.append(snapshot.time)
                if not snapshot.running:
                    break
        await work
        return times

    times = run(watch())
    assert len(times) >= 2
    assert all(later - earlier > 0.09 for earlier, later in pairwise(times[:-1]))  # the last one comes at rest


def test_what_cannot_be_loaded_is_said_in_one_line(run: Run, options: dict[str, Any], tmp_path: Path):
    with pytest.raises(InputError, match=r"no config\.json"):
        run(Client.start(**{**options, "model": str(tmp_path)}))


def test_silence_is_how_long_a_stopped_engine_owes_an_answer(run: Run, client: Client):
    async def stopped() -> tuple[float, float, Delta]:
        assert client.silence == 0.0  # nothing was asked
        task = asyncio.create_task(answer(client, "stopped", prompt(1), endless()))
        while not client.snapshot.running:
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(0.8)  # less what was on its way
        silent = client.silence
        os.kill(client.pid, signal.SIGCONT)
        whole = await task
        await quiet(client)
        return silent, client.silence, whole

    silent, after, whole = run(stopped())
    assert silent > 0.3
    assert after == 0.0
    assert whole.usage.completion_tokens == 90


def test_what_the_engine_prints_is_a_line_of_the_log(run: Run, options: dict[str, Any], caplog):
    caplog.set_level("INFO", "dscale.serve")

    async def start_and_stop() -> int:
        client = await Client.start(**options)
        return await client.stop(0.0)

    assert run(start_and_stop()) == 0
    said = [record.fields["text"] for record in caplog.records if record.getMessage() == "engine said"]
    assert any(text.startswith("drafter ") for text in said)


def test_kill_is_noticed_at_once(run: Run, options: dict[str, Any]):
    async def killed() -> tuple[list[Any], float, int, Client]:
        client = await Client.start(**options)
        assert client.alive
        first = client.generate(Submit("first", prompt(0), endless(), 0))
        tasks = [asyncio.create_task(answer(client, str(i), prompt(i), endless())) for i in range(120)]
        await anext(first)  # it decodes; most of the others wait for one of 16 places
        began = time.monotonic()
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        took = time.monotonic() - began
        return results, took, await client.wait(), client

    results, took, code, client = run(killed())
    assert any(isinstance(one, EngineDied) for one in results)
    assert all(isinstance(one, EngineDied | Delta) for one in results)
    assert took < 5.0
    assert code == -signal.SIGKILL
    assert not client.alive
    with pytest.raises(EngineDied):
        run(answer(client, "after", prompt(0), endless()))


def test_stop_lets_all_finish_and_signals_do_not_reach_the_engine(run: Run, options: dict[str, Any]):
    async def drained() -> tuple[list[Delta], int, Client]:
        client = await Client.start(**options)
        os.kill(client.pid, signal.SIGTERM)
        os.kill(client.pid, signal.SIGINT)
        tasks = [asyncio.create_task(answer(client, str(i), prompt(i), endless(max_tokens=40))) for i in range(32)]
        await asyncio.sleep(0.1)
        code = asyncio.create_task(client.stop(60.0))
        await asyncio.sleep(0)
        assert client.draining
        with pytest.raises(Refusal, match="shutting down") as refused:
            await answer(client, "late", prompt(0), endless())
        assert refused.value.kind == "shutdown"
        return await asyncio.gather(*tasks), await code, client

    answers, code, client = run(drained())
    assert [one.usage.completion_tokens for one in answers] == [40] * 32
    assert code == 0
    assert not client.alive


ORPHAN = """
import asyncio, os, sys
from dscale.serve.client import Client
async def main():
    client = await Client.start(sys.argv[1], drafter="none", dtype="float32", device="cpu")
    print(client.pid, flush=True)
    os._exit(9)
asyncio.run(main())
"""


def test_the_engine_ends_with_its_parent(folders: dict[str, Path]):
    parent = subprocess.run([sys.executable, "-c", ORPHAN, folders["target"]], capture_output=True, text=True)
    assert parent.returncode == 9
    child = Path(f"/proc/{int(parent.stdout)}/stat")
    for _ in range(100):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the engine outlived its parent")
