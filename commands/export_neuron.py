# SPDX-License-Identifier: Apache-2.0
"""optimum-cli export neuron: options become a NeuronConfig, errors become one line. The export itself is elsewhere."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

from optimum_neuron.cli import add_option, console, explain, graph_table, reported_errors, size_list
from optimum_neuron.config import (
    ACTIVATIONS,
    DTYPES,
    KERNEL_TARGETS,
    KERNELS,
    KV_CACHE_DTYPES,
    MOST_LOGPROBS,
    TARGETS,
    NeuronConfig,
)
from optimum_neuron.option_checks import INT4_GROUP_SIZES, QUANTIZATIONS, dtype


TASKS = ("text-generation",)

DESCRIPTION = """\
Compile a causal language model once into a small family of fixed-shape graphs, and write them with the weights and the
tokenizer into a folder that NeuronModelForCausalLM.from_pretrained loads. Without --target the graphs are compiled for
this machine.

Every size is fixed here, for good: larger sizes serve more, and cost memory and time. The KV cache holds
batch_size * sequence_length tokens, or in blocks as many as kv_cache_tokens."""

EXAMPLES = """\
examples:
  optimum-cli export neuron --model HuggingFaceTB/SmolLM2-135M-Instruct smollm2/
  optimum-cli export neuron --model model.Q4_1.gguf --dtype bfloat16 --sequence-length 4096 smollm2/
  optimum-cli export neuron smollm2/ --model checkpoint/ --batch-size 8 --prefill-chunk-buckets 32,128
  optimum-cli export neuron smollm2/ --model checkpoint/ --batch-size 32 --kv-block-size 128 --kv-cache-tokens 16384
  optimum-cli export neuron smollm2/ --model HuggingFaceTB/SmolLM2-135M-Instruct --quantization int8
  optimum-cli export neuron smollm2/ --model HuggingFaceTB/SmolLM2-135M-Instruct --quantization int4 --activations int8
  optimum-cli export neuron smollm2/ --model HuggingFaceTB/SmolLM2-135M-Instruct --adapter my-lora/

then:
  optimum-cli neuron inspect smollm2/
  optimum-cli neuron generate smollm2/ --prompt "What is a prefill?"
"""


class NeuronExportCommand(BaseOptimumCLICommand):
    """`optimum-cli export neuron`."""

    COMMAND = CommandInfo(name="neuron", help="Export a causal language model to AWS Neuron or to the host CPU.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        explain(parser, DESCRIPTION, EXAMPLES)
        parser.add_argument("output", type=Path, help="folder to write; it must not exist, or be empty")
        _add_model_options(parser)
        add_graph_options(parser)

    def run(self) -> None:
        args = self.args
        with reported_errors("interrupted; nothing was written"):
            # Before torch is imported: a wrong size is reported at once.
            config = NeuronConfig.from_dict(config_options(vars(args)))
            from optimum_neuron.export import export_model

            start = time.perf_counter()
            path = export_model(
                args.model,
                args.output,
                config=config,
                task=args.task,
                revision=args.revision,
                token=args.token,
                trust_remote_code=args.trust_remote_code,
                adapter=args.adapter,
                dequantize=args.dequantize,
                quantization_calibration=args.quantization_calibration,
                certificate=args.certificate,
                overwrite=args.overwrite,
            )
            _print_summary(path, time.perf_counter() - start)
            print(path)


def _add_model_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", required=True, help="Hub id, checkpoint folder, or .gguf file")
    group.add_argument("--task", choices=TASKS, default=TASKS[0], help="what the model is for (default: %(default)s)")
    group.add_argument("--revision", help="branch, tag or commit of the Hub repository (default: its main branch)")
    group.add_argument("--token", help="Hub token, for gated and private models (default: the one that hf stored)")
    add_option(group, "--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")
    group.add_argument(
        "--adapter",
        action="append",
        metavar="ADAPTER",
        help="folder or Hub id of a PEFT adapter, as LoRA, to merge into the weights; give the option again to merge another "
        "one into the result",
    )
    group.add_argument(
        "--dequantize",
        action="store_true",
        help="export a quantized checkpoint's weights as plain numbers, or, with --quantization, round them anew (default: keep its codes)",
    )
    add_option(
        group,
        "--quantization-calibration",
        type=Path,
        metavar="FILE",
        help="with --quantization int4, a text in UTF-8 that the model reads once, some thousand tokens of any kind: weights are then nearest "
        "where their inputs are large, which is much more exact at the same size (default: weights are rounded by themselves)",
    )
    group.add_argument("--overwrite", action="store_true", help="replace the artifact that the output folder holds")
    group.add_argument(
        "--no-certificate",
        dest="certificate",
        action="store_false",
        help="of graphs for devices: do not execute them on this CPU beside the model; `neuron inspect --verify` then has nothing "
        "to repeat",
    )


def add_graph_options(parser: ArgumentParser) -> None:
    """Options that make a NeuronConfig; shared by the commands that tell of an export before it is done."""
    _add_size_options(parser)
    _add_sampling_options(parser)
    add_option(
        add_quantization_options(parser),
        "--activations",
        choices=ACTIVATIONS,
        help="round activations to int8, too, where they meet weights of int8 or int4: each token's by blocks of 64 inputs, with a scale each; "
        "less exact, for the host CPU (default: activations stay as they are)",
    )
    _add_target_options(parser)


def _add_size_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sizes", "Counted in tokens, except the two batch sizes.")
    add_option(
        group,
        "--batch-size",
        type=int,
        default=NeuronConfig.batch_size,
        metavar="ROWS",
        help="requests that are served at the same time: slots of the KV cache, rows of a decode step",
    )
    add_option(
        group,
        "--sequence-length",
        type=int,
        default=NeuronConfig.sequence_length,
        metavar="TOKENS",
        help="prompt and answer of one request together",
    )
    add_option(
        group,
        "--kv-block-size",
        type=int,
        metavar="TOKENS",
        help="make the KV cache of blocks of so many tokens, which requests take as they grow, so that more of them are served "
        "in the same memory; a power of two from 64 on, as 128 (default: a slot of --sequence-length for each row)",
    )
    add_option(
        group,
        "--kv-cache-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens that all requests together hold in blocks, at most; --batch-size then only counts rows, and may be larger "
        "than what fits at full length (default: --batch-size times --sequence-length)",
    )
    add_option(
        group,
        "--state-snapshots",
        type=int,
        metavar="COUNT",
        help="of a model with recurrences, short convolutions or compressed keys, copies of a slot's state that are kept, behind which "
        "prompts that start alike go on; each takes what one slot's state takes, and 0 turns this off (default: twice --batch-size; "
        "for Neuron 0, as they take device memory)",
    )
    add_option(
        group,
        "--state-snapshot-interval",
        type=int,
        metavar="TOKENS",
        help="tokens of a long prompt behind which its state is kept again, where a step ends anyway (default: it is kept only "
        "where the prompt ends, where its rest fits a step, and where it parts from others)",
    )
    add_option(
        group,
        "--prefill-chunk-size",
        type=int,
        default=NeuronConfig.prefill_chunk_size,
        metavar="TOKENS",
        help="prompt tokens that one step takes in; a longer prompt takes several steps (default: the largest power "
        "of two up to 512 that the other sizes allow)",
    )
    add_option(
        group,
        "--prefill-chunk-buckets",
        type=size_list,
        nargs="+",
        metavar="TOKENS",
        help="smaller chunk sizes, ascending, compiled as well so that a short prompt costs less, as in 32,128 or "
        "32 128 (default: none)",
    )
    add_option(
        group,
        "--ctx-batch-size",
        type=int,
        default=NeuronConfig.ctx_batch_size,
        metavar="ROWS",
        help="chunk rows of a step: short prompts that one step takes in together, or rows that a long one fills",
    )
    add_option(
        group,
        "--no-mixed-step",
        dest="mixed_step",
        action="store_false",
        default=NeuronConfig.mixed_step,
        help="compile no graphs that decode and take in a prompt in the same step: fewer graphs, but then prompts and "
        "decoding take turns (default: compile them if the batch size is above 1)",
    )
    add_option(
        group,
        "--context-buckets",
        type=size_list,
        nargs="+",
        metavar="TOKENS",
        help="cache lengths that attention reads, ascending, up to the sequence length: a short context then costs "
        "less (default: for Neuron the sequence length and its quarters down to 256; for the host the sequence length "
        "alone, because attention there stops at each token)",
    )


def _add_sampling_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling", "The graphs choose the next token themselves, unless told otherwise."
    )
    add_option(
        group,
        "--no-on-device-sampling",
        dest="on_device_sampling",
        action="store_false",
        default=NeuronConfig.on_device_sampling,
        help="return logits only; the host chooses the tokens",
    )
    add_option(
        group,
        "--output-logits",
        action="store_true",
        default=NeuronConfig.output_logits,
        help="return the logits of every row beside the tokens: for logits processors and scores (default: where the checkpoint's "
        "generation_config.json needs them)",
    )
    add_option(
        group,
        "--prompt-logits",
        action="store_true",
        default=NeuronConfig.prompt_logits,
        help="compile one more graph of each chunk size, which returns the logits of all tokens of a prompt: for model(input_ids), "
        "the loss of labels, and vLLM's prompt_logprobs. Only these run it, and pay: the head computes every token, and "
        "a chunk's logits take ctx-batch-size x chunk size x vocabulary x 4 bytes, twice on the host CPU",
    )
    add_option(
        group,
        "--top-logprobs",
        type=int,
        default=NeuronConfig.top_logprobs,
        metavar="COUNT",
        help=f"be able to tell the log-probability of each chosen token, and of the COUNT most likely ones, 0 to {MOST_LOGPROBS}: "
        "for vLLM's logprobs without logits on the host",
    )


def add_quantization_options(parser: ArgumentParser) -> Any:
    """Options of the form of weights; shared by the commands that ask what an export would make. Returns their group."""
    group = parser.add_argument_group(
        "quantization",
        "Weights, and keys and values, of fewer bits: decoding takes the time in which they are read.",
    )
    add_option(
        group,
        "--quantization",
        choices=QUANTIZATIONS,
        help="round the weights of linear layers: int8 and fp8 (e4m3) with a scale for each output, half of bfloat16's size; int4 with "
        "one for each group of inputs, somewhat more than a quarter; checkpoint keeps the codes of a quantized checkpoint (GGUF, GPTQ, AWQ, "
        "compressed-tensors, FP8, MXFP4) as they are (default: plain weights stay as they are, and so do codes)",
    )
    add_option(
        group,
        "--quantization-group-size",
        type=int,
        choices=INT4_GROUP_SIZES,
        metavar="INPUTS",
        help=f"inputs that share a scale in int4: {', '.join(map(str, INT4_GROUP_SIZES))}; fewer are more exact, and larger "
        f"(default: {INT4_GROUP_SIZES[0]})",
    )
    add_option(
        group,
        "--quantization-zero-point",
        action="store_true",
        help="in int4, spread the codes of a group between its least and its largest weight, and not around zero: more exact, and larger",
    )
    group.add_argument(
        "--quantization-exclude",
        action="append",
        metavar="PATTERN",
        help="linear layers that stay as they are, by name, as in 'model.layers.0.*'; give the option again for another pattern "
        "(default: routers, and what decides how fast a recurrence forgets or which keys are selected; in int4, the head is int8)",
    )
    add_option(
        group,
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="keep keys and values as codes of 8 bits, with a scale for each token and head: half of bfloat16's size, and four bytes for each "
        "scale (default: they are of the type of activations)",
    )
    return group


def _add_target_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    add_option(
        group,
        "--target",
        choices=TARGETS,
        default=NeuronConfig.target,
        help="where the graphs run: the host CPU, compiled (cpu) or not (eager, for debugging), or a Neuron instance "
        "type, whose graphs hlo runs on the CPU, to look at them; auto takes what this machine has",
    )
    add_option(
        group,
        "--dtype",
        type=dtype,
        choices=DTYPES,
        default=NeuronConfig.dtype,
        help="type of weights, activations and KV cache; auto is the checkpoint's",
    )
    add_option(
        group,
        "--tensor-parallel-size",
        type=int,
        default=NeuronConfig.tensor_parallel_size,
        metavar="DEVICES",
        help="cores that share one copy of the model, as many as a host connects: inf2 1, 2, 4, 8, 24; trn1 1, 2, 8, 16, 32; "
        "trn2 and trn3 1, 2, 4, 8, 16, 32, 64",
    )
    add_option(
        group,
        "--float32-reduce",
        action="store_true",
        help="have devices add their partial sums in float32: one rounding less per layer, twice the bytes between devices",
    )
    add_option(
        group,
        "--long-frequencies",
        action="store_true",
        help="of a LongRoPE model, give texts of every length the rotary frequencies of long ones, as vLLM does (default: those of "
        "short ones, which bound the sequence length)",
    )
    add_option(
        group,
        "--kernels",
        nargs="+",
        choices=KERNELS,
        metavar="NAME",
        help=f"kernels of the SDK that stand for operators, for {', '.join(KERNEL_TARGETS[1:])}: {', '.join(KERNELS)}: attention of "
        "prompts' chunks, attention of decode rows, and experts of few tokens; nobody has run one yet (default: none)",
    )


def config_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """What of a command's arguments is a NeuronConfig's."""
    options = {name: args[name] for name in NeuronConfig.option_names()}
    for name in ("prefill_chunk_buckets", "context_buckets", "kernels"):
        if options[name] is None:
            options.pop(name)
        elif name != "kernels":
            options[name] = tuple(size for sizes in options[name] for size in sizes)
    return options


def _print_summary(path: Path, seconds: float) -> None:
    from optimum_neuron.artifacts.artifact import Artifact

    artifact = Artifact.open(path)
    title = f"{len(artifact.graphs)} graphs for {artifact.target}, exported in {seconds:.1f} s"
    console(stderr=True).print(graph_table(artifact, title))


REGISTER_COMMANDS = [(NeuronExportCommand, ExportCommand)]
