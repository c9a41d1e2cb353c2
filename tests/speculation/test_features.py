import pytest
import torch

from dscale.config import InputError
from dscale.kernels.top_logits import top_logits
from dscale.speculation import features
from dscale.speculation.features import (
    FeatureProjections,
    draft_features,
    feature_size,
    logit_projection,
    sign_matrix,
)

N, W, H, V = 3, 6, 48, 200


@pytest.fixture
def block() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head [V, H], hidden [N, W-1, H], logits [N, W-1, V]."""
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(V, H, generator=generator), torch.randn(N, W - 1, H, generator=generator)
    return head, hidden, hidden @ head.T


def test_sizes_are_those_of_the_paper() -> None:
    assert feature_size(16) == 1735
    assert feature_size(16, ("confidence",)) == 270
    assert feature_size(16, ("hidden",)) == 960
    assert feature_size(16, ("logits",)) == 480
    assert feature_size(8) == 114 * 7 + 25


@pytest.mark.parametrize("at_once", [16384, 64])
def test_folded_projection_equals_the_direct_one(
    block: tuple[torch.Tensor, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "FOLD_ROWS", at_once)
    head, hidden, logits = block
    projections = FeatureProjections.build(head, seed=5)
    of_hidden, of_logits = projections.project(hidden)
    direct = (logits - logits.mean(-1, keepdim=True)) @ logit_projection(V, 5)
    torch.testing.assert_close(of_logits, direct, rtol=1e-4, atol=1e-4)
    assert direct.abs().mean() > 0.1
    torch.testing.assert_close(of_hidden, hidden @ sign_matrix(H, 64, 5, stream=0) / H**0.5, rtol=1e-4, atol=1e-5)


def test_shifting_all_logits_changes_only_the_highest(block: tuple[torch.Tensor, ...]) -> None:
    logits = block[2]
    initial = torch.zeros(N, dtype=torch.bool)
    one = draft_features(top_logits(logits), None, 3, initial, None, ("confidence",)).view(N, W - 1, 18)
    two = draft_features(top_logits(logits + 2), None, 3, initial, None, ("confidence",)).view(N, W - 1, 18)
    torch.testing.assert_close(two[..., 0], one[..., 0] + 2)
    torch.testing.assert_close(two[..., 1:], one[..., 1:], rtol=1e-4, atol=1e-4)


def test_projections_come_from_the_seed_alone(block: tuple[torch.Tensor, ...]) -> None:
    head = block[0]
    one, same, other = (FeatureProjections.build(head, seed) for seed in (1, 1, 2))
    assert torch.equal(one.matrix, same.matrix)
    assert (one.matrix != other.matrix).float().mean() > 0.4
    # Golden signs: a predictor on disk depends on them.
    golden = [1, 1, 1, 1, 1, 1, -1, 1, 1, -1, -1, -1, -1, -1, -1, -1]
    assert sign_matrix(2, 8, 7, 0).flatten().tolist() == golden


def test_signs_are_balanced_and_columns_nearly_orthogonal() -> None:
    signs = sign_matrix(4000, 32, 3, stream=1)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    gram = signs.T @ signs / 4000
    assert (gram - torch.eye(32)).abs().max() < 0.08


def test_order_of_the_features(block: tuple[torch.Tensor, ...]) -> None:
    head, hidden, logits = block
    projections = FeatureProjections.build(head, seed=5)
    initial = torch.tensor([True, False, True])
    rows = draft_features(top_logits(logits), hidden, 3, initial, projections)
    assert rows.shape == (N, feature_size(W))
    assert rows.dtype == torch.float32
    p = logits.softmax(-1)
    ordered = logits.sort(dim=-1, descending=True).values
    for position in range(W - 1):
        own = rows[:, 18 * position : 18 * (position + 1)]
        torch.testing.assert_close(own[:, 0], ordered[:, position, 0])
        for rank in range(1, 16):
            torch.testing.assert_close(own[:, rank], ordered[:, position, 0] - ordered[:, position, rank])
        torch.testing.assert_close(own[:, 16], p[:, position].max(-1).values.log(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own[:, 17], -(p * p.log()).sum(-1)[:, position], rtol=1e-4, atol=1e-4)
    hidden_at, logits_at, context_at = 18 * (W - 1), 82 * (W - 1), 114 * (W - 1)
    of_hidden, of_logits = projections.project(hidden)
    torch.testing.assert_close(rows[:, hidden_at + 64 : hidden_at + 128], of_hidden[:, 1])
    torch.testing.assert_close(rows[:, logits_at + 32 : logits_at + 64], of_logits[:, 1])
    context = torch.zeros(N, 25)
    context[:, 0] = 3
    context[:, 3] = torch.tensor([1.0, 0.0, 1.0])
    assert torch.equal(rows[:, context_at:], context)


def test_lanes_may_be_a_tensor_and_rows_do_not_mix(block: tuple[torch.Tensor, ...]) -> None:
    head, hidden, logits = block
    projections = FeatureProjections.build(head, seed=5)
    initial = torch.tensor([True, False, True])
    rows = draft_features(top_logits(logits), hidden, torch.tensor(3), initial, projections)
    assert torch.equal(rows, draft_features(top_logits(logits), hidden, 3, initial, projections))
    alone = draft_features(top_logits(logits[1:2]), hidden[1:2], 3, initial[1:2], projections)
    torch.testing.assert_close(alone, rows[1:2])


@pytest.mark.parametrize("groups", [("confidence",), ("hidden", "context"), ("confidence", "logits")])
def test_subsets_are_slices_of_the_whole(block: tuple[torch.Tensor, ...], groups: tuple[str, ...]) -> None:
    head, hidden, logits = block
    projections = FeatureProjections.build(head, seed=5)
    initial = torch.tensor([True, False, True])
    whole = draft_features(top_logits(logits), hidden, 3, initial, projections)
    ends = {"confidence": (0, 90), "hidden": (90, 410), "logits": (410, 570), "context": (570, 595)}
    expected = torch.cat([whole[:, slice(*ends[group])] for group in groups], dim=1)
    subset = draft_features(top_logits(logits), hidden, 3, initial, projections, groups)
    assert torch.equal(subset, expected)
    assert subset.shape[1] == feature_size(W, groups)


def test_projected_groups_without_projections_are_refused(block: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(InputError, match="need hidden states"):
        draft_features(top_logits(block[2]), block[1], 3, torch.zeros(N, dtype=torch.bool), None)
