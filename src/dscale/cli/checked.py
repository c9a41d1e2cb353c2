"""What `dscale certify` and `dscale reproduce` share: their prompts, an engine of the right size, the record's head."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dscale.cli import options as o
from dscale.config import require

if TYPE_CHECKING:
    from dscale.engine.llm import LLM
    from dscale.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Asked:
    """Prompts as token ids, and what a record says of them."""

    ids: list[list[int]]
    about: dict[str, Any]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))


def ask(prompts: Sequence[str], limit: int, max_tokens: int, longest: int, tokenizer: Tokenizer) -> Asked:
    """`limit` prompts of each source, without those over `longest` tokens."""
    from dscale.evaluate.prompt_sets import read_prompts
    from dscale.evaluate.workloads import tokenise

    ids: list[list[int]] = []
    sets = {}
    for workload in read_prompts(prompts or ("built-in",), limit):
        kept = [one for one in tokenise(workload, tokenizer) if len(one) <= longest]
        sets[workload.name] = {"source": workload.source, "sha256": workload.sha256, "prompts": len(kept)}
        ids += kept
    require(bool(ids), f"--prompts: none has at most {longest} tokens; give --longest")
    return Asked(ids, {"workloads": sets, "max_tokens": max_tokens})


def engine(model: Any, policies: Sequence[str], asked: Asked, max_tokens: int, requests: int, **options: Any) -> LLM:
    """An engine that holds these prompts with their answers and can be switched to each of the policies."""
    loaded = next((policy for policy in policies if policy != "off"), "off")
    length = asked.longest + max_tokens + 1
    return o.build_llm(model, policy=loaded, max_model_len=length, max_requests=requests, **options)


def head() -> dict[str, Any]:
    """Versions, machine and command of a record. Paths in the command are cut to their last part."""
    from dscale.evaluate.machine import machine
    from dscale.versions import versions

    words = [Path(word).name if "/" in word and "://" not in word else word for word in sys.argv[1:]]
    return {"versions": versions(), "machine": machine(), "command": shlex.join(["dscale", *words])}
