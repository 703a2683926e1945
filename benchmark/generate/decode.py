# SPDX-License-Identifier: Apache-2.0
"""What a decode step of this runtime costs: for rows that are live among more slots, as the context grows, and over blocks.

A step of one row in an artifact of many slots should cost what it costs in an artifact of one, a longer context what its keys
and values take to be read, and rows whose keys and values lie in blocks all over the cache what they cost in slots. All cases take
turns, round after round, on a cache of random numbers: zeros that nobody wrote are one page of memory, which stays near.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import describe_machine, warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, positive
from ..output import Table, console, publish


if TYPE_CHECKING:
    from optimum_neuron.generate import NeuronModelForCausalLM
    from optimum_neuron.runtime.runner import GraphRunner

EXAMPLES = """
examples:
  python -m benchmark.generate.decode --artifacts build/artifacts --json build/benchmark/decode.json
  python -m benchmark.generate.decode --model CHECKPOINT --contexts 128 8192 32768        # of a model that takes as many
  python -m benchmark.generate.decode --slots 1 2 --contexts 16 64 --steps 2 --rounds 1      # does it run?
"""
# Of the cases that vary the number of rows.
ROWS_CONTEXT = 256
# Of those that vary the size of a block.
BLOCKS_ROWS, BLOCKS_CONTEXT = 8, 1000


@dataclass(frozen=True)
class Case:
    """A step of `rows` live rows, each with `context` tokens in the cache, in an artifact of `slots`, or of blocks of `block` tokens."""

    slots: int
    rows: int
    context: int
    block: int | None = None


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("generate.decode", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    several: dict[str, Any] = {"type": positive, "nargs": "+"}
    slots_help = "artifacts of so many slots, with one live row and with all of them"
    add_option(what, "--slots", **several, metavar="SLOTS", default=[1, 8, 32], help=slots_help)
    contexts_help = "tokens in the cache of the row of an artifact of one slot"
    add_option(
        what, "--contexts", **several, metavar="TOKENS", default=[128, 1024, 2048, 4096, 8000], help=contexts_help
    )
    blocks_help = f"tokens of a block, beside slots, of {BLOCKS_ROWS} rows behind {BLOCKS_CONTEXT:,} tokens each"
    add_option(what, "--block-sizes", **several, metavar="TOKENS", default=[64, 128, 256, 512], help=blocks_help)
    add_option(what, "--steps", type=positive, metavar="STEPS", default=24, help="of a turn")
    add_option(what, "--rounds", type=positive, metavar="ROUNDS", default=7, help="of all cases in turn")
    add_file_options(parser)
    args = parser.parse_args()
    args.slots, args.contexts = sorted({1, *args.slots}), sorted(set(args.contexts))
    return args


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        from ..limits import measure_limits
        from ..model import default_model

        warn_if_busy()
        read = measure_limits().read
        with artifacts_folder(args.artifacts) as folder:
            rows, contexts, blocks = measure(args.model or default_model(), args, folder)
        report = {
            "benchmark": "decode",
            "dtype": args.dtype,
            "machine": describe_machine(),
            "bytes_read_per_s": read,
            "rows": rows_table(rows),
            "contexts": contexts_table(contexts, read),
            "blocks": blocks_table(blocks),
        }
        publish(report, args.json)
    return 0


def measure(
    model: str, args: Namespace, folder: Path
) -> tuple[dict[Case, float], dict[Case, tuple[float, float]], dict[Case, float]]:
    """Milliseconds of a step for each number of rows, for each context with the bytes of its keys and values, and for each block size."""
    by_slots = {slots: load(model, args, slots, ROWS_CONTEXT, folder) for slots in args.slots}
    cases = [Case(slots, rows, ROWS_CONTEXT) for slots in args.slots for rows in sorted({1, slots})]
    rows = in_turn([(case, by_slots[case.slots].runner) for case in cases], args)
    by_slots.clear()
    one = load(model, args, 1, args.contexts[-1], folder)
    contexts = in_turn([(Case(1, 1, context), one.runner) for context in args.contexts], args)
    token = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in one.artifact.model.layers)
    token_bytes = token * (2 if args.dtype == "bfloat16" else 4)
    sized = {case: (ms, token_bytes * (case.context + args.steps / 2)) for case, ms in contexts.items()}
    by_block = {
        block: load(model, args, BLOCKS_ROWS, BLOCKS_CONTEXT, folder, block) for block in (None, *args.block_sizes)
    }
    cases = [Case(BLOCKS_ROWS, BLOCKS_ROWS, BLOCKS_CONTEXT, block) for block in by_block]
    return rows, sized, in_turn([(case, by_block[case.block].runner) for case in cases], args)


def load(
    model: str, args: Namespace, slots: int, context: int, folder: Path, block: int | None = None
) -> NeuronModelForCausalLM:
    """An artifact whose slots, or as many blocks of `block` tokens, hold all steps behind a context."""
    from dataclasses import replace

    import torch

    from ..model import export
    from ..systems import artifact_config, load_ours

    config = artifact_config(args.dtype, "cpu", slots, context + args.steps)
    if block is not None:
        length = -(-config.sequence_length // block) * block
        config = replace(config, kv_block_size=block, sequence_length=length, context_buckets=(length,))
    loaded: NeuronModelForCausalLM = load_ours(export(model, config, folder).path).model
    for state in loaded.artifact.states():
        numbers = torch.randn(state.shape, generator=torch.Generator().manual_seed(0))
        loaded.runner.executable.write_state(state.name, numbers)
    return loaded


def in_turn(cases: Sequence[tuple[Case, GraphRunner]], args: Namespace) -> dict[Case, float]:
    """Medians over the rounds; a first round does not count."""
    times: dict[Case, list[float]] = {case: [] for case, _ in cases}
    for number in range(args.rounds + 1):
        for case, runner in cases:
            spent = turn(runner, case, args.steps)
            if number:
                times[case].append(spent)
    return {case: statistics.median(each) for case, each in times.items()}


def turn(runner: GraphRunner, case: Case, steps: int) -> float:
    """Milliseconds of a step, the mean of several that follow each other."""
    import numpy as np

    from optimum_neuron.step.spec import GREEDY

    slots = case.slots
    active = np.arange(slots) < case.rows
    token_ids, uniforms = np.ones(slots, dtype=np.int32), np.zeros(slots, dtype=np.float32)
    params = np.tile(np.array(GREEDY, dtype=np.float32), (slots, 1))
    runner.reset_all()
    if case.block is not None:
        sizes = runner.config
        places = np.random.default_rng(0).permutation(sizes.kv_blocks).reshape(slots, sizes.blocks_per_row)
        for slot, blocks in enumerate(places):
            runner.assign(slot, 0, blocks.tolist())
    runner.lengths[active] = case.context
    start = time.perf_counter()
    for _ in range(steps):
        runner.decode(token_ids, active, params, uniforms)
    return 1e3 * (time.perf_counter() - start) / steps


def rows_table(rows: dict[Case, float]) -> list[dict[str, object]]:
    """Prints and returns what rows cost."""
    alone = rows[Case(1, 1, ROWS_CONTEXT)]
    table = Table(f"A decode step behind {ROWS_CONTEXT} tokens", (), ("slots", "live rows", "ms", "times one slot's"))
    for case, ms in rows.items():
        table.add_row(str(case.slots), str(case.rows), f"{ms:.2f}", f"{ms / alone:.2f}")
    console().print(table)
    return [{"slots": case.slots, "rows": case.rows, "ms": ms, "times_one": ms / alone} for case, ms in rows.items()]


def contexts_table(contexts: dict[Case, tuple[float, float]], read: float) -> list[dict[str, object]]:
    """Prints and returns what contexts cost beyond the shortest, beside what reading their keys and values takes."""
    table = Table("A decode step of one row", (), ("context", "ms", "beyond the first", "to read K and V", "ratio"))
    results: list[dict[str, object]] = []
    first_ms, first_bytes = next(iter(contexts.values()))
    for case, (ms, size) in contexts.items():
        more, least = ms - first_ms, 1e3 * (size - first_bytes) / read
        ratio = more / least if least else None
        results.append({"context": case.context, "ms": ms, "more_ms": more, "read_ms": least, "ratio": ratio})
        table.add_row(f"{case.context:,}", f"{ms:.2f}", f"{more:.2f}", f"{least:.2f}", f"{ratio:.2f}" if ratio else "")
    console().print(table)
    return results


def blocks_table(blocks: dict[Case, float]) -> list[dict[str, object]]:
    """Prints and returns what blocks cost over slots."""
    slots = next(iter(blocks.values()))
    title = f"A decode step of {BLOCKS_ROWS} rows behind {BLOCKS_CONTEXT:,} tokens each"
    table = Table(title, ("cache",), ("ms", "times slots'"))
    for case, ms in blocks.items():
        table.add_row(f"blocks of {case.block}" if case.block else "slots", f"{ms:.2f}", f"{ms / slots:.2f}")
    console().print(table)
    return [{"block": case.block, "ms": ms, "times_slots": ms / slots} for case, ms in blocks.items()]


if __name__ == "__main__":
    sys.exit(main())
