"""Record what transformers answers greedily, float32, over the alias's weights. Takes minutes; run when prompts change.

python -m tests.models.make_smollm2_greedy
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from dscale.models.aliases import ALIASES, alias_folder
from tests.conftest import SMOLLM2_PROMPTS

FILE = Path(__file__).with_name("smollm2_greedy.json")


def answer(model: torch.nn.Module, prompt: list[int]) -> dict:
    """200 greedy tokens, past end tokens, and the smallest gap between the first and second logit."""
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=200,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(made.logits).topk(2).values
    gap = (best[:, 0] - best[:, 1]).min().item()
    return {"prompt": prompt, "tokens": made.sequences[0, len(prompt) :].tolist(), "smallest_gap": round(gap, 5)}


def main() -> None:
    """Write the recording beside this file."""
    folder = alias_folder("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for text in SMOLLM2_PROMPTS:
        turn = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        answers.append(answer(model, tokenizer.encode(rendered, add_special_tokens=False)))
        print(text, answers[-1]["smallest_gap"], len(answers[-1]["tokens"]))
    record = {"transformers": transformers.__version__, "sha256": ALIASES["smollm2-135m"].sha256, "answers": answers}
    FILE.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
