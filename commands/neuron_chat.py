# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron chat: a conversation with an artifact."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_neuron.cli import explain, reported_errors
from optimum_neuron.command_options import add_named_model, add_rank_options, run_options
from optimum_neuron.tools.chat.settings import Settings, add_settings_options


DESCRIPTION = '''\
Chat with an artifact, or with a checkpoint, which is exported into the cache on first use. The history stays in the artifact's
cache, so each turn computes only what is new. A line after each answer counts the tokens that were computed and reused, and
gives the time to the first token, the speed, and the room that is left.

Ctrl-C ends an answer, which stays in the history as far as it came. Ctrl-D leaves.
""" stands before and after a message of several lines. /help lists the commands.

Where stdin is no terminal, each line is a message or a command. Answers go to stdout, all else to stderr, and a wrong line ends
the chat with the exit code 1. Tokens are chosen as the checkpoint's generation_config.json says, else the most probable one is
taken each time.'''

EXAMPLES = """\
examples:
  optimum-cli neuron chat smollm2/
  optimum-cli neuron chat HuggingFaceTB/SmolLM2-135M-Instruct
  optimum-cli neuron chat smollm2/ --system "Answer in one sentence." --temperature 0.7 --seed 1
  printf 'Name three fruits.\\nAnd three vegetables?\\n' | optimum-cli neuron chat smollm2/ > answers.txt
"""


class NeuronChatCommand(BaseOptimumCLICommand):
    """`optimum-cli neuron chat`."""

    COMMAND = CommandInfo(name="chat", help="Chat with an artifact; turns compute only what is new.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_named_model(parser)
        parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
        add_settings_options(parser)
        add_rank_options(parser)

    @reported_errors("\ninterrupted")
    def run(self) -> None:
        args = self.args
        settings = Settings.from_args(args)
        start = time.perf_counter()
        if sys.stdin.isatty():
            print(f"loading {args.model} ...", file=sys.stderr, flush=True)
        model, tokenizer = _load(args)

        from optimum_neuron.tools.chat.loop import Terminal, run_chat
        from optimum_neuron.tools.chat.session import ChatSession

        with model.serve() as service:
            session = ChatSession(model, service, tokenizer, settings, args.system)
            terminal = Terminal()
            if terminal.is_interactive:
                terminal.show_note(
                    f"{args.model} loaded in {time.perf_counter() - start:.1f} s; {model.neuron_config.sequence_length:,} tokens "
                    f"fit; {session.kept}\n/help lists the commands, Ctrl-D leaves"
                )
            run_chat(session, terminal)


def _load(args: Namespace) -> tuple[Any, Any]:
    """Return the model and its tokenizer; the imports take most of the time."""
    from optimum_neuron.export.first_use import open_named

    artifact = open_named(args)  # before torch is imported: a wrong name is reported at once

    from optimum_neuron.artifact.artifact import is_graph_file
    from optimum_neuron.checkpoints.tokenizer import load_tokenizer
    from optimum_neuron.generate import NeuronModelForCausalLM
    from optimum_neuron.tools.chat.session import check_template

    # Before any code among the files runs, and the tokenizer before the model, which takes longer.
    artifact.verify(name for name in artifact.manifest["files"] if not is_graph_file(name))
    tokenizer = load_tokenizer(artifact.path, args.model, trust_remote_code=args.trust_remote_code)
    check_template(tokenizer)
    return NeuronModelForCausalLM.from_pretrained(artifact.path, **run_options(args)), tokenizer
