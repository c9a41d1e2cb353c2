"""What Triton's interpreter does otherwise than a chip, put right.

Products: an element's sum in order of k, whatever lies around it. The interpreter's own go to a BLAS whose bits depend
on the row's place in the tile.
Eight bits: rounded to nearest. The interpreter loses the carry of a mantissa that rounds up.
"""

from __future__ import annotations

import numpy as np
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


def round_as_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 to float8_e4m3fn by torch."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    others = interpreter._convert_float

    def convert(data: np.ndarray, given: object, wanted: object, mode: object) -> np.ndarray:
        if given != tl.float32 or wanted != tl.float8e4nv:
            return others(data, given, wanted, mode)
        made = torch.from_numpy(np.array(data, dtype=np.float32)).to(torch.float8_e4m3fn)
        return made.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
