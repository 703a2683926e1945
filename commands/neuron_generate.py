# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron generate: answers a prompt with an artifact."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import (
    add_named_model,
    add_profile_option,
    add_rank_options,
    print_profile,
    run_options,
)

from optimum_neuron.cli import add_option, console, explain, reported_errors
from optimum_neuron.tools.chat.settings import Settings, add_settings_options


if TYPE_CHECKING:
    from optimum_neuron.runtime.profile import Profile


DESCRIPTION = """\
Answer a prompt with an artifact, or with a checkpoint, which is exported into the cache on first use. The answer streams to
stdout; counts and speeds follow on stderr.
Without --prompt it is read from stdin. For more than one prompt, chat: optimum-cli neuron chat.
Tokens are chosen as the checkpoint's generation_config.json says, else the most probable one is taken each time."""

EXAMPLES = """\
examples:
  optimum-cli neuron generate smollm2/ --prompt "What is a prefill?"
  optimum-cli neuron generate HuggingFaceTB/SmolLM2-135M-Instruct --prompt "What is a prefill?"
  optimum-cli neuron generate smollm2/ --prompt "Tell a story." --temperature 0.7 --top-k 40 --seed 1
  optimum-cli neuron generate smollm2/ --no-chat-template --max-new-tokens 32 < prompt.txt
  optimum-cli neuron generate smollm2/ --prompt "What is a prefill?" --profile profile/
"""


class NeuronGenerateCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="generate", help="Answer a prompt with an artifact.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_named_model(parser)
        parser.add_argument("--prompt", metavar="TEXT", help="what to answer")
        parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
        add_settings_options(parser)
        add_rank_options(parser)
        add_profile_option(parser)
        add_option(parser, "--no-chat-template", action="store_true", help="continue the prompt as it is")
        text = "run each graph once before the prompt, so that the speeds are those of later prompts"
        add_option(parser, "--warm-up", action="store_true", help=text)

    @reported_errors("\ninterrupted")
    def run(self) -> None:
        args = self.args
        from optimum_neuron.export.first_use import open_named
        from optimum_neuron.runtime.profile import Profile

        # Before torch is imported: wrong options and folders are reported at once.
        options = Settings.from_args(args).generate_keywords()
        if args.prompt is None and sys.stdin.isatty():
            raise ValueError(
                f"there is no prompt; give one with --prompt or on stdin, or chat: optimum-cli neuron chat {args.model}"
            )
        path = open_named(args).path
        with nullcontext() if args.profile is None else Profile(args.profile) as profile:
            _answer(path, args, options, profile)
        print_profile(args.profile)


def _answer(path: Path, args: Namespace, options: dict[str, Any], profile: Profile | None) -> None:
    """Stream the answer to stdout, then write its counts and speeds to stderr."""
    from optimum_neuron.generate.text_model import TextModel

    start = time.perf_counter()
    with TextModel.from_pretrained(path, **run_options(args), profile=profile) as model:
        # Imports transformers where it has to apply an option: loading, and no part of the first token.
        model.make_requests(options)
        loaded = time.perf_counter()
        if args.warm_up:
            model.runner.warm_up()
        prompt = _read_prompt(args, has_template=model.tokenizer.chat_template is not None)
        began = time.perf_counter()
        answer = model.answer(prompt, max_new_tokens=args.max_new_tokens, seed=args.seed, **options)
        for piece in answer:
            print(piece, end="", flush=True)
        print()
    new_tokens, first, last = len(answer.times), answer.times[0], answer.times[-1]
    counts = {
        "load, s": f"{loaded - start:.2f}",
        "prompt tokens": str(answer.prompt_tokens),
        "TTFT, ms": f"{(first - began) * 1000:.1f}",
        "generated tokens": str(new_tokens),
        "decode, tok/s": f"{(new_tokens - 1) / (last - first):.1f}" if new_tokens > 1 else "-",
    }
    _print_counts(counts, model.runner.graph_calls)


def _read_prompt(args: Namespace, *, has_template: bool) -> str | list[dict[str, str]]:
    """Return the prompt as it is, or as messages for the chat template."""
    prompt = sys.stdin.read().strip() if args.prompt is None else args.prompt
    has_template = has_template and not args.no_chat_template
    if args.system is not None and not has_template:
        raise ValueError("--system needs a chat template: leave it out, or write it into the prompt")
    if not prompt:
        raise ValueError("the prompt is empty; give one with --prompt or on stdin")
    if not has_template:
        return prompt
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*messages, {"role": "user", "content": prompt}]


def _print_counts(counts: dict[str, str], graph_calls: dict[str, int]) -> None:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for row in counts.items():
        table.add_row(*row)
    table.add_section()
    for name, calls in sorted(graph_calls.items()):
        table.add_row(f"calls of {name}", str(calls))
    console(stderr=True).print(table)
