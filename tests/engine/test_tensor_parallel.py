"""Two processes that share a model on a CPU give the text of one, whatever is asked of them, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dscale.config import DecoderConfig, InputError, RankFailed, SamplingParams, TargetConfig
from dscale.engine.crew import Crew
from dscale.engine.llm import LLM
from dscale.engine.prefill_graphs import LANES, PrefillRunner
from dscale.engine.worker import Admission, Worker
from dscale.layers.ranks import Ranks
from dscale.models.checkpoint import tensors_of
from dscale.models.drafter_checkpoint import save_drafter
from dscale.models.families import target_pieces, to_hf_config
from dscale.models.loader import LoadedTarget, random_target
from dscale.models.shares import Share
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.engine.test_lossless import GREEDY, SEEDED, prompts, tokens
from tests.engine.test_prefill_graphs import Closure
from tests.oracle.make_pair import save_tokenizer

ODD = DecoderConfig(5, 48, 97, 3, 6, 3, 16, max_position=512, norm_eps=1e-5, qkv_bias=True)  # heads 2 and 4, 97 inner


def written(folder: Path, target: LoadedTarget) -> dict[str, str]:
    """The target and a drafter for it as checkpoints: what every rank can load by itself."""
    model, drafter = folder / "target", folder / "drafter"
    model.mkdir(parents=True)
    decoder = target.config.decoder
    save_file(dict(tensors_of(target.model, target_pieces(target.config), decoder)), model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(to_hf_config(target.config)))
    save_tokenizer(model, decoder.vocab_size)
    save_drafter(tiny_drafter(target), drafter, dtype=torch.float32)
    return {"model": str(model), "drafter": str(drafter)}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """even: 4 query and 2 key/value heads; odd: what does not divide by two; single: one key/value head for both."""
    folder = tmp_path_factory.mktemp("pairs")
    odd = TargetConfig("qwen2", ODD, tie_embeddings=False)
    single = TargetConfig("llama", replace(ODD, num_heads=4, num_kv_heads=1, qkv_bias=False), tie_embeddings=True)
    targets = {name: LoadedTarget(random_target(c, 0), c, None, name) for name, c in (("odd", odd), ("single", single))}
    targets["even"] = tiny_target("qwen3")
    return {name: written(folder / name, target) for name, target in targets.items()}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Two ranks that compare what they make of every step."""
    crew = Crew.start(2, "cpu", check=True)
    yield crew
    crew.close()


def build(pair: dict[str, str], policy: str, crew: Crew | None = None, **options) -> LLM:
    """An engine of one process, or of the crew's two; few pages, so that requests are preempted."""
    options = {"num_pages": 14, "max_requests": 4, "slots": 3.0, "max_prefill_tokens": 19, **options}
    if crew is not None:
        options |= {"tensor_parallel": 2, "crew": crew}
    return LLM(**pair, predictor="random", policy=policy, dtype="float32", device="cpu", **options)


@pytest.mark.parametrize("policy", ["off", "full", "dvl", "confidence", "auto"])
def test_two_ranks_give_the_text_of_one(pairs, crew: Crew, policy: str):
    alone, shared = build(pairs["even"], policy), build(pairs["even"], policy, crew)
    for params in (GREEDY, SEEDED):
        assert tokens(shared, prompts(6), params) == tokens(alone, prompts(6), params)
    assert shared.engine.scheduler.preemptions > 0
    assert shared.engine.scheduler.pool.held == 0
    if policy in ("full", "dvl"):
        assert shared.engine.counters.accepted == alone.engine.counters.accepted > 0
        assert shared.engine.counters.slots == alone.engine.counters.slots


@pytest.mark.parametrize("pair", ["odd", "single"])
def test_heads_that_do_not_divide_are_dealt_out_or_copied(pairs, crew: Crew, pair: str):
    alone, shared = build(pairs[pair], "full"), build(pairs[pair], "full", crew)
    decoder = shared.engine.worker.models.target.config.decoder
    assert (decoder.num_heads, decoder.num_kv_heads) == (2, 1)
    assert shared.engine.worker.models.target_cache.shape[3] == 1
    assert tokens(shared, prompts(6), SEEDED) == tokens(alone, prompts(6), SEEDED)


def test_caches_in_eight_bits_round_the_same(pairs, crew: Crew):
    options = {"kv_cache_dtype": "fp8", "draft_kv_cache_dtype": "fp8"}
    alone, shared = build(pairs["even"], "off", kv_cache_dtype="fp8"), build(pairs["even"], "full", crew, **options)
    assert shared.engine.worker.models.target_cache.dtype is torch.float8_e4m3fn
    assert tokens(shared, prompts(6), SEEDED) == tokens(alone, prompts(6), SEEDED)


def test_random_shapes_are_the_same_weights(crew: Crew):
    pair = {"model": "random:tiny", "drafter": "auto"}
    rows = [[1, 2, 3], [400] * 30]
    assert tokens(build(pair, "dvl", crew, num_pages=64), rows, GREEDY) == tokens(
        build(pair, "dvl", num_pages=64), rows, GREEDY
    )


def test_arrivals_aborts_and_a_switch_meanwhile(pairs, crew: Crew):
    def run(llm: LLM) -> list[list[int]]:
        engine, made = llm.engine, []
        for step in range(60):
            if step % 4 == 0 and step < 32:
                number = step // 4
                params = replace(GREEDY if number % 2 else SEEDED, seed=number)
                made.append(engine.add(str(number), prompts(8)[number], params, number))
            if step == 10:
                engine.abort("1")
            if step == 20:
                llm.switch("full")
            engine.step()
        while engine.busy:
            engine.step()
        return [request.output for request in made if request.id != "1"]

    assert run(build(pairs["even"], "dvl", crew)) == run(build(pairs["even"], "dvl"))


def capture_prefills(put: Callable[[object, str, object], None] = setattr) -> None:
    """Have workers of this process replay their prefills, on a CPU too. A follower calls it as it starts."""

    def serve(worker: Worker, most: int, graphs: bool, prefill_rows: int) -> None:
        worker.prefills = PrefillRunner(worker.state, worker.models, prefill_rows, Closure())

    put(Worker, "serve", serve)


def test_every_rank_replays_captured_prefills(pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Padded to their capacity, in lanes; scores of prompts come from rows that each rank kept of the replay."""
    params = replace(SEEDED, prompt_logprobs=1)
    options = {"num_pages": 64, "max_requests": 12, "max_prefill_tokens": 100}
    rows = [[1, 2, number % 5] for number in range(LANES)]
    rows += [row[:14] for row in prompts(4)]  # over LANES pieces in a prefill: two replays of one graph
    alone = build(pairs["even"], "full", **options).generate(prompt_token_ids=rows, sampling_params=params)
    start = "from tests.engine.test_tensor_parallel import capture_prefills\ncapture_prefills()\n"
    (tmp_path / "sitecustomize.py").write_text(start)
    monkeypatch.syspath_prepend(tmp_path)
    capture_prefills(monkeypatch.setattr)
    shared = build(pairs["even"], "full", tensor_parallel=2, check_ranks=True, **options)
    together = shared.generate(prompt_token_ids=rows, sampling_params=params)
    assert set(shared.engine.worker.prefills._captured) == {(64, True)}
    for want, have in zip(alone, together, strict=True):
        assert have.outputs[0].token_ids == want.outputs[0].token_ids
        scores = [[one.logprob for one in output.prompt_logprobs[1:]] for output in (want, have)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    shared.close()
    assert shared.engine.worker.prefills is None


def test_log_probabilities_penalties_and_stop_strings(pairs, crew: Crew):
    params = SamplingParams(
        temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=1, frequency_penalty=0.5, logit_bias={2: 0.3}
    )
    alone, shared = (
        build(pairs["even"], "full", one).generate(prompt_token_ids=prompts(4), sampling_params=params)
        for one in (None, crew)
    )
    for want, have in zip(alone, shared, strict=True):
        assert have.outputs[0].token_ids == want.outputs[0].token_ids
        assert [one.logprob for one in have.outputs[0].logprobs] == pytest.approx(
            [one.logprob for one in want.outputs[0].logprobs], abs=1e-4
        )
        assert [one.logprob for one in have.prompt_logprobs[1:]] == pytest.approx(
            [one.logprob for one in want.prompt_logprobs[1:]], abs=1e-4
        )


def finish(llm: LLM) -> None:
    """Step until nothing is left to do."""
    while llm.engine.busy:
        llm.engine.step()


def strange_seed(llm: LLM, row: int) -> None:
    """Give the other rank, and it alone, another seed for a request."""
    worker = llm.engine.worker
    state = worker.state
    anchor = int(state.length[row]), int(state.anchor[row]), int(state.remaining[row]), False
    worker.crew.tell(worker.number, "place", [Admission(row, replace(SEEDED, seed=None), 999, (), anchor)], [], [], [])


def test_the_first_rank_decides_and_a_difference_is_found_where_it_is_looked_for(pairs):
    expected = tokens(build(pairs["even"], "full"), [[1, 2, 3]], SEEDED)
    for check in (False, True):
        llm = build(pairs["even"], "full", tensor_parallel=2, check_ranks=check)
        request = llm.engine.add("one", [1, 2, 3], SEEDED, SEEDED.seed)
        llm.engine.step()
        strange_seed(llm, request.row)
        if check:
            with pytest.raises(RankFailed, match=r"ranks disagree: \d+ drafts, lengths or tokens"):
                finish(llm)
        else:
            finish(llm)
            assert [request.output] == expected
        llm.close()


def test_a_rank_that_dies_is_named_and_nobody_hangs(pairs):
    llm = build(pairs["even"], "full", tensor_parallel=2, num_pages=64)
    process = llm.engine.worker.crew.followers[0].process
    for number in range(4):
        llm.engine.add(str(number), [1, 2], SamplingParams(temperature=0.0, max_tokens=400), number)
    llm.engine.step()
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="tensor parallel: rank 1 ended by signal 9"):
        finish(llm)
    with pytest.raises(RankFailed):
        llm.generate(prompt_token_ids=[[1]])
    assert time.monotonic() - began < 10


def test_followers_end_with_a_first_rank_that_dies(pairs):
    script = (
        "import os, sys; from dscale.engine.crew import Crew; crew = Crew.start(2, 'cpu');"
        "print(crew.followers[0].process.pid, flush=True); os._exit(9)"
    )
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout)
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_what_cannot_be_shared_is_refused_in_one_line(pairs):
    with pytest.raises(InputError, match="2 ranks cannot share the 3 query and 1 key/value heads of it"):
        Share.must(replace(ODD, num_heads=3, num_kv_heads=1), Ranks(0, 2), "it")
    with pytest.raises(InputError, match="model: ranks load it themselves"):
        LLM(tiny_target("qwen3"), tensor_parallel=2, device="cpu", policy="off")
    with pytest.raises(InputError, match="deterministic: not with tensor_parallel 2"):
        LLM("random:tiny", tensor_parallel=2, deterministic=True)
    with pytest.raises(InputError, match="tensor_parallel: 0 must be at least 1"):
        LLM("random:tiny", tensor_parallel=0)


@pytest.mark.parametrize("size", [2, 3])
def test_shares_make_up_the_whole(size: int):
    shares = [Share.must(ODD, Ranks(rank, size), "it") for rank in range(size)]
    q, k, v = (torch.randn(heads * 16, 48) for heads in (6, 3, 3))
    held = [share.cut("stack.layers.1.qkv.weight", [q, k, v]) for share in shares]
    for index, whole in enumerate((q, k, v)):
        assert torch.equal(torch.cat([one[index] for one in held]), whole)
    for name, whole, dimension in (
        ("stack.layers.0.output.weight", torch.randn(48, 96), 1),
        ("stack.layers.0.down.weight", torch.randn(48, 97), 1),
        ("stack.layers.0.gate_up.weight", torch.randn(97, 48), 0),
        ("head.weight", torch.randn(5, 48), 0),
    ):
        assert torch.equal(torch.cat([share.cut(name, [whole])[0] for share in shares], dimension), whole)
    assert all(torch.equal(share.cut("stack.layers.0.down.bias", [q[0]])[0], q[0]) for share in shares)
    for share in shares:
        assert share.local.num_heads == 2 * share.local.num_kv_heads
