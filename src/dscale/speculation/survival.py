"""From a draft block to the chance that its drafts survive: features and predictor in one (dscale.md §2)."""

from __future__ import annotations

from torch import Tensor

from dscale.config import require
from dscale.kernels import triton
from dscale.kernels.top_logits import TopLogits
from dscale.speculation.features import HIDDEN, LOGITS, FeatureProjections, draft_features
from dscale.speculation.predictor import Predictor


def predicted_survival(
    predictor: Predictor,
    top: TopLogits,
    hidden: Tensor | None,
    live: Tensor,
    initial: Tensor,
    projections: FeatureProjections | None,
) -> Tensor:
    """q [N, W] float32 of N draft blocks, 1 first and nonincreasing; live [N] bool, the rest as of draft_features."""
    groups = predictor.config.features
    if not triton.usable(top.values):
        features = draft_features(top, hidden, live.sum(), initial, projections, groups)
        return predictor.survival(features)
    from dscale.kernels.triton.predict import predict

    projected = None
    if predictor.config.projects:
        require(hidden is not None and projections is not None, f"features: {groups} need hidden states, projections")
        assert hidden is not None
        assert projections is not None
        projected = hidden.float() @ projections.matrix
    layers = (predictor.first.weight, predictor.first.bias, predictor.second.weight, predictor.second.bias)
    hazard = predictor.config.head == "hazard"
    sizes = (HIDDEN, LOGITS)
    return predict(top.values, top.log_sum_exp, top.entropy, projected, live, initial, layers, groups, sizes, hazard)
