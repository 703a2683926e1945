# SPDX-License-Identifier: Apache-2.0
"""Simulates a cache of blocks against slots of the same memory on trn2, under requests of long-tailed lengths.

Llama-3.1-8B on 8 cores. Slots are as long as the longest request, so a given number of cache tokens makes a fixed number of them;
blocks serve as many requests as there are rows and tokens for. Both are served by the engine's own scheduler, on a clock that
advances by what `optimum-cli neuron estimate` expects of each step's graph. As many users as keep a queue wait at all
times. Expected times are fitted to published runs of slots; nobody has measured blocks on a device: read ratios.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from optimum_neuron import progress
from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.graphs.spec import GraphSpec
from optimum_neuron.tune.simulate import Outcome

from ..options import add_result_options, make_parser, positive
from ..output import Table, publish
from ..section import Compared, Report, Section
from .lengths import LENGTHS, Lengths
from .simulation import Workload, simulate


LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
CORES = 8
EXAMPLES = """
examples:
  python -m benchmark.simulate.blocks --json build/benchmark/simulated_blocks.json
  python -m benchmark.simulate.blocks --lengths lognormal --rows 64 128 --block-sizes 64 128 256
  python -m benchmark.simulate.blocks --requests 100 --users 50       # does it run?
"""


def parse_arguments(arguments: list[str] | None) -> Namespace:
    """The options."""
    parser = make_parser("simulate.blocks", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to compare")
    add_option(what, "--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS), help="of requests")
    many: dict[str, Any] = {"type": positive, "nargs": "+", "metavar": "N"}
    add_option(what, "--block-sizes", **many, default=[128], help="tokens of a block")
    add_option(what, "--rows", **many, default=[128], help="rows of a step over blocks")
    add_option(what, "--cache-tokens", type=positive, metavar="TOKENS", default=131072, help="of slots and of blocks")
    add_option(
        what, "--chunk-size", type=positive, metavar="TOKENS", default=512, help="prompt tokens of a step, of slots"
    )
    chunks_help = (
        "the same of blocks, a system for each: somewhat smaller chunks make up for the rows that decode beside them"
    )
    add_option(what, "--block-chunk-sizes", **many, default=[448, 512], help=chunks_help)
    load = parser.add_argument_group("load")
    add_option(load, "--users", type=positive, metavar="N", default=256, help="who send again when they are answered")
    add_option(load, "--requests", type=positive, metavar="N", default=2000, help="that finish")
    add_result_options(parser.add_argument_group("files"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the simulations; returns the exit code."""
    args = parse_arguments(arguments)
    with reported_errors():
        cost = step_seconds()
        found: dict[str, list[dict[str, Any]]] = {}
        count = 1 + len(args.rows) * len(args.block_sizes) * len(args.block_chunk_sizes)
        with progress.stage("Simulating", len(args.lengths) * count) as advance:
            for name in args.lengths:
                found[name] = []
                for system, config in systems(args, LENGTHS[name]).items():
                    found[name].append(serve(args, LENGTHS[name], system, config, cost))
                    advance(f"{name}: {system}")
        report = {"benchmark": "simulate.blocks", "options": _plain(args), "systems": found}
        SECTION.show(report)
        publish(report, args.json)
    return 0


def systems(args: Namespace, lengths: Lengths) -> dict[str, NeuronConfig]:
    """What is compared: as many slots as the cache has tokens for, and rows over blocks."""
    slots = max(2, args.cache_tokens // lengths.sequence_length)
    config = NeuronConfig(
        batch_size=slots,
        sequence_length=lengths.sequence_length,
        prefill_chunk_size=args.chunk_size,
        dtype="bfloat16",
        tensor_parallel_size=CORES,
        target="trn2",
    )
    found = {f"{slots} slots, chunks of {args.chunk_size}": config}
    for rows, size, chunk in product(args.rows, args.block_sizes, args.block_chunk_sizes):
        found[f"{rows} rows, blocks of {size}, chunks of {chunk}"] = replace(
            config, batch_size=rows, kv_block_size=size, kv_cache_tokens=args.cache_tokens, prefill_chunk_size=chunk
        )
    return found


def step_seconds() -> Callable[[GraphSpec], float]:
    """What a step of each graph is expected to take on trn2."""
    from transformers import LlamaConfig

    from optimum_neuron.targets.neuron.estimate.core_sizes import core_sizes
    from optimum_neuron.targets.neuron.estimate.model_sizes import measure
    from optimum_neuron.targets.neuron.estimate.step_speed import graph_work
    from optimum_neuron.targets.neuron.sdk.hardware import CHIPS
    from optimum_neuron.targets.neuron.sdk.step_times import STEP_TIMES

    sizes = core_sizes(measure(LlamaConfig(**LLAMA_8B), "Llama-3.1-8B", "bfloat16", trust_remote_code=False), CORES)
    return lambda graph: graph_work(sizes, graph, CHIPS["trn2"], CORES).seconds(STEP_TIMES)


def serve(
    args: Namespace, lengths: Lengths, system: str, config: NeuronConfig, cost: Callable[[GraphSpec], float]
) -> dict[str, Any]:
    """What users of one system get."""
    load = Workload(
        requests=args.requests, users=args.users, prompt_quantiles=lengths.prompts, new_quantiles=lengths.answers
    )
    outcome = simulate(config, SchedulerOptions(prefix_reuse=False), cost, load)
    return {"system": system, **_numbers(outcome)}


def _numbers(outcome: Outcome) -> dict[str, float]:
    itl, ttft = (np.array(times) * 1e3 for times in (outcome.itl, outcome.ttft))
    return {
        "requests_s": outcome.finished / outcome.seconds,
        "tok_s": (outcome.finished_tokens + outcome.unfinished_tokens) / outcome.seconds,
        "itl_p50_ms": float(np.median(itl)),
        "itl_p99_ms": float(np.quantile(itl, 0.99)),
        "ttft_p50_ms": float(np.median(ttft)),
        "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
        "preempted": float(outcome.statistics.preemptions),
    }


def tables(report: Report) -> Iterator[Table]:
    """A table for each kind of lengths: every system, and its requests per second over those of slots."""
    for name, rows in report["systems"].items():
        numbers = [header for header in rows[0] if header != "system"]
        headers = [each.replace("_ms", " ms").replace("_s", "/s").replace("_", " ") for each in numbers]
        table = Table(f"{name}: {LENGTHS[name].source}", ("system",), (*headers, "times slots"))
        for row in rows:
            ratio = row["requests_s"] / rows[0]["requests_s"]
            table.add_row(row["system"], *(f"{row[each]:,.1f}" for each in numbers), f"{ratio:.2f}")
        yield table


def compared(report: Report) -> Iterator[Compared]:
    """Blocks, compared with slots of the same memory."""
    for lengths, (slots, *others) in report["systems"].items():
        for row in others:
            for name, value in row.items():
                if name.endswith(("_ms", "_s")):
                    group = f"{lengths}, {row['system']}"
                    yield Compared(
                        group, name.replace("_", " "), value, {"slots": slots[name]}, not name.endswith("_ms")
                    )


ABOUT = """**Simulated**, not measured: blocks have not run on a device. Llama-3.1-8B on 8 cores of trn2, a step takes what `optimum-cli neuron estimate` \
expects. Slots and blocks have the same memory. [What is simulated](../benchmark/README.md#simulate)."""
SECTION = Section("Blocks on Neuron, simulated", ABOUT, tables, compared)


def _plain(args: Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "json"}


if __name__ == "__main__":
    sys.exit(main())
