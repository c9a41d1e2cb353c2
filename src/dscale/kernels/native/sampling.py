"""Drawing tokens in C++: the same tokens as the torch versions of speculation/sampling.py, several times faster."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from functools import cache

import torch
from torch import Tensor, get_num_threads

from dscale.kernels.native import build

FIELDS = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
}


@cache
def _draw() -> Callable[..., None]:
    function = build.load()[0].dscale_draw
    function.argtypes = [c_void_p] * 8 + [c_long, c_long, c_int, c_long]
    function.restype = None
    return function


def draw_into(tokens: Tensor, logits: Tensor, parameters: dict[str, Tensor]) -> None:
    """Write the drawn token of every row whose temperature is above 0; the other tokens [R] int64 stay.

    logits [R, V] float32 or bfloat16; parameters: a tensor [R] for each of FIELDS. Call when `native.usable(logits)`.
    """
    logits = logits.contiguous()
    columns = [parameters[name].to(dtype).contiguous() for name, dtype in FIELDS.items()]
    _draw()(
        logits.data_ptr(),
        *(column.data_ptr() for column in columns),
        tokens.data_ptr(),
        *logits.shape,
        logits.dtype is torch.bfloat16,
        get_num_threads(),
    )
