"""From a policy's name to the policy: the one place where names are read."""

from __future__ import annotations

import torch

from dscale.config import SpeculationConfig, require
from dscale.layers.ranks import head_rows
from dscale.models.decoder import Target
from dscale.speculation.auto import Auto
from dscale.speculation.budget import allocate_exact, allocate_seeded
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.costs import Costs
from dscale.speculation.dspark import DSpark, TemperedScorer
from dscale.speculation.features import FeatureProjections
from dscale.speculation.policies import ConfidenceScorer, Fixed, Off, Policy, PredictorScorer, Scorer, SharedBudget
from dscale.speculation.predictor import Predictor


def scorer_for(config: SpeculationConfig, predictor: Predictor | None, width: int, target: Target) -> Scorer | None:
    """What predicts acceptance: the trained predictor where the policy takes one and it fits, else the confidence."""
    name = config.policy.partition(":")[0]
    if name in ("off", "full", "fixed"):
        return None
    if name == "dvl":
        require(predictor is not None, "policy 'dvl' needs a predictor; give one with --predictor, or use confidence")
    if name in ("dvl", "auto") and predictor is not None:
        if predictor.config.width == width:
            predictor.to(target.embedding.device)
            return PredictorScorer(predictor, projections_for(predictor, target))
        require(name == "auto", f"predictor: fitted for width {predictor.config.width}; width {width} is asked for")
    if name == "dspark":
        return TemperedScorer(width, target.embedding.device)
    return ConfidenceScorer(ConfidenceModel.day_one(width, target.embedding.device))


def projections_for(predictor: Predictor, target: Target) -> FeatureProjections | None:
    """The fixed projections a predictor's features need, or None when it reads the confidence features alone."""
    config = predictor.config
    return FeatureProjections.build(head_rows(target.head), config.projection_seed) if config.projects else None


def build_policy(
    name: str,
    width: int,
    slots: float,
    scorer: Scorer | None,
    costs: Costs,
    resizes: bool,
    budgets: tuple[int, ...] = (),
    device: torch.device | str = "cpu",
) -> Policy:
    """The policy of this name (dscale.config.POLICIES) for blocks of `width` rows.

    resizes: sizes of a step need not be known before its draft. budgets: rows a request between which `auto` chooses,
    where steps are captured; () leaves width and budget open.
    """
    kind, _, argument = name.partition(":")
    if kind == "off" or width == 1:
        return Off()
    if kind == "full":
        return Fixed(width, width)
    if kind == "fixed":
        rows = int(argument)
        require(rows <= width, f"policy {name!r}: the block has {width} rows; allowed are fixed:1 to fixed:{width}")
        return Fixed(width, rows)
    assert scorer is not None, "adaptive policies come with a scorer"
    if kind == "dspark":
        return DSpark(scorer, width, costs)
    if kind == "auto":
        narrow = scorer
        if not isinstance(scorer, ConfidenceScorer) and not budgets:  # the predictor is fitted for whole blocks
            narrow = ConfidenceScorer(ConfidenceModel.day_one(width, device))
        return Auto(scorer, narrow, width, costs, resizes, budgets)
    seeded = argument == "seeded"
    return SharedBudget(scorer, width, slots, allocate_seeded if seeded else allocate_exact, name)
