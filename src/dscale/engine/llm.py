"""`LLM`: the engine behind a Python call.

from dscale import LLM, SamplingParams
llm = LLM("smollm2-135m")
print(llm.chat([{"role": "user", "content": "What is a block?"}])[0].outputs[0].text)
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dscale.config import (
    GRAPH_KINDS,
    CacheConfig,
    EngineConfig,
    InputError,
    SamplingParams,
    SpeculationConfig,
    require,
    resolve_dtype,
)
from dscale.engine.crew import Crew, Member, check_shareable, sharing
from dscale.engine.engine import Engine
from dscale.engine.graphs import BUDGETS, capturable
from dscale.engine.outputs import RequestOutput, output_of
from dscale.engine.pages import PagePool, pages_for
from dscale.engine.placement import default_dtype, deterministic_target, free_memory, pack_weights, resolve_device
from dscale.engine.recorder import Recorder, SeenPolicy
from dscale.engine.request import Request, Status, derive_seed, params_per_prompt
from dscale.engine.scheduler import Scheduler
from dscale.engine.worker import Worker
from dscale.kernels.attention import AttentionOptions
from dscale.layers.ranks import ALONE, Ranks
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import drafter_hash, load_drafter
from dscale.models.fp8 import about_bytes, fp8_drafter, fp8_head
from dscale.models.loader import LoadedTarget, load_target
from dscale.models.shapes import is_shape, random_drafter_of
from dscale.speculation.auto import Auto
from dscale.speculation.choose import build_policy, scorer_for
from dscale.speculation.costs import ReplayCosts
from dscale.speculation.dspark import DSpark
from dscale.speculation.policies import Policy, Scorer
from dscale.speculation.predictor import Predictor, PredictorConfig, random_predictor, read_config
from dscale.speculation.simulated import SIMULATED, SimulatedAcceptance
from dscale.speculation.state import CacheTypes, DeviceState, Models

Messages = Sequence[dict[str, Any]]
OnFinish = Callable[[int, RequestOutput], None]


class LLM:
    """A target, optionally with a drafter and a predictor, ready to generate.

    model: folder, hub id, GGUF file, alias, bundle, or random:SHAPE (models/shapes.py). drafter and predictor: "auto"
    takes the bundle's, or the one that ships for an alias; None or "none" goes without; "random" makes untrained ones
    that cost the same; else a folder or a loaded object. policy: see dscale.config.POLICIES; `auto` without a drafter
    is `off`. width: block width W, anchor included (None: the drafter's own). slots: verified rows per request of `dvl`
    and `confidence`. recorder: keeps every verification, for fitting a predictor. simulate: acceptance is made up
    (speculation/simulated.py) with this mean progress, by this trace, or as a SimulatedAcceptance says; every output
    then carries the note "simulated acceptance". Other options are fields of EngineConfig. tensor_parallel over 1
    starts as many processes (engine/crew.py), each with its share of the weights; `close` ends them. crew: processes
    that run already. InputError in one line for anything that does not fit together.
    """

    def __init__(
        self,
        model: str | LoadedTarget,
        drafter: str | Drafter | None = "auto",
        predictor: str | Predictor | None = "auto",
        policy: str = "auto",
        width: int | None = None,
        slots: float = 8.0,
        layout: str | None = None,
        recorder: Recorder | None = None,
        simulate: SimulatedAcceptance | float | str | None = None,
        crew: Member | None = None,
        **engine: Any,
    ) -> None:
        given: dict[str, Any] = {"model": model, "predictor": predictor, "policy": policy, "width": width}
        given |= {"drafter": drafter, "slots": slots, "layout": layout, "simulate": simulate, **engine}
        self.speculation = SpeculationConfig(policy, width, slots, layout)
        self.config = EngineConfig(**engine)
        self.simulate = None if simulate is None else SimulatedAcceptance.of(simulate)
        require(self.simulate is None or recorder is None, "recorder: simulated acceptance teaches nothing; drop one")
        device = resolve_device(self.config.device)
        self.dtype = default_dtype(device) if self.config.dtype == "auto" else resolve_dtype(self.config.dtype)
        self._requests = 0
        self._scorers: dict[tuple[str, int], Scorer | None] = {}
        if self.config.tensor_parallel == 1:
            self._load(model, drafter, predictor, device, recorder, ALONE)
            return
        if crew is None or isinstance(crew, Crew):
            check_shareable(model, drafter, recorder)
        self._crew = crew or Crew.start(self.config.tensor_parallel, device, self.config.check_ranks)
        size = self._crew.ranks.size
        require(size == self.config.tensor_parallel, f"crew: has {size} ranks, not {self.config.tensor_parallel}")
        if not isinstance(self._crew, Crew):
            self._load(model, drafter, predictor, self._crew.device, recorder, self._crew.ranks)
            return
        try:
            self._lead(self._crew, given, own=crew is None)
        except BaseException:
            self._crew.close()
            raise

    def _load(
        self,
        model: str | LoadedTarget,
        drafter: str | Drafter | None,
        predictor: str | Predictor | None,
        device: str,
        recorder: Recorder | None,
        ranks: Ranks,
    ) -> None:
        """Models and engine, of this rank."""
        self.loaded = model if isinstance(model, LoadedTarget) else load_target(model, self.dtype, device, ranks)
        if self.config.deterministic and torch.device(device).type != "cpu":
            self.loaded = deterministic_target(self.loaded)
        self.drafter = self._load_drafter(drafter, device, ranks)
        self._reader = self._in_eight_bits()
        self.predictor = self._find_predictor(predictor)
        self._predictor = self.predictor if isinstance(self.predictor, Predictor) else None
        if recorder is not None:
            recorder.follow(self.predictor_config)
        self.engine = self._build_engine(recorder)

    def _lead(self, crew: Crew, given: dict[str, Any], own: bool) -> None:
        """Build this engine on every rank at once, and from then on lead. own: the crew ends with this engine."""
        number = crew.build(given)
        with crew.guard():
            self._load(given["model"], given["drafter"], given["predictor"], crew.device, None, crew.ranks)
        worker = self.engine.worker
        worker.crew, worker.number = crew, number
        print(sharing(crew.ranks.size, self.loaded.config.decoder, self.drafter), file=sys.stderr)
        self._end = weakref.finalize(self, crew.close if own else crew.drop, *(() if own else (number,)))

    def close(self) -> None:
        """End the processes of the other ranks, if this engine started any; nothing can be generated after."""
        if self.config.tensor_parallel > 1:
            self.engine.worker.graphs = self.engine.worker.prefills = None  # captured collectives go before their group
            self._end()

    def _load_drafter(self, drafter: str | Drafter | None, device: str, ranks: Ranks) -> Drafter | None:
        if self.speculation.policy == "off":
            return None
        self._drafter_source: str | Drafter = ""
        if isinstance(drafter, Drafter):
            self._drafter_source = drafter
            drafter.prepare()
            return drafter
        if drafter == "random" or (drafter == "auto" and is_shape(self.loaded.name)):
            self._drafter_source = random_drafter_of(self.loaded.config, self.dtype, device, ranks=ranks)
            return self._drafter_source
        path = self.loaded.own_drafter if drafter == "auto" else None if drafter == "none" else drafter
        if path is None:
            known = self.speculation.policy == "auto"
            require(known, f"policy {self.speculation.policy!r} needs a drafter; give one with --drafter, or use off")
            return None
        self._drafter_source = str(path)
        return load_drafter(path, self.loaded.model, self.dtype, device, self.speculation.layout, ranks)

    def _in_eight_bits(self) -> Target | None:
        """Exchange the drafter for one in eight bits where that was asked for; then also the head that reads it."""
        if self.drafter is None or self.config.draft_weights != "fp8":
            return None
        self.drafter, reader = fp8_drafter(self.drafter), fp8_head(self.loaded.model)
        print(about_bytes(self.drafter, reader), file=sys.stderr)
        return reader

    def _find_predictor(self, predictor: str | Predictor | None) -> str | Predictor | None:
        if predictor == "auto":
            shipped = self.loaded.own_predictor
            fits = shipped and self.drafter and read_config(shipped).drafter_hash == drafter_hash(self._drafter_source)
            return str(shipped) if fits else None
        if predictor == "random":
            return random_predictor(self._width) if self.drafter else None
        return None if predictor == "none" else predictor

    def _build_engine(self, recorder: Recorder | None) -> Engine:
        target = self.loaded.model
        limit = self.loaded.config.decoder.max_position
        length = limit if self.config.max_model_len is None else self.config.max_model_len
        require(length <= limit, f"max_model_len: {length} is over the model's context length {limit}")
        width = self._width
        if self.drafter is not None:
            trained = self.drafter.config.width
            require(width <= trained, f"width: {width} is wider than the drafter's trained block; at most {trained}")
        types = CacheTypes.of(self.config, target)
        num_pages = self.config.num_pages or self._fitting_pages(target, types, length + width)
        if target.stack.ranks.size > 1:
            num_pages = target.stack.ranks.least(num_pages, target.embedding.device)
        models = Models.allocate(target, self.drafter, num_pages, length + width + 1, types)
        models.reader = self._reader
        models.attention = AttentionOptions(self.config.attention_layout, self.config.deterministic)
        pack_weights(target, self.drafter)
        state = DeviceState(self.config.max_requests, pages_for(length + width + 1), target.embedding.device)
        if self.simulate is not None:
            if target.stack.ranks.leads:
                print(f"{SIMULATED}: {self.simulate.about()}; the text means nothing", file=sys.stderr)
            state.simulation = self.simulate.on(target.embedding.device)
        pool = PagePool(CacheConfig(num_pages, self.config.prefix_caching))
        scheduler = Scheduler(pool, self.config.max_requests, self.config.max_prefill_tokens, width)
        worker = Worker(models, state)
        on_gpu = worker.device.type == "cuda"
        self._captured = on_gpu and self.config.graphs and capturable(models)
        worker.policy = self._policy(worker, width, self.speculation)
        if recorder is not None:
            worker.policy = recorder.attach(worker.policy, target)
        self._ready(worker)
        lag = int(on_gpu) if self.config.lag is None else self.config.lag
        return Engine(worker, scheduler, self.loaded.own_tokenizer, length, lag, recorder)

    def _ready(self, worker: Worker) -> None:
        """Ring and graphs for the policy in force; on a CPU there is nothing to do."""
        worker.serve(self.config.max_requests, self._captured, self.config.max_prefill_tokens)
        if worker.graphs is not None and worker.prefills is not None:
            worker.prefills.prepare()
            policy = worker.policy.policy if isinstance(worker.policy, SeenPolicy) else worker.policy
            worker.graphs.prepare(GRAPH_KINDS[self.config.graph_kinds], timed=isinstance(policy, Auto | DSpark))

    def _policy(self, worker: Worker, width: int, speculation: SpeculationConfig) -> Policy:
        """On a GPU with graphs the sizes of steps are few and known beforehand."""
        scorer = self._scorer(speculation, width) if self.drafter is not None else None
        policy = "off" if self.drafter is None else speculation.policy
        slots, device = speculation.slots, worker.device
        if not self._captured:
            return build_policy(policy, width, slots, scorer, worker.costs, device.type == "cpu", device=device)
        costs = ReplayCosts(worker.replay_seconds)
        made = build_policy(policy, width, slots, scorer, costs, False, BUDGETS, device)
        costs.shapes = made.shapes
        return made

    def _scorer(self, speculation: SpeculationConfig, width: int) -> Scorer | None:
        """Made once for each kind of policy and width: one that learns keeps what it learned."""
        key = speculation.policy.partition(":")[0], width
        if key not in self._scorers:
            predictor = self.load_predictor() if key[0] in ("dvl", "auto") else None
            self._scorers[key] = scorer_for(speculation, predictor, width, self.loaded.model)
        return self._scorers[key]

    def load_predictor(self) -> Predictor | None:
        """The predictor that every policy shares, read when it is first asked for; None without one."""
        if self._predictor is None and isinstance(self.predictor, str):
            self._predictor = Predictor.load(self.predictor, self.drafter_hash)
        return self._predictor

    @property
    def predictor_config(self) -> PredictorConfig | None:
        """What the predictor was fitted for; None without one."""
        found = self.predictor
        return read_config(Path(found)) if isinstance(found, str) else None if found is None else found.config

    @property
    def drafter_hash(self) -> str:
        """Hash of the drafter's weights; slow when they are large, and "" without a drafter."""
        return drafter_hash(self._drafter_source) if self.drafter is not None else ""

    def _switch(self, policy: str, slots: float | None, width: int | None) -> str:
        before, engine = self.speculation, self.engine
        wanted = SpeculationConfig(policy, width or before.width, slots or before.slots, before.layout)
        drafts = wanted.policy not in ("off", "auto")
        require(self.drafter is not None or not drafts, f"policy {policy!r} needs a drafter; none is loaded")
        most = engine.scheduler.lookahead
        rows = wanted.width or most
        require(rows <= most or self.drafter is None, f"width: {rows} is over the engine's block; at most {most}")
        chosen = self._policy(engine.worker, rows, wanted)
        if engine.recorder is not None and chosen.width == engine.recorder.width:
            chosen = engine.recorder.attach(chosen, self.loaded.model)
        engine.settle()
        engine.worker.policy, self.speculation = chosen, wanted
        self._ready(engine.worker)
        return chosen.name

    def switch(self, policy: str, slots: float | None = None, width: int | None = None) -> str:
        """Change the policy for the steps to come, also while requests run; None keeps what is in force.

        Returns the name of the policy now in force. Speed changes by it, text does not. InputError, and no change, for
        a policy that needs a drafter or predictor that is not loaded, or blocks wider than the engine's.
        """
        worker = self.engine.worker
        if worker.crew is None:
            return self._switch(policy, slots, width)
        with worker.crew.guard():
            worker.crew.tell(worker.number, "switch", policy, slots, width)
            return self._switch(policy, slots, width)

    def _fitting_pages(self, target: Target, types: CacheTypes, length: int) -> int:
        """Pages for every request at full length, or what a share of free memory holds."""
        per_page = types.page_bytes(target.config.decoder, self.drafter.config.decoder if self.drafter else None)
        room = int(free_memory(target.embedding.device) * self.config.memory_fraction / per_page)
        require(room >= 2, f"memory_fraction: {self.config.memory_fraction} of free memory holds no cache page")
        return min(self.config.max_requests * pages_for(length + 1) + 1, room)

    @property
    def _width(self) -> int:
        """W asked for, or the drafter's own; 1 without a drafter."""
        return self.speculation.width or (self.drafter.config.width if self.drafter else 1)

    @property
    def note(self) -> str | None:
        """What every figure of this engine must be read with, or None."""
        return SIMULATED if self.simulate is not None else None

    @property
    def policy(self) -> str:
        """Name of the policy in force."""
        return self.engine.worker.policy.name

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text, or token ids), all batched together; outputs in the order of the prompts.

        on_finish(index, output) is called for each prompt as soon as its sequences have ended.
        """
        if prompt_token_ids is None:
            require(prompts is not None, "generate: give prompts or prompt_token_ids")
            texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
            prompt_token_ids = [self.loaded.tokenizer.encode(text) for text in texts]
        else:
            texts = [None] * len(prompt_token_ids)  # type: ignore[list-item]
        params = params_per_prompt(sampling_params, len(texts))
        groups: list[list[Request]] = []
        try:
            for row, one in zip(prompt_token_ids, params, strict=True):
                groups.append(self._submit(list(row), one))
            return self._drain(groups, texts, on_finish)
        finally:
            for request in (request for group in groups for request in group):
                self.engine.abort(request.id)

    def _drain(
        self, groups: list[list[Request]], texts: Sequence[str | None], on_finish: OnFinish | None
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        pending = {request.id: index for index, group in enumerate(groups) for request in group}
        while self.engine.busy:
            for request in self.engine.step():
                index = pending.get(request.id)
                if index is None or any(one.status is not Status.FINISHED for one in groups[index]):
                    continue
                if index not in outputs:
                    outputs[index] = output_of(groups[index], texts[index], self.note)
                    if on_finish is not None:
                        on_finish(index, outputs[index])
        return [outputs[index] for index in range(len(groups))]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: OnFinish | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; template arguments go to the model's chat template."""
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Sequence[Any] = [messages] if single else messages
        ids = [self.loaded.tokenizer.chat(conversation, **template) for conversation in conversations]
        return self.generate(sampling_params=sampling_params, prompt_token_ids=ids, on_finish=on_finish)

    def stream(self, prompt_token_ids: Sequence[int], sampling_params: SamplingParams) -> Iterator[str]:
        """Pieces of the text of one sequence as they become certain; closing the iterator aborts the request."""
        (request,) = self._submit(list(prompt_token_ids), replace(sampling_params, n=1))
        assert request.text is not None
        try:
            while request.status is not Status.FINISHED:
                self.engine.step()
                piece = request.text.take(final=request.status is Status.FINISHED)
                if piece:
                    yield piece
        finally:
            self.engine.abort(request.id)

    def _submit(self, ids: list[int], params: SamplingParams) -> list[Request]:
        """One request per sequence of `n`; each has its own seed."""
        number, self._requests = self._requests, self._requests + 1
        base = params.seed if params.seed is not None else derive_seed(self.config.seed, number)
        seeds = [base if index == 0 else derive_seed(base, index) for index in range(params.n)]
        group: list[Request] = []
        try:
            for index, seed in enumerate(seeds):
                group.append(self.engine.add(f"{number}-{index}", ids, params, seed))
        except InputError:
            for request in group:
                self.engine.abort(request.id)
            raise
        return group
