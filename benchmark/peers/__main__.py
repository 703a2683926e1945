# SPDX-License-Identifier: Apache-2.0
"""Compares this runtime with those that a user would choose instead on a CPU, in one run, in turn, round after round.

Every runtime has an environment and a process of its own, the same weights, token ids and number of threads. Prompts are
random and never the same twice, and no runtime keeps prefixes. Measured are prefill of one prompt, a decode step of several rows, a load of
requests with mixed lengths, and what it takes to begin: conversion, load, the first token from a cold start, memory.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from optimum_neuron.cli import add_option, reported_errors

from ..options import add_result_options, make_parser, positive
from .names import AVX2, MODELS, OURS, PEERS, PRECISIONS, RANDOM_1B, SMOLLM2


FULL: dict[str, Any] = {
    "models": list(MODELS),
    "precisions": list(PRECISIONS),
    "prompts": [128, 512, 2048],
    "batches": [1, 4, 8, 32],
    "requests": 32,
    "rounds": 5,
}
QUICK: dict[str, Any] = {
    "models": [SMOLLM2],
    "precisions": ["bfloat16"],
    "prompts": [128, 512],
    "batches": [1, 8],
    "requests": 12,
    "rounds": 2,
}
EXAMPLES = f"""
peers:
  {OURS}-rounded  this project with --activations int8, and {OURS}-plain with --activations none: the default is one of
                       them, by the CPU
  transformers         generate() with its defaults; requests by its continuous batching
  transformers-static  generate() with a static cache and compiled decode steps
  llamacpp             llama.cpp, by llama-cpp-python, with its default cache of float16; int8 is q8_0, int4 is q4_0
  openvino             OpenVINO GenAI, converted by optimum-intel; bfloat16 is float16 weights computed in bfloat16
  onnxruntime          ONNX Runtime GenAI, by its model builder; it has no bfloat16 on a CPU
  vllm                 vLLM's own CPU backend
  {OURS}'s own int8 has a scale for each output, its int4 one for 32 inputs; both compute in bfloat16.

examples:
  python -m benchmark.peers --json build/benchmark/peers.json
  python -m benchmark.peers --quick        # SmolLM2 alone, few rounds and rows
  python -m benchmark.peers --models {SMOLLM2} --precisions float32 --peers llamacpp openvino --rounds 3
  python -m benchmark.peers --models {RANDOM_1B} --precisions int8 int4 --peers llamacpp openvino onnxruntime        # a Llama of 1.2 billion weights
  python -m benchmark.peers --instruction-set avx2        # plays a CPU without AVX512

The first run installs the peers' environments (6.5 GB) and builds llama.cpp, which takes a C++ compiler. A peer that does not install, or
fails, is named with its reason; the others are measured all the same.
"""


def parse_arguments() -> Namespace:
    """The options; imports nothing heavy, so that --help is quick."""
    parser = make_parser("peers", __doc__, EXAMPLES)
    defaults = QUICK if "--quick" in sys.argv else FULL
    what = parser.add_argument_group("what to measure")
    add_option(what, "--quick", action="store_true", help="fewer of everything that is not named otherwise")
    add_option(what, "--models", nargs="+", choices=MODELS, default=defaults["models"], help="which models")
    add_option(what, "--precisions", nargs="+", choices=PRECISIONS, default=defaults["precisions"], help="of weights")
    others = [name for name in PEERS if name != OURS]
    add_option(what, "--peers", nargs="*", choices=others, default=others, help=f"beside {OURS}")
    set_help = "hold all of them to less than this CPU has; who cannot be held is named"
    add_option(what, "--instruction-set", choices=("avx2",), default=None, help=set_help)
    size = parser.add_argument_group("sizes")
    several = {"type": positive, "nargs": "+"}
    add_option(size, "--prompts", **several, metavar="TOKENS", default=defaults["prompts"], help="prefill of each")
    add_option(size, "--batches", **several, metavar="ROWS", default=defaults["batches"], help="a decode step of each")
    add_option(
        size, "--requests", type=positive, metavar="COUNT", default=defaults["requests"], help="of the mixed load"
    )
    add_option(size, "--rounds", type=positive, metavar="ROUNDS", default=defaults["rounds"], help="of all in turn")
    cores = len(os.sched_getaffinity(0))
    add_option(size, "--threads", type=positive, metavar="THREADS", default=cores, help="of every runtime")
    add_option(size, "--seed", type=int, metavar="SEED", default=0, help="of the random prompts")
    files = parser.add_argument_group("files")
    folder_help = "environments, checkpoints and conversions, for the next run"
    add_option(files, "--folder", type=Path, metavar="FOLDER", default=Path("build/peers"), help=folder_help)
    add_result_options(files)
    args = parser.parse_args()
    args.batches, args.prompts = sorted(set(args.batches)), sorted(set(args.prompts))
    if args.threads > cores:
        parser.error(f"--threads {args.threads} is more than the {cores} cores of this machine: lower it")
    return args


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads)} | (AVX2 if args.instruction_set else {})  # before torch comes
    with reported_errors():
        from ..machine import warn_if_busy
        from ..output import publish
        from .report import SECTION
        from .run import run

        warn_if_busy()
        report = run(args)
        SECTION.show(report)
        publish(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
