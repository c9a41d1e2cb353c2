"""What a drafter starts from."""

import pytest
import torch

from dscale.config import AnchorLayout, InputError
from dscale.kernels.norm import rms_norm_torch
from dscale.models.drafter_checkpoint import save_drafter
from dscale.train.initial import initial_drafter, new_config
from dscale.train.recipe import TrainConfig

from .tiny import tiny_drafter, tiny_target

CPU = torch.device("cpu")
SIZES = {"width": 4, "layers": 2, "mask_token": 5}


def made(init="random", **settings):
    return initial_drafter(tiny_target(), TrainConfig(steps=1, init=init, **SIZES | settings), CPU)


def test_new_config_follows_the_tap_rule():
    config = new_config(tiny_target(), layers=2)
    assert config.taps == (1, 2)
    assert config.decoder.qk_norm
    assert (config.block_size, config.width, config.target_layers) == (16, 16, 5)
    first = new_config(tiny_target(), width=9, layout="anchor-first")
    assert (first.block_size, first.width, first.layout) == (8, 9, AnchorLayout.ANCHOR_FIRST)


def test_random_weights_follow_the_seed():
    one, again, other = made(), made(), made(seed=1)
    assert torch.equal(one.fc.weight, again.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert float(one.fc.weight.std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(("init", "layers"), [("target", [3, 4]), ("target:1-2", [1, 2]), ("target:4,0", [4, 0])])
def test_layers_of_the_target_see_the_last_tap_as_the_target_would(init, layers):
    """Keys and values of context rows are those that the target layer makes of the tap, up to the size of keys."""
    target, drafter = tiny_target(), made(init)
    taps = torch.randn(7, 2 * 24, generator=torch.Generator().manual_seed(0))
    for ours, index in enumerate(layers):
        theirs = target.stack.blocks[index]
        normed = rms_norm_torch(taps[:, 24:], theirs.input_norm.weight, 1e-5)
        k, v = theirs.qkv(normed)[:, 32:].view(7, 2, 2, 8).unbind(1)
        own_k, own_v = drafter.layer_context_kv(ours, drafter.context(taps))
        assert torch.allclose(own_v, v, atol=1e-4)
        assert torch.allclose(torch.cosine_similarity(own_k, k, dim=-1), torch.ones(7, 2), atol=1e-4)
        assert 0.7 < float(own_k.norm() / k.norm()) < 1.4
        assert torch.equal(drafter.stack.blocks[ours].down.weight, theirs.down.weight)
    assert torch.equal(drafter.stack.norm.weight, target.stack.norm.weight)


def test_an_earlier_drafter_goes_on_in_float32_and_may_change_its_width(tmp_path):
    old = tiny_drafter(tiny_target())
    save_drafter(old, tmp_path / "old")
    same = initial_drafter(tiny_target(), TrainConfig(steps=1, init=str(tmp_path / "old")), CPU)
    assert same.config.width == 4
    assert same.context_projection is None
    assert all(p.requires_grad and p.dtype == torch.float32 for p in same.parameters())
    assert torch.equal(same.fc.weight, old.fc.weight.bfloat16().float())
    wider = initial_drafter(tiny_target(), TrainConfig(steps=1, init=str(tmp_path / "old"), width=8), CPU)
    assert wider.config.width == 8
    with pytest.raises(InputError, match=r"train\.layers: 3, but the drafter .*old has 2"):
        initial_drafter(tiny_target(), TrainConfig(steps=1, init=str(tmp_path / "old"), layers=3), CPU)


def test_layers_that_are_not_there_are_refused():
    for init in ("target:3-9", "target:1", "target:one-two", "target:1,2,3"):
        with pytest.raises(InputError, match=r"train\.init: target:.*; give 2 layers out of 0 to 4"):
            made(init)
    with pytest.raises(InputError, match="no such file"):
        made("nowhere")
