"""The parts of the plug-in that need no SGLang: settings, logits merged over ranks, projections of a parted head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dscale.config import InputError
from dscale.integrations.sglang.counters import Counters
from dscale.integrations.sglang.drafts import Drafts, Head, merge
from dscale.integrations.sglang.plugin import _hold_back
from dscale.integrations.sglang.settings import Settings
from dscale.kernels.top_logits import top_logits
from dscale.speculation.features import FeatureProjections


def test_settings_of_environment_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dscale.toml"
    file.write_text('policy = "dvl"\nslots = 6\npredictor = "random"\nattention-layout = "wide"\n')
    made = Settings.read({"DSCALE_CONFIG": str(file), "DSCALE_SLOTS": "4"})
    assert made == Settings("dvl", 4, "random", "wide")
    assert made.rows(16) == 4
    assert Settings.read({}) == Settings()
    assert Settings("fixed:5").rows(16) == 5
    assert Settings().rows(16) == 16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"DSCALE_POLICY": "auto"}, "does not run on SGLang"),
        ({"DSCALE_POLICY": "dvl"}, "needs a predictor"),
        ({"DSCALE_SLOTS": "7.5"}, "DSCALE_SLOTS: '7.5' is not a whole number"),
        ({"DSCALE_ATTENTION_LAYOUT": "tall"}, "attention_layout: 'tall'"),
        ({"DSCALE_GRAPHS": "3"}, "graphs: 3; allowed are whole numbers from 0 to 2"),
        ({"DSCALE_CHECK_RANKS": "2"}, "check_ranks: 2; allowed are whole numbers from 0 to 1"),
        ({"DSCALE_AHEAD": "yes"}, "DSCALE_AHEAD: 'yes' is not a whole number"),
        ({"DSCALE_CONFIG": "/nowhere.toml"}, "/nowhere.toml: cannot be read"),
    ],
)
def test_wrong_settings_are_told_in_a_line(given: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Settings.read(given)
    assert "\n" not in str(caught.value)


def test_more_slots_than_rows_are_refused() -> None:
    with pytest.raises(InputError, match="slots: 9: a block of this drafter has 8 rows"):
        Settings("confidence", 9).rows(8)


def test_tops_of_ranks_are_the_top_of_the_whole() -> None:
    logits = 3 * torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    whole = top_logits(logits)
    parts = [top_logits(part) for part in logits.split(32, dim=1)]
    numbers = torch.stack(
        [torch.cat([part.values, part.log_sum_exp[:, None], part.entropy[:, None]], dim=1) for part in parts]
    )
    made = merge(numbers, torch.stack([part.ids + 32 * rank for rank, part in enumerate(parts)]))
    assert torch.equal(made.ids, whole.ids)
    assert torch.equal(made.values, whole.values)
    torch.testing.assert_close(made.log_sum_exp, whole.log_sum_exp)
    torch.testing.assert_close(made.entropy, whole.entropy, rtol=1e-5, atol=1e-5)


def test_projections_of_a_parted_head_add_up() -> None:
    head = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    whole = FeatureProjections.build(head, seed=3)
    parts: list[torch.Tensor] = []
    for first in (0, 16, 32):
        FeatureProjections.build(head[first : first + 16], 3, (first, 48), lambda part: parts.append(part) or part)
    torch.testing.assert_close(sum(parts), whole.matrix[:, 64:])


@torch.inference_mode()
def test_rows_are_shared_out_where_q_is_high() -> None:
    generator = torch.Generator().manual_seed(2)
    head = Head(torch.randn(64, 16, generator=generator), 0, 64)
    hidden, live = torch.randn(3, 7, 16, generator=generator), torch.ones(3, dtype=torch.bool)
    for policy in ("dvl", "dvl:seeded", "confidence"):
        drafts = Drafts(Settings(policy, 4, "random"), 8, head)
        draft = drafts.read(hidden, live, torch.zeros(3, dtype=torch.bool))
        assert torch.equal(draft.tokens, (hidden @ head.weight.T).argmax(-1))
        k = drafts.lengths(draft, live)
        assert k.sum() == 12
        assert k.unique().numel() > 1
    full = Drafts(Settings("full"), 8, head)
    draft = full.read(hidden, live, live)
    assert draft.survival is None
    assert full.lengths(draft, live).tolist() == [8, 8, 8]


@pytest.mark.parametrize("ahead", [True, False])
def test_the_stream_waits_where_the_host_does_not(ahead: bool) -> None:
    waited: list[str] = []
    stream = SimpleNamespace(wait_stream=waited.append)
    worker = SimpleNamespace(ahead=True) if ahead else SimpleNamespace()  # SGLang's own workers know nothing of it
    _hold_back(None, SimpleNamespace(model_worker=worker, schedule_stream=stream, forward_stream="forward"))
    assert waited == ["forward"] * ahead


def test_counters_add_up() -> None:
    counters = Counters(width=8, rows=4, export=False)
    counters.add([3, 0])
    counters.add([1])
    assert counters.sums["vllm:spec_decode_num_accepted_tokens"] == 4
    assert counters.sums["dscale:verified_slots"] == 12
    assert counters.sums["dscale:verified_draft_tokens"] + counters.sums["dscale:trimmed_draft_tokens"] == 3 * 7
