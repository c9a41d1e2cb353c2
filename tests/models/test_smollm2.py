"""The real model, from the cache: greedy text of 200 tokens equals transformers', and the alias is what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from dscale.kernels.attention import RaggedBatch
from dscale.layers.attention import PagedAttention
from dscale.layers.rotary import rotary_table
from dscale.models.aliases import ALIASES
from dscale.models.decoder import Target
from dscale.models.loader import LoadedTarget, load_target
from tests.conftest import GreedyReference


def greedy(target: Target, prompts: list[tuple[int, ...]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts side by side through one paged cache: prompts at once, then one row each a step."""
    decoder, lanes = target.config.decoder, len(prompts)
    pages = -(-(max(map(len, prompts)) + count) // 16)
    table = rotary_table(decoder.rope, decoder.head_dim, pages * 16, torch.device("cpu"))
    cache = torch.zeros(decoder.num_layers, 2, lanes * pages, decoder.num_kv_heads, 16, decoder.head_dim)
    page_table = torch.arange(lanes * pages, dtype=torch.int32).view(lanes, pages)
    fed, done, tokens = [list(prompt) for prompt in prompts], [0] * lanes, [[] for _ in prompts]
    for _ in range(count):
        rows = [(lane, done[lane] + i) for lane in range(lanes) for i in range(len(fed[lane]))]
        ends = torch.tensor([0, *(len(new) for new in fed)]).cumsum(0)
        batch = RaggedBatch(
            positions=torch.tensor([position for _, position in rows]),
            slots=torch.tensor([lane * pages * 16 + position for lane, position in rows]),
            page_table=page_table,
            lanes=torch.arange(lanes),
            starts=ends,
            contexts=torch.tensor(done),
            max_rows=max(map(len, fed)),
            max_context=max(before + len(new) for before, new in zip(done, fed, strict=True)),
        )
        ids = torch.tensor([token for new in fed for token in new])
        hidden, _ = target(ids, PagedAttention(decoder, cache, table, batch))
        best = target.logits(hidden[ends[1:] - 1]).argmax(-1).tolist()
        for lane, token in enumerate(best):
            done[lane] += len(fed[lane])
            tokens[lane].append(token)
            fed[lane] = [token]
    return tokens


def test_greedy_text_equals_transformers(smollm2: LoadedTarget, smollm2_greedy: list[GreedyReference]) -> None:
    assert [len(reference.tokens) for reference in smollm2_greedy] == [200] * 5
    made = greedy(smollm2.model, [reference.prompt for reference in smollm2_greedy], 200)
    for reference, ours in zip(smollm2_greedy, made, strict=True):
        assert tuple(ours) == reference.tokens


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


def test_second_load_takes_under_a_second(smollm2: LoadedTarget) -> None:
    """CPU seconds, so that other work on the machine does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = min(_seconds_to_load(torch.float32) for _ in range(5))
    torch.set_num_threads(threads)
    assert best < 1.0


def _seconds_to_load(dtype: torch.dtype) -> float:
    start = time.process_time()
    load_target("smollm2-135m", dtype)
    return time.process_time() - start
