# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron generate: answers a prompt with an artifact."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_neuron.cli import add_option, console, explain, reported_errors
from optimum_neuron.command_options import (
    add_named_model,
    add_profile_option,
    add_rank_options,
    print_profile,
    run_options,
)
from optimum_neuron.errors import first_line
from optimum_neuron.tools.chat.settings import DEFAULT_NEW_TOKENS, Settings, add_settings_options


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
    """`optimum-cli neuron generate`."""

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
        add_option(
            parser,
            "--warm-up",
            action="store_true",
            help="run each graph once before the prompt, so that the speeds are those of later prompts",
        )

    @reported_errors("\ninterrupted")
    def run(self) -> None:
        args = self.args
        from optimum_neuron.export.first_use import open_named
        from optimum_neuron.runtime.profile import profile_to

        # Before torch is imported: wrong options and folders are reported at once.
        options = {"max_new_tokens": args.max_new_tokens, **Settings.from_args(args).generate_keywords()}
        if args.prompt is None and sys.stdin.isatty():
            raise ValueError(
                f"there is no prompt; give one with --prompt or on stdin, or chat: optimum-cli neuron chat {args.model}"
            )
        path = open_named(args).path
        with profile_to(args.profile) as profile:
            _answer(path, args, options, profile)
        print_profile(args.profile)


def _answer(path: Path, args: Namespace, options: dict[str, Any], profile: Profile | None) -> None:
    """Stream the answer to stdout, then write its counts and speeds to stderr."""
    from transformers import TextStreamer, set_seed

    from optimum_neuron import NeuronModelForCausalLM
    from optimum_neuron.checkpoints.tokenizer import load_tokenizer

    start = time.perf_counter()
    # This verifies all files, before any code among them runs.
    model = NeuronModelForCausalLM.from_pretrained(path, **run_options(args), profile=profile)
    tokenizer = load_tokenizer(path, str(path), trust_remote_code=args.trust_remote_code)
    loaded = time.perf_counter()
    if args.warm_up:
        model.runner.warm_up()
    if args.seed is not None:
        set_seed(args.seed)
    inputs = _encode(tokenizer, args)
    prompt_tokens = inputs["input_ids"].shape[1]
    if options["max_new_tokens"] is None:
        options["max_new_tokens"] = _longest(model, prompt_tokens)
    clock = TokenClock(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    began = time.perf_counter()
    sequences = model.generate(**inputs, **options, streamer=clock)
    new_tokens = sequences.shape[1] - prompt_tokens
    first, last = clock.times[1], clock.times[-1]
    counts = {
        "load, s": f"{loaded - start:.2f}",
        "prompt tokens": str(prompt_tokens),
        "TTFT, ms": f"{(first - began) * 1000:.1f}",
        "generated tokens": str(new_tokens),
        "decode, tok/s": f"{(new_tokens - 1) / (last - first):.1f}" if new_tokens > 1 else "-",
    }
    _print_counts(counts, model.runner.graph_calls)


class TokenClock:
    """Passes tokens on to a streamer and notes when each came; the first ones are the prompt."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter())
        self.streamer.put(tokens)

    def end(self) -> None:
        self.streamer.end()


def _encode(tokenizer: Any, args: Namespace) -> dict[str, Any]:
    """Return the inputs of the model: the prompt in the chat template, or as it is."""
    prompt = sys.stdin.read().strip() if args.prompt is None else args.prompt
    has_template = tokenizer.chat_template is not None and not args.no_chat_template
    if args.system is not None and not has_template:
        raise ValueError("--system needs a chat template: leave it out, or write it into the prompt")
    if not prompt:
        raise ValueError("the prompt is empty; give one with --prompt or on stdin")
    for text in (prompt, args.system or ""):
        text.encode()  # an argument or a line may hold bytes that are no UTF-8, which no tokenizer takes
    if has_template:
        messages = [] if args.system is None else [{"role": "system", "content": args.system}]
        encoded = _render(tokenizer, [*messages, {"role": "user", "content": prompt}])
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    # Some tokenizers also return token_type_ids, which no decoder takes.
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # a template is a program
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path} fails ({first_line(error)}); correct it, or leave it out by "
            f"--no-chat-template"
        ) from error


def _longest(model: Any, prompt_tokens: int) -> int:
    """Return the length of the answer by default. A prompt that does not fit is for the model to refuse."""
    from optimum_neuron.runtime.lengths import most_new_tokens

    room = max(1, most_new_tokens(prompt_tokens, model.neuron_config))
    return min(model.new_tokens(model.settled(), prompt_tokens) or DEFAULT_NEW_TOKENS, room)


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
