"""The chunked loss against plain autograd over all logits."""

import pytest
import torch
from torch.nn import functional

from dscale.train.loss import block_loss, distil_terms, loss_terms, slot_weights


def test_slot_weights_decay_and_follow_supervision():
    supervised = torch.tensor([[True, True, False], [True, False, False]])
    weight = slot_weights(supervised, 2.0)
    expected = torch.tensor([[1.0, 0.60653, 0.0], [1.0, 0.0, 0.0]])
    assert torch.allclose(weight, expected, atol=1e-4)


def test_loss_and_gradient_equal_plain_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 12, generator=generator, requires_grad=True)
    head = torch.randn(53, 12, generator=generator)
    label = torch.randint(0, 53, (37,), generator=generator)
    weight = torch.rand(37, generator=generator)
    loss, right = block_loss(hidden, label, weight, head, weight.sum(), chunks=5)
    (loss * 3).backward()
    ours = hidden.grad.clone()
    hidden.grad = None
    logits = hidden @ head.t()
    plain = (functional.cross_entropy(logits, label, reduction="none") * weight).sum() / weight.sum()
    (plain * 3).backward()
    assert torch.allclose(loss, plain, atol=1e-5)
    assert torch.allclose(ours, hidden.grad, atol=1e-5)
    assert torch.equal(right, logits.argmax(-1) == label)


@pytest.mark.parametrize("distance", ["l1", "kl"])
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_distillation_and_its_gradient_equal_autograd(distance, share):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(19, 8, generator=generator, requires_grad=True)
    truth, head = torch.randn(19, 8, generator=generator), torch.randn(31, 8, generator=generator)
    label, weight = torch.randint(0, 31, (19,), generator=generator), torch.rand(19, generator=generator)
    terms = loss_terms(share, distance, compiled=False)
    loss, _ = block_loss(hidden, label, weight, head, weight.sum(), 3, terms, truth)
    loss.backward()
    ours = hidden.grad.clone()
    hidden.grad = None
    logits = hidden @ head.t()
    p, q = logits.softmax(-1), (truth @ head.t()).softmax(-1)
    apart = (p - q).abs().sum(-1) if distance == "l1" else (q * (q / p).log()).sum(-1)
    rows = (1 - share) * functional.cross_entropy(logits, label, reduction="none") + share * apart
    plain = (rows * weight).sum() / weight.sum()
    plain.backward()
    assert torch.allclose(loss, plain, atol=1e-5)
    assert torch.allclose(ours, hidden.grad, atol=1e-5)


def test_l1_by_hand():
    # p = (1/2, 1/2, ~0), q = (3/4, ~0, 1/4): |p - q| sums to 1/4 + 1/2 + 1/4 = 1, and A = 1 leaves no cross-entropy.
    head = torch.eye(3)
    hidden, truth = torch.tensor([[0.0, 0.0, -60.0]]), torch.tensor([[3.0, 1e-30, 1.0]]).log()
    loss, slope, _ = distil_terms(1.0, "l1", hidden, torch.tensor([1]), torch.tensor([2.0]), truth, head)
    assert float(loss) == pytest.approx(2.0, abs=1e-5)
    # s = (-1, +1, -1), <s, p> = 0: p∘s = (-1/2, 1/2, 0), twice for the weight.
    assert torch.allclose(slope, torch.tensor([[-1.0, 1.0, 0.0]]), atol=1e-5)


def test_rows_without_weight_change_nothing():
    generator = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(8, 6, generator=generator), torch.randn(11, 6, generator=generator)
    label, weight = torch.arange(8), torch.ones(8)
    weight[4:] = 0
    base, _ = block_loss(hidden, label, weight, head, weight.sum(), chunks=2)
    hidden[4:] = 100.0
    assert torch.equal(block_loss(hidden, label, weight, head, weight.sum(), chunks=2)[0], base)
