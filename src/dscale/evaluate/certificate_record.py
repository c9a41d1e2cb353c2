"""The record of `dscale certify`: certificates with what they were made from. Schema 1:

{"kind": "certificate", "schema": 1, "versions": {...}, "machine": {...}, "command": "...", "model": "...",
 "exact": true, "certified": true, "prompts": {...}, "certificates": [...], "notes": [...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dscale.config import InputError, require
from dscale.evaluate.certificate import Text, Verdict
from dscale.evaluate.drafter_agreement import Agreement
from dscale.evaluate.record_file import read_json

KIND = "certificate"
SCHEMA = 1


@dataclass(frozen=True)
class Scope:
    """What a certificate is about, and no more than that. width, slots, dtype, device: None where a server does not
    tell; contexts: fewest and most tokens before a checked position; resolution: as of certificate.resolution."""

    policy: str
    width: int | None
    slots: float | None
    dtype: str | None
    device: str | None
    temperature: float
    top_p: float
    seed: int | None
    contexts: tuple[int, int]
    prompts: int
    positions: int
    accepted: int | None
    resolution: float
    exact: bool

    @property
    def sampling(self) -> str:
        """In words."""
        if self.temperature == 0:
            return "greedy"
        return f"sampled at temperature {self.temperature:g}, top_p {self.top_p:g}, seeds from {self.seed}"

    def __str__(self) -> str:
        """One sentence."""
        where = [f"policy {self.policy}"]
        where += [f"blocks of {self.width}"] if self.width else []
        where += [f"{self.dtype} on {self.device}"] if self.dtype else []
        drafts = "" if self.accepted is None else f", {self.accepted:,} of them accepted drafts"
        seen = "one wrong token in" if self.exact else "an excess over the floor of"
        size = (
            f"{1 / self.resolution:,.0f} would have been met"
            if self.exact
            else f"{self.resolution:.2%} would have shown"
        )
        return (
            f"{', '.join(where)}, {self.sampling}, {self.prompts} prompts, contexts of {self.contexts[0]} to "
            f"{self.contexts[1]} tokens, {self.positions:,} positions{drafts}; {seen} {size}"
        )


@dataclass(frozen=True)
class Certificate:
    """One verdict. evidence: of certificate.evidence_json; text: free-running comparison, None where none was made;
    mean_accepted_length: tokens of a drafted step, None where nothing is drafted or steps are unknown; drafter: what
    the trainer's pass says of the same steps, None where it was not asked."""

    scope: Scope
    verdict: Verdict
    evidence: dict[str, Any]
    text: Text | None
    mean_accepted_length: float | None
    drafter: Agreement | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "scope": asdict(self.scope) | {"sentence": str(self.scope)},
            "certified": self.verdict.certified,
            "reasons": list(self.verdict.reasons),
            "warnings": list(self.verdict.warnings),
            "mean_accepted_length": self.mean_accepted_length,
            "text": None if self.text is None else asdict(self.text),
            "drafter": None if self.drafter is None else asdict(self.drafter),
            "evidence": self.evidence,
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Certificate:
        """What `as_json` wrote."""
        scope = {entry.name: content["scope"][entry.name] for entry in fields(Scope)}
        text = content["text"]
        if text is not None:
            text = Text(**text | {"first_difference": {int(k): v for k, v in text["first_difference"].items()}})
        verdict = Verdict(content["certified"], tuple(content["reasons"]), tuple(content["warnings"]))
        scope["contexts"] = tuple(scope["contexts"])
        drafter = None if content["drafter"] is None else Agreement(**content["drafter"])
        return cls(Scope(**scope), verdict, content["evidence"], text, content["mean_accepted_length"], drafter)


@dataclass(frozen=True)
class CertificateRecord:
    """All certificates of one command. prompts: workloads with source, hash and count, and the most tokens of an
    answer; server: "" for an engine in process, else what was asked about itself."""

    versions: dict[str, str]
    machine: dict[str, Any]
    command: str
    model: str
    exact: bool
    prompts: dict[str, Any]
    certificates: tuple[Certificate, ...]
    server: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def certified(self) -> bool:
        """Whether every certificate is given."""
        return all(one.verdict.certified for one in self.certificates)

    def as_json(self) -> dict[str, Any]:
        """The file's content."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain |= {"certificates": [one.as_json() for one in self.certificates], "notes": list(self.notes)}
        return {"kind": KIND, "schema": SCHEMA, "certified": self.certified} | plain


def read_certificates(path: Path) -> CertificateRecord:
    """A record from its file. InputError in one line for another kind, another schema, or a file that is none."""
    content = read_kind(path, KIND, SCHEMA, "dscale certify")
    try:
        own = {entry.name: content[entry.name] for entry in fields(CertificateRecord)}
        made = tuple(Certificate.of(one) for one in content["certificates"])
        return CertificateRecord(**own | {"certificates": made, "notes": tuple(content["notes"])})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: damaged record of `dscale certify`: {error}") from None


def read_kind(path: Path, kind: str, schema: int, command: str) -> dict[str, Any]:
    """The content of a record of this kind and schema."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read a record of `{command}`: {error}") from None
    require(isinstance(content, dict) and content.get("kind") == kind, f"{path}: no record of `{command}`")
    require(content.get("schema") == schema, f"{path}: schema {content.get('schema')}; this version reads {schema}")
    return content
