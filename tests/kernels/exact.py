"""Products in Triton's interpreter made as a chip makes them: an element's sum in order of k, whatever lies around it.

The interpreter's own go to a BLAS whose bits depend on the row's place in the tile.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(total.dtype) * b.data[None, k, :].astype(total.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
