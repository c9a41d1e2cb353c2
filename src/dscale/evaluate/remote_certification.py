"""A certificate of any server against a reference server: the same model without speculation (measurement.md §3).

Text is captured greedily from the server and scored by the server once and by the reference twice. The reference's own
text, scored by the reference, is the control for what scoring by prefill and decoding round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dscale.evaluate.certificate import Text, decide, evidence_json, resolution
from dscale.evaluate.certificate_record import Certificate, Scope
from dscale.evaluate.certification import contexts_of, gather
from dscale.evaluate.continuations import mean_progress, sampling_of
from dscale.evaluate.remote import Endpoint, RemoteScorer, capture_remote


def certify_server(
    server: Endpoint,
    reference: Endpoint,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    encode: Callable[[str], list[int]],
    name: str = "the server's own",
) -> tuple[Certificate, str]:
    """The certificate, relative to the floor, and a line on how it was scored. name: of the policy, for the record."""
    params = sampling_of(0.0, max_tokens, 0)
    given = [one.given for one in capture_remote(server, prompts, params, encode)]
    plain = [one.given for one in capture_remote(reference, prompts, params, encode)]
    scorer, own = RemoteScorer(reference), RemoteScorer(server)
    first, second = scorer.score(given), scorer.score(given[::-1])[::-1]
    control = np.concatenate([one.wrong for one in scorer.score(plain)])
    evidence = replace(gather(given, first, second, own.score(given)), control=(int(control.sum()), len(control)))
    text = Text.of([one.tokens for one in given], [one.tokens for one in plain])
    progress = mean_progress(given)
    verdict = decide(evidence, False, text, progress)
    size = resolution(int(evidence.accepted.sum()), int(evidence.floor.sum()), False)
    accepted = int(evidence.accepted.sum()) if evidence.boundaries else None
    count = len(evidence.violation)
    scope = Scope(
        name, None, None, None, None, 0.0, 1.0, None, contexts_of(given), len(given), count, accepted, size, False
    )  # fmt: skip
    made = Certificate(scope, verdict, evidence_json(evidence, False), text, progress)
    return made, f"the reference was scored by {scorer.way}, the server by {own.way}; texts are greedy"
