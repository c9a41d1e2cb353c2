"""Runs inside SGLang's environment, on a CPU unless told otherwise, and writes what it generated as JSON.

    SGLANG_PYTHON tests/integrations/sglang_texts.py JOB.json OUT.json

JOB: {"target", "drafter" or null, "algorithm" or null, "tp", "device" (cpu), "dtype" (float32), "options" (further ones
of sglang.Engine), "rounds": [{"prompts", "tokens", "sampling"}]}. All prompts of a round go at once, prompt i for
tokens + 3·i tokens with seed i. OUT: per round and prompt {"ids", "steps", "cached"} (or why the round was refused),
and what the plug-in says of itself.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


CPU = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def prepare(device: str) -> None:
    """The environment that SGLang's processes need, on a CPU more of it, and the plug-in's entry point."""
    site = Path(tempfile.mkdtemp()) / "site"
    folder = site / "dscale_plugin-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: dscale-plugin\nVersion: 0\n")
    entry = "[sglang.srt.plugins]\ndscale = dscale.integrations.sglang.plugin:register\n"
    (folder / "entry_points.txt").write_text(entry)
    paths = [str(site), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if device == "cpu":
        paths.insert(0, str(ROOT / "tests" / "integrations" / "cpu_site"))
        os.environ.update(CPU)
    os.environ.update({"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "DSCALE_SGLANG_READY": "1"})
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main(job: dict[str, Any], out: Path) -> None:
    """One engine, all rounds."""
    import sglang

    options = {
        "model_path": job["target"], "dtype": job.get("dtype", "float32"), "device": job.get("device", "cpu"),
        "attention_backend": "dscale", "max_running_requests": 4, "max_total_tokens": 4096, "log_level": "warning",
        "disable_cuda_graph": True, "random_seed": 1, "skip_tokenizer_init": True, "watchdog_timeout": 600,
        "mem_fraction_static": 0.3, "tp_size": job.get("tp", 1), **job.get("options", {}),
    }  # fmt: skip
    if job["algorithm"]:
        options |= {"speculative_algorithm": job["algorithm"], "speculative_draft_model_path": job["drafter"]}
    engine = sglang.Engine(**options)
    rounds = []
    for one in job["rounds"]:
        params = [
            {"max_new_tokens": one["tokens"] + 3 * i, "ignore_eos": True, "sampling_seed": i, **one["sampling"]}
            for i in range(len(one["prompts"]))
        ]
        try:
            answers = engine.generate(input_ids=one["prompts"], sampling_params=params)
        except ValueError as refused:
            rounds.append(str(refused))
            continue
        rounds.append(
            [
                {
                    "ids": answer["output_ids"],
                    "steps": answer["meta_info"].get("spec_verify_ct"),
                    "cached": answer["meta_info"]["cached_tokens"],
                }
                for answer in answers
            ]
        )
    plugin = engine.get_server_info()["internal_states"][0].get("dscale")
    out.write_text(json.dumps({"rounds": rounds, "plugin": plugin}))
    engine.shutdown()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    if os.environ.get("DSCALE_SGLANG_READY"):
        main(given, Path(sys.argv[2]))
    else:
        prepare(given.get("device", "cpu"))
