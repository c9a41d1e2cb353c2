"""What runs inside a step must be capturable: under fake tensors any read of a value on the host raises."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from dscale.kernels.top_logits import top_logits
from dscale.speculation.acceptance import accept, clip_at_end
from dscale.speculation.budget import allocate_exact, allocate_seeded
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.features import FeatureProjections, draft_features
from dscale.speculation.packing import gather, pack
from dscale.speculation.predictor import Predictor, PredictorConfig, survival
from dscale.speculation.sampling import RowParams, draw_on_device, logprobs

N, W, V, H = 4, 6, 50, 32
M = 2 * N


@pytest.mark.parametrize("allocate", [allocate_exact, allocate_seeded])
@pytest.mark.parametrize("scorer", ["predictor", "confidence"])
def test_a_whole_step_reads_nothing_back(allocate: Callable[..., Tensor], scorer: str) -> None:
    with FakeTensorMode():
        top = top_logits(torch.randn(N, W - 1, V))
        live, hidden = torch.ones(N, dtype=torch.bool), torch.randn(N, W - 1, H)
        if scorer == "predictor":
            projections = FeatureProjections(0, torch.randn(H, 96))
            features = draft_features(top, hidden, live.sum(), ~live, projections)
            q = survival(Predictor(PredictorConfig(W, "x"))(features))
        else:
            model = ConfidenceModel.day_one(W)
            q = model.survival(top)
        k = allocate(q, 2 * live.sum(), live)
        packed = pack(k, M)
        drafts = top.ids[..., 0]
        ids = gather(packed, torch.cat([drafts[:, :1], drafts], dim=1), 0)
        params = RowParams(*(torch.ones(M) for _ in range(6)))
        integers = {name: torch.ones(M, dtype=torch.int64) for name in ("top_k", "seed", "position")}
        params = RowParams(**{**vars(params), **integers})
        logits = torch.randn(M, V)
        y = draw_on_device(logits, params, logits.argmax(-1))
        outcome = accept(drafts, k, y, packed.starts)
        ends = torch.full((N, 3), -1)
        emitted, finished = clip_at_end(outcome.tokens, outcome.emitted, ends, torch.full((N,), 9))
        scores = logprobs(logits, y, 5)
    assert ids.shape == (M,)
    assert emitted.shape == finished.shape == (N,)
    assert outcome.tokens.shape == (N, W)
    assert scores.values.shape == (M, 5)


def test_the_check_notices_a_read() -> None:
    with FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            x.sum().item()
