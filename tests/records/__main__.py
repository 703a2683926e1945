# SPDX-License-Identifier: Apache-2.0
"""Records what exports and the scheduler make, and compares it with an earlier record.

    python -m tests.records record FILE [--models MODEL ...] [--targets TARGET ...]
    python -m tests.records compare FILE

A change that only moves or renames code leaves all digests equal. Record before it, and compare after it. Without options a record has 12
models for all targets of this environment: cpu, eager, the programs that Neuron graphs are lowered from, and HLO where torch-xla is installed.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path


# Plans of Gemma 3 number some buffers in an order that follows the seed of strings' hashes, which is random by default.
if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.records", *sys.argv[1:]])
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "helpers")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from records.models import MODELS  # noqa: E402
from records.record import compare, make_record, targets  # noqa: E402


def main() -> int:
    parser = ArgumentParser(
        "python -m tests.records", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="write a record")
    record.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    record.add_argument("--targets", nargs="+", choices=targets(), default=targets())
    comparison = commands.add_parser("compare", help="make a record's digests again, and print those that differ")
    for each in (record, comparison):
        each.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        args.file.write_text(json.dumps(make_record(args.models, args.targets), indent=1) + "\n", encoding="utf-8")
        return 0
    found = compare(args.file)
    sys.stdout.write("\n".join(found or ["all digests are equal"]) + "\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
