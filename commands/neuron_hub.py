# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron card and push: an artifact's model card, and its upload to a repository of the Hub."""

from __future__ import annotations

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import add_artifact

from optimum_neuron.cli import add_option, explain, reported_errors


CARD = """\
Write the model card of an artifact, README.md, as the Hub reads it: how it was compiled, sizes, quantization, how to load and
serve it, and its speeds. Without measured ones it says so: neuron bench ARTIFACT --json ARTIFACT/bench.json writes those that neuron
card, inspect and push find.

Only --overwrite replaces a README.md that a person wrote or changed."""

PUSH = """\
Upload an artifact to a repository of the Hub, all in one commit, with its README.md or one that is made as neuron card does. The
repository and the branch are made where there are none. An interrupted push is completed by the next one."""


class NeuronCardCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="card", help="Write an artifact's model card.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, CARD, "example:\n  optimum-cli neuron card smollm2/\n")
        add_artifact(parser)
        _add_card_options(parser)
        parser.add_argument("--overwrite", action="store_true", help="replace a README.md that was written by hand")

    @reported_errors()
    def run(self) -> None:
        args = self.args
        from optimum_neuron.artifact.artifact import Artifact

        artifact = Artifact.open(args.artifact)
        from optimum_neuron.hub.card import write_card

        print(write_card(artifact, base_model=args.base_model, tags=args.tag, overwrite=args.overwrite))


class NeuronPushCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="push", help="Upload an artifact to a repository of the Hub, with its model card.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, PUSH, "example:\n  optimum-cli neuron push smollm2/ me/smollm2-neuron --private\n")
        add_artifact(parser)
        parser.add_argument("repo", metavar="REPO", help="repository, as org/name")
        parser.add_argument(
            "--private", action="store_true", default=None, help="make the repository private, where there is none"
        )
        parser.add_argument("--token", help="Hub token that may write (default: the one that hf stored)")
        parser.add_argument("--revision", help="branch (default: main)")
        add_option(parser, "--create-pr", action="store_true", help="open a pull request in place of a commit")
        parser.add_argument("--message", help="of the commit (default: Upload model)")
        _add_card_options(parser)

    @reported_errors("interrupted; what was uploaded is not uploaded again, so run the command again")
    def run(self) -> None:
        args = self.args
        from optimum_neuron.artifact.artifact import Artifact

        artifact = Artifact.open(args.artifact)
        from optimum_neuron.hub.push import push_artifact

        done = push_artifact(
            artifact,
            args.repo,
            private=args.private,
            token=args.token,
            revision=args.revision,
            create_pr=args.create_pr,
            commit_message=args.message,
            base_model=args.base_model,
            tags=args.tag,
        )
        print(done.pr_url or done.commit_url)


def _add_card_options(parser: ArgumentParser) -> None:
    text = "Hub id of the checkpoint, for the card (default: the repository that was exported, where it was one)"
    add_option(parser, "--base-model", metavar="MODEL", help=text)
    text = "of the card; give the option again for another one"
    parser.add_argument("--tag", action="append", metavar="TAG", help=text)
