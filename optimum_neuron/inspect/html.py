# SPDX-License-Identifier: Apache-2.0
"""The page of an artifact: one file that asks for no other. All text in it is escaped, and only its own script may run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .facts import Compared, Facts, Graph, Memory
from .svg import grid, stack
from .units import bytes_text, count_text


_KIND_NAMES = {
    "token_generation": "decode", "chunked_prefill": "prefill", "mixed": "mixed", "scoring": "scoring", "helper": "no step",
}  # fmt: skip
_PARTS = {
    "weights": "weights", "KV cache": "cache", "state of slots": "state", "snapshots": "snapshots", "scratch": "scratch", "reserve": "reserve",
}  # fmt: skip
# Bars of cores that are alike become one where there are more.
_MOST_BARS = 16
_MOST_OPERATORS = 12
_FIRST_COMPARED = 12


def render(facts: Facts) -> str:
    """The page as a text of HTML."""
    css, script = (_part(name) for name in ("page.css", "page.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "bytes": bytes_text,
        "count": count_text,
        "number": _number,
        "percent": lambda share: f"{share:.0%}",
    }
    template = environment.from_string(_part("page.html"))
    return template.render(
        facts=facts,
        css=Markup(css),
        script=Markup(script),
        css_hash=_hash(css),
        script_hash=_hash(script),
        kind_names=_KIND_NAMES,
        part_classes=_PARTS,
        grid=grid(facts.graphs),
        bars=list(_bars(facts.memory)),
        parts=[part for part in _PARTS if any(part in each.parts for each in facts.memory)],
        largest=max((each.total for each in facts.memory), default=0),
        costs=any(each.cost for each in facts.graphs),
        timed=any("seconds at least" in each.cost for each in facts.graphs),
        counted=[(each, _operators(each), sum(each.operators.values())) for each in facts.graphs if each.operators],
        compared=_comparisons(facts),
        first_compared=_FIRST_COMPARED,
        errors=sum(each["severity"] == "error" for each in facts.lint.findings),
        speed_groups=list(_speeds(facts.speeds)),
        options=[(name, _option(value)) for name, value in facts.options.items() if value not in (None, False, [])],
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Of what stands between tags, as a policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _number(value: float) -> str:
    """With four digits where there are more, and no exponent where it is of a size that people read."""
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def _option(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _bars(memory: Sequence[Memory]) -> Iterator[dict[str, Any]]:
    """A bar for each core, or one for all of those that are alike where there are many."""
    full = max((each.capacity or each.total for each in memory), default=0)
    alike: dict[tuple[tuple[str, int], ...], list[Memory]] = {}
    for each in memory:
        key = tuple(each.parts.items())
        alike.setdefault(key if len(memory) > _MOST_BARS else (*key, (each.place, 0)), []).append(each)
    for members in alike.values():
        first = members[0]
        place = first.place if len(members) == 1 else f"{len(members)} cores alike, from {first.place}"
        yield {"place": place, "memory": first, "segments": stack(first.parts, full)}


def _operators(graph: Graph) -> list[tuple[str, int, float]]:
    """The most frequent ones by name, with their count and its percentage of the largest; then all others together."""
    ordered = sorted(graph.operators.items(), key=lambda item: -item[1])
    shown, rest = ordered[:_MOST_OPERATORS], ordered[_MOST_OPERATORS:]
    if rest:
        shown.append((f"{len(rest)} others", sum(count for _, count in rest)))
    largest = max((count for _, count in shown), default=1)
    return [(name, count, 100 * count / largest) for name, count in shown]


def _comparisons(facts: Facts) -> list[tuple[Compared, float]]:
    """With the percentage of its bound that each difference is; the nearest to it first."""
    found = facts.certificate.comparisons if facts.certificate else ()
    shares = [(each, 100 * each.difference / each.bound if each.bound else 0.0) for each in found]
    return sorted(shares, key=lambda item: -item[1])


def _speeds(speeds: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[tuple[dict[str, Any], float]]]]:
    """By unit, each with its percentage of the largest."""
    by_unit: dict[str, list[dict[str, Any]]] = {}
    for each in speeds:
        by_unit.setdefault(each["unit"], []).append(each)
    for unit, members in by_unit.items():
        largest = max(each["value"] for each in members) or 1
        yield unit, [(each, 100 * each["value"] / largest) for each in members]
