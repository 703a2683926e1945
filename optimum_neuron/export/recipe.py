# SPDX-License-Identifier: Apache-2.0
"""export_model: from a checkpoint to an artifact. Checks everything it can before it writes anything."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .. import progress
from ..artifact.artifact import MANIFEST_NAME
from ..artifact.disk_space import check_disk, expected_bytes, written_bytes
from ..artifact.filesystem import explained_full_disk
from ..artifact.manifest import describe_graph
from ..artifact.quantization import write_formats
from ..artifact.signpost import write_signpost
from ..artifact.weights import check_memory, named_tensors
from ..artifact.writer import check_output, write_artifact
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.find import find_checkpoint
from ..checkpoints.hub import refuse_revision
from ..checkpoints.quantize.activations import round_activations, settle_activations
from ..checkpoints.quantize.calibration import Calibration, read_calibration
from ..checkpoints.quantize.quantize import quantize
from ..checkpoints.quantized import DEQUANTIZE, KEEP
from ..checkpoints.scratch import giving_back, scratch_folder, tensors_in_files
from ..checkpoints.tokenizer import fit_tokenizer
from ..checkpoints.writable import WritableWhereWritten
from ..config import ACTIVATIONS, HLO_TARGETS, NeuronConfig
from ..parity.fixed_shapes import check_fixed_shapes
from ..parity.inspect import (
    check_blocks,
    check_compressions,
    check_kv_codes,
    check_selections,
    check_snapshots,
    inspect_model,
)
from ..parity.rope_length import check_text_length, keep_frequencies, take_long_frequencies
from ..parity.text_length import check_tables
from ..runtime import golden
from ..runtime.defaults import follow_defaults
from ..step.family import check_every_step_has_a_graph
from ..step.features.codes.formats import weight_formats
from ..step.model_spec import ModelSpec
from ..step.spec import GraphSpec, graph_specs
from ..step.state_specs import snapshot_specs, state_specs
from ..targets import CompileJob, Target, get_target, resolve_target
from ..targets.threads import fit_threads
from ..version import __version__
from .adapters import PeftAdapter, find_adapters
from .origin import origin_of


logger = logging.getLogger(__name__)

TASKS = ("text-generation",)


def export_model(
    model: str | Path,
    output: str | Path,
    *,
    config: NeuronConfig | None = None,
    task: str = "text-generation",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    adapter: str | Path | Sequence[str | Path] | None = None,
    dequantize: bool = False,
    quantization_calibration: str | Path | None = None,
    certify: Callable[[PreTrainedModel, CompileJob], None] | None = None,
    overwrite: bool = False,
) -> Path:
    """Exports a checkpoint of a causal language model to an artifact folder.

    Args:
        model: a Hub id, a checkpoint folder, or a .gguf file, which of a Hub repository is named as `org/repo:file.gguf`.
        output: the folder to create.
        config: sizes and options of the graphs; default `NeuronConfig()`.
        task: only "text-generation".
        revision, token, cache_dir, force_download, local_files_only: of a Hub repository, as in transformers.
        trust_remote_code: run modeling code that the checkpoint brings.
        adapter: a folder or Hub id of a PEFT adapter that is merged into the weights, in float32; or several, in turn.
            `revision` is not theirs.
        dequantize: export the weights of a quantized checkpoint as plain numbers; its codes are kept otherwise.
        quantization_calibration: a text in UTF-8 on which the model runs, so that weights of int4 are nearest where their inputs are large.
            Its digest alone goes to the artifact.
        certify: of the hlo and Neuron targets: called with the model and its lowered graphs before the artifact is whole; may write files
            into the job's folder, and raises where the graphs are wrong. `targets.neuron.certificate.certify_export` is one.
        overwrite: replace an artifact that is already at `output`.

    Returns:
        The absolute path of the artifact.

    Raises:
        ValueError: the checkpoint or the options cannot be exported; the message names the values and the remedy.
        FileNotFoundError: there is no such checkpoint.
        FileExistsError: `output` is taken.
        OSError: the disk is full.
        RuntimeError: compiling failed, or there is no compiler, or an adapter was named and PEFT is not installed.
        TypeError: `certify` is no function.
    """
    config = NeuronConfig() if config is None else config
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not supported; choose one of {', '.join(TASKS)}")
    config = dataclasses.replace(config, target=resolve_target(config.target))
    target = get_target(config.target)
    target.check(config)
    if certify is not None and not callable(certify):
        raise TypeError(
            f"certify={certify!r} is no function; pass targets.neuron.certificate.certify_export, or leave it out"
        )
    if certify is not None and config.target not in HLO_TARGETS:
        raise ValueError(
            f"target={config.target!r} has no graphs in HLO to certify, as {', '.join(HLO_TARGETS)} have; leave out --certify (certify)"
        )
    fit_threads()
    output = Path(output).expanduser().absolute()
    check_output(output, overwrite=overwrite)
    hub: dict[str, Any] = {
        "cache_dir": cache_dir,
        "force_download": force_download,
        "local_files_only": local_files_only,
    }
    if (Path(model).expanduser() / MANIFEST_NAME).is_file():
        refuse_revision(Path(model), revision)
        raise ValueError(f"{model} is an artifact already; name the checkpoint that it was exported from")
    checkpoint = find_checkpoint(
        model,
        revision=revision,
        token=token,
        trust_remote_code=trust_remote_code,
        **hub,
    )
    checkpoint = dataclasses.replace(checkpoint, codes=_what_of_codes(checkpoint, config, dequantize=dequantize))
    adapters = find_adapters(adapter, token=token, **hub)
    config = config.fitted(checkpoint.longest_text(checkpoint.load_config()))
    checkpoint.check_length(checkpoint.load_config(), config.sequence_length)
    defaults = checkpoint.check_verbatim(adapters)
    checkpoint.warn_of_unread_keys()
    config = follow_defaults(defaults, checkpoint.load_config(), config, checkpoint.source)
    calibration = (
        None if quantization_calibration is None else read_calibration(quantization_calibration, checkpoint, config)
    )
    folder = next(parent for parent in output.parents if parent.is_dir())
    check_disk(folder, expected_bytes(checkpoint, config))
    with scratch_folder(folder), explained_full_disk(folder, "name an output folder on another disk"):
        loaded, config = _load(checkpoint, adapters, config)
        graphs = graph_specs(config)
        check_every_step_has_a_graph(config, graphs)
        with tensors_in_files():
            quantize(loaded, config, calibration)
        config = settle_activations(loaded, config, by_default=target.rounds_activations())
        with progress.stage("Checking that step graphs compute what the model does"), giving_back():
            spec = _inspect(loaded, config)
        if config.target in ("cpu", "eager"):  # which run here, and a device has memory of its own
            check_memory((*state_specs(config, spec), *snapshot_specs(config, spec)))
        # Behind the check: of activations that differ in a last bit, codes can be others.
        round_activations(loaded, config)
        check_disk(folder, written_bytes(named_tensors(loaded)))
        return _write(
            checkpoint,
            adapters,
            loaded,
            config,
            spec,
            graphs,
            target,
            output,
            certify,
            overwrite,
            calibration,
        )


def _load(
    checkpoint: Checkpoint, adapters: Sequence[PeftAdapter], config: NeuronConfig
) -> tuple[PreTrainedModel, NeuronConfig]:
    """The model, and the config with the type and the codes that it has."""
    with progress.stage("Loading the checkpoint"), tensors_in_files():
        for each in adapters:
            each.warn_of_other_base(checkpoint)
        loaded = checkpoint.load_model(config.dtype, adapters)
    config = dataclasses.replace(config, dtype=str(loaded.dtype).removeprefix("torch."))
    if config.quantization is None and weight_formats(loaded):
        config = dataclasses.replace(config, quantization="checkpoint")
    return loaded, config


def _inspect(model: PreTrainedModel, config: NeuronConfig) -> ModelSpec:
    with WritableWhereWritten():
        spec = inspect_model(model)
    check_tables(model, config.sequence_length)
    if config.long_frequencies:
        take_long_frequencies(model, config.sequence_length)
    check_text_length(model, config.sequence_length)
    _warn_of_gathered_blocks(model, config, spec)
    _tell_of_selections(model, config, spec)
    check_compressions(model, spec, config)
    check_kv_codes(model, spec, config)
    check_snapshots(model, spec, config)
    keep_frequencies(model)
    if config.target != "eager":
        check_fixed_shapes(model, config.target)
    return spec


def _what_of_codes(checkpoint: Checkpoint, config: NeuronConfig, *, dequantize: bool) -> str | None:
    keep = config.quantization == "checkpoint"
    if keep and dequantize:
        raise ValueError(
            "quantization='checkpoint' keeps codes, and dequantize=True makes plain weights; leave out one of them"
        )
    if config.quantization is not None and not keep and checkpoint.is_quantized:
        if not dequantize:
            raise ValueError(
                f"{checkpoint.source} is quantized, and quantization={config.quantization!r} would round its weights once more; leave it "
                f"out to keep the checkpoint's codes, or pass --dequantize (dequantize=True) as well"
            )
        logger.warning(
            "%s is quantized, and --quantization %s rounds its weights a second time: the artifact's answers differ from the "
            "checkpoint's by more than either rounding; leave out --quantization and --dequantize to keep the checkpoint's codes, or "
            "export the checkpoint before it was quantized",
            checkpoint.source,
            config.quantization,
        )
    if (
        config.activations in ACTIVATIONS
        and config.quantization is None
        and (dequantize or not checkpoint.is_quantized)
    ):
        raise ValueError(
            f"activations={config.activations!r} meets weights of int8 or int4, and {checkpoint.source} is exported with plain ones; give "
            f"--quantization int8 (quantization='int8') as well, or leave activations out"
        )
    return KEEP if keep else DEQUANTIZE if dequantize else None


def _write(
    checkpoint: Checkpoint,
    adapters: Sequence[PeftAdapter],
    model: PreTrainedModel,
    config: NeuronConfig,
    spec: ModelSpec,
    graphs: tuple[GraphSpec, ...],
    target: Target,
    output: Path,
    certify: Callable[[PreTrainedModel, CompileJob], None] | None,
    overwrite: bool,
    calibration: Calibration | None,
) -> Path:
    with write_artifact(output, overwrite=overwrite) as writer:
        checkpoint.write_verbatim(model, writer.path, adapters)
        fit_tokenizer(writer.path, config.sequence_length)
        write_formats(weight_formats(model), writer.path)
        write_signpost(writer.path)
        with progress.stage("Writing weights"):
            tied = target.write_model(model, config, writer.path)
        job = CompileJob(writer.path, config, spec, graphs, tied, checkpoint.trust_remote_code)
        target_data = target.compile(job)
        if config.target in HLO_TARGETS:
            with progress.stage("Recording golden tokens"):
                golden.record(model, config, spec).write(writer.path)
        if certify is not None:
            certify(model, job)
        with progress.stage("Hashing files"):
            writer.commit(
                {
                    "config": config.to_dict(),
                    "model": spec.to_dict(),
                    "source": checkpoint.source,
                    "origin": origin_of(checkpoint, calibration),
                    "adapters": [adapter.record() for adapter in adapters],
                    "target": config.target,
                    "target_data": target_data,
                    "task": TASKS[0],
                    "tied_weights": tied,
                    "versions": _versions(),
                    "graphs": {graph.name: describe_graph(graph, spec) for graph in graphs},
                }
            )
    return output


def _warn_of_gathered_blocks(model: PreTrainedModel, config: NeuronConfig, spec: ModelSpec) -> None:
    if check_blocks(model, config):
        logger.warning(
            "%d layers of %s gather their blocks in each step: they attend by code of their own, over all %d rows of %d tokens, "
            "however few blocks these have; a smaller --batch-size makes steps shorter",
            len(spec.layers),
            type(model).__name__,
            config.batch_size,
            config.sequence_length,
        )


def _tell_of_selections(model: PreTrainedModel, config: NeuronConfig, spec: ModelSpec) -> None:
    without = check_selections(model, spec, config)
    if without:
        logger.warning(
            "%d layers of %s attend to all keys, and their selection is left out: they select %d, and no text has more than %d tokens",
            len(without),
            type(model).__name__,
            min(each.always for each in spec.selections if each.layer_idx in without),
            config.sequence_length,
        )


def _versions() -> dict[str, str]:
    return {"optimum_neuron": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
