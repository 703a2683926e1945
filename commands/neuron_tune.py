# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron tune: the sizes to export for a trace of requests."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import add_file, add_model_options, add_number, hub_options

from optimum_neuron.cli import add_option, console, explain, reported_errors, write_json
from optimum_neuron.config import DTYPES, NEURON_TARGETS


MISSED = 3  # the exit code
DEFAULT_REQUESTS = 1000

DESCRIPTION = f"""\
Find the sizes to export for a trace of requests: rows, chunk, context buckets, mixed steps. Every candidate serves the whole trace on a
simulated clock, by the engine's scheduler. It prints the times of users, and the commands that export and serve the best candidate.

A trace is a file with a line for each request: JSON lines or CSV with arrival (seconds), prompt_tokens, new_tokens and, where prompts
start alike, prefix (any name) and prefix_tokens. Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens) and
Mooncake's (timestamp, input_length, output_length, hash_ids) are taken as they are.

Limits are percentiles over all requests; itl is a percentile over all pauses. ttft=2s means ttft.p99=2s. Candidates that meet all limits
come first, ordered by throughput, then by room below the limits, then by minutes of compiling. Exit code {MISSED}: no candidate meets
them, and the nearest one is printed.

For this CPU, graphs are exported with the model's weights, and each is measured. For a device, step times are predictions of
optimum-cli neuron estimate. Candidates that exceed a core's memory or --compile-budget are left out."""

EXAMPLES = """\
examples:
  optimum-cli neuron tune --model HuggingFaceTB/SmolLM2-135M-Instruct --trace trace.csv --slo ttft=2s,itl=50ms
  optimum-cli neuron tune --model meta-llama/Llama-3.1-8B --target trn2 --tensor-parallel-size 8 \\
    --trace AzureLLMInferenceTrace_conv.csv --slo ttft.p90=1s,itl=60ms --compile-budget 4h
  optimum-cli neuron tune --model checkpoint/ --target cpu --trace trace.jsonl --search batch=4,8 chunk=64,128 policy=mixed
  optimum-cli neuron tune --artifact smollm2/ --trace trace.jsonl --slo ttft=2s     # what an artifact would do
"""


class NeuronTuneCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="tune", help="Find the sizes to export for a trace of requests and limits on latency.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        group = parser.add_argument_group("what to serve, on what")
        add_model_options(group, required=False)
        text = "in place of --model: an exported artifact, with the sizes that it has"
        group.add_argument("--artifact", type=Path, help=text)
        targets = ("auto", "cpu", *NEURON_TARGETS)
        group.add_argument("--target", choices=targets, help="where graphs run; auto is this machine (default: auto)")
        add_number(group, "--tensor-parallel-size", "CORES", "cores that share one copy of the model (default: 1)")
        text = "of weights, activations and KV cache (default: the checkpoint's)"
        add_option(group, "--dtype", choices=DTYPES, help=text)
        group = parser.add_argument_group("load")
        group.add_argument("--trace", type=Path, required=True, metavar="FILE", help="requests, and when they come")
        requests_help = f"of the trace, those that come first; 0: all (default: {DEFAULT_REQUESTS})"
        add_number(group, "--requests", "COUNT", requests_help)
        text = "as ttft=2s,itl=50ms,e2e.p90=30s (default: none; throughput decides)"
        group.add_argument("--slo", metavar="LIMITS", help=text)
        _add_search_options(parser.add_argument_group("search"))
        group = parser.add_argument_group("files")
        add_file(group, "--json", "write everything, in seconds, bytes and minutes")

    @reported_errors()
    def run(self) -> None:
        args = self.args
        from optimum_neuron.tools.tune.slo import Slo
        from optimum_neuron.tools.tune.trace import RequestTrace, read_trace

        _check(args)
        slo = Slo(()) if args.slo is None else Slo.parse_limits(args.slo)
        trace = read_trace(args.trace)
        count = DEFAULT_REQUESTS if args.requests is None else args.requests or len(trace.requests)
        trace = RequestTrace(trace.requests[:count], trace.name)

        from optimum_neuron.tools.tune.report import print_report, to_json
        from optimum_neuron.tools.tune.tune import tune_artifact, tune_model

        if args.artifact is not None:
            report = tune_artifact(args.artifact, trace, slo, trust_remote_code=args.trust_remote_code)
        else:
            names = ("tensor_parallel_size", "dtype", "sequence_length")
            report = tune_model(
                args.model,
                trace,
                slo,
                target=args.target or "auto",
                axes=args.search or (),
                options={name: getattr(args, name) for name in names if getattr(args, name) is not None},
                compile_budget=args.compile_budget,
                graph_minutes=args.graph_minutes,
                **hub_options(args),
            )
        print_report(report, console())
        if args.json is not None:
            write_json(args.json, to_json(report))
        if not report.search.best.meets:
            raise SystemExit(MISSED)


def _add_search_options(group: Any) -> None:
    add_option(
        group,
        "--search",
        nargs="+",
        default=None,
        metavar="AXIS=VALUES",
        help="what to compare: batch=4,8,16 chunk=128,512 ctx=1,2 buckets=none,quarters,halves,512+2048 policy=mixed,alternate; other "
        "axes keep their values (default: a grid for the target)",
    )
    add_number(group, "--sequence-length", "TOKENS", "of all candidates (default: what the longest request needs)")
    budget_help = "time that compiling all graphs may take, one after the other, as 60min or 4h (default: any)"
    add_option(group, "--compile-budget", type=_minutes, metavar="TIME", help=budget_help)
    graph_help = "time that a device's compiler takes for a graph, as 10min (default: a guess from one published pair)"
    add_option(group, "--graph-minutes", type=_minutes, metavar="TIME", help=graph_help)


def _minutes(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    minutes = float(found[1]) * {"s": 1 / 60, "min": 1.0, "h": 60.0}[found[2]] if found else 0.0
    if not 0 < minutes < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no time above 0; give it as 90s, 60min or 4h")
    return minutes


# Options of a search, which an artifact leaves no room for.
_OF_MODELS = (
    "revision", "token", "target", "tensor_parallel_size", "dtype", "search", "sequence_length", "compile_budget", "graph_minutes",
)  # fmt: skip


def _check(args: Namespace) -> None:
    if (args.model is None) == (args.artifact is None):
        raise ValueError("name either --model, to search its sizes, or --artifact, which has its own")
    if args.requests is not None and args.requests < 0:
        raise ValueError(f"--requests {args.requests} must be at least 0, which is all of the trace")
    if args.artifact is None:
        return
    for name in _OF_MODELS:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is an option of a search, and --artifact {args.artifact} has its own sizes; leave it out"
            )
