"""The load on a server: a real tiny one, and a stub that fails, is cut off, counts too many tokens, or is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dscale.evaluate.arm_process import ArmGone, ServedByServer, free_port, served_model
from dscale.evaluate.load import Measured, Progress, Server, Watcher, arrivals, closed_loop, open_loop
from dscale.evaluate.manifest import BenchRequest, Manifest
from tests.evaluate.stub_server import stub_server
from tests.serve.inprocess import InProcess, live, service_of, tiny_llm


def requests(count: int, max_tokens: int = 6) -> tuple[BenchRequest, ...]:
    said = [({"role": "user", "content": f"number {number}"},) for number in range(count)]
    return tuple(BenchRequest(f"r{i}", f"p{i}", "w", one, max_tokens, i) for i, one in enumerate(said))


class Seen(Watcher):
    """Keeps the last progress, and the most that ran."""

    def __init__(self) -> None:
        self.last: Progress | None = None
        self.most = 0

    def changed(self, progress: Progress) -> None:
        self.last, self.most = progress, max(self.most, progress.running)


def closed(url: str, count: int, concurrency: int, watcher: Watcher | None = None, **server: Any) -> Measured:
    load = closed_loop(Server(url, "stub", **server), requests(count), concurrency, 0.0, watcher or Watcher())
    return asyncio.run(load)


def test_a_real_server_tells_tokens_steps_and_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    client = InProcess(tiny_llm("full", max_requests=2))
    service = service_of(client)
    metrics = service.metrics
    assert metrics is not None
    render = metrics.render

    def fresh() -> bytes:
        metrics.observe(client.snapshot)
        return render()

    monkeypatch.setattr(metrics, "render", fresh)
    try:
        with live(service) as url:
            served = ServedByServer(Server(url, served_model(url)), Manifest("m", requests(5), requests(0)))
            about = served.about()
            measured, counters = served.run(2, None, 0, Watcher())
            unstreamed = Server(url, served_model(url), {"stream": False})
            whole = asyncio.run(closed_loop(unstreamed, requests(5), 2, 0.0, Watcher())).rows
    finally:
        client.stop()
    assert (about["engine"], about["policy"]) == ("dscale", "full")
    rows = measured.rows
    assert [row.id for row in rows] == [f"r{i}" for i in range(5)]
    assert all(row.error is None and row.output_tokens == 6 for row in rows)
    assert all(0 <= row.sent_s < row.first_token_s <= row.ended_s for row in rows if row.first_token_s is not None)
    assert min(row.sent_s for row in rows) == 0
    assert measured.window_s == max(row.ended_s for row in rows)
    assert counters["tokens"] == sum(row.output_tokens for row in rows) == 30
    assert counters["request_steps"] == sum(row.steps or 0 for row in rows)
    assert counters["verified"] == sum(row.verified or 0 for row in rows)
    assert counters["accepted"] == sum(row.accepted or 0 for row in rows) == sum(counters["accepted_by_position"])
    assert counters["drafted"] == sum(row.drafted or 0 for row in rows)
    assert counters["steps"] <= counters["request_steps"]
    assert [row.first_token_s for row in whole] == [None] * 5
    counted = [(row.output_tokens, row.prompt_tokens, row.steps, row.accepted, row.verified) for row in rows]
    assert [(one.output_tokens, one.prompt_tokens, one.steps, one.accepted, one.verified) for one in whole] == counted


def test_closed_loop_keeps_c_requests_running_and_sends_what_is_wanted() -> None:
    seen = Seen()
    with stub_server(pause=0.02) as (url, stub):
        measured = closed(url, 9, 3, seen, extra={"top_k": 1})
    assert stub.most_running == seen.most == 3
    assert all(row.output_tokens == 6 and row.prompt_tokens == 7 and row.steps is None for row in measured.rows)
    assert seen.last is not None
    assert (seen.last.done, seen.last.running, seen.last.failed, seen.last.tokens) == (9, 0, 0, 54)
    body = stub.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("stub", 6, 0.0, 1)
    assert body["stream_options"] == {"include_usage": True}
    first = measured.rows[0]
    assert first.first_token_s is not None
    assert first.first_token_s - first.sent_s >= 0.02  # the empty event before the pause is no token


def test_open_loop_sends_at_its_own_times() -> None:
    with stub_server(pause=0.3) as (url, stub):
        server = Server(url, "stub")
        measured = asyncio.run(open_loop(server, requests(6), 60.0, 0.0, seed=3, watcher=Watcher()))
    assert stub.most_running == 6  # it does not wait for answers
    due = arrivals(6, 60.0, 3)
    assert all(row.sent_s >= at - 0.01 for row, at in zip(measured.rows, due, strict=True))
    gaps = arrivals(20_000, 50.0, 0)
    assert gaps[0] == 0
    assert gaps[-1] / 20_000 == pytest.approx(1 / 50, rel=0.03)


def test_failures_are_told_in_their_rows() -> None:
    with stub_server(fail_every=3) as (url, _):
        rows = closed(url, 6, 1).rows
    assert [row.error for row in rows] == [None, None, "HTTP 500: out of luck"] * 2
    assert rows[2].output_tokens == 0
    with stub_server(cut_every=2) as (url, _):
        rows = closed(url, 2, 1).rows
    assert rows[0].error is None
    assert "ended early" in (rows[1].error or "")


def test_a_dead_server_stops_the_load_at_once() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    seen = Seen()
    rows = closed(url, 50, 2, seen).rows
    assert len(rows) == 50
    assert all("cannot be reached" in (row.error or "") for row in rows)
    assert sum((row.error or "").startswith("not sent") for row in rows) >= 48
    assert seen.last is not None
    with pytest.raises(ArmGone, match="no server answers there"):
        served_model(url)


def test_tokens_are_clipped_at_the_cap_and_at_the_end_token() -> None:
    class Words:
        """A tokenizer of one token a word."""

        def encode(self, text: str, add_special: bool) -> list[int]:
            return [0] * len(text.split())

    with stub_server(beyond=4) as (url, _):
        assert closed(url, 1, 1).rows[0].output_tokens == 6  # never over max_tokens
        shorter = Server(url, "stub", {"max_tokens": 4}, tokenizer=Words())  # 3 words and the end, counted as 8
        rows = asyncio.run(closed_loop(shorter, requests(1), 1, 0.0, Watcher())).rows
    assert rows[0].output_tokens == 4
