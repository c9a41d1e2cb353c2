"""Sixty-four clients that misbehave, against a real `dscale serve`: nothing may be lost, leaked or wrong.

    python benchmarks/server_load.py --seconds 180 --drain --kill --out benchmarks/records/server_load.json
    python benchmarks/server_load.py --seconds 20 --clients 16                  # a minute on two cores

Closed loop: each client asks, reads, and asks again; by chance it sends what must be refused, goes away in the middle,
or reads slowly; one switches the policy now and then. Afterwards every whole answer is compared, token by token, with
what `dscale.LLM` gives offline without speculation in the server's own dtype (rows do not depend on the batch, so that
bfloat16 is exact too). --drain: SIGTERM while 32 streams run. --kill: kill -9 of the engine while 32 streams run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from server_asks import Ask, Choice, difference, made_ask, made_wrong, offline, wide_ask
from server_process import Server

from dscale import LLM
from dscale.evaluate.record_file import write_record

Act = Callable[[], Coroutine[Any, Any, None]]
POLICIES = ("off", "full", "fixed:4", "dvl", "confidence", "auto")
REFUSED = (429, 503)  # limits that may be met
MOST_BODY = 1 << 20
SERVER = ("--max-model-len", 1024, "--num-pages", 90, "--max-body", MOST_BODY, "--max-queue", 120)
SERVER_LIMIT = ("--max-per-client", 60, "--drain-seconds", 300)
PATIENCE = 300.0  # seconds until a request without an answer counts as lost
WARM = 1 / 3  # share of the run after which memory has to be flat
STREAMS = 32


class Load:
    """The clients' common account. ended: outcomes by name; lost: what should not have happened, in words."""

    def __init__(self, url: str, seed: int, longest: int) -> None:
        self.url, self.seed, self.longest = url, seed, longest
        self.ended: Counter[str] = Counter()
        self.status: Counter[int] = Counter()
        self.lost: list[str] = []
        self.whole: list[tuple[Ask, list[Choice]]] = []
        self.until = 0.0

    async def run(self, clients: int, seconds: float) -> None:
        """Clients that start no new request after so many seconds, and one that switches policies."""
        self.until = time.monotonic() + seconds
        switching = asyncio.create_task(self._switch())
        await asyncio.gather(*(self._client(number) for number in range(clients)))
        switching.cancel()

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        limits = httpx.Limits(max_connections=1)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits) as quick,
            httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, transport=slow_transport()) as slow,
        ):
            while time.monotonic() < self.until:
                kind = rng.choices(("ask", "wrong", "leave", "slow"), (62, 16, 16, 6))[0]
                try:
                    await self._act(kind, rng, slow if kind == "slow" else quick)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.lost.append(f"client {number}, {kind}: {type(error).__name__} {error}"[:300])

    async def _act(self, kind: str, rng: random.Random, client: httpx.AsyncClient) -> None:
        if kind == "wrong":
            await self._wrong(rng, client)
        elif kind == "leave":
            await self._leave(rng, client)
        else:
            ask = wide_ask(rng) if kind == "slow" else made_ask(rng, self.longest)
            await self._ask(ask, client, 0.05 if kind == "slow" else 0.0)

    async def _wrong(self, rng: random.Random, client: httpx.AsyncClient) -> None:
        wrong = made_wrong(rng, MOST_BODY)
        headers = {"Content-Type": "application/json"}
        response = await client.post(wrong.path, content=wrong.content, headers=headers)
        self.status[response.status_code] += 1
        error = response.json()["error"]
        if response.status_code in REFUSED:  # what only the engine can judge is judged after limits
            self.ended[f"limit: {error['code']}"] += 1
            await asyncio.sleep(float(response.headers["Retry-After"]))
        elif response.status_code == wrong.status and error["message"]:
            self.ended[f"refused: {wrong.name}"] += 1
        else:
            self.lost.append(f"{wrong.name}: status {response.status_code}, {error}"[:300])

    async def _leave(self, rng: random.Random, client: httpx.AsyncClient) -> None:
        """Go away: in the middle of a stream, or before a whole answer."""
        ask = made_ask(rng, self.longest)
        if not ask.stream:
            try:
                async with asyncio.timeout(rng.uniform(0.0, 2.0)):
                    await client.post(ask.path, json=ask.body())
            except TimeoutError:
                pass
            self.ended["left before the answer"] += 1
            return
        async with client.stream("POST", ask.path, json=ask.body()) as response:
            left = rng.randint(0, 6)
            async for _ in response.aiter_lines():
                left -= 1
                if left < 0:
                    break
        self.ended["left in the middle"] += 1

    async def _ask(self, ask: Ask, client: httpx.AsyncClient, pause: float) -> None:
        async with client.stream("POST", ask.path, json=ask.body()) as response:
            self.status[response.status_code] += 1
            if response.status_code in REFUSED:
                error = json.loads(await response.aread())["error"]
                self.ended[f"limit: {error['code']}"] += 1
                await asyncio.sleep(float(response.headers["Retry-After"]))
                return
            if response.status_code != 200:
                self.lost.append(f"status {response.status_code}: {(await response.aread())[:200]!r}")
                return
            choices = await (read_stream(response, pause) if ask.stream else read_whole(response))
        if any(one.finish_reason not in ("stop", "length") for one in choices):
            self.lost.append(f"an answer broke off: {[one.finish_reason for one in choices]}")
            return
        self.ended["slowly read" if pause else "answered"] += 1
        self.whole.append((ask, choices))

    async def _switch(self) -> None:
        rng = random.Random(self.seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as client:
            while True:
                await asyncio.sleep(4.0)
                slots = rng.choice((2.0, 4.0, 8.0))
                asked = {"policy": rng.choice(POLICIES), "slots": slots}
                response = await client.post("/dscale/policy", json=asked)
                if response.status_code == 200:
                    self.ended["policy switched"] += 1
                else:
                    self.lost.append(f"policy {asked}: {response.text}"[:300])


def slow_transport() -> httpx.AsyncHTTPTransport:
    """Connections whose receive buffer is small, so that a reader that waits makes the server wait."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
    return httpx.AsyncHTTPTransport(socket_options=options)


async def read_whole(response: httpx.Response) -> list[Choice]:
    """Choices of a whole answer."""
    body = json.loads(await response.aread())
    return [
        Choice(one["message"]["content"] if "message" in one else one["text"], one["token_ids"], one["finish_reason"],
               scores_of(one["logprobs"]))
        for one in body["choices"]
    ]  # fmt: skip


async def read_stream(response: httpx.Response, pause: float) -> list[Choice]:
    """Choices of a stream; it ends with [DONE], or ValueError."""
    parts: dict[int, list[dict[str, Any]]] = {}
    async for line in response.aiter_lines():
        await asyncio.sleep(pause)
        if line == "data: [DONE]":
            return [joined(parts[index]) for index in sorted(parts)]
        if line:
            data = json.loads(line.removeprefix("data: "))
            if "error" in data:
                raise ValueError(f"error in the stream: {data['error']}")
            for one in data["choices"]:
                parts.setdefault(one["index"], []).append(one)
    raise ValueError("the stream ended without [DONE]")


def joined(parts: list[dict[str, Any]]) -> Choice:
    """One sequence of a stream."""
    text = "".join(one["delta"].get("content", "") if "delta" in one else one["text"] for one in parts)
    ids = [token for one in parts for token in one.get("token_ids", ())]
    scores = [scores_of(one["logprobs"]) for one in parts if one.get("logprobs")]
    return Choice(text, ids, parts[-1]["finish_reason"], list(chain(*scores)) if scores else None)


def scores_of(logprobs: dict[str, Any] | None) -> Any:
    """Log-probabilities of the tokens in a choice's logprobs object."""
    if logprobs is None:
        return None
    known = logprobs.get("content")
    return [one["logprob"] for one in known] if known is not None else logprobs["token_logprobs"]


async def watch(server: Server, load: Load, samples: list[tuple[float, float, float]]) -> None:
    """Resident MiB of both processes every second, and a line now and then."""
    began = time.monotonic()
    while True:
        samples.append((time.monotonic() - began, *server.memory()))
        if len(samples) % 15 == 0:
            done, lost = sum(load.ended.values()), len(load.lost)
            print(f"{samples[-1][0]:4.0f} s  {done} ended, {lost} lost, {samples[-1][2]:.0f} MiB", file=sys.stderr)
        await asyncio.sleep(1.0)


def memory_record(samples: list[tuple[float, float, float]]) -> dict[str, Any]:
    """Of each process: MiB at a third and at the end (medians of a tenth of the run), and the slope between."""
    warm = samples[int(len(samples) * WARM) :]
    tenth = max(len(samples) // 10, 1)
    record: dict[str, Any] = {}
    for column, name in ((1, "http"), (2, "engine")):
        values = [one[column] for one in warm]
        slope = statistics.linear_regression([one[0] for one in warm], values).slope * 60
        first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
        record[name] = {"warm_mib": first, "end_mib": last, "growth": last / first - 1, "mib_a_minute": slope}
    return record


def loaded(server: Server, args: argparse.Namespace) -> tuple[dict[str, Any], Load]:
    """Put the server under load; the record of it."""
    load, samples = Load(server.url, args.seed, args.max_tokens), []

    async def both() -> None:
        watching = asyncio.create_task(watch(server, load, samples))
        await load.run(args.clients, args.seconds)
        watching.cancel()

    began = time.monotonic()
    asyncio.run(both())
    idle = server.idle_metrics()
    tokens = sum(len(one.token_ids) for _, choices in load.whole for one in choices)
    record = {
        "clients": args.clients,
        "seconds": time.monotonic() - began,
        "ended": dict(load.ended.most_common()),
        "statuses": {str(status): count for status, count in sorted(load.status.items())},
        "lost": load.lost,
        "server_errors": sum(n for status, n in load.status.items() if status >= 500 and status != 503),
        "tokens_of_whole_answers": tokens,
        "pages_held_when_idle": idle["vllm:kv_cache_usage_perc"] * server.about["pages"],
        "running_when_idle": idle["vllm:num_requests_running"] + idle["vllm:num_requests_waiting"],
        "preemptions": idle["vllm:num_preemptions_total"],
        "memory": memory_record(samples),
        "log_errors": [row for row in server.rows if row["level"] in ("error", "critical")],
        "lines_not_json": server.other,
    }
    return record, load


def compared(load: Load, about: dict[str, Any], model: str) -> dict[str, Any]:
    """How many whole answers are the offline engine's."""
    llm = LLM(model, policy="off", dtype=about["dtype"], max_requests=32, max_model_len=1024)
    wants = offline(llm, [ask for ask, _ in load.whole])
    pairs = zip(load.whole, wants, strict=True)
    found = [(ask, why) for (ask, got), want in pairs if (why := difference(got, want)) is not None]
    shown = [f"{json.dumps(ask.body())}: {why}" for ask, why in found[:20]]
    return {"answers": len(wants), "sequences": sum(map(len, wants)), "different": len(found), "first": shown}


async def streaming(server: Server, count: int, tokens: int, act: Act) -> list[tuple[str, float]]:
    """Run so many streams; once all have begun, act(); how each ended, and how many seconds after act began."""
    begun, acted = asyncio.Semaphore(0), [0.0]

    async def one(client: httpx.AsyncClient, seed: int) -> tuple[str, float]:
        body = {"prompt": "Once", "stream": True, "max_tokens": tokens, "ignore_eos": True, "seed": seed}
        how = "broke off without a word"
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                begun.release()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        data = json.loads(line[6:])
                        how = f"error: {data['error']['message']}" if "error" in data else how
                    how = "finished" if line == "data: [DONE]" else how
        except httpx.HTTPError as error:
            how = f"connection lost: {type(error).__name__}"
        return how, time.monotonic() - acted[0]

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
        tasks = [asyncio.create_task(one(client, seed)) for seed in range(count)]
        for _ in tasks:
            await begun.acquire()
        acted[0] = time.monotonic()
        acting = asyncio.create_task(act())
        ends = list(await asyncio.gather(*tasks))
        await acting
        return ends


def ended_streams(server: Server, tokens: int, act: Act) -> dict[str, Any]:
    """Streams that something happens to."""
    began = time.monotonic()
    ends = asyncio.run(streaming(server, STREAMS, tokens, act))
    how = dict(Counter(how for how, _ in ends))
    code = server.ended()
    return {"streams": STREAMS, "ends": how, "slowest_s": max(seconds for _, seconds in ends), "exit_code": code,
            "seconds": time.monotonic() - began}  # fmt: skip


def drained(server: Server) -> dict[str, Any]:
    """SIGTERM while streams run."""

    async def act() -> None:
        server.process.send_signal(signal.SIGTERM)

    return ended_streams(server, 96, act)


def killed(server: Server) -> dict[str, Any]:
    """kill -9 of the engine while streams run; what /health says until nothing listens any more, and when first."""
    health: list[tuple[float, str]] = []

    async def act() -> None:
        os.kill(server.engine_pid, signal.SIGKILL)
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=server.url, timeout=5) as client:
            try:
                while time.monotonic() - began < 10:
                    said = await client.get("/health")
                    health.append((time.monotonic() - began, str(said.status_code)))
                    await asyncio.sleep(0.05)
            except httpx.HTTPError as error:
                health.append((time.monotonic() - began, type(error).__name__))

    record = ended_streams(server, 900, act)
    failed = min((at for at, said in health if said != "200"), default=None)
    return record | {"health": list(dict.fromkeys(said for _, said in health)), "health_failed_after_s": failed}


def started(args: argparse.Namespace, *flags: object) -> Server:
    """A server with the limits of this test."""
    return Server(args.model, (*SERVER_LIMIT, "--dtype", args.dtype, *flags))


def good(record: dict[str, Any]) -> list[str]:
    """What of the record is not as it must be."""
    load, bad = record["load"], []
    for name in ("lost", "server_errors", "pages_held_when_idle", "running_when_idle", "log_errors"):
        bad += [f"{name}: {load[name]}"] if load[name] else []
    bad += [f"memory of {name}: {one}" for name, one in load["memory"].items() if one["growth"] > 0.03]
    bad += [f"answers: {record['answers']}"] if record["answers"]["different"] else []
    drain, kill = record.get("drain"), record.get("kill")
    if drain and (drain["ends"] != {"finished": STREAMS} or drain["exit_code"] != 0):
        bad.append(f"drain: {drain}")
    if kill and (
        any(not how.startswith("error: engine") for how in kill["ends"])
        or kill["slowest_s"] > 5
        or kill["exit_code"] == 0
        or (kill["health_failed_after_s"] or 99) > 5
    ):
        bad.append(f"kill: {kill}")
    return bad


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--max-tokens", type=int, default=48, help="most new tokens of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drain", action="store_true", help="also: SIGTERM during 32 streams")
    parser.add_argument("--kill", action="store_true", help="also: kill -9 of the engine during 32 streams")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"schema": "dscale.server_load/1", "model": args.model, "seed": args.seed}
    with started(args, *SERVER) as server:
        about = {name: server.about[name] for name in ("dtype", "device", "pages", "max_requests", "versions")}
        record |= {"server": about, "flags": [str(one) for one in (*SERVER, *SERVER_LIMIT)]}
        record["load"], load = loaded(server, args)
        record["exit_code"] = server.stop()
    record["answers"] = compared(load, about, args.model)
    for name, asked, act in (("drain", args.drain, drained), ("kill", args.kill, killed)):
        if asked:
            with started(args, "--max-requests", STREAMS, "--max-model-len", 1024) as server:
                record[name] = act(server)
    bad = good(record)
    record["good"] = not bad
    print(json.dumps(record, indent=1))
    if args.out is not None:
        write_record(args.out, record)
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
