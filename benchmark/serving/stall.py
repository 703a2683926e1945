# SPDX-License-Identifier: Apache-2.0
"""Measures serving: how long decoding pauses when a long prompt comes, under each policy and in transformers.

Two scenarios, each served by every system in turn, on the same random prompts, in one process:

stall    some requests decode and one long prompt comes: the pauses between their tokens (inter-token latency, ITL) until
         the newcomer's first token, its time to that token (TTFT), and all new tokens per second of the whole run
users    users who each send a new request when their last one is finished: the same numbers over all requests

The policies run on one artifact. mixed decodes and takes in prompts in the same step; alternate does so in turn;
prefill_first takes in all prompts before it decodes; all_chunks takes in a whole prompt between two decode steps.
"""

from __future__ import annotations

import gc
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import OtherProcesses, describe_machine, warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, positive, recorded
from ..output import Table, digits
from ..section import Compared, Report, Section


if TYPE_CHECKING:
    from optimum_neuron.engine.policy import Policy

    from .servers import Server
    from .workloads import Trace, Workload

POLICIES: tuple[Policy, ...] = ("mixed", "alternate", "prefill_first", "all_chunks")
SCENARIOS = ("stall", "users")
SLOTS, CHUNK_SIZE, SHORT_PROMPT = 4, 24, 512
EXAMPLES = """
examples:
  python -m benchmark.serving.stall --artifacts build/artifacts --json build/benchmark/stall.json
  python -m benchmark.serving.stall --scenarios stall --long-prompt 256 --repeats 1 --no-peer      # does it run?
"""


def parse_arguments() -> Namespace:
    """Return the options; needs no torch, so that --help is quick."""
    parser = make_parser("serving.stall", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    add_option(what, "--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="which of them")
    add_option(what, "--no-peer", action="store_true", help="leave out transformers' continuous batching")
    add_option(what, "--long-prompt", type=positive, metavar="TOKENS", default=2048, help="of the newcomer")
    add_option(what, "--repeats", type=positive, metavar="ROUNDS", default=5, help="rounds, all systems in turn")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; return the exit code."""
    args = parse_arguments()
    with reported_errors():
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            report = run(args, folder)
        SECTION.finish(report, args.json)
    return 0


def run(args: Namespace, folder: Path) -> dict[str, Any]:
    """Export, then let all systems serve each workload in turn; return the report."""
    from ..model import default_model
    from .workloads import Stall, Users

    checkpoint = args.model or default_model()
    stall = Stall(SLOTS - 1, SHORT_PROMPT, args.long_prompt, warm_tokens=16, after_tokens=96, long_new_tokens=16)
    users = Users(2 * SLOTS, 8 * SLOTS, args.long_prompt // 6, args.long_prompt // 32)
    longest = max(args.long_prompt, SHORT_PROMPT) + stall.warm_tokens + stall.after_tokens
    servers = open_servers(checkpoint, args, folder, longest)
    report: dict[str, Any] = {
        "benchmark": "stall",
        "model": Path(checkpoint).name,
        "options": {**recorded(args), "slots": SLOTS, "chunk_size": CHUNK_SIZE},
        "machine": describe_machine(),
        **{name: {} for name in ("numbers", "padding", "workloads", "other_cores")},
        "steps": [],
    }
    for scenario, workload in (("stall", stall), ("users", users)):
        if scenario in args.scenarios:
            measure(report, scenario, workload, servers)
    return report


def open_servers(checkpoint: str, args: Namespace, folder: Path, longest: int) -> list[Server]:
    """Return the engine under each policy over one artifact, and the peer."""
    from optimum_neuron import progress
    from optimum_neuron.engine.policy import SchedulerOptions
    from optimum_neuron.generate.model import NeuronModelForCausalLM

    from ..model import export, load_transformers, serving_config
    from .servers import OurServer, TransformersServer

    with progress.stage("Exporting"):
        path = export(checkpoint, serving_config(SLOTS, longest, CHUNK_SIZE, args.dtype), folder).path
    model = NeuronModelForCausalLM.from_pretrained(path)
    servers: list[Server] = [OurServer(policy, model, SchedulerOptions(policy=policy)) for policy in POLICIES]
    if not args.no_peer:
        loaded = load_transformers(checkpoint, args.dtype)
        # Its step holds as many tokens as a mixed one.
        servers.append(TransformersServer("transformers", loaded, SLOTS + CHUNK_SIZE, SLOTS, SLOTS * longest))
    return servers


def measure(report: dict[str, Any], scenario: str, workload: Workload, servers: Sequence[Server]) -> None:
    """Let each server run the workload once and then, round after round, all in turn; add the results to the report."""
    from optimum_neuron import progress

    from ..systems import PromptSource
    from .servers import OurServer

    rounds: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    repeats = report["options"]["repeats"]
    traces: dict[str, Trace] = {}
    # As servers do: or else the collector looks through all that was loaded, in the middle of a step.
    gc.collect()
    gc.freeze()
    others = OtherProcesses()
    with progress.stage(f"Measuring {scenario}", len(servers) * (repeats + 1)) as advance:
        for number in range(repeats + 1):
            # Each round begins with another system: what runs after a slow one finds colder caches.
            for server in [*servers[number % len(servers) :], *servers[: number % len(servers)]]:
                trace = server.serve(workload.jobs(PromptSource(servers[0].vocab_size, number)))
                rounds[server.name] += [workload.results(trace)] if number else []
                traces[server.name] = trace
                advance(server.name)
    gc.unfreeze()
    report["other_cores"][scenario] = others.cores()
    report["workloads"][scenario] = asdict(workload)
    report["numbers"][scenario] = {
        name: {number: statistics.median(each[number] for each in found) for number in found[0]}
        for name, found in rounds.items()
    }
    ours = [server for server in servers if isinstance(server, OurServer)]
    report["padding"][scenario] = {server.name: padding(traces[server.name].counters) for server in ours}
    report["steps"] += [step for server in ours for step in step_times(traces[server.name])]


def step_times(trace: Trace) -> list[dict[str, Any]]:
    """Return the median time of each kind of step."""
    times: dict[str, list[float]] = {}
    for kind, seconds in trace.steps:
        times.setdefault(kind, []).append(1e3 * seconds)
    return [{"kind": kind, "ms": statistics.median(of_kind)} for kind, of_kind in times.items()]


def padding(counters: dict[str, Any]) -> dict[str, Any]:
    """Return the share of chunk tokens that were padding, and the calls of each graph."""
    real, padded = counters["prompt_tokens"], counters["padded_prompt_tokens"]
    share = padded / (real + padded) if real + padded else 0.0
    return {"padded_share": share, "graph_calls": counters["graph_calls"]}


def tables(report: Report) -> Iterator[Table]:
    """A table for each scenario."""
    for scenario, systems in report["numbers"].items():
        load = report["workloads"][scenario].items()
        sizes = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in load)
        names = list(systems[POLICIES[0]])
        table = Table(f"{scenario} ({sizes})", ("system",), (*map(_title, names), "padding"))
        for system, numbers in systems.items():
            padding = report["padding"][scenario].get(system)
            share = f"{padding['padded_share']:.0%}" if padding else ""
            table.add_row(system, *(digits(numbers[name]) for name in names), share)
        yield table


def _title(name: str) -> str:
    words = name.replace("_ms", " ms").replace("tok_s", "tok/s").replace("_", " ")
    return words.replace("ttft", "TTFT").replace("itl", "ITL")


def compared(report: Report) -> Iterator[Compared]:
    """The policy mixed, compared with the others and the peer."""
    for scenario, systems in report["numbers"].items():
        for number, value in systems[POLICIES[0]].items():
            others = {name: numbers[number] for name, numbers in systems.items() if name != POLICIES[0]}
            yield Compared(scenario, _title(number), value, others, number.endswith("tok_s"))


SECTION = Section(
    "Long prompts among decodes",
    "The engine under each policy, and transformers' continuous batching, on the same prompts. `mixed` is the default. ITL is the pause between "
    "two tokens of a request, TTFT the time to the first token. [What each scenario is](../benchmark/README.md#serving).",
    tables,
    compared,
    picture="A long prompt among decodes: the longest pause, and its price",
)


if __name__ == "__main__":
    sys.exit(main())
