# SPDX-License-Identifier: Apache-2.0
"""Proves an artifact on the hardware that it is for: does everything compile, load, and compute the right thing there?

Checks run one after another, and a failed one does not stop the others:

compiler     neuronx-cc answers, and lists every operator of the graphs
export       the graphs compile (only with --model)
load         graphs, weights and KV state get onto the device
golden       teacher-forced, the tokens and logits that the exporting host recorded come back
chunks       a prompt gives the same bits whatever its chunk boundaries, inside one graph
neighbours   a request gives the same bits whoever the neighbours are, inside one graph
slot copy    a prefix copied on the device is the prefix
latency      each graph's time per run
memory       what the device has in use, by neuron-monitor

It ends with a table, one JSON report, and, where a check failed, what to do about it. Exit code 1 means a failed check.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from output import publish

from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.config import HLO_TARGETS, NeuronConfig


EXAMPLES = """
examples:
  python benchmark/neuron_smoke.py out/ --json smoke.json
  python benchmark/neuron_smoke.py --model checkpoint/ --target trn2 --batch-size 4 --sequence-length 2048
  python benchmark/neuron_smoke.py --model model.gguf --target hlo --runs 2        # does it run? on any CPU, no device
"""


def parse_arguments() -> argparse.Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("artifact", type=Path, nargs="?", help="an exported artifact; or give --model")
    export = parser.add_argument_group("to export first")
    export.add_argument("--model", help="Hub id, checkpoint folder or .gguf file")
    export.add_argument("--target", choices=HLO_TARGETS, default="trn2", help="(default: %(default)s)")
    add_option(export, "--batch-size", type=int, default=2, help="slots")
    add_option(export, "--sequence-length", type=int, default=256, help="tokens per slot")
    add_option(export, "--prefill-chunk-size", type=int, default=64, help="tokens per chunk")
    add_option(export, "--tensor-parallel-size", type=int, default=1, help="devices")
    export.add_argument("--dtype", default="auto", help="type of weights and cache (default: the checkpoint's)")
    parser.add_argument("--runs", type=int, default=20, help="timed runs per graph (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the report there, too")
    args = parser.parse_args()
    if (args.artifact is None) == (args.model is None):
        parser.error("name either an artifact or --model")
    if args.runs < 1:
        parser.error(f"--runs {args.runs} must be at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    with reported_errors():
        config = None
        if args.model is not None:
            config = NeuronConfig(
                target=args.target,
                batch_size=args.batch_size,
                sequence_length=args.sequence_length,
                prefill_chunk_size=args.prefill_chunk_size,
                tensor_parallel_size=args.tensor_parallel_size,
                dtype=args.dtype,
            )
        # Heavy imports after the options have been checked.
        from neuron_checks import run_checks

        with tempfile.TemporaryDirectory() if config is not None else nullcontext("") as scratch:
            folder = args.artifact if config is None else Path(scratch) / "artifact"
            report = run_checks(folder, args.model, config, args.runs)
        report.print(sys.stdout)
        publish(report.to_json(), lambda: None, args.json)
        return 0 if report.passed else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
