# SPDX-License-Identifier: Apache-2.0
"""optimum-cli export neuron: the command that exports a checkpoint."""

from __future__ import annotations

import gc
import time
from argparse import ArgumentParser
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand
from optimum.commands.register.neuron_options import add_declared, add_graph_options, read_declared

from optimum_neuron import progress
from optimum_neuron.cli import console, explain, graph_table, reported_errors
from optimum_neuron.config import ExportOptions, NeuronConfig
from optimum_neuron.targets import get_target, resolve_target


DESCRIPTION = """\
Compile a causal language model once into a small family of fixed-shape graphs, and write them with the weights and the
tokenizer into a folder that NeuronModelForCausalLM.from_pretrained loads. Without --target the graphs are compiled for
this machine.

Every size is fixed here, for good: larger sizes serve more, and cost memory and time. The KV cache holds
batch_size * sequence_length tokens, or in blocks as many as kv_cache_tokens."""

EXAMPLES = """\
examples:
  optimum-cli export neuron --model HuggingFaceTB/SmolLM2-135M-Instruct smollm2/
  optimum-cli export neuron --model meta-llama/Llama-3.1-8B --target trn2 --tensor-parallel-size 8 --batch-size 8 llama/
  optimum-cli export neuron --model model.Q4_1.gguf --dtype bfloat16 --sequence-length 4096 smollm2/
  optimum-cli export neuron smollm2/ --model checkpoint/ --batch-size 8 --prefill-chunk-buckets 32,128
  optimum-cli export neuron smollm2/ --model checkpoint/ --batch-size 32 --kv-block-size 128 --kv-cache-tokens 16384
  optimum-cli export neuron smollm2/ --model HuggingFaceTB/SmolLM2-135M-Instruct --quantization int4 --activations int8
  optimum-cli export neuron smollm2/ --model HuggingFaceTB/SmolLM2-135M-Instruct --adapter my-lora/

then:
  optimum-cli neuron inspect smollm2/
  optimum-cli neuron generate smollm2/ --prompt "What is a prefill?"
"""


class NeuronExportCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="neuron", help="Export a causal language model to AWS Neuron or to the host CPU.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        parser.usage = "optimum-cli export neuron OUTPUT --model MODEL [options]"
        parser.add_argument("output", type=Path, help="folder to write; it must not exist, or be empty")
        basics = parser.add_argument_group("basic options")
        text = "Hub id, checkpoint folder, .gguf file, or org/repo:file.gguf"
        basics.add_argument("-m", "--model", required=True, help=text)
        devices = add_graph_options(parser, basics)
        checkpoint = parser.add_argument_group("checkpoint")
        add_declared(checkpoint, [each for each in ExportOptions.declared().values() if each.group == "checkpoint"])
        text = "replace the artifact that the output folder holds"
        basics.add_argument("--overwrite", action="store_true", help=text)
        text = "also run the devices' graphs on this CPU, compare with the model, and record it for `neuron inspect`"
        devices.add_argument("--certify", action="store_true", help=f"{text}; takes about as long as all else")

    @reported_errors("interrupted; nothing was written")
    def run(self) -> None:
        args = self.args
        # Before torch is imported: a wrong size is reported at once.
        config = NeuronConfig.from_dict(read_declared(args, NeuronConfig))
        start = time.perf_counter()
        with progress.importing():
            get_target(resolve_target(config.target)).prepare()
            from optimum_neuron.artifact.artifact import Artifact
            from optimum_neuron.export.recipe import export_model
            from optimum_neuron.tools.certify import certify_export
        gc.freeze()  # no collection walks what modules made

        path = export_model(
            args.model,
            args.output,
            config=config,
            **read_declared(args, ExportOptions),
            certify=certify_export if args.certify else None,
            overwrite=args.overwrite,
        )
        artifact = Artifact.open(path)
        title = f"{len(artifact.graphs)} graphs for {artifact.target}, exported in {time.perf_counter() - start:.1f} s"
        console(stderr=True).print(graph_table(artifact, title))
        print(path)


REGISTER_COMMANDS = [(NeuronExportCommand, ExportCommand)]
