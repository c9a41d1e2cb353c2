"""The acceptance predictor: from the features of a draft block to the chance that each draft survives (dscale.md §2).

z = W2 · relu(W1 · features + b1) + b2        one logit per new position; standardisation is folded into W1, b1
q_0 = 1,  q_j = min over t ≤ j of σ(z_t)      position j needs its predecessors
q_j = Π over t ≤ j of σ(z_t)                  with the hazard head: z_t speaks of draft t once those before it passed
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from dscale.config import InputError, require
from dscale.speculation.features import GROUPS, feature_size
from dscale.speculation.transfer import place_tensor

WEIGHTS = "predictor.safetensors"
KIND = "dscale-predictor"
LENGTH_WEIGHT = 0.02  # of the squared error of the accepted length, in the loss
HEADS = ("survival", "hazard")


@dataclass(frozen=True)
class PredictorConfig:
    """What a predictor was fitted for. drafter_hash: its drafter's; metrics: its quality on held-out prompts.

    head: what σ(z_j) is. "survival": that the first j drafts pass; "hazard": that draft j passes once j - 1 did.
    """

    width: int
    drafter_hash: str
    features: tuple[str, ...] = GROUPS
    hidden_units: int = 64
    projection_seed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    head: str = "survival"

    def __post_init__(self) -> None:
        require(self.width >= 2, f"predictor width: {self.width} must be at least 2")
        require(self.hidden_units >= 1, f"predictor hidden_units: {self.hidden_units} must be at least 1")
        require(self.head in HEADS, f"predictor head: {self.head!r}; allowed are {', '.join(HEADS)}")
        known = tuple(group for group in GROUPS if group in self.features)
        require(
            len(known) == len(self.features) > 0,
            f"predictor features: {list(self.features)}; allowed are {list(GROUPS)}",
        )
        object.__setattr__(self, "features", known)

    @property
    def feature_size(self) -> int:
        """Length of a feature row."""
        return feature_size(self.width, self.features)

    @property
    def projects(self) -> bool:
        """True when the features need FeatureProjections."""
        return "hidden" in self.features or "logits" in self.features


class Predictor(nn.Module):
    """MLP F-64-(W-1) with ReLU."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Linear(config.feature_size, config.hidden_units)
        self.second = nn.Linear(config.hidden_units, config.width - 1)

    def forward(self, features: Tensor) -> Tensor:
        """Feature rows [N, F] float32 → logits z [N, W-1]."""
        return self.second(functional.relu(self.first(features)))

    def survival(self, features: Tensor) -> Tensor:
        """Feature rows [N, F] float32 → q [N, W] float32, 1 first and nonincreasing."""
        return survival(self(features), self.config.head)

    @torch.no_grad()
    def fold(self, mean: Tensor, std: Tensor) -> None:
        """Make the first layer take raw features where it took (features - mean) / std; mean, std [F].

        A feature that never varied in training carries nothing: its weights become 0, whatever it is when served.
        """
        varied = std > 1e-6 * mean.abs().clamp_min(1.0)
        weight = self.first.weight * torch.where(varied, 1.0 / std.clamp_min(1e-30), 0.0)
        self.first.bias.sub_(weight @ mean)
        self.first.weight.copy_(weight)

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Replace the weights in place, from the host and in stream order: steps captured before see the new ones.

        InputError, and no change, where names or shapes are not this predictor's.
        """
        own = self.state_dict()
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        wanted = {name: tuple(value.shape) for name, value in own.items()}
        require(shapes == wanted, f"predictor: tensors {shapes} cannot replace {wanted}")
        for name, value in weights.items():
            place_tensor(value.to(own[name].dtype), own[name])

    def save(self, folder: str | Path) -> None:
        """Write config.json and predictor.safetensors into folder, made when it is not there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"kind": KIND, **asdict(self.config)}, indent=2) + "\n")
        save_file({name: value.contiguous().cpu() for name, value in self.state_dict().items()}, folder / WEIGHTS)

    @classmethod
    def load(cls, folder: str | Path, drafter_hash: str | None) -> Predictor:
        """Read what `save` wrote, for the drafter of this hash; None skips that check.

        Raises InputError when a file is missing or broken, or the predictor belongs to another drafter.
        """
        folder = Path(folder)
        config = read_config(folder)
        require(
            drafter_hash is None or config.drafter_hash == drafter_hash,
            f"predictor {folder}: fitted for drafter {config.drafter_hash}, but the drafter here is {drafter_hash}",
        )
        try:
            weights = load_file(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise InputError(f"predictor {folder / WEIGHTS}: cannot be read ({error})") from error
        predictor = cls(config)
        wanted = {name: tuple(value.shape) for name, value in predictor.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in weights.items()}
        require(wanted == found, f"predictor {folder / WEIGHTS}: tensors {found}, but config.json asks for {wanted}")
        predictor.load_state_dict(weights)
        return predictor.eval().requires_grad_(False)


def random_predictor(width: int, seed: int = 0) -> Predictor:
    """A predictor of untrained weights for blocks of `width`: what it costs, without what it knows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Predictor(PredictorConfig(width, "random")).eval().requires_grad_(False)


def read_config(folder: Path) -> PredictorConfig:
    """The config.json of a predictor folder."""
    path = folder / "config.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"predictor {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"predictor {path}: not JSON ({error})") from error
    kind = record.pop("kind", None) if isinstance(record, dict) else None
    require(kind == KIND, f"predictor {path}: kind is {kind!r}; a predictor has {KIND!r}")
    try:
        return PredictorConfig(**{**record, "features": tuple(record.get("features", GROUPS))})
    except TypeError as error:
        raise InputError(f"predictor {path}: {error}") from error


def survival(z: Tensor, head: str = "survival") -> Tensor:
    """Logits z [N, W-1] → q [N, W] float32, the chance that the first j drafts all pass: 1 first, nonincreasing."""
    passes = torch.sigmoid(z.float())
    chances = passes.cumprod(-1) if head == "hazard" else passes.cummin(-1).values
    return torch.cat([torch.ones_like(chances[:, :1]), chances], dim=-1)


def predictor_loss(z: Tensor, accepted: Tensor, slots: Tensor | None = None, head: str = "survival") -> Tensor:
    """Training loss (dscale.md §2): mean binary cross-entropy + 0.02 · MSE(Σ_j σ(z_j), accepted).

    z [N, W-1]; accepted [N] integer, drafts accepted when slots [N] rows were verified; None: all W. Scalar.

    Of a block cut at `slots` rows only positions j < slots count, in both terms: had all of them passed, nothing is
    known of the later ones. Had one failed the later ones failed too, yet they are left out all the same: kept only
    where they failed they would pull q down. Since slots are chosen without looking at acceptance, what is left is
    unbiased. The hazard head learns from positions that were reached, j ≤ accepted + 1, and its length is Σ_j q_j.
    """
    positions = torch.arange(1, z.shape[-1] + 1, device=z.device)
    seen = (positions < slots[:, None]) if slots is not None else torch.ones_like(z, dtype=torch.bool)
    labels = (positions <= accepted[:, None]).to(z.dtype)
    chances = survival(z, head)[:, 1:] if head == "hazard" else torch.sigmoid(z)
    length_error = functional.mse_loss((chances * seen).sum(-1), accepted.to(z.dtype))
    known = seen & (positions <= accepted[:, None] + 1) if head == "hazard" else seen
    errors = functional.binary_cross_entropy_with_logits(z, labels, reduction="none")
    return (errors * known).sum() / known.sum().clamp_min(1) + LENGTH_WEIGHT * length_error
