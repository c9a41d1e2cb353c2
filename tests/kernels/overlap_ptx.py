"""Print, as JSON, the PTX for Hopper of every kernel that overlaps, with OVERLAP on and off: [{name, on, off}].

Run as a program without TRITON_INTERPRET, needs no GPU. Prints null where this triton cannot compile for CUDA.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dscale.kernels.triton import activation, fp8, norm, rotary

HOPPER = GPUTarget("cuda", 90, 32)
EIGHT_BITS = {"values": "*fp8e4nv", "scales": "*fp32"}
NAMED = {"angles": "*fp32", "slots": "*i64", "eps": "fp32"} | dict.fromkeys(
    ("x", "residual", "weight", "out", "total", "gate_up", "fused", "q_norm", "k_norm", "q_out", "keys", "values"),
    "*bf16",
)
ROTARY = {"INTERLEAVED": False, "HEADS": 8, "HALF": 64}
VARIANTS: list[tuple[ModuleType, str, dict[str, Any]]] = [
    (norm, "_norm_row", {"ADD": False, "BLOCK": 64}),
    (norm, "_norm_row", {"ADD": True, "BLOCK": 4096}),
    (activation, "_silu_mul", {"BLOCK": 1024}),
    (rotary, "_rotate_write", {"NORM": False, **ROTARY}),
    (rotary, "_rotate_write", {"NORM": True, **ROTARY}),
    (fp8, "_quantise_row", {"BLOCK": 4096}),
    (fp8, "_norm_row_fp8", {"ADD": False, "BLOCK": 4096}),
    (fp8, "_norm_row_fp8", {"ADD": True, "BLOCK": 4096}),
    (fp8, "_silu_mul_fp8", {"BLOCK": 16384}),
]


def compiled(module: ModuleType, name: str, constants: dict[str, Any], on: bool) -> str:
    kernel = getattr(module, name)
    types = NAMED | (EIGHT_BITS if module is fp8 else {})
    values = constants | {"OVERLAP": on}
    signature = {one: "constexpr" if one in values else types.get(one, "i32") for one in kernel.arg_names}
    options = {"launch_pdl": True} if on else {}
    return triton.compile(ASTSource(kernel, signature, values), target=HOPPER, options=options).asm["ptx"]


def can_compile() -> bool:
    try:
        return "nvidia" in triton.backends.backends and bool(triton.knobs.nvidia.ptxas.path)
    except RuntimeError:  # no ptxas
        return False


def rows() -> list[dict[str, str]]:
    return [
        {"name": f"{name} {constants}"} | {key: compiled(module, name, constants, key == "on") for key in ("on", "off")}
        for module, name, constants in VARIANTS
    ]


if __name__ == "__main__":
    print(json.dumps(rows() if can_compile() else None))
