"""Sections of `dscale certify` and `dscale reproduce`: is the text the target's, and does the engine repeat itself?"""

from __future__ import annotations

from typing import Any

from dscale.evaluate.report.blocks import Block, Card, Cards, Figure, Listing, Section, Table, Text, number, spanned
from dscale.evaluate.report.figures import Line, draw_lines, panel

Record = dict[str, Any]
SIDE_BY_SIDE = 5  # certificates of a table by offset, so that it fits a printed page


def certificates(key: str, name: str, record: Record) -> list[Section]:
    """Verdicts with their scopes, rates beside their floor, and violations by offset in the block."""
    found = record["certificates"]
    blocks: list[Block] = [Cards(tuple(map(_card, found))), _rates(found)]
    groups = [found[at : at + SIDE_BY_SIDE] for at in range(0, len(found), SIDE_BY_SIDE)]
    blocks += [one for one in (_figure(found), *map(_offsets, groups)) if one is not None]
    blocks.append(Text("A certificate holds for its scope and no more:"))
    blocks.append(Listing(tuple(_scope(one) for one in found)))
    told = [f"{label(one)}: {line}" for one in found for line in (*one["reasons"], *one["warnings"])]
    told += record["notes"]
    if told:
        blocks += [Text("To be known:", strong=not record["certified"]), Listing(tuple(told))]
    mode = "exact" if record["exact"] else "relative to its floor"
    return [Section(f"{key}certificate", f"Losslessness certificate, {mode}", tuple(blocks), name)]


def label(certificate: Record) -> str:
    """Policy, dtype, and how it was sampled."""
    scope = certificate["scope"]
    sampled = "" if scope["temperature"] == 0 else f", temperature {scope['temperature']:g}"
    return f"{scope['policy']}{sampled}"


def _scope(certificate: Record) -> str:
    return f"{certificate['scope']['sentence']}."


def _card(certificate: Record) -> Card:
    scope, evidence = certificate["scope"], certificate["evidence"]
    accepted = evidence["accepted"]
    held = certificate["certified"]
    sizes = (
        f"{accepted['violations']} violations on {accepted['positions']:,} accepted drafts, floor {accepted['floor']}"
    )
    progress = certificate["mean_accepted_length"]
    detail = f"{scope['dtype'] or 'dtype untold'}, {scope['prompts']} prompts, {scope['positions']:,} positions"
    detail += "" if progress is None else f", {progress:.2f} tokens a drafted step"
    return Card(label(certificate), "certified" if held else "refused", sizes, detail, held)


def _rates(found: list[Record]) -> Table:
    rows = []
    for one in found:
        evidence, text = one["evidence"], one["text"]
        cells = [_rate(evidence[part], what) for part in ("accepted", "all") for what in ("violation", "floor")]
        own = evidence["own_violations"]
        beyond = evidence["beyond_margin"]["count"]
        equal = "–" if text is None else f"{text['equal']} of {text['prompts']}"
        verdict = "certified" if one["certified"] else "refused"
        rows.append((label(one), verdict, *cells, "–" if own is None else str(own), str(beyond), equal))
    columns = ("policy", "verdict", "violations, accepted", "floor", "violations, all", "floor", "own", "beyond margin")
    return Table(
        "Violations and floor, rates with standard errors",
        (*columns, "equal texts"),
        tuple(rows),
        "Violation: not what the engine without speculation says after the same prefix. Floor: two of its own replays "
        "disagree. Own: not what the speculative engine says when it verifies the block again.",
    )


def _rate(tally: Record, what: str) -> str:
    return f"{100 * tally[f'{what}_rate']:.3f}% ± {100 * tally[f'{what}_error']:.3f}"


def _figure(found: list[Record]) -> Figure | None:
    """Rates of violations by offset; nothing where there is neither a violation nor a floor."""
    shown = [one for one in found if any(row["violations"] or row["floor"] for row in one["evidence"]["by_offset"])]
    if not shown:
        return None
    lines = []
    for place, one in enumerate(shown):
        rows = [row for row in one["evidence"]["by_offset"] if row["offset"] != "final"]
        at = [row["offset"] for row in rows]
        rates = [[100 * row[what] / row["positions"] for row in rows] for what in ("violations", "floor")]
        lines += [Line(label(one), at, rates[0], 2 * place), Line(f"{label(one)}, floor", at, rates[1], 2 * place + 1)]
    return Figure(
        "Violations by offset in the block",
        "Rate at which accepted drafts of each depth are not the target's token, beside their floor.",
        (panel(draw_lines(lines, zero=True), "Violations and floor", "offset in the block", "% of positions"),),
        tuple((line.label, line.style) for line in lines),
    )


def _offsets(found: list[Record]) -> Table | None:
    """Violations, floor and positions by offset, a column a certificate."""
    known = [{row["offset"]: row for row in one["evidence"]["by_offset"]} for one in found]
    offsets = sorted({at for rows in known for at in rows if at != "final"})
    if not offsets:
        return None
    rows = [
        (str(at), *(_offset(rows.get(at)) for rows in known))
        for at in [*offsets, "final"]
        if any(at in r for r in known)
    ]
    note = (
        "violations / floor / positions. final: tokens that no draft proposed. Marked ✗ where an offset stands out "
        "after Holm's correction."
    )
    columns = ("offset", *map(label, found))
    return Table("Certificate by offset in the block", columns, tuple(rows), note)


def _offset(row: Record | None) -> str:
    if row is None:
        return "–"
    return f"{row['violations']} / {row['floor']} / {row['positions']:,}" + (" ✗" if row["stands_out"] else "")


def reproducibility(key: str, name: str, record: Record) -> list[Section]:
    """How often the same prompts on the same boot end in other texts: hazard of a flip a token, by arm."""
    rows = []
    for arm in record["arms"]:
        low, high = arm["hazard_interval"]
        share = [arm["share"], *arm["share_interval"]]
        cells = (f"{arm['hazard']:.2e} ({low:.1e} … {high:.1e})", f"{arm['diverged']} of {arm['sequences']}")
        sampled = "greedy" if arm["temperature"] == 0 else f"temperature {arm['temperature']:g}"
        rows.append((arm["arm"], sampled, *cells, spanned(share, 1, 100, "%"), number(arm["at_risk"], 0)))
    columns = ("arm", "sampling", "hazard of a flip a token", "texts that diverge", "their share", "positions at risk")
    note = (
        "Hazard: first disagreements over positions at risk, those up to the first disagreement; intervals by Wilson's "
        "score. No gate between two engines may be tighter than this."
    )
    told = f"{record['model']}, {record['dtype'] or 'dtype untold'}."
    table = Table("Same prompts, same boot, twice: 95% intervals", columns, tuple(rows), note)
    blocks: list[Block] = [Text(told), table]
    blocks += [Listing(tuple(record["notes"]))] if record["notes"] else []
    return [Section(f"{key}hazard", "Reproducibility", tuple(blocks), name)]
