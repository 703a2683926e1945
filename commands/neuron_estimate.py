# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron estimate: memory and speed of a model on Neuron hardware."""

from __future__ import annotations

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.register.neuron_options import (
    add_file,
    add_model_options,
    add_number,
    add_quantization_options,
    add_size_options,
    given_options,
    hub_options,
)

from optimum_neuron.cli import console, explain, reported_errors, write_json
from optimum_neuron.config import NEURON_TARGETS


DESCRIPTION = """\
Show the memory that a model needs on AWS Neuron hardware, and how fast it may be, before you export it or rent anything. It reads the
model's config alone, and needs no Neuron software or device.

Memory, per core: weights and KV cache to the byte, the largest need of a step for its activations, and a reserve for the code of each
graph. The KV cache has batch_size + 1 rows, the last one for padding; key/value heads are repeated where there are more cores than heads.
Speed: "at most" is a roofline: a decode step reads all weights and the cache once at full bandwidth, a chunk of a prompt takes its
arithmetic at full rate. The ranges follow published runs of other software; they hold four of five runs of models and groups of cores
that their constants were not fitted to. Prices are not known here: the first recommendation is the host with the least device memory
that holds the model.

Sizes mean the same as in optimum-cli export neuron. Without --tensor-parallel-size, all sizes that the topology of a host takes are
compared: cores that share one copy of the model. A core is a logical NeuronCore; trn2 and trn3 chips have four."""

EXAMPLES = """\
examples:
  optimum-cli neuron estimate --model meta-llama/Llama-3.1-8B --batch-size 32 --sequence-length 4096
  optimum-cli neuron estimate --model checkpoint/ --target trn2 --sequence-length 32768 --context-length 8000
  optimum-cli neuron estimate --model model.Q4_1.gguf --dtype bfloat16 --target inf2 trn1
  optimum-cli neuron estimate --model artifact/ --target trn2 --tensor-parallel-size 4 --json estimate.json

then:
  optimum-cli export neuron --model meta-llama/Llama-3.1-8B --target trn2 --tensor-parallel-size 4 artifact/
"""


class NeuronEstimateCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="estimate", help="Show which Neuron instances hold a model, and how fast it may be.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        add_model_options(parser.add_argument_group("model"), required=True)
        group = parser.add_argument_group("hardware")
        text = (
            "chips to compare: Inferentia2, Trainium1, Trainium2, Trainium3, or auto for this machine's (default: all)"
        )
        targets = ("auto", *NEURON_TARGETS)
        group.add_argument("--target", choices=targets, nargs="+", default=list(NEURON_TARGETS), help=text)
        text = "cores that share one copy of the model (default: compare all)"
        add_number(group, "--tensor-parallel-size", "CORES", text)
        group = parser.add_argument_group("sizes", "For an artifact, those that it has, unless given.")
        add_size_options(group)
        text = "tokens in the cache when speeds are taken, in the graph of the smallest context bucket that holds them"
        add_number(group, "--context-length", "TOKENS", f"{text} (default: the sequence length)")
        add_quantization_options(parser)
        group = parser.add_argument_group("files")
        add_file(group, "--json", "write everything, in bytes and seconds")

    @reported_errors()
    def run(self) -> None:
        args = self.args
        from optimum_neuron.tools.estimate.estimate import estimate_model
        from optimum_neuron.tools.estimate.report import print_report, to_json

        report = estimate_model(
            args.model,
            given_options(args),
            args.target,
            tensor_parallel_size=args.tensor_parallel_size,
            context_length=args.context_length,
            **hub_options(args),
        )
        print_report(report, console())
        if args.json is not None:
            write_json(args.json, to_json(report))
