# SPDX-License-Identifier: Apache-2.0
"""The page of an artifact: one file that asks for no other and runs no script. All text in it is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ...hub.facts import ArtifactFacts, Certified, GraphFacts, MemoryParts, bytes_text, count_text


_KINDS = {
    "token_generation": "decode", "chunked_prefill": "prefill", "mixed": "mixed", "scoring": "scoring", "helper": "no step",
}  # fmt: skip
_PARTS = ("weights", "KV cache", "state of slots", "snapshots", "scratch", "reserve")
# Cores that are alike become one row where there are more.
_MOST_CORES = 16
_MOST_OPERATORS = _MOST_COMPARED = 12
_NONE = "-"


class Table(NamedTuple):
    """Rows under headings. Columns after the first `words` hold numbers; a table without headings holds pairs."""

    headers: Sequence[str]
    rows: Iterable[Sequence[object]]
    words: int = 1


def render_page(facts: ArtifactFacts) -> str:
    """Return the page as a text of HTML."""
    css = _read_part("page.css")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": bytes_text, "number": _number_text}
    comparisons = facts.certificate.comparisons if facts.certificate else ()
    options = [(name, value) for name, value in facts.options.items() if value not in (None, False, [])]
    versions = [(f"exported with {name}", version) for name, version in facts.exported_with.items()]
    versions += [(f"compiled with {name}", version) for name, version in facts.compiled_with.items()]
    page: str = environment.from_string(_read_part("page.html")).render(
        facts=facts,
        css=Markup(css),
        css_hash="sha256-" + base64.b64encode(hashlib.sha256(css.encode()).digest()).decode(),
        costs=any(each.cost for each in facts.graphs),
        steps=_steps_table(facts.graphs),
        graphs=_graphs_table(facts.graphs),
        memory=_memory_table(facts.memory),
        operators=[(each.name, sum(each.operators.values()), _operators_table(each)) for each in facts.graphs if each.operators],
        compared=_compared_table(facts.certificate),
        hidden=max(0, len(comparisons) - _MOST_COMPARED),
        errors=sum(each["severity"] == "error" for each in facts.lint.findings),
        findings=Table(
            ("graph", "problem", "remedy"),
            [(each["graph"], f"{each['severity']}: {each['problem']}", each["remedy"]) for each in facts.lint.findings],
            3,
        ),
        speeds=_speeds_table(facts.speeds),
        options=Table((), [(name, ", ".join(map(str, value)) if isinstance(value, list) else value) for name, value in options]),
        versions=Table((), versions),
        weight_types=Table((), [(name, bytes_text(size)) for name, size in facts.weight_types.items()]),
        quantized=_quantized_table(facts),
    )  # fmt: skip
    return page


def _read_part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _number_text(value: float) -> str:
    """Return a number with four digits where it has more, and without an exponent where people read its size."""
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def _draw_chip(kind: str, text: str) -> Markup:
    return Markup('<span class="chip {}">{}</span>').format(kind, text)


def _draw_bar(parts: Mapping[str, float], full: float) -> Markup:
    """Return a bar of parts, of which `full` would fill it; each has the color of its place in `_PARTS`."""
    drawn, start = Markup(), 0.0
    for name, value in parts.items():
        width = 100 * value / full if full else 0.0
        place = _PARTS.index(name) if name in _PARTS else 0
        drawn += Markup('<rect class="part{}" x="{:.3f}" width="{:.3f}" height="10"/>').format(place, start, width)
        start += width
    return Markup('<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(drawn)  # fmt: skip


def _steps_table(graphs: Sequence[GraphFacts]) -> Table:
    steps = [each for each in graphs if each.kind != "helper"]
    contexts = sorted({each.context for each in steps})

    def draw_cell(size: int, context: int) -> Markup:
        there = [each for each in steps if (each.chunk_size, each.context) == (size, context)]
        return Markup("").join(_draw_chip(each.kind, f"{_KINDS[each.kind]}, {each.tokens:,} tokens") for each in there)

    rows = [
        (f"chunk {size:,}" if size else "no chunk", *(draw_cell(size, context) for context in contexts))
        for size in sorted({each.chunk_size for each in steps})
    ]
    return Table(("", *(f"context {context:,}" for context in contexts)), rows, len(contexts) + 1)


def _graphs_table(graphs: Sequence[GraphFacts]) -> Table:
    headers = ["graph", "kind", "rows x tokens", "context", "padding at most", "size"]
    costs: dict[str, Any] = {}
    if any(each.cost for each in graphs):
        costs = {"read": bytes_text, "written": bytes_text, "flops": count_text}
        headers += ["read", "written", "operations"]
    if any("seconds at least" in each.cost for each in graphs):
        costs["seconds at least"] = lambda seconds: _number_text(seconds * 1e3)
        headers.append("ms at least")
    rows = [
        (
            Markup("<code>{}</code>").format(each.name),
            _draw_chip(each.kind, _KINDS[each.kind]),
            each.shape or _NONE,
            f"{each.context:,}" if each.context else _NONE,
            _NONE if each.padding is None else f"{each.padding:.0%}",
            bytes_text(each.bytes) if each.bytes else _NONE,
            *(text(each.cost[name]) if name in each.cost else _NONE for name, text in costs.items()),
        )
        for each in graphs
    ]
    return Table(headers, rows, 3)


def _memory_table(memory: Sequence[MemoryParts]) -> Table:
    """Return a row for each core, or one for all that are alike where there are many."""
    full = max((each.capacity or each.total for each in memory), default=0)
    parts = [part for part in _PARTS if any(part in each.parts for each in memory)]
    alike: dict[object, list[MemoryParts]] = {}
    for each in memory:
        key = tuple(each.parts.items())
        alike.setdefault(key if len(memory) > _MOST_CORES else (key, each.place), []).append(each)
    rows = [
        (
            first.place if not others else f"{len(others) + 1} cores alike, from {first.place}",
            _draw_bar(first.parts, full),
            *(bytes_text(first.parts[part]) if part in first.parts else _NONE for part in parts),
            bytes_text(first.total),
        )
        for first, *others in alike.values()
    ]
    dots = [
        Markup('<svg class="dot" viewBox="0 0 10 10" aria-hidden="true"><rect class="part{}" width="10" height="10"/></svg>{}').format(_PARTS.index(part), part)
        for part in parts
    ]  # fmt: skip
    return Table(("", "", *dots, "total"), rows, 2)


def _operators_table(graph: GraphFacts) -> Table:
    """Return the most frequent ones, and all others together."""
    ordered = sorted(graph.operators.items(), key=lambda item: -item[1])
    shown, rest = ordered[:_MOST_OPERATORS], ordered[_MOST_OPERATORS:]
    if rest:
        shown.append((f"{len(rest)} others", sum(count for _, count in rest)))
    largest = max((count for _, count in shown), default=1)
    return Table(("operator", "", "count"), [(name, _draw_bar({name: count}, largest), _number_text(count)) for name, count in shown], 2)  # fmt: skip


def _compared_table(certificate: Certified | None) -> Table:
    """Return the comparisons that are nearest to their bounds."""
    found = sorted(
        certificate.comparisons if certificate else (), key=lambda each: -each.difference / (each.bound or 1)
    )
    rows = [
        (
            f"{each.subject}, {each.place}",
            each.dtype,
            _draw_bar({"of its bound": each.difference}, each.bound),
            _number_text(each.difference),
            _number_text(each.bound),
            _number_text(each.count),
        )
        for each in found[:_MOST_COMPARED]
    ]
    return Table(("compared", "in", "of its bound", "largest difference", "bound", "numbers"), rows, 3)


def _speeds_table(speeds: Sequence[dict[str, Any]]) -> Table:
    largest: dict[str, float] = {}
    for each in speeds:
        largest[each["unit"]] = max(largest.get(each["unit"], 0), each["value"])
    rows = [
        (
            each["name"],
            ", ".join(f"{name} {value}" for name, value in each.get("conditions", {}).items()),
            _draw_bar({"": each["value"]}, largest[each["unit"]]),
            f"{_number_text(each['value'])} {each['unit']}",
        )
        for each in speeds
    ]
    return Table(("measured", "with", "", "value"), rows, 3)


def _quantized_table(facts: ArtifactFacts) -> Table:
    rows = [
        (
            each.kind,
            each.scale,
            "yes" if each.has_shift else "no",
            each.activations or facts.options["dtype"],
            Markup("<code>{}</code>").format(each.example),
            f"{each.weights:,}",
            f"{each.groups:,}",
        )
        for each in facts.quantized
    ]
    return Table(("codes", "scales in", "zero points", "activations", "such as", "weights", "scales of an output"), rows, 5)  # fmt: skip
