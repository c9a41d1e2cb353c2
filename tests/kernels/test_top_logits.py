import pytest
import torch

from dscale.kernels.top_logits import RANKS, argmax, top_logits, top_logits_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_float64_by_hand(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 5, 400, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    top = top_logits(logits)
    wide = logits.double()
    p = wide.softmax(-1)
    assert top.values.shape == top.ids.shape == (3, 5, RANKS)
    assert top.log_sum_exp.shape == top.entropy.shape == (3, 5)
    torch.testing.assert_close(top.values.double(), wide.sort(dim=-1, descending=True).values[..., :RANKS])
    torch.testing.assert_close(logits.gather(-1, top.ids).float(), top.values)
    torch.testing.assert_close(top.log_sum_exp.double(), wide.logsumexp(-1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(top.entropy.double(), -(p * p.log()).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(top.log_probability.double(), p.max(-1).values.log(), rtol=1e-4, atol=1e-5)
    assert all(x.dtype == torch.float32 for x in (top.values, top.log_sum_exp, top.entropy))


def test_forbidden_tokens_add_no_entropy() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 32:] = -torch.inf
    top = top_logits(logits)
    torch.testing.assert_close(top.entropy, torch.tensor([32.0]).log())
    torch.testing.assert_close(top.log_probability, torch.tensor([1 / 32]).log())


def test_small_vocabulary_repeats_its_last_token() -> None:
    top = top_logits(torch.tensor([[3.0, 1.0, 2.0]]))
    assert top.ids[0].tolist() == [0, 2] + [1] * 14
    assert top.values[0].tolist() == [3.0, 2.0] + [1.0] * 14


def test_dispatch_agrees_with_the_plain_version() -> None:
    logits = torch.randn(7, 70_000, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():  # the native kernels refuse tensors that may need gradients
        fast = top_logits(logits)
    plain = top_logits_torch(logits)
    for name, expected in zip(("values", "ids", "log_sum_exp", "entropy"), plain, strict=True):
        torch.testing.assert_close(getattr(fast, name), expected, rtol=1e-5, atol=1e-5)


def test_select_takes_lanes() -> None:
    top = top_logits(torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(2)))
    some = top.select(torch.tensor([True, False, True]))
    assert torch.equal(some.values, top.values[[0, 2]])
    assert torch.equal(some.ids, top.ids[[0, 2]])
    assert torch.equal(some.log_probability, top.log_probability[[0, 2]])
    assert torch.equal(some.entropy, top.entropy[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inference", [False, True])
def test_argmax_takes_the_lowest_of_equal_ids(dtype: torch.dtype, inference: bool) -> None:
    logits = torch.randint(0, 6, (50, 777), generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.inference_mode(inference):
        found = argmax(logits)
    for row, index in zip(logits.tolist(), found.tolist(), strict=True):
        assert index == row.index(max(row))
