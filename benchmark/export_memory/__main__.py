# SPDX-License-Identifier: Apache-2.0
"""Exports a model of random weights in a process that the kernel gives little memory, and tells how much of it was used.

The checkpoint is made on the spot, tensor by tensor. The process may have two of its largest tensors and 2 GB, all imports included.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import describe_machine, warn_if_busy
from ..options import add_file_options, artifacts_folder, make_parser, positive
from ..output import Table, publish
from ..section import Report, Section


if TYPE_CHECKING:
    from .capped import Measured
    from .shapes import Sizes

_BESIDE_TENSORS = 2_000_000_000
EXAMPLES = """
shapes:
  1b  Llama 3.2 1B's    8b  Llama 3.1 8B's, 16.1 GB in bfloat16; the disk needs as much again for the artifact, and where weights
      are cast or quantized for these, too

how to read it:
  taken     private memory that can be written to, at most; the kernel refuses more than the limit (RLIMIT_DATA)
  touched   of that, what was in use at a time, at most (RssAnon)
  resident  that, and pages of mapped files, which the system takes back when it wants to (VmHWM)

examples:
  python -m benchmark.export_memory --json build/benchmark/export_memory.json
  python -m benchmark.export_memory --shape 1b --stored float32 --quantization int8
  python -m benchmark.export_memory --shape 1b --target hlo --tensor-parallel-size 2    # with the python of .venv-neuron

The exit code is 1 where the export failed, as it does where it needs more than the limit.
"""


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = make_parser("export_memory", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to export")
    add_option(what, "--shape", choices=("1b", "8b"), default="8b", help="of the model")
    types = ("bfloat16", "float32")
    add_option(what, "--stored", choices=types, default="bfloat16", help="type of the checkpoint's weights")
    add_option(what, "--dtype", choices=types, default="bfloat16", help="type of the artifact's weights")
    add_option(what, "--quantization", choices=("int8", "int4", "fp8"), default=None, help="kind of codes, if any")
    add_option(what, "--target", choices=("cpu", "eager", "hlo"), default="cpu", help="of the export")
    add_option(
        what,
        "--tensor-parallel-size",
        type=positive,
        metavar="RANKS",
        default=1,
        help="files of weights; of target hlo",
    )
    add_option(what, "--sequence-length", type=positive, metavar="TOKENS", default=256, help="of each of one slot")
    add_file_options(parser)
    args = parser.parse_args()
    with reported_errors():
        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            sizes, measured = _run(args, folder)
        report = {
            "benchmark": "export_memory",
            "options": {name: value for name, value in vars(args).items() if name not in ("artifacts", "json")},
            "sizes": asdict(sizes),
            "limit": limit_of(sizes),
            "measured": asdict(measured),
            "machine": describe_machine(),
        }
        SECTION.show(report)
        publish(report, args.json)
    return 1 if measured.exit_code else 0


def limit_of(sizes: Sizes) -> int:
    """Bytes that an export of a checkpoint may take."""
    return 2 * sizes.largest + _BESIDE_TENSORS


def _run(args: Namespace, folder: Path) -> tuple[Sizes, Measured]:
    import torch

    from .capped import measure
    from .shapes import write_checkpoint

    checkpoint, output = folder / f"{args.shape}-{args.stored}", folder / "artifact"
    shutil.rmtree(checkpoint, ignore_errors=True)
    try:
        sizes = write_checkpoint(args.shape, getattr(torch, args.stored), checkpoint)
        options: dict[str, Any] = {
            "target": args.target,
            "dtype": args.dtype,
            "batch_size": 1,
            "sequence_length": args.sequence_length,
            "tensor_parallel_size": args.tensor_parallel_size,
            "quantization": args.quantization,
        }
        return sizes, measure(checkpoint, output, options, limit_of(sizes))
    finally:
        for made in (checkpoint, output):
            shutil.rmtree(made, ignore_errors=True)


def tables(report: Report) -> Iterator[Table]:
    """The one export."""
    options, sizes, measured = (report[name] for name in ("options", "sizes", "measured"))
    what = [options["shape"], options["stored"], options["quantization"] or options["dtype"], options["target"]]
    peaks = [measured["peaks"][name] for name in ("VmData", "RssAnon", "VmHWM")]
    table = Table(
        "An export that failed: memory until then, GB" if measured["exit_code"] else "Memory of an export, GB",
        ("shape", "stored", "exported", "target"),
        ("checkpoint", "largest tensor", "limit", "taken", "touched", "resident", "seconds"),
    )
    numbers = (sizes["total"], sizes["largest"], report["limit"], *peaks)
    table.add_row(*what, *(f"{number / 1e9:.2f}" for number in numbers), f"{measured['seconds']:.0f}")
    yield table


ABOUT = """Random weights, in a process whose private memory the kernel limits to two of the largest tensors and 2 GB. `taken` is private memory that can be \
written to, `touched` the part of it that was in use, `resident` that and pages of mapped files. [How it is measured](../benchmark/README.md#export_memory)."""
SECTION = Section("Memory of an export", ABOUT, tables)


if __name__ == "__main__":
    sys.exit(main())
