"""vLLM's OpenAI server on a CPU, given what its manual asks for: an arm of benchmarks/peers_cpu.toml.

    VLLM_PYTHON benchmarks/vllm_server.py --model FOLDER --port 8001 --max-num-seqs 8 [vLLM's own options …]

Runs with the interpreter of an environment with vLLM (docs/oracles.md). It is vLLM's own server but for two things:
Intel's OpenMP is preloaded where the environment has it, and the draft's context keys are normed with every layer's own
weights, which vLLM 0.32 gets wrong on a CPU; VLLM_AS_SHIPPED=1 in the environment leaves that alone. The engine's
process is spawned and imports this file again, as spawned processes do with their parent's main file, so that it has
the same norm.
"""

from __future__ import annotations

import os
import runpy

from vllm_cpu import correct_context_keys, preload_openmp

os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the scripts beside this one want a single process

if __name__ == "__main__":
    preload_openmp()
if os.environ.get("VLLM_AS_SHIPPED") != "1":
    correct_context_keys()
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
