"""The real model: the alias is what it says. For its text see tests/engine/test_smollm2.py."""

from __future__ import annotations

import json
from pathlib import Path

from dscale.models.aliases import ALIASES
from dscale.models.loader import LoadedTarget


def test_alias_is_the_known_file(smollm2: LoadedTarget, smollm2_folder: Path) -> None:
    assert json.loads((smollm2_folder / "dscale.json").read_text())["sha256"] == ALIASES["smollm2-135m"].sha256
    assert sum(parameter.numel() for parameter in smollm2.model.parameters()) == 134_515_008
    assert (smollm2.alias, smollm2.config.eos_token_ids) == ("smollm2-135m", (2,))


def test_tokenizer_splits_digits_and_round_trips(smollm2: LoadedTarget) -> None:
    tokenizer = smollm2.tokenizer
    assert len(tokenizer.encode("12345")) == 5
    for text in ("naïve café\n\n\t東京 🎉", "def f(x):\n    return x  # don't", "  two  spaces  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    turn = tokenizer.render([{"role": "user", "content": "hi"}])
    assert turn.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.chat([{"role": "user", "content": "hi"}])[0] == 1
