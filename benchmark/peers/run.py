# SPDX-License-Identifier: Apache-2.0
"""A run from options to a report: what has to be there, then model by model and precision by precision."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimum_neuron import progress

from ..limits import measure_limits, measure_read
from ..machine import describe_machine
from .gguf_file import write_gguf
from .measure import Runner
from .models import WEIGHT_BITS, Shape, checkpoint_folder
from .names import OURS, PEERS
from .prepare import Workshop, available_memory, live_together
from .results import Group
from .schedule import Prompts, cases, longest_row, turns
from .workers.protocol import Sizes


Checks = tuple[Sequence[list[int]], list[list[int]]]


def run(args: Namespace) -> dict[str, Any]:
    """Prepares everything once, then measures each group; returns the JSON object."""
    sizes = Sizes(tuple(args.batches), longest_row(args.prompts, args.batches))
    with progress.stage("Making environments"):
        workshop = Workshop.open(args.folder, [OURS, *args.peers], args.threads, sizes, bool(args.instruction_set))
    limits = measure_limits()
    groups: list[Group] = []
    for model in args.models:
        with progress.stage(f"Preparing {model}"):
            checkpoint = checkpoint_folder(model, workshop.folder / "models")
            if "llamacpp" in workshop.pythons:
                write_gguf(checkpoint)
            checks = workshop.checks(checkpoint)
        for precision in args.precisions:
            group = Group(model, precision, cases(args.prompts, args.batches, args.requests))
            measure(group, workshop, checkpoint, checks, args)
            limits = limits.best(measure_limits())
            groups.append(group)
    for group in groups:
        group.set_limits(limits, Shape.of(checkpoint_folder(group.model, workshop.folder / "models")))
    options = {name: value for name, value in vars(args).items() if name not in ("json", "folder")}
    return {
        "benchmark": "peers",
        "machine": describe_machine(),
        "options": options,
        "missing": workshop.missing,
        "notes": notes(workshop, args.instruction_set),
        "limits": asdict(limits),
        "groups": [group.to_dict() for group in groups],
    }


def measure(group: Group, workshop: Workshop, checkpoint: Path, checks: Checks, args: Namespace) -> None:
    """Fills a group."""
    with progress.stage(f"Converting {group.model} to {group.precision}"):
        places = workshop.places(group, checkpoint)
    if not places:
        return
    shape = Shape.of(checkpoint)
    together = live_together(shape.weights, len(places), WEIGHT_BITS[group.precision], available_memory())
    order = list(turns(list(places), group.cases, args.rounds, together))
    with progress.stage(f"Measuring {group.model}, {group.precision}", len(order)) as advance:
        runner = Runner(
            group,
            lambda peer: places[peer].start(workshop.threads),
            {name: workshop.load_arguments(place, group.precision) for name, place in places.items()},
            Prompts(shape.vocab_size, args.seed),
            checks,
            advance,
            measure_read,
        )
        runner.run(order)


def notes(workshop: Workshop, instruction_set: str | None) -> list[str]:
    """What is to be known of an instruction set that was asked for."""
    if instruction_set is None:
        return []
    beyond = {name: PEERS[name].beyond_avx2 for name in workshop.pythons}
    return [f"{name} is not held to {instruction_set}: {reason}" for name, reason in beyond.items() if reason]
