# SPDX-License-Identifier: Apache-2.0
"""Memory and speed of a model on Neuron hardware, from its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...artifact.artifact import MANIFEST_NAME, Artifact
from ...artifact.quantization import read_formats
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.find import find_checkpoint
from ...checkpoints.quantize.quantize import formats_of
from ...config import NeuronConfig
from ...parity.inspect import check_states
from ...step.family import GraphFamily
from ...step.features.codes.modules import WeightFormat
from ...step.features.recurrence.state import RecurrentState
from ...step.spec import graph_specs
from ...targets.neuron.sdk.devices import resolve_neuron_target
from ...targets.neuron.sdk.hardware import Instance, check_parallel_size, chip_of, hosts_of, parallel_sizes
from .core_sizes import CoreSizes, core_sizes
from .model_sizes import ModelSizes, measure_model
from .step_needs import CoreMemory, core_memory, largest_batch, longest_sequence
from .step_speed import Speed, graph_speed


# Options that an estimate takes from an artifact; where no size is given, also those that followed from its sizes.
_INHERITED = (
    "batch_size", "sequence_length", "state_snapshots", "dtype", "kv_cache_dtype", "on_device_sampling", "output_logits",
    "prompt_logits", "quantization", "quantization_group_size", "quantization_zero_point", "quantization_exclude",
)  # fmt: skip
_FOLLOWING = (
    "kv_block_size", "kv_cache_tokens", "ctx_batch_size", "prefill_chunk_size", "prefill_chunk_buckets", "mixed_step",
)  # fmt: skip
# Where the search for a length ends if the model names no limit.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """A model on cores of one target, with given sizes."""

    config: NeuronConfig
    memory: CoreMemory
    hbm: int  # bytes of device memory of one core
    largest_batch: int  # largest batch_size that fits with the sequence_length; 0 if none does
    longest_sequence: int  # longest sequence_length that fits with the batch_size; 0 if none does
    decode: Speed  # of a step of decode rows
    prefill: Speed  # of a step of chunk rows
    hosts: tuple[Instance, ...]  # for the tensor parallel size, smallest first

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.hbm

    def copies_on(self, host: Instance) -> int:
        return host.cores // self.config.tensor_parallel_size


@dataclass(frozen=True)
class EstimateReport:
    """Estimates of one model by target and tensor parallel size, at `context_length` tokens in the cache; notes are sentences."""

    model: str
    sizes: ModelSizes
    context_length: int
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...]


def estimate_model(
    model: str,
    options: Mapping[str, Any],
    targets: Sequence[str],
    *,
    tensor_parallel_size: int | None = None,
    context_length: int | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
) -> EstimateReport:
    """Estimate a model on several Neuron targets; "auto" is this machine's.

    Args:
        model: a Hub id, of which the config alone is downloaded, a folder with a config.json, a .gguf file or an artifact.
        options: given options of NeuronConfig, without target and tensor_parallel_size.
        tensor_parallel_size: default: all that a host's topology and the model allow.
        context_length: tokens in the cache when speeds are taken; default: the whole sequence_length.

    Raises:
        TypeError, ValueError: a size is out of range, a target is no Neuron device, or the model cannot be exported.
        FileNotFoundError: there is no such model.
    """
    path, given = Path(model).expanduser(), dict(options)
    if (path / MANIFEST_NAME).is_file():
        exported = Artifact.open(path, with_graphs=False).config.to_dict()
        names = _INHERITED if options.keys() - {"dtype"} else _INHERITED + _FOLLOWING
        given = {name: exported[name] for name in names} | given
    targets = list(dict.fromkeys(map(resolve_neuron_target, targets)))
    cores = 1 if tensor_parallel_size is None else tensor_parallel_size
    config = NeuronConfig.from_dict(given | {"target": targets[0], "tensor_parallel_size": cores})
    groups, notes = _core_groups(targets, tensor_parallel_size)
    context = config.sequence_length if context_length is None else context_length
    if not 1 <= context <= config.sequence_length:
        raise ValueError(
            f"context_length={context} must lie between 1 and sequence_length={config.sequence_length}; lower it, or raise "
            f"sequence_length"
        )
    found = find_checkpoint(model, revision=revision, token=token, trust_remote_code=trust_remote_code, weights=False)
    sizes, assumed = measure_checkpoint(found, config)
    check_states(sizes.model, sizes.spec, config)
    estimates, refused = _estimates(sizes, given | {"dtype": sizes.dtype}, groups, context)
    return EstimateReport(model, sizes, context, estimates, (*assumed, *notes, *refused))


def _core_groups(targets: Sequence[str], size: int | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return groups of cores as options, and the reasons to leave targets out; raise ValueError where all are."""
    groups: list[dict[str, Any]] = []
    refused = []
    for target in targets:
        try:
            if size is not None:
                check_parallel_size(target, size)
        except ValueError as error:
            refused.append(error)
            continue
        sizes = parallel_sizes(target) if size is None else (size,)
        groups += [{"target": target, "tensor_parallel_size": cores} for cores in sizes]
    if not groups:
        raise refused[-1]
    return groups, [f"{error}." for error in refused]


def measure_checkpoint(checkpoint: Checkpoint, config: NeuronConfig) -> tuple[ModelSizes, list[str]]:
    """Return a checkpoint's sizes in the config's type and quantization, and assumptions; raise ValueError where it cannot be exported."""
    model_config = checkpoint.load_config()
    checkpoint.check_length(model_config, config.sequence_length)
    notes = []
    dtype = checkpoint.resolve_dtype(model_config, config.dtype)
    if dtype is None:
        dtype = "float32"
        notes.append("The checkpoint names no dtype, so float32 is assumed; --dtype bfloat16 needs half of it.")

    def formats(model: PreTrainedModel) -> Mapping[str, WeightFormat]:
        kept = read_formats(checkpoint.folder) if config.quantization == "checkpoint" else {}
        return kept or formats_of(model, config)

    if config.quantization is None and checkpoint.is_quantized:
        notes.append(
            f"The checkpoint is quantized, and its weights are counted as plain {dtype}; an export that keeps its codes needs less: give "
            f"--quantization int8, int4 or fp8, whichever is most like them."
        )

    trusted = checkpoint.trust_remote_code
    return measure_model(model_config, checkpoint.source, dtype, trust_remote_code=trusted, formats=formats), notes


def _estimates(
    sizes: ModelSizes, options: dict[str, Any], groups: list[dict[str, Any]], context: int
) -> tuple[tuple[Estimate, ...], list[str]]:
    """Return one estimate for each group of cores that can share the model, and the reasons to leave others out."""
    shares: dict[int, CoreSizes] = {}
    has_codes = options.get("kv_cache_dtype") is not None
    refused: dict[int, ValueError] = {}
    for cores in sorted({group["tensor_parallel_size"] for group in groups}):
        try:
            shares[cores] = replace(core_sizes(sizes, cores), cache_has_codes=has_codes)
        except ValueError as error:
            refused[cores] = error
    if not shares:
        raise next(iter(refused.values()))
    found = tuple(
        estimate_target(shares[group["tensor_parallel_size"]], options | group, context, sizes.longest or _LONGEST)
        for group in groups
        if group["tensor_parallel_size"] in shares
    )
    notes = [f"{error}." for error in refused.values()]
    if sizes.heads and any(cores > 1 and share.heads == sum(sizes.heads) for cores, share in shares.items()):
        notes.append(
            "The model's tensor parallel plan leaves its attention whole: every core has all of its heads and their cache."
        )
    recurrences = sizes.spec.states_of(RecurrentState)
    alike = (cores for cores, share in shares.items() if share.spec.states_of(RecurrentState) == recurrences)
    whole = [str(cores) for cores in alike if cores > 1 and recurrences]
    if whole:
        notes.append(
            f"On {', '.join(whole)} cores layers with recurrences are whole on every core, and so are the states that slots keep of them."
        )
    return found, notes


def estimate_target(sizes: CoreSizes, options: Mapping[str, Any], context: int, longest: int) -> Estimate:
    """Estimate one target by a core's share for the options' tensor_parallel_size, with `context` tokens in the cache.

    The options of a NeuronConfig have a Neuron target and a dtype that is not "auto"; `longest` is the model's limit of sequence_length.
    """
    config = NeuronConfig.from_dict(options)
    chip, cores = chip_of(config.target), config.tensor_parallel_size
    family = GraphFamily(graph_specs(config))
    blocks = min(config.kv_blocks, config.batch_size * config.blocks_of(context))
    decode = family.select("token_generation", context, blocks=blocks)
    chunk = family.select("chunked_prefill", context, [config.prefill_chunk_size])
    return Estimate(
        config=config,
        memory=core_memory(sizes, config, chip),
        hbm=chip.core_hbm,
        largest_batch=largest_batch(sizes, config, options, chip),
        longest_sequence=longest_sequence(sizes, config, options, chip, longest),
        decode=graph_speed(sizes, decode, chip, cores),
        prefill=graph_speed(sizes, chunk, chip, cores),
        hosts=hosts_of(config.target, cores),
    )
