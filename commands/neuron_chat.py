# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron chat: a conversation with an artifact. What is computed of it, and how it is read, is elsewhere."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_neuron.chat.settings import Settings, add_settings_options
from optimum_neuron.cli import add_named_model, add_rank_options, explain, reported_errors


DESCRIPTION = '''\
Chat with an artifact, or with a checkpoint, which is exported into the cache on first use. The history stays in a slot of the
artifact's cache, so each turn computes only what is new in it: your message, and what differs from what the slot holds. The line
after each answer has the tokens that were computed and reused, time to the first token, speed, and the room that is left. Models
with recurrent state continue from snapshots of it.

Ctrl-C ends an answer, and what there is of it stays in the history. At an empty prompt Ctrl-C and Ctrl-D leave. A line that
ends with \\ continues on the next one, and """ begins and ends a message of several lines.

/help lists the commands: /clear, /system, /retry, /undo, /save, /load, /stats, /set and /exit.

Where stdin is no terminal, each line is a message or a command; answers go to stdout, all else to stderr, and what is wrong
with a line ends the chat with the exit code 1. Tokens are chosen as the checkpoint's generation_config.json says, else the most
probable one is taken each time.'''

EXAMPLES = """\
examples:
  optimum-cli neuron chat smollm2/
  optimum-cli neuron chat HuggingFaceTB/SmolLM2-135M-Instruct
  optimum-cli neuron chat smollm2/ --system "Answer in one sentence." --temperature 0.7 --seed 1
  printf 'Name three fruits.\\nAnd three vegetables?\\n/save fruits.json\\n' | optimum-cli neuron chat smollm2/
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

    def run(self) -> None:
        with reported_errors("\ninterrupted"):
            _chat(self.args)


def _chat(args: Namespace) -> None:
    from optimum_neuron.artifacts.artifact import is_graph_file
    from optimum_neuron.first_use import open_named

    # Before torch is imported: wrong options and folders are reported at once.
    settings = Settings.of(args)
    artifact = open_named(args)
    if sys.stdin.isatty():
        sys.stderr.write(f"loading {args.model} ...\n")  # the imports that follow take seconds

    from optimum_neuron.chat.commands import ALIASES, COMMANDS
    from optimum_neuron.chat.loop import chat
    from optimum_neuron.chat.session import ChatSession, check_template
    from optimum_neuron.chat.terminal import Terminal
    from optimum_neuron.checkpoints.tokenizer import load_tokenizer
    from optimum_neuron.modeling import NeuronModelForCausalLM

    start = time.perf_counter()
    # Before any code among the files runs, and the tokenizer before the model, which takes longer.
    artifact.verify(name for name in artifact.manifest["files"] if not is_graph_file(name))
    tokenizer = load_tokenizer(artifact.path, args.model, trust_remote_code=args.trust_remote_code)
    check_template(tokenizer)
    model = NeuronModelForCausalLM.from_pretrained(
        artifact.path,
        trust_remote_code=args.trust_remote_code,
        rank_python=args.rank_python,
        rank_timeout=args.rank_timeout,
    )
    with model.serve() as service:
        session = ChatSession(model, service, tokenizer, settings, args.system)
        terminal = Terminal([*COMMANDS, *ALIASES])
        if terminal.is_interactive:
            terminal.tell(
                f"{args.model} loaded in {time.perf_counter() - start:.1f} s; {model.neuron_config.sequence_length:,} tokens "
                f"fit; {session.kept}\n/help lists the commands, Ctrl-D leaves"
            )
        chat(session, terminal)
