"""Recorded steps against the walk and against features of single passes."""

import numpy as np
import torch

from dscale.kernels.top_logits import top_logits
from dscale.speculation.features import FeatureProjections, draft_features
from dscale.train.rows import answers
from dscale.train.traces import LANES, Traces, collect
from dscale.train.walk import accepted_everywhere, walk_rows

from .test_drafter import hidden_of_one_anchor, trainer
from .tiny import tensors, tiny_rows


def test_every_step_of_the_walk_is_recorded_with_its_own_features(tmp_path):
    run, rows = trainer(rows=4, anchors=24), tiny_rows(seed=5)
    projections = FeatureProjections.build(run.target.head.weight, 0)
    traces = collect(run.forward, rows, projections)
    walked = walk_rows(accepted_everywhere(run.forward, rows), rows.answer)
    assert len(traces.accepted) == sum(w.steps for w in walked)
    assert (np.bincount(traces.prompt) == [w.steps for w in walked]).all()
    ids, first, _ = tensors(rows)
    record = int(np.flatnonzero((traces.prompt == 1) & (traces.position > 0))[0])
    start = answers(rows.answer[0])[1][0]
    p = start - 1 + int(traces.position[record])
    with torch.no_grad():
        hidden = hidden_of_one_anchor(run, ids, first, 0, p)[None]
        top = top_logits(run.target.logits(hidden))
        alone = draft_features(top, hidden, LANES, torch.tensor([False]), projections)[0]
    assert np.allclose(traces.features[record], alone.numpy(), atol=0.02)
    traces.save(tmp_path / "traces.npz")
    assert np.array_equal(Traces.load(tmp_path / "traces.npz").accepted, traces.accepted)
