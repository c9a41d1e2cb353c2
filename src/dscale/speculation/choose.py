"""From a policy's name to the policy: the one place where names are read."""

from __future__ import annotations

from dscale.config import SpeculationConfig, require
from dscale.models.decoder import Target
from dscale.speculation.auto import Auto
from dscale.speculation.budget import allocate_exact, allocate_seeded
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.costs import StepCosts
from dscale.speculation.features import FeatureProjections
from dscale.speculation.policies import ConfidenceScorer, Fixed, Off, Policy, PredictorScorer, Scorer, SharedBudget
from dscale.speculation.predictor import Predictor


def scorer_for(
    config: SpeculationConfig, predictor: str | None, drafter_hash: str, width: int, target: Target
) -> Scorer | None:
    """What predicts acceptance: the trained predictor where the policy takes one and it fits, else the confidence."""
    name = config.policy.partition(":")[0]
    if name in ("off", "full", "fixed"):
        return None
    if name == "dvl":
        require(predictor is not None, "policy 'dvl' needs a predictor; give one with --predictor, or use confidence")
    if name in ("dvl", "auto") and predictor is not None:
        loaded = Predictor.load(predictor, drafter_hash)
        if loaded.config.width == width:
            loaded.to(target.embedding.device)
            needs = loaded.config.needs_projections
            head = target.head.weight
            return PredictorScorer(loaded, FeatureProjections.build(head, loaded.config.projection_seed) if needs else None)
        require(name == "auto", f"predictor {predictor}: fitted for width {loaded.config.width}; width {width} is asked for")
    return ConfidenceScorer(ConfidenceModel.day_one(width, target.embedding.device))


def build_policy(name: str, width: int, slots: float, scorer: Scorer | None, costs: StepCosts) -> Policy:
    """The policy of this name (dscale.config.POLICIES) for blocks of `width` rows."""
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
    if kind == "auto":
        return Auto(scorer, width, costs)
    seeded = argument == "seeded"
    return SharedBudget(scorer, width, slots, allocate_seeded if seeded else allocate_exact, name)
