"""Counters of the three servers under our names: real text of ours, recorded text of the other two."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from dscale.evaluate.counters import Scrape, read_metrics
from dscale.serve.messages import Snapshot
from dscale.serve.metrics import Metrics

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 27.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7960117988931448e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 189.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 32.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 26.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="target",position="0"} 1.79601179e+09
vllm:num_requests_running{engine="0",model_name="target"} 0.0
vllm:generation_tokens_total{engine="0",model_name="target"} 60.0
vllm:generation_tokens_total{engine="1",model_name="target"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0
sglang:spec_verify_calls_total{model_name="m"} 100.0
sglang:generation_tokens_total{model_name="m"} 350.0
sglang:spec_accept_length{model_name="m"} 3.5
"""


def ours(policy: str = "dvl", **counters: float) -> str:
    metrics = Metrics(CollectorRegistry(), "m")
    snapshot = Snapshot(1.0, policy, running=3, accepted_at=[5, 2], drafted_at=[9, 9], verified_at=[9, 4],
                        counters=dict(counters))  # fmt: skip
    metrics.observe(snapshot)
    return metrics.render().decode()


def test_ours() -> None:
    text = ours(drafted_steps=9, drafted=18, accepted=7, steps=5, request_steps=10, slots=23, decode_seconds=0.5)
    found = read_metrics(text)
    assert (found.engine, found.policy, found.running) == ("dscale", "dvl", 3)
    counted = found.since(Scrape())
    assert counted["accepted_by_position"] == [5, 2]
    want = {"drafts": 9, "drafted": 18, "accepted": 7, "steps": 5, "request_steps": 10, "verified": 23,
            "step_seconds": 0.5}  # fmt: skip
    assert {name: counted[name] for name in want} == want


def test_differences_are_of_every_counter_and_position() -> None:
    before = read_metrics(ours(drafted_steps=1, slots=3))
    after = read_metrics(ours(drafted_steps=9, slots=23, decode_seconds=0.25))
    counted = after.since(before)
    assert (counted["drafts"], counted["verified"], counted["step_seconds"]) == (8, 20, 0.25)
    assert counted["accepted_by_position"] == [0, 0]


def test_vllm() -> None:
    found = read_metrics(VLLM)
    assert (found.engine, found.running, found.policy) == ("vllm", 0, None)
    assert found.since(Scrape()) == {
        "drafts": 27, "drafted": 189, "accepted": 32, "tokens": 61, "accepted_by_position": [26, 4, 2],
    }  # fmt: skip


def test_sglang_accepts_what_its_calls_did_not_add_themselves() -> None:
    found = read_metrics(SGLANG)
    assert (found.engine, found.running) == ("sglang", 2)
    assert found.since(Scrape()) == {"drafts": 100, "tokens": 350, "accepted": 250}


def test_what_is_no_metric_is_passed_over() -> None:
    found = read_metrics("<html>\nnonsense{ 1\nvllm:generation_tokens_total NaN\nother_total x\nup 1\n")
    assert (found.engine, found.since(Scrape())) == ("server", {})
