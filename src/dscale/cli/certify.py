"""`dscale certify`: does speculation change what the target would have said?

dscale certify smollm2-135m --policy dvl --policy auto --prompts gsm8k.jsonl --limit 16 --out certificate.json
dscale certify smollm2-135m --base-url http://localhost:8000 --reference-url http://localhost:8001 --out server.json
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dscale.cli import checked
from dscale.cli import options as o
from dscale.config import require

if TYPE_CHECKING:
    from dscale.evaluate.certificate_record import Certificate, CertificateRecord


def certify(
    model: o.CheckedModel,
    policy: Annotated[list[str] | None, typer.Option(help="Policy to certify, default auto; repeatable.")] = None,
    prompts: o.PromptSets = None,
    limit: o.Limit = 16,
    max_tokens: o.MaxTokens = 96,
    longest: o.Longest = 1024,
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--floor", help="Demand equality, or no more than the floor; exact in float32 on a CPU."),
    ] = None,
    seeded: Annotated[bool, typer.Option("--seeded", help="Certify seeded sampling too, beside greedy.")] = False,
    temperature: Annotated[float, typer.Option(help="Of seeded sampling.")] = 0.8,
    seed: o.SeedOfPrompts = 0,
    drafter: o.Drafter = "auto",
    predictor: o.Predictor = "auto",
    width: o.Width = None,
    slots: o.Slots = 8.0,
    layout: o.Layout = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    draft_weights: o.DraftWeights = "auto",
    max_requests: o.Requests = 16,
    base_url: Annotated[str | None, typer.Option(help="Certify this OpenAI-compatible server instead.")] = None,
    reference_url: Annotated[str | None, typer.Option(help="Its reference, without speculation.")] = None,
    served_model: o.ServedModel = None,
    out: o.RecordFile = None,
    as_json: o.AsJson = False,
) -> None:
    """Certify that speculation changes no text: exit code 0 certified, 1 not.

    Example: dscale certify smollm2-135m --policy dvl --prompts gsm8k.jsonl --limit 16 --dtype float32 --out cert.json
    """
    require(max_requests > 0 and limit >= 0, "--max-requests and --limit: must be positive (--limit 0 takes all)")
    require(not seeded or temperature > 0, f"--temperature: {temperature} must be positive with --seeded")
    if base_url is not None or reference_url is not None:
        require(None not in (base_url, reference_url), "certify: --base-url and --reference-url go together")
        require(not seeded and not exact, "certify: servers are certified greedily and against their floor")
        assert base_url is not None
        assert reference_url is not None
        name = policy[0] if policy else "the server's own"
        record = of_servers(
            model, name, base_url, reference_url, served_model, prompts, limit, max_tokens, longest, max_requests
        )
    else:
        options = {"predictor": predictor, "width": width, "slots": slots, "layout": layout, "drafter": drafter}
        temperatures = [0.0, temperature] if seeded else [0.0]
        record = of_engine(
            model, tuple(policy or ("auto",)), prompts, limit, max_tokens, longest, exact, temperatures, seed,
            max_requests, options | {"dtype": dtype, "device": device, "draft_weights": draft_weights},
        )  # fmt: skip
    finish(record, out, as_json)


def of_engine(
    model: str,
    policies: tuple[str, ...],
    prompts: list[str] | None,
    limit: int,
    max_tokens: int,
    longest: int,
    exact: bool | None,
    temperatures: list[float],
    seed: int,
    requests: int,
    options: dict[str, Any],
) -> CertificateRecord:
    """Certificates of an engine in this process, by policy and temperature."""
    from dscale.config import SpeculationConfig, resolve_dtype
    from dscale.engine.placement import default_dtype, resolve_device
    from dscale.evaluate.certificate_record import CertificateRecord
    from dscale.evaluate.certification import Certifier
    from dscale.evaluate.continuations import sampling_of
    from dscale.models.loader import load_target

    for one in policies:
        SpeculationConfig(one)
    device = resolve_device(options["device"])
    dtype = default_dtype(device) if options["dtype"] == "auto" else resolve_dtype(options["dtype"])
    with o.spinner(f"loading {model}"):
        loaded = load_target(model, dtype, device)
    asked = checked.ask(prompts or [], limit, max_tokens, longest, loaded.tokenizer)
    llm = checked.engine(loaded, policies, asked, max_tokens, requests, **options)
    plain = checked.engine(
        loaded, ("off",), asked, max_tokens, requests, drafter=None, dtype=options["dtype"], device=options["device"]
    )
    strict = str(dtype) == "torch.float32" and device == "cpu" if exact is None else exact
    certifier, made = Certifier(llm, plain, asked.ids, strict), []
    with o.reporting() as report:
        for index, (one, degree) in enumerate([(one, degree) for one in policies for degree in temperatures]):
            report("certifying", index, len(policies) * len(temperatures))
            made.append(certifier.certificate(one, sampling_of(degree, max_tokens, seed)))
    return CertificateRecord(
        **checked.head(), model=Path(model).name, exact=strict, prompts=asked.about, certificates=tuple(made)
    )


def of_servers(
    model: str,
    name: str,
    base_url: str,
    reference_url: str,
    served_model: str | None,
    prompts: list[str] | None,
    limit: int,
    max_tokens: int,
    longest: int,
    requests: int,
) -> CertificateRecord:
    """The certificate of a server against another one."""
    from dscale.evaluate.certificate_record import CertificateRecord
    from dscale.evaluate.remote import Endpoint
    from dscale.evaluate.remote_certification import certify_server
    from dscale.models.loader import open_target

    tokenizer = open_target(model).tokenizer()
    asked = checked.ask(prompts or [], limit, max_tokens, longest, tokenizer)
    server, reference = (Endpoint.open(url, served_model, requests) for url in (base_url, reference_url))
    with o.spinner("scoring"):
        made, note = certify_server(
            server, reference, asked.ids, max_tokens, partial(tokenizer.encode, add_special=False), name
        )
    return CertificateRecord(
        **checked.head(), model=server.model, exact=False, prompts=asked.about, certificates=(made,),
        server=f"{base_url} against {reference_url}", notes=(note,),
    )  # fmt: skip


def finish(record: CertificateRecord, out: Path | None, as_json: bool) -> None:
    """Write and print; exit code 1 unless all is certified."""
    from dscale.evaluate.record_file import write_record

    if out is not None:
        write_record(out, record.as_json(), exact=True)
    if as_json:
        print(json.dumps(record.as_json()))
    else:
        for one in record.certificates:
            print_certificate(one)
        for note in record.notes:
            print(note)
    if not record.certified:
        raise typer.Exit(1)


def print_certificate(one: Certificate) -> None:
    """Verdict, scope, figures and what must be known besides."""
    accepted, every = one.evidence["accepted"], one.evidence["all"]
    print(f"{'CERTIFIED' if one.verdict.certified else 'NOT CERTIFIED'}: {one.scope}")
    print(
        f"  violations {accepted['violations']} of {accepted['positions']} accepted drafts (floor {accepted['floor']})"
        f", {every['violations']} of {every['positions']} positions (floor {every['floor']})"
    )
    progress = one.mean_accepted_length
    texts = "" if one.text is None else f"  texts equal {one.text.equal} of {one.text.prompts}"
    print(texts + ("" if progress is None else f"; {progress:.2f} tokens a drafted step"))
    for line in one.verdict.reasons:
        print(f"  because {line}")
    for line in one.verdict.warnings:
        print(f"  note: {line}")
