"""CPU kernels in C++, compiled once at first use and cached; every one has a plain torch version beside its caller.

Without a C++ compiler, or with DSCALE_NATIVE=0, `usable` is False and the torch versions run.

A row's result depends on that row alone: bit for bit the same whatever other rows are in the batch, however many there
are, and on how many threads they run. Sums are taken in float32 in a fixed order. Tensors are made contiguous where
they are not; rows are the first dimension.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, empty, empty_like, get_num_threads, is_grad_enabled

from dscale.config import require
from dscale.kernels.native import build

if TYPE_CHECKING:
    from dscale.kernels.attention import RaggedBatch
    from dscale.kernels.rotary import HeadShape

ALL_ROWS = 2**31 - 1  # the kernels serve every number of rows
TOP = 16

_P, _L, _I, _F = c_void_p, c_long, c_int, c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "packed_size": (_L, _L, _I),
    "pack": (_P, _P, _L, _L, _I, _L),
    "linear": (_P, _P, _P, _P, _L, _L, _L, _I, _L),
    "norm": (_P, _P, _P, _P, _P, _L, _L, _F, _I, _I, _L),
    "silu_mul": (_P, _P, _L, _L, _I, _L),
    "split_rotate_write": (_P, _P, _P, _P, _P, _P, _L, _L, _P, _P, _L, _L, _L, _L, _I, _F, _I, _L),
    "write_context": (_P, _P, _P, _P, _L, _L, _L, _L, _P, _L, _L, _L, _L, _I, _F, _I, _L),
    "attention": (_P, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _L, _L, _I, _L, _F, _I, _L),
    "argmax": (_P, _P, _L, _L, _I, _L),
    "top_logits": (_P, _P, _P, _P, _P, _L, _L, _I, _L),
    "fast_bfloat16": (),
    "stack_scratch": (_P, _L),
    "stack": (_P, _P),
}


class _Functions:
    """The library's entry points with their argument types declared."""

    def __init__(self, library: Any) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"dscale_{name}")
            function.argtypes = arguments
            function.restype = c_long if name in ("packed_size", "fast_bfloat16", "stack_scratch") else None
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@cache
def _loaded() -> tuple[_Functions | None, str]:
    try:
        library, text = build.load()
        return _Functions(library), text
    except build.NotBuilt as reason:
        if "DSCALE_NATIVE" not in str(reason):
            warnings.warn(f"CPU kernels run in torch, more slowly: {reason}", stacklevel=3)
        return None, f"not loaded: {reason}"


def _native() -> _Functions:
    functions, text = _loaded()
    if functions is None:
        raise RuntimeError(f"native kernels are {text}")
    return functions


def status() -> str:
    """One line: the loaded library and its thread runtime, or why there is none. Compiles it if needed."""
    return _loaded()[1]


def fast_bfloat16() -> bool:
    """True when the kernels are loaded and this processor multiplies bfloat16 pairs itself (AVX512-BF16)."""
    functions = _loaded()[0]
    return functions is not None and functions.fast_bfloat16() != 0


def usable(x: Tensor) -> bool:
    """True when the native kernels are loaded and take this tensor (CPU, no gradient, float32 or bfloat16)."""
    if is_grad_enabled() or not x.is_cpu:
        return False
    dtype = x.dtype
    return (dtype is torch.bfloat16 or dtype is torch.float32) and _loaded()[0] is not None


def stack_functions() -> tuple[Any, Any]:
    """The entry points of stack.py: the whole decoder, and the scratch elements it needs for a number of rows."""
    return _native().stack, _native().stack_scratch


@dataclass(frozen=True)
class PackedWeight:
    """A linear weight in the order the CPU kernel reads it; it stands for the weight at every number of rows."""

    data: Tensor
    max_rows: int
    out_features: int
    in_features: int

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied layer is not packed: its weight may yet change."""
        return None


def pack(weight: Tensor) -> PackedWeight | None:
    """A copy of a linear weight [out, in] for the native kernel, or None where that kernel would not be used."""
    weight = weight.detach()
    with torch.no_grad():
        if not usable(weight):
            return None
        weight = weight.contiguous()
        outs, depth = weight.shape
        bf16 = weight.dtype is torch.bfloat16
        data = empty(_native().packed_size(outs, depth, bf16), dtype=weight.dtype)
        _native().pack(weight.data_ptr(), data.data_ptr(), outs, depth, bf16, get_num_threads())
    return PackedWeight(data, ALL_ROWS, outs, depth)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [R, in] times the packed weight, plus bias [out] → [R, out] in x's dtype."""
    rows, depth = x.shape
    outs, dtype = packed.out_features, x.dtype
    if depth != packed.in_features or dtype is not packed.data.dtype:
        require(
            False, f"linear input: {depth} features of {dtype}, must be {packed.in_features} of {packed.data.dtype}"
        )
    x = x.contiguous()
    y = empty((rows, outs), dtype=dtype)
    offset = None if bias is None else bias.data_ptr()
    _native().linear(
        x.data_ptr(), packed.data.data_ptr(), offset, y.data_ptr(), rows, outs, depth, dtype is torch.bfloat16,
        get_num_threads(),
    )  # fmt: skip
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows of x [..., H] by weight [H]; same dtype out."""
    x = x.contiguous()
    y = empty_like(x)
    _norm(x, None, weight, y, None, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [..., H]; the sum is rounded to x's dtype before the norm."""
    x, residual = x.contiguous(), residual.contiguous()
    y, total = empty_like(x), empty_like(x)
    _norm(x, residual, weight, y, total, eps)
    return y, total


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, total: Tensor | None, eps: float) -> None:
    size, dtype = x.shape[-1], x.dtype
    wide = weight.dtype is not dtype
    if wide and weight.dtype is not torch.float32:
        weight = weight.to(dtype)
        wide = False
    _native().norm(
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), y.data_ptr(),
        None if total is None else total.data_ptr(), x.numel() // size, size, eps, dtype is torch.bfloat16, wide,
        get_num_threads(),
    )  # fmt: skip


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second half: [R, 2I] → [R, I]."""
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = empty((rows, size), dtype=gate_up.dtype)
    bf16 = gate_up.dtype is torch.bfloat16
    _native().silu_mul(gate_up.data_ptr(), y.data_ptr(), rows, size, bf16, get_num_threads())
    return y


def split_rotate_write(
    qkv: Tensor,
    angles: Tensor,
    shape: HeadShape,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> Tensor:
    """See kernels/rotary.py: k and v of qkv [R, (heads + 2·kv)·d] go to the cache; returns rotated q [R, heads, d]."""
    qkv, dtype = qkv.contiguous(), qkv.dtype
    rows, heads, size = qkv.shape[0], shape.num_heads, shape.head_dim
    q = empty((rows, heads, size), dtype=dtype)
    angles = angles.float().contiguous()
    if q_norm is not None and q_norm.dtype is not dtype:
        q_norm = q_norm.to(dtype)
    if k_norm is not None and k_norm.dtype is not dtype:
        k_norm = k_norm.to(dtype)
    _native().split_rotate_write(
        qkv.data_ptr(), angles.data_ptr(), None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        key_cache.stride(0), key_cache.shape[2], slots.data_ptr(), q.data_ptr(), rows, heads, shape.num_kv_heads, size,
        shape.interleaved, shape.norm_eps, dtype is torch.bfloat16, get_num_threads(),
    )  # fmt: skip
    return q


def write_context(
    kv: Tensor, angles: Tensor, shape: HeadShape, cache: Tensor, slots: Tensor, k_norms: Sequence[Tensor] | None = None
) -> None:
    """See kernels/rotary.py: keys and values kv [R, layers, 2, kv, d] go to cache [layers, 2, pages, kv, page, d]."""
    kv, angles, dtype = kv.contiguous(), angles.float().contiguous(), kv.dtype
    rows, layers, _, heads, size = kv.shape
    norms = None if k_norms is None else [norm.to(dtype) for norm in k_norms]
    pointers = None if norms is None else (c_void_p * layers)(*[norm.data_ptr() for norm in norms])
    _native().write_context(
        kv.data_ptr(), angles.data_ptr(), pointers, cache.data_ptr(), cache.stride(0), cache.stride(1),
        cache.stride(2), cache.shape[4], slots.data_ptr(), rows, layers, heads, size, shape.interleaved, shape.norm_eps,
        dtype is torch.bfloat16, get_num_threads(),
    )  # fmt: skip


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: RaggedBatch, scale: float, window: int | None = None
) -> Tensor:
    """See kernels/attention.py: q [R, heads, d], caches [pages, kv, page, d] → [R, heads, d]."""
    q = q.contiguous()
    out = empty_like(q)
    rows, heads, size = q.shape
    table = batch.page_table
    _native().attention(
        q.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr(), table.data_ptr(),
        batch.lanes.data_ptr(), batch.starts.data_ptr(), batch.contexts.data_ptr(), rows, batch.lanes.shape[0], heads,
        key_cache.shape[1], size, key_cache.shape[2], key_cache.stride(0), table.stride(0), batch.causal, window or 0,
        scale, q.dtype is torch.bfloat16, get_num_threads(),
    )  # fmt: skip
    return out


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row [R, V] → [R] int64; the first among equals."""
    logits = logits.contiguous()
    rows, size = logits.shape
    ids = empty(rows, dtype=torch.int64)
    _native().argmax(logits.data_ptr(), ids.data_ptr(), rows, size, logits.dtype is torch.bfloat16, get_num_threads())
    return ids


def top_logits(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of logits [R, V], V at least 16: the 16 largest in falling order, their ids, log Σ e^logit, entropy.

    values [R, 16] float32, ids [R, 16] int64 (among equal logits the lower first), log_sum [R] and entropy [R] float32.
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    require(size >= TOP, f"logits: {size} columns, must be at least {TOP}")
    values, ids = empty((rows, TOP), dtype=torch.float32), empty((rows, TOP), dtype=torch.int64)
    log_sum, entropy = empty(rows, dtype=torch.float32), empty(rows, dtype=torch.float32)
    _native().top_logits(
        logits.data_ptr(), values.data_ptr(), ids.data_ptr(), log_sum.data_ptr(), entropy.data_ptr(), rows, size,
        logits.dtype is torch.bfloat16, get_num_threads(),
    )  # fmt: skip
    return values, ids, log_sum, entropy
