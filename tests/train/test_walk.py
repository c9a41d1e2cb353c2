"""The walk over known acceptance, and acceptance at every position against single forward passes."""

import numpy as np
import torch

from dscale.train.walk import accepted_everywhere, mean_progress, walk, walk_rows

from .test_drafter import hidden_of_one_anchor, trainer
from .tiny import tensors, tiny_rows


def test_walk_moves_by_accepted_plus_one():
    accepted = np.array([0, 0, 3, 0, 0, 0, 1, 9, 0, 2, 1, 0], np.int8)
    done = walk(accepted, start=3, end=12)  # 2 → 6 → 8 → 9 → 12
    assert (done.tokens, done.steps) == (9, 4)
    assert mean_progress([done, walk(accepted, 3, 7)]) == (9 + 4) / (4 + 1)


def test_accepted_everywhere_equals_single_passes():
    run, rows = trainer(rows=4, anchors=40), tiny_rows(seed=4)
    accepted = accepted_everywhere(run.forward, rows)
    ids, first, answer = tensors(rows)
    for row in (0, 5):
        for p in range(1, 100, 7):
            if accepted[row, p] < 0:
                assert not (answer[row, p + 1] and first[row, p + 1] == first[row, p])
                continue
            with torch.no_grad():
                drafts = run.target.logits(hidden_of_one_anchor(run, ids, first, row, p)).argmax(-1).tolist()
            count = 0
            while count < 3 and answer[row, p + 1 + count] and int(ids[row, p + 1 + count]) == drafts[count]:
                count += 1
            assert accepted[row, p] == count
    assert sum(w.tokens for w in walk_rows(accepted, rows.answer)) == int(answer.sum())
