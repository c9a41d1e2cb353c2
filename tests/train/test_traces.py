"""Trace folders read back, and recorded steps against the walk over acceptance at every position."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dscale.config import InputError
from dscale.speculation.features import FeatureReader, feature_size
from dscale.train.artifacts import Stage
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.rows import answers
from dscale.train.trace_walk import collect
from dscale.train.traces import TRACES, Traces, check_groups, join_traces, prompt_id, trace_stats, write_traces
from dscale.train.walk import accepted_everywhere, walk_rows

from .tiny import tiny_drafter, tiny_rows, tiny_target

CONFIDENCE = FeatureReader(("confidence", "context"), None)


def made_up(request: list[int], groups=("confidence",), width=4, seed=0) -> Traces:
    rng = np.random.default_rng(seed)
    count = len(request)
    return Traces(
        features=rng.normal(size=(count, feature_size(width, groups))).astype(np.float16),
        drafts=rng.integers(0, 50, (count, width - 1)).astype(np.int32),
        accepted=rng.integers(0, width, count).astype(np.int16),
        slots=np.full(count, width, np.int16),
        request=np.array(request, np.int32),
        prompt=np.array(request, np.int64) + (1 << 40),
        position=np.arange(count, dtype=np.int32),
        workload=np.zeros(count, np.int16),
        groups=groups,
        width=width,
        workloads=("a",),
    )


def tiny_forward(anchors: int) -> BlockForward:
    target = tiny_target()
    return BlockForward(target, tiny_drafter(target), ForwardConfig(length=128, rows=4, anchors=anchors))


def write_folder(folder, parts: list[Traces]) -> Stage:
    first = parts[0]
    inputs = {"groups": list(first.groups), "width": first.width, "workloads": list(first.workloads)}
    stage = Stage.open(folder, TRACES, inputs)
    for number, part in enumerate(parts):
        stage.add(write_traces(folder, f"traces-{number:05d}.safetensors", part))
    stage.finish({})
    return stage


def test_folder_holds_what_was_written(tmp_path):
    parts = [made_up([0, 0, 1]), made_up([2, 3, 3, 3], seed=1)]
    stage = write_folder(tmp_path, parts)
    found, whole = Traces.open(tmp_path), join_traces(parts)
    assert (found.groups, found.width, found.workloads) == (("confidence",), 4, ("a",))
    for name, array in whole.arrays().items():
        assert np.array_equal(getattr(found, name), array), name
        assert getattr(found, name).dtype == array.dtype
    assert [shard.counts["requests"] for shard in stage.shards] == [2, 2]
    some = found.select(found.request == 3)
    assert (len(some), some.workloads) == (3, ("a",))


def test_damage_is_named_in_one_line(tmp_path):
    write_folder(tmp_path, [made_up([0, 1])])
    shard = tmp_path / "traces-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match="corrupt"):
        Traces.open(tmp_path)
    data[-1] ^= 1
    shard.write_bytes(data)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["inputs"]["width"] = 5
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="not those of width 5"):
        Traces.open(tmp_path)


def test_groups_come_in_the_order_of_their_features():
    assert check_groups(("context", "confidence")) == ("confidence", "context")
    with pytest.raises(InputError, match="groups: moon; allowed are"):
        check_groups(("moon",))


@pytest.mark.parametrize("anchors", [1, 24])
def test_every_step_of_the_walk_is_recorded_once(anchors):
    forward, rows = tiny_forward(anchors), tiny_rows(seed=5)
    traces = collect(forward, rows, CONFIDENCE, lanes=5)
    everywhere = accepted_everywhere(tiny_forward(24), rows)
    walked = walk_rows(everywhere, rows.answer)
    assert (np.bincount(traces.request) == [w.steps for w in walked]).all()
    assert (traces.features[:, -25] == 5).all()
    assert ((traces.features[:, -22] == 1) == (traces.position == 0)).all()
    places = [(row, *edges) for row in range(len(rows)) for edges in answers(rows.answer[row])]
    for record in range(len(traces)):
        row, start, end = places[traces.request[record]]
        p = start - 1 + int(traces.position[record])
        assert traces.accepted[record] == everywhere[row, p]
        left = end - 1 - p
        censored = left < 3 and traces.accepted[record] == left
        assert traces.slots[record] == (left + 1 if censored else 4)
        assert traces.exact[record] != censored


def test_only_greedy_and_wanted_conversations_are_walked():
    rows = tiny_rows(seed=5)
    rows.greedy[::2] = False
    wanted = np.arange(len(rows.prompt)) < 4
    traces = collect(tiny_forward(24), rows, CONFIDENCE, wanted=wanted)
    assert sorted(set(traces.prompt.tolist())) == [1, 3]
    assert sorted(set(traces.request.tolist())) == [0, 1]


def test_figures_by_hand():
    """Request 0 ends with its bonus token, request 1 inside a block with an accepted draft: 4 + 1 and 1 + 2 tokens."""
    made = made_up([0, 1, 0, 1])
    values = {
        "accepted": np.array([3, 0, 0, 2], np.int16),
        "slots": np.array([4, 4, 4, 3], np.int16),
        "position": np.array([0, 0, 4, 1], np.int32),
        "workload": np.array([0, 1, 0, 1], np.int16),
    }
    traces = replace(made, **values, workloads=("a", "b", "never"))
    assert traces.exact.tolist() == [True, True, True, False]
    stats = trace_stats(traces)
    assert list(stats["workloads"]) == ["a", "b"]
    assert stats["workloads"]["a"] == {
        "requests": 1, "prompts": 1, "records": 2, "mean_accepted": 1.5, "progress": 2.5, "exact": 1.0,
    }  # fmt: skip
    assert stats["workloads"]["b"]["progress"] == (1 + 2) / 2
    assert (stats["requests"], stats["records"], stats["progress"]) == (2, 4, 2.0)


def test_the_id_of_a_prompt_is_that_of_its_tokens():
    assert prompt_id([1, 2, 3]) == prompt_id((1, 2, 3)) != prompt_id([1, 2])
    assert 0 <= prompt_id([7]) < 1 << 63
