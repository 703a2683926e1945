# SPDX-License-Identifier: Apache-2.0
"""Shows a run's JSON: a table for each model and precision, what is lost, and a picture. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..output import Table, digits
from ..section import Compared, Report, Section
from .names import OURS, PEERS


Group = Mapping[str, Any]
Found = Mapping[str, float | None]
AGREEMENT = "tokens as the reference's"
ABOUT = """Each runtime has an environment and a process of its own, the same weights, token ids and number of threads, and they take turns. \
Prefill and new tokens are in tokens per second (more is better), a decode step in milliseconds (less is better). In brackets is the share of the \
machine's limit: what reading weights and cache, or computing, takes at least, over what it took. \
[What each row means](../benchmark/README.md#peers)."""


def place(group: Group) -> str:
    """Return the heading of a group."""
    return f"{group['model']}, {group['precision']}"


def shown(group: Group, report: Report) -> list[str]:
    """Return the peers that have a number in a group, in the order of the command."""
    there = {peer for of_peers in group["figures"].values() for peer in of_peers}
    return [peer for peer in (OURS, *report["options"]["peers"]) if peer in there]


def tables(report: Report) -> Iterator[Table]:
    """A table for each group: medians and shares."""
    for group in report["groups"]:
        peers = shown(group, report)
        table = Table(place(group), ("",), [PEERS[peer].label for peer in peers])
        for row in _rows(group, peers, cell):
            table.add_row(*row)
        yield table


def _rows(group: Group, peers: Sequence[str], written: Callable[[Found], str]) -> Iterator[tuple[str, ...]]:
    for figure, values in group["figures"].items():
        yield figure, *(written(values[peer]) if peer in values else "" for peer in peers)
    if agreement := group["agreement"]:
        yield AGREEMENT, *(f"{agreement[peer]:.0%}" if peer in agreement else "" for peer in peers)


def cell(found: Found) -> str:
    """Return a median, and its share of the limit where there is one."""
    share = found["share"]
    return digits(found["median"]) + ("" if share is None else f" ({share:.0%})")


def compared(report: Report) -> Iterator[Compared]:
    """Every figure of every group that this project has, with those of the other runtimes."""
    for group in report["groups"]:
        for figure, values in group["figures"].items():
            others = {PEERS[peer].label: found["median"] for peer, found in values.items() if not PEERS[peer].is_ours}
            if OURS in values:
                yield Compared(place(group), figure, values[OURS]["median"], others, figure.endswith("tok/s"))


def notes(report: Report) -> Iterator[str]:
    """Why numbers are missing, and what else to know of the run."""
    for group in report["groups"]:
        for peer, reasons in group["reasons"].items():
            yield f"Missing, {place(group)}, {PEERS[peer].label}: {'; '.join(reasons)}."
    for peer, reason in report["missing"].items():
        yield f"Missing, {PEERS[peer].label}: {reason}."
    shares = [
        found["share"] or 0
        for group in report["groups"]
        for row in group["figures"].values()
        for found in row.values()
    ]
    if max(shares) > 1:
        yield "A share above 100% means that the machine gave more during that case than while its limits were measured."
    yield from report["notes"]


def summary_table(report: Report) -> Table:
    """One table of medians: all rows of a run, and all other runtimes; variants of a runtime only where they win a row."""
    won = {name for row in compared(report) for name in row.lost()}
    others = [peer for peer in report["options"]["peers"] if not PEERS[peer].is_ours]
    peers = [OURS, *(peer for peer in others if not PEERS[peer].variant or PEERS[peer].label in won)]
    several = len({group["model"] for group in report["groups"]}) > 1
    table = Table("", ("",), [PEERS[peer].label for peer in peers])
    for group in report["groups"]:
        heading = f"**{place(group) if several else group['precision']}** "
        for name, *cells in _rows(group, peers, lambda found: digits(found["median"])):
            table.add_row(heading + name, *cells)
            heading = ""
    return table


def kinds(rows: Sequence[Compared]) -> list[str]:
    """Return what is lost, each kind of row once."""
    words = {"prefill": "prefill", "decode": "decode", "first": "start", "load,": "load", "export": "export"}
    found = [words.get(row.what.split()[0], "memory" if "memory" in row.what else "throughput") for row in rows]
    return list(dict.fromkeys(found))


SECTION = Section("Other runtimes", ABOUT, tables, compared, notes, "This project and other runtimes")
