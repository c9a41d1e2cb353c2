"""`dscale serve --refit`: predictor and confidence calibration follow the traffic while it is served.

The engine's loop only collects records and asks `turn` between steps. When a refit is due, a thread hands the records
to another process (train/refit_process.py) and waits for it. What is better there on held-out prompts is copied over
the weights in force, in place and between two steps; text cannot change by it, only how many drafts are verified.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dscale.config import InputError, require
from dscale.engine.llm import LLM
from dscale.engine.recorder import Recorder
from dscale.serve.messages import RefitOptions, RefitState, Refitted
from dscale.speculation.policies import ConfidenceScorer
from dscale.speculation.predictor import Predictor
from dscale.train.recent_traces import RecentTraces
from dscale.train.refit import MIN_PROMPTS, Refit, RefitJob, Verdict
from dscale.train.refit_folder import RefitFolder, weights_hash
from dscale.train.refit_process import RefitFailed, RefitProcess
from dscale.train.traces import Traces, join_traces

PARTS = ("predictor", "confidence")


def refitting_recorder() -> Recorder:
    """The recorder that an engine with refits is made with."""
    return Recorder(groups=None)


@dataclass(frozen=True)
class _Ended:
    """What the thread hands back. disk: why the predictor could not be kept, if it could not."""

    refit: Refit
    disk: str | None


class Refitter:
    """Refits of one engine. Made and used in the loop's thread, between steps.

    InputError when there is nothing to refit, or the folder of earlier refits cannot be used.
    """

    def __init__(self, llm: LLM, options: RefitOptions) -> None:
        recorder = llm.engine.recorder
        require(llm.drafter is not None, "refit: there is no drafter, so nothing to refit; give one with --drafter")
        assert recorder is not None, "the engine is made with refitting_recorder()"
        self.llm, self.options, self.recorder = llm, options, recorder
        self.process = RefitProcess()
        self.traces = RecentTraces(recorder.groups, options.keep)
        recorder.done = self.traces.add
        self.state = RefitState(outcomes={name: dict.fromkeys(("accepted", "rejected"), 0) for name in PARTS})
        self.state.outcomes["refit"] = {"failed": 0}
        self._served = self._fitting_predictor()
        self._host = deepcopy(self._served).cpu() if self._served is not None else None  # what serves, on the host
        self._folder = self._open_folder()
        self._thread = ThreadPoolExecutor(1, "refit")
        self._job: Future[_Ended] | None = None
        self._scorer: ConfidenceScorer | None = None  # whose calibration the running job is to better
        self._began = time.monotonic()

    def _fitting_predictor(self) -> Predictor | None:
        """The engine's predictor, when it is one for the blocks that are recorded."""
        found = self.llm.load_predictor()
        return found if found is not None and found.config.width == self.recorder.width else None

    def _open_folder(self) -> RefitFolder | None:
        """The folder of refits; a predictor kept there takes the place of the one that was loaded."""
        if self.options.folder is None or self._host is None:
            return None
        folder = RefitFolder(Path(self.options.folder), self._host.config.drafter_hash, weights_hash(self._host))
        kept = folder.read()
        if kept is not None:
            self.state.version, predictor = kept
            self._take_predictor(dict(predictor.state_dict()))
        return folder

    @property
    def running(self) -> bool:
        """True while a refit is under way."""
        return self._job is not None

    def turn(self) -> list[Refitted]:
        """Between two steps: begin a refit that is due, or take in one that has ended and say what came of it."""
        if self._job is None:
            if self._due():
                self._begin()
            return []
        if not self._job.done():
            return []
        job, self._job = self._job, None
        return [Refitted(self._take_in(job))]

    def now(self) -> RefitState:
        """Where refits stand, for a snapshot."""
        self.state.records = len(self.traces)
        return deepcopy(self.state)

    def close(self) -> None:
        """End a refit that runs."""
        self.process.close()
        self._thread.shutdown(cancel_futures=True)

    def _due(self) -> bool:
        enough = self.traces.fresh >= self.options.min_records
        return enough and time.monotonic() - self._began >= self.options.every and self.traces.prompts >= MIN_PROMPTS

    def _begin(self) -> None:
        """Hand what there is to the thread; only references and a few small tensors are copied here."""
        self._began = time.monotonic()
        scorers = self.llm.engine.worker.policy.scorers()
        self._scorer = next((one for one in scorers if isinstance(one, ConfidenceScorer)), None)
        confidence = None if self._scorer is None else self._scorer.learner.weight.detach().cpu().clone()
        self._job = self._thread.submit(self._fit, self.traces.take(), self._host, confidence)

    def _fit(self, pieces: list[Traces], predictor: Predictor | None, confidence: Tensor | None) -> _Ended:
        """In the thread: a refit, and a better predictor written to the folder."""
        refit = self.process.run(RefitJob(join_traces(pieces), predictor, confidence))
        return _Ended(refit, self._keep(refit))

    def _keep(self, refit: Refit) -> str | None:
        verdict = refit.predictor
        if self._folder is None or self._host is None or verdict is None or verdict.weights is None:
            return None
        new = Predictor(replace(self._host.config, metrics=verdict.new))
        new.load_state_dict(verdict.weights)
        try:
            self._folder.keep(self.state.version + 1, new, {"old": verdict.old, "new": verdict.new})
        except InputError as error:
            return str(error)
        return None

    def _take_in(self, job: Future[_Ended]) -> dict[str, Any]:
        """The record of a refit that ended, whatever way; the engine goes on after each."""
        try:
            return self._adopt(job.result())
        except RefitFailed as error:
            reason = str(error)
        except Exception as error:  # a refit is never worth an engine
            reason = f"{type(error).__name__}: {error}"
        self.state.outcomes["refit"]["failed"] += 1
        return {"outcome": "failed", "reason": reason, "version": self.state.version}

    def _adopt(self, ended: _Ended) -> dict[str, Any]:
        """Put what is better in force."""
        refit = ended.refit
        record: dict[str, Any] = {}
        for name in PARTS:
            verdict: Verdict | None = getattr(refit, name)
            if verdict is None:
                continue
            outcome = "rejected"
            if verdict.weights is not None:
                (self._take_predictor if name == "predictor" else self._take_confidence)(verdict.weights)
                outcome = "accepted"
                self.state.version += name == "predictor"
            self.state.outcomes[name][outcome] += 1
            self.state.log_loss[name] = {"old": verdict.old["log_loss"], "new": verdict.new["log_loss"]}
            record[name] = {"outcome": outcome, "old": _rounded(verdict.old), "new": _rounded(verdict.new)}
        about = {"version": self.state.version, "records": refit.records, "prompts": refit.prompts}
        record |= about | {"not_recorded": dict(self.recorder.skipped), "seconds": round(refit.seconds, 2)}
        return record | ({} if ended.disk is None else {"not_kept": ended.disk})

    def _take_predictor(self, weights: dict[str, Tensor]) -> None:
        assert self._served is not None
        assert self._host is not None
        self._served.take(weights)
        self._host.take(weights)
        self.llm.engine.worker.policy.rescored()

    def _take_confidence(self, weights: dict[str, Tensor]) -> None:
        assert self._scorer is not None
        self._scorer.take(weights["weight"])
        self.llm.engine.worker.policy.rescored()


def _rounded(scores: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in scores.items()}
