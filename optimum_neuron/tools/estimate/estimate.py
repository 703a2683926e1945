# SPDX-License-Identifier: Apache-2.0
"""What a model needs and may reach on Neuron hardware, before anything is exported, compiled or rented.

Reads a config, never weights. Imports torch only once the sizes asked for make sense.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...artifact.artifact import MANIFEST_NAME, Artifact
from ...config import TARGETS_WITHOUT_FP8, NeuronConfig
from ...step.family import GraphFamily
from ...step.spec import graph_specs
from ...targets.neuron.sdk.devices import resolve_neuron_target
from ...targets.neuron.sdk.hardware import CHIPS, PARALLEL_SIZES, Chip, Instance, check_parallel_size, hosts_of
from .step_needs import Memory, memory
from .step_speed import Speed, speed


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...checkpoints.checkpoint import Checkpoint
    from ...step.features.codes.formats import WeightFormat
    from .core_sizes import CoreSizes
    from .model_sizes import ModelSizes

# What an artifact passes on to an estimate of it; without a size of one's own, also what followed from its sizes.
_INHERITED = (
    "batch_size",
    "sequence_length",
    "state_snapshots",
    "dtype",
    "kv_cache_dtype",
    "on_device_sampling",
    "output_logits",
    "prompt_logits",
    "quantization",
    "quantization_group_size",
    "quantization_zero_point",
    "quantization_exclude",
)
_FOLLOWING = (
    "kv_block_size",
    "kv_cache_tokens",
    "ctx_batch_size",
    "prefill_chunk_size",
    "prefill_chunk_buckets",
    "mixed_step",
)
_LENGTH_STEP = 1024
# Where the search for a length ends if the model names no limit.
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """A model on cores of one target, with the sizes asked for.

    Attributes:
        hbm: bytes of device memory of one core.
        largest_batch: the largest batch_size that fits at the asked sequence_length; 0 if none does.
        longest_sequence: the longest sequence_length that fits at the asked batch_size; 0 if none does.
        decode, prefill: one step of decode rows, and one of chunk rows.
        hosts: whose topology takes the tensor parallel size, smallest first.
    """

    config: NeuronConfig
    memory: Memory
    hbm: int
    largest_batch: int
    longest_sequence: int
    decode: Speed
    prefill: Speed
    hosts: tuple[Instance, ...]

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.hbm

    def copies(self, host: Instance) -> int:
        """Copies of the model that a host has cores for."""
        return host.cores // self.config.tensor_parallel_size


@dataclass(frozen=True)
class Report:
    """Estimates of one model, by target and tensor parallel size.

    Attributes:
        context_length: tokens in the cache when speeds are taken.
        notes: sentences about what was assumed or left out.
    """

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
) -> Report:
    """Estimates a model on several targets.

    Args:
        model: a Hub id, of which the config alone is downloaded, a folder with a config.json, a .gguf file or an artifact.
        options: of NeuronConfig, those that were given; target and tensor_parallel_size are not among them.
        targets: Neuron targets; "auto" is this machine's.
        tensor_parallel_size: default: all that the topology of a host takes and the model can be shared by.
        context_length: tokens in the cache when speeds are taken; default: the whole sequence_length.

    Raises:
        TypeError, ValueError: a size is out of range, a target is no Neuron device, or the model cannot be exported.
        FileNotFoundError: there is no such model.
    """
    options = _with_artifact(Path(model).expanduser(), options)
    targets, without = _with_types(dict.fromkeys(resolve_neuron_target(target) for target in targets), options)
    # Wrong sizes are refused before torch is imported.
    config = NeuronConfig.from_dict(
        options
        | {"target": targets[0], "tensor_parallel_size": 1 if tensor_parallel_size is None else tensor_parallel_size}
    )
    groups, notes = _groups(targets, tensor_parallel_size)
    context = config.sequence_length if context_length is None else context_length
    if not 1 <= context <= config.sequence_length:
        raise ValueError(
            f"context_length={context} must lie between 1 and sequence_length={config.sequence_length}; lower it, or raise "
            f"sequence_length"
        )
    from ...checkpoints.find import find_config
    from ...parity.inspect import check_kv_codes, check_snapshots

    found = find_config(model, revision=revision, token=token, trust_remote_code=trust_remote_code)
    sizes, assumed = measure_checkpoint(found, config)
    check_snapshots(sizes.model, sizes.spec, config)
    check_kv_codes(sizes.model, sizes.spec, config)
    estimates, refused = _estimates(sizes, options | {"dtype": sizes.dtype}, groups, context)
    return Report(model, sizes, context, estimates, (*assumed, *without, *notes, *refused))


def _with_types(targets: Iterable[str], options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Targets that have the types of weights, or all where none does; and why others are left out."""
    asked = list(targets)
    has_fp8 = "fp8" in (options.get("quantization"), options.get("kv_cache_dtype"))
    left = [target for target in asked if target in TARGETS_WITHOUT_FP8 and has_fp8]
    if len(left) == len(asked):
        return asked, []
    return [target for target in asked if target not in left], [f"{target} has no fp8." for target in left]


def _with_artifact(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    if not (path / MANIFEST_NAME).is_file():
        return dict(options)
    exported = Artifact.open(path, with_graphs=False).config.to_dict()
    names = _INHERITED if options.keys() - {"dtype"} else _INHERITED + _FOLLOWING
    return {name: exported[name] for name in names} | dict(options)


def _groups(targets: Sequence[str], size: int | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return groups of cores as options, and why targets are left out; ValueError: all are."""
    groups: list[dict[str, Any]] = []
    refused = []
    for target in targets:
        try:
            if size is not None:
                check_parallel_size(target, size)
        except ValueError as error:
            refused.append(error)
            continue
        sizes = PARALLEL_SIZES[target] if size is None else (size,)
        groups += [{"target": target, "tensor_parallel_size": cores} for cores in sizes]
    if not groups:
        raise refused[-1]
    return groups, [f"{error}." for error in refused]


def measure_checkpoint(checkpoint: Checkpoint, config: NeuronConfig) -> tuple[ModelSizes, list[str]]:
    """What a checkpoint's config describes, in the config's type and quantization, and sentences about what was assumed.

    Raises:
        ValueError: the model cannot be exported, or is not made for texts of this length.
    """
    from ...artifact.quantization import read_formats
    from ...checkpoints.quantize.quantize import formats_of
    from .model_sizes import measure

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

    return measure(
        model_config, checkpoint.source, dtype, trust_remote_code=checkpoint.trust_remote_code, formats=formats
    ), notes


def _estimates(
    sizes: ModelSizes, options: dict[str, Any], groups: list[dict[str, Any]], context: int
) -> tuple[tuple[Estimate, ...], list[str]]:
    """One for each group of cores that the model can be shared by; and why others are left out."""
    from .core_sizes import core_sizes

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
        estimate(shares[group["tensor_parallel_size"]], options | group, context, sizes.longest or _LONGEST)
        for group in groups
        if group["tensor_parallel_size"] in shares
    )
    notes = [f"{error}." for error in refused.values()]
    if sizes.heads and any(cores > 1 and share.heads == sum(sizes.heads) for cores, share in shares.items()):
        notes.append(
            "The model's tensor parallel plan leaves its attention whole: every core has all of its heads and their cache."
        )
    recurrences = sizes.spec.recurrences
    whole = [str(cores) for cores, share in shares.items() if cores > 1 and share.spec.recurrences == recurrences]
    if whole and recurrences:
        notes.append(
            f"On {', '.join(whole)} cores layers with recurrences are whole on every core, and so are the states that slots keep of them."
        )
    return found, notes


def estimate(sizes: CoreSizes, options: Mapping[str, Any], context: int, longest: int) -> Estimate:
    """What one target needs and reaches.

    Args:
        sizes: of one core, for the options' tensor_parallel_size.
        options: of a NeuronConfig, with a Neuron target and a dtype that is not "auto".
        context: tokens in the cache when speeds are taken.
        longest: the model's own limit of sequence_length.
    """
    config = NeuronConfig.from_dict(options)
    chip, cores = CHIPS[config.target], config.tensor_parallel_size
    family = GraphFamily(graph_specs(config))
    blocks = min(config.kv_blocks, config.batch_size * config.blocks_of(context))
    decode = family.select("token_generation", context, blocks=blocks)
    chunk = family.select("chunked_prefill", context, [config.prefill_chunk_size])
    return Estimate(
        config=config,
        memory=memory(sizes, config, chip),
        hbm=chip.core_hbm,
        largest_batch=_largest_batch(sizes, config, options, chip),
        longest_sequence=_longest_sequence(sizes, config, options, chip, longest),
        decode=speed(sizes, decode, chip, cores),
        prefill=speed(sizes, chunk, chip, cores),
        hosts=hosts_of(config.target, cores),
    )


def _fits(sizes: CoreSizes, options: Mapping[str, Any], chip: Chip) -> bool:
    return memory(sizes, NeuronConfig.from_dict(options), chip).total <= chip.core_hbm


def _largest_batch(sizes: CoreSizes, config: NeuronConfig, options: Mapping[str, Any], chip: Chip) -> int:
    """Rows at full length, of blocks too. The chunk size stays as it is, so that a larger batch never needs less."""
    asked = {**options, "prefill_chunk_size": config.prefill_chunk_size, "kv_cache_tokens": None}
    least = max(config.ctx_batch_size, 2 if options.get("mixed_step") else 1)
    batches = range(least, config.sequence_length - config.prompt_capacity + 1)
    return _last(batches, lambda batch: _fits(sizes, {**asked, "batch_size": batch}, chip))


def _longest_sequence(
    sizes: CoreSizes, config: NeuronConfig, options: Mapping[str, Any], chip: Chip, longest: int
) -> int:
    """Of the lengths below 1024, their multiples, and the asked one: among those, a longer one never has fewer graphs."""

    def fits(length: int) -> bool:
        changes: dict[str, Any] = {"sequence_length": length, "prefill_chunk_size": config.prefill_chunk_size}
        if config.kv_cache_tokens is not None:
            changes["kv_cache_tokens"] = max(length, config.kv_cache_tokens)
        if options.get("context_buckets") is not None:
            changes["context_buckets"] = (*(size for size in config.context_buckets[:-1] if size < length), length)
        return _fits(sizes, {**options, **changes}, chip)

    least = config.step_capacity
    if config.kv_block_size is not None:
        blocks = range(config.blocks_of(config.prefill_chunk_size), longest // config.kv_block_size + 1)
        found = config.kv_block_size * _last(blocks, lambda count: fits(count * (config.kv_block_size or 1)))
        return max(found, config.sequence_length) if fits(config.sequence_length) else found
    multiples = range(-(-least // _LENGTH_STEP) * _LENGTH_STEP, longest + 1, _LENGTH_STEP)
    found = _last([*range(least, min(_LENGTH_STEP, longest + 1)), *multiples], fits)
    return max(found, config.sequence_length) if fits(config.sequence_length) else found


def _last(values: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return the last of ascending values that fits, where all before it do; 0 if none does."""
    place = bisect_right(values, False, key=lambda value: not fits(value))
    return values[place - 1] if place else 0
