"""Muon's step on its own."""

import torch

from dscale.train.optimizer import Optimizer, matrices, muon_update, orthogonalise

from .tiny import tiny_drafter, tiny_target


def test_orthogonalise_brings_singular_values_near_one():
    for shape in ((3, 16, 40), (1, 40, 16)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        singular = torch.linalg.svdvals(orthogonalise(x).float())
        assert singular.min() > 0.5
        assert singular.max() < 1.4


def test_the_step_has_the_size_of_an_adamw_step():
    gradient = torch.randn(1, 64, 96, generator=torch.Generator().manual_seed(1)) * 1e-4
    step = muon_update(gradient, torch.zeros_like(gradient), 0.95)
    assert 0.12 < float(step.float().square().mean().sqrt()) < 0.24


def test_every_matrix_of_the_drafter_is_covered_once():
    drafter = tiny_drafter(tiny_target())
    covered = sum(rows * parameter.shape[1] for parameter, _, rows in matrices(drafter))
    assert covered == sum(p.numel() for p in drafter.parameters() if p.dim() == 2)


def test_a_step_moves_every_parameter_and_drops_the_gradients():
    drafter = tiny_drafter(tiny_target())
    before = [p.detach().clone() for p in drafter.parameters()]
    for p in drafter.parameters():
        p.grad = torch.randn_like(p)
    Optimizer(drafter, "muon", (0.9, 0.95)).step(1e-2)
    for old, p in zip(before, drafter.parameters(), strict=True):
        assert not torch.equal(old, p)
        assert p.grad is None
