# SPDX-License-Identifier: Apache-2.0
"""Draws docs/terminal.svg: the first commands of the README, run now, and what they print."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text


COMMANDS = (
    "optimum-cli export neuron --model {model} --dtype bfloat16 --batch-size 4 smollm2/",
    'optimum-cli neuron generate smollm2/ --prompt "Name three fruits." --max-new-tokens 32',
)
WIDTH = 100
# As rich draws a terminal, without the fonts that it would have a browser fetch from elsewhere.
_SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="checkpoint to export (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("terminal.svg"), help="file to write")
    args = parser.parse_args()
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    shown = args.model if not Path(args.model).exists() else Path(args.model).name
    environment = os.environ | {
        "COLUMNS": str(WIDTH),
        "FORCE_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), command.format(model=shown)))
            run = subprocess.run(
                shlex.split(command.format(model=args.model)),
                cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
            )  # fmt: skip
            console.print(Text.from_ansi(run.stdout.rstrip()))
    args.output.write_text(console.export_svg(title="optimum-cli", code_format=_SVG), encoding="utf-8")


if __name__ == "__main__":
    main()
