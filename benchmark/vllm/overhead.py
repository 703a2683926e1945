# SPDX-License-Identifier: Apache-2.0
"""Measures where the time of vLLM's steps goes: into the graphs, the plugin, or vLLM, and how long the graphs stand idle.

Two engines in this process serve the same artifact, without and with async scheduling (sync, async), in turn. With it, the
graphs run in a thread, and vLLM schedules the next step meanwhile. Three loads, of greedy requests sampled on the device:

decode 1   one request
decode N   as many requests as the artifact has slots
mixed      all but one of them decode, and one long prompt after another is taken in

Every function is timed from outside, by a wrapper around it. Graphs run on one thread.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import check_vllm, describe_machine, version_of, warn_if_busy
from ..options import (
    add_file_options,
    add_model_options,
    artifacts_folder,
    at_least,
    make_parser,
    positive,
)
from ..output import Table, console, publish


if TYPE_CHECKING:
    from .engine import ObservedEngine
    from .steps import Step

EXAMPLES = """
examples:
  python -m benchmark.vllm.overhead --artifacts build/artifacts --json build/benchmark/vllm_overhead.json
  python -m benchmark.vllm.overhead --steps 20 --repeats 1                    # does it run?

plugin is what the plugin takes beside the graphs, scheduler and outputs what vLLM takes. idle is a step's time beyond that
of a graph in sync: how long the graphs stand still between two steps. In async, the graph's time contains waits for
Python's lock. A table and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("vllm.overhead", __doc__, EXAMPLES)
    add_model_options(parser.add_argument_group("what to measure"))
    size = parser.add_argument_group("sizes")
    # One takes in prompts while the others decode.
    add_option(size, "--slots", type=at_least(2), metavar="ROWS", default=8, help="requests at a time")
    add_option(size, "--chunk-size", type=positive, metavar="TOKENS", default=128, help="prompt tokens of a step")
    add_option(size, "--sequence-length", type=positive, metavar="TOKENS", default=2304, help="of a slot")
    add_option(size, "--steps", type=positive, metavar="STEPS", default=40, help="of each load and round")
    add_option(size, "--repeats", type=positive, metavar="ROUNDS", default=10, help="rounds, both engines in turn")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    # Else the engine is another process, and out of sight.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="optimum_neuron", VLLM_NO_USAGE_STATS="1")
    os.environ.update(VLLM_LOGGING_STREAM="ext://sys.stderr", VLLM_LOGGING_LEVEL="WARNING")
    # Two engines compute in two threads, and OpenMP gives each of them workers: more than cores would slow both down.
    os.environ["OMP_NUM_THREADS"] = "1"
    with reported_errors():
        check_vllm()
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            results = run(args, folder)
        print_table(results)
        publish(results, args.json)
    return 0


def run(args: Namespace, folder: Path) -> dict[str, Any]:
    """Exports, opens both engines, and measures them in turn; returns what goes into the JSON."""
    from optimum_neuron import progress

    from ..model import default_model, export, serving_config

    if args.steps > args.sequence_length // 2:
        raise ValueError(
            f"--steps {args.steps} is more than half of --sequence-length {args.sequence_length}: requests would fill their "
            f"slots; lower it, or raise --repeats instead"
        )
    model = args.model or default_model()
    config = serving_config(args.slots, args.sequence_length, args.chunk_size, args.dtype)
    with progress.stage("Exporting"):
        artifact = export(model, config, folder).path
    return {
        "benchmark": "vllm_overhead",
        "model": Path(model).name,
        "options": {name: value for name, value in vars(args).items() if not isinstance(value, Path)},
        "machine": describe_machine() | {"vllm": version_of(Path(sys.executable), "vllm")},
        "loads": measure(args, artifact),
    }


def measure(args: Namespace, artifact: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by load and by "async" and "sync"."""
    from optimum_neuron import progress

    from .engine import ObservedEngine
    from .steps import medians, over_rounds, with_idle

    engines: dict[str, ObservedEngine] = {}
    with progress.stage("Starting engines", 2) as advance:
        for name in ("sync", "async"):
            engines[name] = ObservedEngine(artifact, asynchronous=name == "async")
            advance(name)
    kinds = {"decode 1": "token_generation", f"decode {args.slots}": "token_generation", "mixed": "mixed"}
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {load: [] for load in kinds}
    with progress.stage("Measuring", args.repeats * len(kinds)) as advance:
        for number in range(args.repeats):
            for load, kind in kinds.items():
                # One right after the other: what else the machine does changes less within a pair than between pairs.
                taken = {
                    name: medians(steps_under(engines[name], load, args.steps), kind)
                    for name in (reversed(engines) if number % 2 else engines)
                }
                rounds[load].append(with_idle(taken, "sync"))
                advance(f"round {number + 1}, {load}")
    return {
        load: {name: over_rounds([one[name] for one in of_load]) for name in engines}
        for load, of_load in rounds.items()
    }


def steps_under(engine: ObservedEngine, load: str, steps: int) -> list[Step]:
    """An engine's steps under a load, by its name."""
    return engine.mixed(steps) if load == "mixed" else engine.decode(int(load.removeprefix("decode ")), steps)


def print_table(results: dict[str, Any]) -> None:
    """A row per load and engine."""
    out, machine, options = console(), results["machine"], results["options"]
    out.print(
        f"{results['model']}, {options['dtype']}, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"vLLM {machine['vllm']}, chunks of {options['chunk_size']} tokens"
    )
    times = ("step_ms", "graph_ms", "idle_ms", "idle_share", "plugin_ms", "plugin_share")
    columns = (*times, "scheduler_ms", "outputs_ms")
    headers = [column.replace("_", " ") for column in columns]
    table = Table("Medians over rounds of medians over steps; shares are of a step", ("load", "scheduling"), headers)
    for load, engines in results["loads"].items():
        for name, numbers in engines.items():
            cells = (f"{numbers[each]:.1%}" if each.endswith("share") else f"{numbers[each]:.2f}" for each in columns)
            table.add_row(load, name, *cells)
        table.add_section()
    out.print(table)


if __name__ == "__main__":
    sys.exit(main())
