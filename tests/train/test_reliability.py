import sys

from dscale.train.reliability import plot_reliability

CURVE = [{"count": 3, "predicted": 0.2, "observed": 0.1}, {"count": 3, "predicted": 0.7, "observed": 0.8}]


def test_plots_and_does_without_matplotlib(tmp_path, monkeypatch):
    positions = [{"position": j, "reliability": CURVE} for j in range(1, 8)]
    assert plot_reliability(positions, CURVE, tmp_path / "a.png")
    assert plot_reliability(positions, CURVE, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot_reliability(positions, CURVE, tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()
