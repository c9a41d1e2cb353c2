"""The chunked loss against plain autograd over all logits."""

import torch
from torch.nn import functional

from dscale.train.loss import block_loss, slot_weights


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


def test_rows_without_weight_change_nothing():
    generator = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(8, 6, generator=generator), torch.randn(11, 6, generator=generator)
    label, weight = torch.arange(8), torch.ones(8)
    weight[4:] = 0
    base, _ = block_loss(hidden, label, weight, head, weight.sum(), chunks=2)
    hidden[4:] = 100.0
    assert torch.equal(block_loss(hidden, label, weight, head, weight.sum(), chunks=2)[0], base)
