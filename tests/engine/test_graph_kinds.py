"""Which steps are captured at the start, greedy ones, sampled ones or both, and what capturing them takes."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from dscale.config import GRAPH_KINDS, EngineConfig, InputError
from dscale.engine.graphs import GraphCounters, GraphRunner, kinds_for, without_collection
from dscale.engine.prefill_graphs import PrefillRunner
from tests.engine.test_graphs import Closure, captured, fixed_auto
from tests.engine.test_lossless import GREEDY, SEEDED, engine, prompts, reference, tokens


@pytest.mark.parametrize("name", GRAPH_KINDS)
def test_prepare_captures_every_size_once(name: str) -> None:
    """Buckets 1, 2, 4; off and budgets 4, 6, 8 in blocks of 8: 12 steps of a kind. Then only steps of the other kind
    are captured, while requests wait."""
    llm, kinds, backend = engine("llama", "auto"), GRAPH_KINDS[name], Closure()
    fixed_auto(llm)
    graphs = captured(llm, backend)
    graphs.prepare(kinds, timed=True)
    prepared = list(graphs._captured)
    assert set(prepared) == {
        graphs._key(lanes, shape, greedy)
        for lanes in (1, 2, 4) for shape in graphs.policy.shapes(lanes) for greedy in kinds
    }  # fmt: skip
    counters = graphs.counters
    assert (counters.greedy, counters.sampled) == (12 * (True in kinds), 12 * (False in kinds))
    assert counters.graphs == backend.captures == len(prepared) == 12 * len(kinds)
    assert {key.all_greedy for key in graphs._seconds} == {kinds[0]}
    assert len(graphs._seconds) == 12
    for params in (SEEDED, GREEDY, SEEDED):
        assert tokens(llm, prompts(8), params) == reference("llama", params is SEEDED)
    assert {key.all_greedy for key in list(graphs._captured)[len(prepared) :]} == {True, False} - set(kinds)
    assert graphs.ran == {True, False}


@pytest.mark.parametrize("name", GRAPH_KINDS)
def test_an_engine_prepares_what_it_was_told(name: str) -> None:
    llm = engine("llama", "dvl", graph_kinds=name)
    worker, counters = llm.engine.worker, captured(llm, Closure()).counters
    worker.prefills = PrefillRunner(worker.state, worker.models, 64, Closure())
    llm._ready(worker)  # on a CPU it adds nothing of its own
    assert (counters.greedy, counters.sampled) == (3 * (name != "sampled"), 3 * (name != "greedy"))


def test_mixed_requests_are_served_by_what_was_prepared() -> None:
    """One request at a temperature makes its step one that samples, whoever else is in it."""
    params = [SEEDED, GREEDY] * 4
    plain = engine("llama", "dvl").generate(prompt_token_ids=prompts(8), sampling_params=params)
    llm = engine("llama", "dvl", lag=1)
    graphs = captured(llm, Closure())
    graphs.prepare()
    outputs = llm.generate(prompt_token_ids=prompts(8), sampling_params=params)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    assert graphs.backend.captures == 2 * 3
    assert False in graphs.ran


def test_both_kinds_take_three_runs_and_one_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Closure()
    graphs = captured(engine("llama", "dvl"), backend)
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(gc.isenabled()))
    graphs.prepare()
    assert backend.runs == [2, 1] * 3  # a size, then its twin
    assert (collected, backend.counted) == ([True], 2)
    assert gc.isenabled()
    graphs.prepare()  # nothing is left to capture
    assert (collected, backend.counted) == ([True], 2)


def test_a_capture_that_requests_wait_for_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine("llama", "dvl")
    graphs = captured(llm, Closure())
    graphs.prepare(GRAPH_KINDS["greedy"])
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    tokens(llm, prompts(3), SEEDED)
    assert graphs.backend.runs[3:] == [1] * graphs.counters.sampled
    assert graphs.counters.sampled > 0


def test_after_a_change_of_policy_the_kinds_that_ran_are_prepared() -> None:
    llm = engine("llama", "dvl")
    graphs = captured(llm, Closure())
    graphs.prepare()
    tokens(llm, prompts(2), SEEDED)
    again = GraphRunner(graphs.state, graphs.models, graphs.policy, 4, Closure(), graphs.ran)
    assert str(again.prepare()).startswith("3 step graphs (0 greedy, 3 sampled), 0 MiB, captured in ")
    again.ran.add(True)
    assert again.prepare().greedy == 3


@pytest.mark.parametrize("before", [True, False])
def test_a_failed_capture_leaves_collection_as_it_was(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    try:
        with suppress(ZeroDivisionError), without_collection():
            with without_collection():
                pass
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == before
    finally:
        gc.enable()


def test_kinds_that_temperatures_need() -> None:
    temperatures = [0.0], [1.0, 0.3], [0.0, 1.0], [1e-6]
    assert [kinds_for(one) for one in temperatures] == ["greedy", "sampled", "both", "greedy"]
    assert EngineConfig().graph_kinds == "both"
    with pytest.raises(InputError, match=r"^graph_kinds: 'all'; allowed are greedy, sampled, both$"):
        EngineConfig(graph_kinds="all")
    assert str(GraphCounters(3)).startswith("3 step graphs, 0 MiB")  # of prefill: nothing is drawn
