# SPDX-License-Identifier: Apache-2.0
"""Runs tasks of EleutherAI's lm-evaluation-harness on an artifact: its HFLM takes NeuronModelForCausalLM as it takes any model.

Tasks that compare answers score the tokens of prompts, which takes an artifact that was exported with --prompt-logits; tasks
that generate take any. Requests are run as many at a time as the artifact has rows, and are cut to its sequence length.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from optimum_neuron.cli import add_option, reported_errors

from ..options import add_result_options, make_parser, positive
from ..output import Table, console, publish


EXAMPLES = """
examples:
  pip install lm_eval
  optimum-cli export neuron --model HuggingFaceTB/SmolLM2-135M-Instruct --prompt-logits --batch-size 4 smollm2/
  python -m benchmark.quality.harness smollm2/ --tasks arc_easy lambada_openai --limit 100
  python -m benchmark.quality.harness smollm2/ --tasks mine --include tasks/

A table and, as the last line, one JSON object go to stdout; progress and warnings to stderr. Tasks read their data from the Hub, unless
they name files of their own.
"""


def parse_arguments(arguments: list[str] | None = None) -> Namespace:
    """The options; needs no torch, so that --help is quick."""
    parser = make_parser("quality.harness", __doc__, EXAMPLES)
    parser.add_argument("artifact", type=Path, help="its folder")
    add_option(parser, "--tasks", nargs="+", metavar="TASK", required=True, help="names of the harness's tasks")
    add_option(parser, "--include", type=Path, metavar="FOLDER", default=None, help="with tasks of one's own, as YAML")
    add_option(
        parser, "--limit", type=positive, metavar="COUNT", default=None, help="examples of each task (default: all)"
    )
    add_option(
        parser,
        "--few-shot",
        type=int,
        metavar="COUNT",
        default=None,
        help="examples before each (default: the task's)",
    )
    add_result_options(parser.add_argument_group("files"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the tasks; returns the exit code."""
    args = parse_arguments(arguments)
    with reported_errors():
        found = evaluate(args)
        _print(found)
        publish(found, args.json)
    return 0


def evaluate(args: Namespace) -> dict[str, Any]:
    """The harness's results by task.

    Raises:
        ModuleNotFoundError: there is no lm_eval.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing, which the harness needs: pip install lm_eval") from error
    from optimum_neuron.generate import NeuronModelForCausalLM

    model = NeuronModelForCausalLM.from_pretrained(args.artifact)
    sizes = model.neuron_config
    lm = HFLM(
        pretrained=model,
        tokenizer=str(args.artifact),
        batch_size=sizes.batch_size,
        max_length=sizes.sequence_length,
    )
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=args.tasks,
        num_fewshot=args.few_shot,
        limit=args.limit,
        task_manager=TaskManager(include_path=None if args.include is None else str(args.include)),
        bootstrap_iters=0,
    )
    return {
        "artifact": str(args.artifact),
        "lm_eval": lm_eval.__version__,
        "results": {task: dict(values) for task, values in results["results"].items()},
    }


def _print(found: dict[str, Any]) -> None:
    table = Table(found["artifact"], ["task", "figure"], ["value"])
    for task, values in found["results"].items():
        for name, value in values.items():
            if isinstance(value, float):
                table.add_row(task, name, f"{value:.4f}")
    console().print(table)


if __name__ == "__main__":
    sys.exit(main())
