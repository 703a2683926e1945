# SPDX-License-Identifier: Apache-2.0
"""The page of an artifact: one file that asks for no other and runs no script. All text in it is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ...hub.facts import ArtifactFacts, GraphFacts, MemoryParts, bytes_text, count_text
from .collect import HELPER, PARTS, pairs_text


_KINDS = {
    "token_generation": "decode", "chunked_prefill": "prefill", "mixed": "mixed", "scoring": "scoring", "helper": "no step",
}  # fmt: skip
_MOST_OPERATORS = _MOST_COMPARED = 12


def render_page(facts: ArtifactFacts) -> str:
    """Return the page as a text of HTML."""
    css = _read_part("page.css")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": bytes_text, "count": count_text, "number": _number_text, "pairs": pairs_text}
    environment.filters["context"] = "context {:,}".format
    steps = [each for each in facts.graphs if each.kind != HELPER]
    comparisons = facts.certificate.comparisons if facts.certificate else ()
    versions = [(f"exported with {name}", version) for name, version in facts.exported_with.items()]
    versions += [(f"compiled with {name}", version) for name, version in facts.compiled_with.items()]
    options = [(name, value) for name, value in facts.options.items() if value not in (None, False, [])]
    page: str = environment.from_string(_read_part("page.html")).render(
        facts=facts,
        css=Markup(css),
        css_hash="sha256-" + base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        bar=_draw_bar,
        kinds=_KINDS,
        costs=any(each.cost for each in facts.graphs),
        times=any("seconds at least" in each.cost for each in facts.graphs),
        steps=steps,
        contexts=sorted({each.context for each in steps}),
        chunk_sizes=sorted({each.chunk_size for each in steps}),
        memory=_memory_table(facts.memory),
        operators=[
            (each.name, sum(each.operators.values()), _operator_rows(each)) for each in facts.graphs if each.operators
        ],
        # Those that are nearest to their bounds.
        compared=sorted(comparisons, key=lambda each: -each.difference / (each.bound or 1))[:_MOST_COMPARED],
        hidden=max(0, len(comparisons) - _MOST_COMPARED),
        errors=sum(each["severity"] == "error" for each in facts.lint.findings),
        options=[(name, ", ".join(map(str, value)) if isinstance(value, list) else value) for name, value in options],
        versions=versions,
    )
    return page


def _read_part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _number_text(value: float) -> str:
    """Return a number with four digits where it has more, and without an exponent where people read its size."""
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def _draw_bar(parts: Mapping[str, float], full: float) -> Markup:
    """Return a bar of parts, of which `full` would fill it; each has the color of its place in `PARTS`."""
    drawn, start = Markup(), 0.0
    for name, value in parts.items():
        width = 100 * value / full if full else 0.0
        place = PARTS.index(name) if name in PARTS else 0
        drawn += Markup('<rect class="part{}" x="{:.3f}" width="{:.3f}" height="10"/>').format(place, start, width)
        start += width
    return Markup('<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(drawn)  # fmt: skip


def _memory_table(memory: Sequence[MemoryParts]) -> dict[str, Sequence[Any]]:
    """Return headers, and a row for each core, or one for all that are alike."""
    full = max((each.capacity or each.total for each in memory), default=0)
    parts = [part for part in PARTS if any(part in each.parts for each in memory)]
    alike: dict[object, list[MemoryParts]] = {}
    for each in memory:
        alike.setdefault(tuple(each.parts.items()), []).append(each)
    rows = [
        (
            first.place if not others else f"{len(others) + 1} cores alike, from {first.place}",
            _draw_bar(first.parts, full),
            *(bytes_text(first.parts[part]) if part in first.parts else "-" for part in parts),
            bytes_text(first.total),
        )
        for first, *others in alike.values()
    ]
    dot = (
        '<svg class="dot" viewBox="0 0 10 10" aria-hidden="true"><rect class="part{}" width="10" height="10"/></svg>{}'
    )
    dots = [Markup(dot).format(PARTS.index(part), part) for part in parts]
    return {"headers": ("", "", *dots, "total"), "rows": rows}


def _operator_rows(graph: GraphFacts) -> list[tuple[str, Markup, str]]:
    """Return the most frequent ones, and all others together."""
    ordered = sorted(graph.operators.items(), key=lambda item: -item[1])
    shown, rest = ordered[:_MOST_OPERATORS], ordered[_MOST_OPERATORS:]
    if rest:
        shown.append((f"{len(rest)} others", sum(count for _, count in rest)))
    largest = max((count for _, count in shown), default=1)
    return [(name, _draw_bar({name: count}, largest), _number_text(count)) for name, count in shown]
