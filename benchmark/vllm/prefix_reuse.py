# SPDX-License-Identifier: Apache-2.0
"""What a shared prefix costs: computed again, copied from slot to slot, or gathered by a block table in every step.

The first two are what the runtime does without and with prefix reuse. The third is what graphs would pay whose cache is
kept in pages, where attention has no kernel that reads pages: they gather each row's pages before they attend.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from optimum_neuron.cli import add_option, reported_errors

from ..machine import describe_machine, warn_if_busy
from ..options import (
    add_file_options,
    add_model_options,
    artifacts_folder,
    at_least,
    make_parser,
    positive,
)
from ..output import console, make_table, publish


if TYPE_CHECKING:
    import torch

    from optimum_neuron.modeling import NeuronModelForCausalLM

EXAMPLES = """
examples:
  python -m benchmark.vllm.prefix_reuse --artifacts build/artifacts --json build/benchmark/prefix_reuse.json
  python -m benchmark.vllm.prefix_reuse --batch-size 2 --prefixes 256 --repeats 1      # does it run?

A table and, as the last line, one JSON object go to stdout; progress and warnings to stderr. It needs no vLLM.
"""
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


def measure(model: NeuronModelForCausalLM, tokens: int, repeats: int) -> Costs:
    """Costs of a prefix of `tokens` tokens in every slot."""
    from optimum_neuron.graphs.spec import GREEDY
    from optimum_neuron.runtime.step_tensors import Chunk

    runner, vocab_size = model.runner, model.artifact.model.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab_size, tokens).astype(np.int32)
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
        runner.decode(
            ones, ones.astype(bool), np.tile(np.asarray(GREEDY, np.float32), (slots, 1)), np.zeros(slots, np.float32)
        )
        runner.lengths[:] = lengths

    states = [spec.shape for spec in model.artifact.states()]
    gather = gather_ms(states, model.dtype, tokens, repeats)
    return Costs(tokens, prefill_ms, copy_ms, median_ms(decode, repeats), gather)


def gather_ms(states: Sequence[tuple[int, ...]], dtype: torch.dtype, tokens: int, repeats: int) -> float:
    """A step's gathers: every slot's pages of every cache tensor, in an order that no two rows share."""
    import torch

    slots = states[0][0] - 1
    per_slot = -(-tokens // PAGE)
    table = torch.randperm(slots * per_slot)
    pools = [torch.zeros(slots * per_slot, heads, PAGE, dim, dtype=dtype) for _, heads, _, dim in states]
    return median_ms(lambda: [pool[table] for pool in pools], repeats)


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("vllm.prefix_reuse", __doc__, EXAMPLES)
    add_model_options(parser.add_argument_group("what to measure"))
    size = parser.add_argument_group("sizes")
    # A prefix is copied from one slot to another.
    add_option(size, "--batch-size", type=at_least(2), metavar="ROWS", default=8, help="slots")
    lengths = {"type": positive, "nargs": "+", "metavar": "TOKENS", "default": [256, 1024, 2048]}
    add_option(size, "--prefixes", **lengths, help="lengths of the prefix")
    add_option(size, "--repeats", type=positive, metavar="RUNS", default=9, help="runs of each; the median counts")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            rows = run(args, folder)
        print_table(rows)
        results = {"benchmark": "prefix_reuse", "batch_size": args.batch_size, "machine": describe_machine()}
        publish(json.dumps(results | {"rows": [asdict(row) for row in rows]}), args.json)
    return 0


def run(args: Namespace, folder: Path) -> list[Costs]:
    """Exports, loads and measures."""
    from optimum_neuron.modeling import NeuronModelForCausalLM

    from ..model import default_model, export, serving_config

    config = serving_config(args.batch_size, max(args.prefixes) + 256, 128, args.dtype)
    model = NeuronModelForCausalLM.from_pretrained(export(args.model or default_model(), config, folder).path)
    return [measure(model, tokens, args.repeats) for tokens in args.prefixes]


def print_table(rows: Sequence[Costs]) -> None:
    """A row per length."""
    headers = ("prefix", "prefill ms", "copy ms", "ratio", "decode step ms", "gather ms", "of a step")
    table = make_table("Medians", (), headers)
    for row in rows:
        ratio, share = row.prefill_ms / row.copy_ms, row.gather_ms / row.decode_ms
        cells = (f"{row.tokens:,}", *(f"{value:.1f}" for value in (row.prefill_ms, row.copy_ms)), f"{ratio:.0f}")
        table.add_row(*cells, f"{row.decode_ms:.1f}", f"{row.gather_ms:.1f}", f"{share:.0%}")
    console().print(table)


if __name__ == "__main__":
    sys.exit(main())
