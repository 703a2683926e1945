# SPDX-License-Identifier: Apache-2.0
"""What generate() and the engine take of a decode step beside the run of its graph: choosing, feeding, counting, in Python.

One prompt in an artifact of one slot, so that steps are as short as they get. All paths take turns, round after round.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optimum_neuron.cli import add_option, reported_errors

from ..machine import describe_machine, warn_if_busy
from ..options import add_file_options, add_model_options, artifacts_folder, make_parser, positive
from ..output import Table, console, publish


if TYPE_CHECKING:
    from torch import Tensor

    from optimum_neuron.generate import NeuronModelForCausalLM

PROMPT = 64
EXAMPLES = """
examples:
  python -m benchmark.generate.host --artifacts build/artifacts --json build/benchmark/host.json
  python -m benchmark.generate.host --new-tokens 4 --rounds 1      # does it run?
"""


class TimedRuns:
    """An executable that notes how long its graphs ran; in all else the one that it stands for."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable
        self.runs_ahead = executable.runs_ahead  # asked for in each step, so not by __getattr__
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def run(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        outputs = self._executable.run(*arguments)
        self.seconds.append(time.perf_counter() - start)
        return outputs


def parse_arguments() -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("generate.host", __doc__, EXAMPLES)
    what = parser.add_argument_group("what to measure")
    add_model_options(what)
    add_option(what, "--new-tokens", type=positive, metavar="TOKENS", default=100, help="of a call")
    add_option(what, "--rounds", type=positive, metavar="ROUNDS", default=7, help="of all paths in turn")
    add_file_options(parser)
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    args = parse_arguments()
    with reported_errors():
        import torch

        from ..model import default_model, export
        from ..systems import artifact_config, load_ours

        warn_if_busy()
        with artifacts_folder(args.artifacts) as folder:
            config = artifact_config(args.dtype, "cpu", 1, PROMPT + args.new_tokens)
            model = load_ours(export(args.model or default_model(), config, folder).path).model
        runs = model.runner.executable = TimedRuns(model.runner.executable)
        random = torch.Generator().manual_seed(0)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in PATHS}
        for number in range(args.rounds + 1):
            prompt = torch.randint(3, model.artifact.model.vocab_size, (1, PROMPT), generator=random)
            for name, call in PATHS.items():
                runs.seconds.clear()
                spent = call(model, prompt, args.new_tokens)
                if number:
                    found[name].append((spent, sum(runs.seconds)))
        report = {
            "benchmark": "host",
            "dtype": args.dtype,
            "machine": describe_machine(),
            "paths": table_of(found, args),
        }
        publish(report, args.json)
    return 0


def by_generate(model: NeuronModelForCausalLM, prompt: Tensor, new_tokens: int) -> float:
    """Seconds of a call of generate()."""
    import torch

    start = time.perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return time.perf_counter() - start


def by_engine(model: NeuronModelForCausalLM, prompt: Tensor, new_tokens: int) -> float:
    """Seconds that the engine takes for a request."""
    from optimum_neuron import Request
    from optimum_neuron.engine.engine import Engine

    engine = Engine(model.runner, vocab_size=model.artifact.model.vocab_size)
    engine.add_request(Request(request_id="0", prompt_token_ids=prompt[0].numpy(), max_new_tokens=new_tokens))
    start = time.perf_counter()
    for _ in engine.run():
        pass
    return time.perf_counter() - start


PATHS: dict[str, Callable[[NeuronModelForCausalLM, Tensor, int], float]] = {
    "generate": by_generate,
    "engine": by_engine,
}


def table_of(found: dict[str, list[tuple[float, float]]], args: Namespace) -> list[dict[str, object]]:
    """Prints and returns medians over rounds, per token."""
    table = Table(f"{args.new_tokens} tokens of one row", ("path",), ("ms/token", "beside graphs, ms", "share"))
    results: list[dict[str, object]] = []
    for name, calls in found.items():
        token = 1e3 * statistics.median(spent for spent, _ in calls) / args.new_tokens
        beside = 1e3 * statistics.median(spent - runs for spent, runs in calls) / args.new_tokens
        share = statistics.median((spent - runs) / spent for spent, runs in calls)
        results.append({"path": name, "ms": token, "beside_ms": beside, "share": share})
        table.add_row(name, f"{token:.2f}", f"{beside:.2f}", f"{share:.1%}")
    console().print(table)
    return results


if __name__ == "__main__":
    sys.exit(main())
