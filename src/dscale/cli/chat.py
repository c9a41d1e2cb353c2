"""`dscale chat`: talk with a model in the terminal.

dscale chat -m smollm2-135m
"""

from __future__ import annotations

import sys
from typing import Any

from dscale.cli import options as o
from dscale.config import InputError, SamplingParams, require


def chat(
    model: o.Model = "smollm2-135m",
    drafter: o.Drafter = "auto",
    predictor: o.Predictor = "auto",
    policy: o.PolicyName = "auto",
    width: o.Width = None,
    slots: o.Slots = 8.0,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    draft_weights: o.DraftWeights = "auto",
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: o.Seed = None,
) -> None:
    """Talk with a model; an empty line or end of input leaves, /new starts over.

    Example: dscale chat -m smollm2-135m
    """
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    llm = o.build_llm(
        model, drafter=drafter, predictor=predictor, policy=policy, width=width, slots=slots,
        dtype=dtype, device=device, draft_weights=draft_weights, max_requests=1,
        temperatures=[temperature],
    )  # fmt: skip
    require(llm.loaded.tokenizer.has_chat_template, f"{model}: has no chat template; use `dscale generate --raw`")
    o.errors.print(f"{model} · policy {llm.policy} · empty line leaves, /new starts over", style="dim")
    messages: list[dict[str, Any]] = []
    while True:
        text = _ask()
        if not text:
            return
        if text == "/new":
            messages = []
            continue
        messages.append({"role": "user", "content": text})
        reply = ""
        try:
            for piece in llm.stream(llm.loaded.tokenizer.chat(messages), params):
                sys.stdout.write(piece)
                sys.stdout.flush()
                reply += piece
        except InputError as error:  # the conversation outgrew the context
            o.errors.print(f"dscale: {error}; /new starts over", style="red", highlight=False)
            messages.pop()
            continue
        print()
        messages.append({"role": "assistant", "content": reply})


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
