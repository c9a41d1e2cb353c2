import json
from pathlib import Path

import pytest
import torch

from dscale.config import InputError
from dscale.speculation.predictor import Predictor, PredictorConfig, predictor_loss, survival


def make(width: int = 5, **changes: object) -> Predictor:
    torch.manual_seed(0)
    return Predictor(PredictorConfig(width=width, drafter_hash="abc", **changes))  # type: ignore[arg-type]


def test_paper_size() -> None:
    predictor = make(width=16)
    assert sum(p.numel() for p in predictor.parameters()) == 1735 * 64 + 64 + 64 * 15 + 15
    assert predictor(torch.zeros(3, 1735)).shape == (3, 15)


def test_survival_is_the_cumulative_minimum() -> None:
    z = torch.tensor([[2.0, -1.0, 0.5, -3.0], [-0.5, 4.0, 4.0, -0.6]])
    s = torch.sigmoid(z)
    expected = torch.tensor([[1.0, s[0, 0], s[0, 1], s[0, 1], s[0, 3]], [1.0, s[1, 0], s[1, 0], s[1, 0], s[1, 3]]])
    torch.testing.assert_close(survival(z), expected)


def test_fold_equals_standardising_first() -> None:
    predictor = make()
    size = predictor.config.feature_size
    features = torch.randn(20, size) * torch.rand(size) * 30 + torch.randn(size) * 20
    features[:, 7] = 4.0  # never varies
    mean, std = features.mean(0), features.std(0)
    standard = torch.where(std > 1e-4, (features - mean) / std.clamp_min(1e-9), 0.0)
    expected = predictor(standard).detach()
    predictor.fold(mean, std)
    torch.testing.assert_close(predictor(features), expected, rtol=1e-3, atol=1e-4)
    moved = features.clone()
    moved[:, 7] = 1000.0
    torch.testing.assert_close(predictor(moved), expected, rtol=1e-3, atol=1e-4)


def test_loss_by_hand() -> None:
    z = torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.5, -1.0]])
    accepted = torch.tensor([2, 0])
    labels = [[1, 1, 0], [0, 0, 0]]
    s = torch.sigmoid(z).double()
    cross = -sum((s[i, j] if labels[i][j] else 1 - s[i, j]).log() for i in range(2) for j in range(3)) / 6
    length = ((s[0].sum() - 2) ** 2 + (s[1].sum() - 0) ** 2) / 2
    assert predictor_loss(z, accepted).item() == pytest.approx((cross + 0.02 * length).item(), rel=1e-5)


def test_save_and_load(tmp_path: Path) -> None:
    predictor = make(features=("confidence", "context"), metrics={"r2": 0.61}, projection_seed=9)
    predictor.save(tmp_path / "p")
    again = Predictor.load(tmp_path / "p", "abc")
    assert again.config == predictor.config
    assert again.config.metrics == {"r2": 0.61}
    assert not again.config.projects
    assert again.config.feature_size == 18 * 4 + 25
    features = torch.randn(2, again.config.feature_size)
    assert torch.equal(again(features), predictor(features))
    assert not any(p.requires_grad for p in again.parameters())
    assert {f.name for f in (tmp_path / "p").iterdir()} == {"config.json", "predictor.safetensors"}


def test_another_drafter_is_refused_by_name(tmp_path: Path) -> None:
    make().save(tmp_path)
    with pytest.raises(InputError, match=r"drafter abc.*drafter here is def") as error:
        Predictor.load(tmp_path, "def")
    assert "\n" not in str(error.value)
    Predictor.load(tmp_path, None)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: cannot be read"):
        Predictor.load(tmp_path, "abc")
    make().save(tmp_path)
    weights = tmp_path / "predictor.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        Predictor.load(tmp_path, "abc")
    weights.write_bytes(whole)
    record = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"width": 6}, "config.json asks for"),
        ({"surprise": 1}, "surprise"),
        ({"features": ["colour"]}, "colour"),
        ({"kind": "drafter"}, "kind is 'drafter'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**record, **changes}))
        with pytest.raises(InputError, match=message):
            Predictor.load(tmp_path, "abc")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        Predictor.load(tmp_path, "abc")


def test_feature_groups_keep_one_order() -> None:
    config = PredictorConfig(width=4, drafter_hash="x", features=("context", "confidence"))
    assert config.features == ("confidence", "context")


def test_hazard_head_is_the_cumulative_product_and_is_kept_on_disk(tmp_path: Path) -> None:
    z = torch.tensor([[2.0, -1.0, 0.5]])
    s = torch.sigmoid(z)[0]
    torch.testing.assert_close(survival(z, "hazard")[0], torch.stack([torch.ones(()), *s.cumprod(0)]))
    predictor = make(head="hazard")
    predictor.save(tmp_path)
    again = Predictor.load(tmp_path, "abc")
    features = torch.randn(3, again.config.feature_size)
    assert torch.equal(again.survival(features), survival(predictor(features), "hazard"))
    with pytest.raises(InputError, match="survival, hazard"):
        make(head="tail")


def test_a_folder_from_before_there_were_heads_is_read(tmp_path: Path) -> None:
    make().save(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    del record["head"]
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert Predictor.load(tmp_path, "abc").config.head == "survival"
