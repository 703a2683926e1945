# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron chat: a conversation with an artifact."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import add_named_model, add_rank_options, run_options

from optimum_neuron.cli import explain, reported_errors
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
        from optimum_neuron.export.first_use import open_named
        from optimum_neuron.generate.text_model import TextModel
        from optimum_neuron.tools.chat.loop import Terminal, run_chat
        from optimum_neuron.tools.chat.session import ChatSession, check_template

        # A tokenizer without a chat template is refused before the graphs are loaded.
        path = open_named(args).path
        model = TextModel.from_pretrained(path, **run_options(args), check_tokenizer=check_template)
        with model.serve() as service:
            session = ChatSession(model, service, model.tokenizer, settings, args.system)
            terminal = Terminal()
            if terminal.is_interactive:
                terminal.show_note(
                    f"{args.model} loaded in {time.perf_counter() - start:.1f} s; {model.neuron_config.sequence_length:,} tokens "
                    f"fit; {session.kept}\n/help lists the commands, Ctrl-D leaves"
                )
            run_chat(session, terminal)
