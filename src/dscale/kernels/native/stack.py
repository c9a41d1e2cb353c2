"""A whole decoder stack in one native call; see stack.cpp. The plain version is DecoderStack.forward."""

from __future__ import annotations

from ctypes import POINTER, Structure, addressof, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dscale.config import require
from dscale.kernels import native

if TYPE_CHECKING:
    from dscale.kernels.attention import RaggedBatch

_WEIGHTS = (
    "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias", "post_norm",
    "gate_up", "gate_up_bias", "down", "down_bias",
)  # fmt: skip
_SIZES = ("count", "hidden", "inner", "heads", "kv", "size", "interleaved", "bf16")
_POINTERS = (
    "x",
    "out",
    "taps",
    "cache",
    "scratch",
    "tap_layers",
    "angles",
    "slots",
    "lanes",
    "starts",
    "contexts",
    "table",
)
_COUNTS = (
    "tap_count", "rows", "lane_count", "page_size", "page_stride", "layer_stride", "value_stride", "table_stride",
    "causal", "threads",
)  # fmt: skip


class LayerPointers(Structure):
    """DscaleLayer of stack.cpp."""

    _fields_ = [*((name, c_void_p) for name in _WEIGHTS), ("window", c_int64), ("causal", c_int64)]


class StackPointers(Structure):
    """DscaleStack of stack.cpp."""

    _fields_ = [
        ("layers", POINTER(LayerPointers)),
        ("final_norm", c_void_p),
        *((name, c_int64) for name in _SIZES),
        ("eps", c_float),
        ("scale", c_float),
    ]


class RowPointers(Structure):
    """DscaleRows of stack.cpp."""

    _fields_ = [*((name, c_void_p) for name in _POINTERS), *((name, c_int64) for name in _COUNTS)]


class NativeStack:
    """Pointers to the packed weights of a decoder stack, ready to run. Keeps the tensors it points to alive."""

    def __init__(self, layers: list[dict[str, Tensor | None]], windows: list[int], causal: list[int], norm: Tensor,
                 sizes: dict[str, int], eps: float) -> None:  # fmt: skip
        self._kept = (layers, norm)
        self._layers = (LayerPointers * len(layers))()
        for pointers, weights, window, mask in zip(self._layers, layers, windows, causal, strict=True):
            for name in _WEIGHTS:
                tensor = weights.get(name)
                setattr(pointers, name, None if tensor is None else tensor.data_ptr())
            pointers.window, pointers.causal = window, mask
        self._stack = StackPointers(self._layers, norm.data_ptr(), eps=eps, scale=sizes["size"] ** -0.5, **sizes)
        self.dtype = norm.dtype
        self._call, self._scratch_size = native.stack_functions()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied decoder is not packed: its weights may yet change."""
        return None

    def run(
        self, x: Tensor, cache: Tensor, angles: Tensor, batch: RaggedBatch, taps: tuple[int, ...], hidden: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Rows x [R, H] → (hidden [R, H], taps [R, T·H] or None); cache [layers, 2, pages, kv, page, d] is written.

        hidden False, for taps before the last layer: it ends with that layer's keys and values, and hidden is x.
        """
        if x.dtype is not self.dtype or cache.dtype is not self.dtype:
            require(False, f"native decoder: rows {x.dtype} and cache {cache.dtype}, packed for {self.dtype}")
        x = x.contiguous()
        rows, size = x.shape
        out = torch.empty_like(x) if hidden else x
        tapped = x.new_empty(rows, len(taps) * size) if taps else None
        scratch = x.new_empty(self._scratch_size(byref(self._stack), rows))
        tap_layers = (c_int64 * max(len(taps), 1))(*taps)
        work = RowPointers(
            x.data_ptr(), out.data_ptr() if hidden else None, None if tapped is None else tapped.data_ptr(),
            cache.data_ptr(), scratch.data_ptr(), addressof(tap_layers), angles.data_ptr(), batch.slots.data_ptr(),
            batch.lanes.data_ptr(), batch.starts.data_ptr(), batch.contexts.data_ptr(), batch.page_table.data_ptr(),
            len(taps), rows, batch.lanes.shape[0], cache.shape[4], cache.stride(2), cache.stride(0), cache.stride(1),
            batch.page_table.stride(0), batch.causal, torch.get_num_threads(),
        )  # fmt: skip
        self._call(byref(self._stack), byref(work))
        return out, tapped
