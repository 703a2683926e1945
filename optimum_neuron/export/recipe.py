# SPDX-License-Identifier: Apache-2.0
"""export_model: from a checkpoint to an artifact. It checks everything it can before it writes anything."""

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
from ..artifact.filesystem import check_disk, explained_full_disk
from ..artifact.manifest import describe_graph
from ..artifact.quantization import write_formats
from ..artifact.weights import check_memory, named_tensors, untie
from ..artifact.writer import check_output, write_artifact, write_signpost
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.find import find_checkpoint
from ..checkpoints.formats import DEQUANTIZE, KEEP
from ..checkpoints.hub import refuse_revision
from ..checkpoints.mapped import WritableWhereWritten, giving_back, scratch_folder, tensors_in_files
from ..checkpoints.origin import read_origin
from ..checkpoints.quantize.calibration import Calibration, read_calibration
from ..checkpoints.quantize.quantize import quantize, round_activations, settle_activations
from ..checkpoints.tokenizer import fit_tokenizer, has_tokenizer, load_tokenizer
from ..checkpoints.verbatim import check_verbatim, write_verbatim
from ..config import ACTIVATIONS, HLO_TARGETS, TASKS, ExportOptions, NeuronConfig, takes_options
from ..parity.inspect import check_fixed_shapes, check_states, inspect_model
from ..parity.text_length import check_tables, check_text_length, keep_frequencies, take_long_frequencies
from ..runtime import golden
from ..runtime.defaults import follow_defaults
from ..step.features.codes.modules import weight_formats
from ..step.model_spec import ModelSpec
from ..step.spec import graph_specs
from ..step.state_specs import kept_state_specs, state_specs
from ..targets import CompileJob, Target, get_target, resolve_target
from ..targets.threads import fit_threads
from ..text.tokenizer import write_record
from ..version import __version__
from .adapters import PeftAdapter, find_adapters


logger = logging.getLogger(__name__)

Certify = Callable[[PreTrainedModel, CompileJob], None]


@takes_options(ExportOptions)
def export_model(
    model: str | Path,
    output: str | Path,
    *,
    config: NeuronConfig | None = None,
    certify: Certify | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """Export a checkpoint of a causal language model to an artifact folder.

    Args:
        model: a Hub id, a checkpoint folder, a .gguf file, or `org/repo:file.gguf` for a file of a Hub repository.
        output: the folder to create.
        config: sizes and options of the graphs; default `NeuronConfig()`.
        certify: for the hlo and Neuron targets, a function of the model and its lowered graphs, called before the artifact is whole. It may
            write files into the job's folder, and raises where the graphs are wrong; such as `optimum_neuron.tools.certify.certify_export`.
        overwrite: replace an artifact that is already at `output`.
        options: fields of `ExportOptions`.

    Returns:
        The absolute path of the artifact.

    Raises:
        ValueError: the checkpoint or the options cannot be exported; the message names the values and the remedy.
        FileNotFoundError, FileExistsError: there is no such checkpoint; `output` is taken.
        OSError: the disk is full.
        RuntimeError: compiling failed, or there is no compiler, or an adapter was named and PEFT is not installed.
        TypeError: an option is unknown, or `certify` is no function.
    """
    reading = ExportOptions.from_dict(options)
    config, target = _choose_target(NeuronConfig() if config is None else config, certify)
    fit_threads()
    output = Path(output).expanduser().absolute()
    check_output(output, overwrite=overwrite)
    checkpoint, adapters = _find_sources(model, reading, config)
    with progress.stage("Reading the config and the tokenizer"):
        config = _fit_config(checkpoint, adapters, config)
        text = reading.quantization_calibration
        calibration = None if text is None else read_calibration(text, checkpoint, config)
    folder = next(parent for parent in output.parents if parent.is_dir())
    check_disk(folder, checkpoint.least_bytes(config.dtype, config.quantization))
    with scratch_folder(folder), explained_full_disk(folder, "name an output folder on another disk"):
        loaded, config = _load_model(checkpoint, adapters, config)
        with tensors_in_files():
            quantize(loaded, config, calibration)
        config = settle_activations(loaded, config, by_default=target.rounds_activations())
        spec = _check_model(loaded, config)
        # After the check: with activations that differ in a last bit, codes can be others.
        round_activations(loaded, config)
        check_disk(folder, sum(each.nbytes for each in untie(named_tensors(loaded))[0].values()))
        with write_artifact(output, overwrite=overwrite) as writer:
            with progress.stage("Writing the tokenizer and the weights"):
                write_verbatim(checkpoint, loaded, writer.path, [each.folder for each in adapters])
                fit_tokenizer(writer.path, config.sequence_length)
                _note_tokenizer(writer.path)
                write_formats(weight_formats(loaded), writer.path)
                write_signpost(writer.path)
                tied = target.write_model(loaded, config, writer.path)
            job = CompileJob(writer.path, config, spec, graph_specs(config), tied, checkpoint.trust_remote_code)
            target_data = target.compile(job)
            if config.target in HLO_TARGETS:
                with progress.stage("Recording golden tokens"):
                    golden.record(loaded, config, spec).write(writer.path)
            if certify is not None:
                certify(loaded, job)
            with progress.stage("Hashing files"):
                writer.commit(_describe(checkpoint, adapters, job, target_data, calibration))
    return output


def _fit_config(checkpoint: Checkpoint, adapters: Sequence[PeftAdapter], config: NeuronConfig) -> NeuronConfig:
    """Return the config with the defaults that follow from the checkpoint, once all its files but the weights are checked."""
    model_config = checkpoint.load_config()
    config = config.fitted(checkpoint.longest_text(model_config))
    checkpoint.check_length(model_config, config.sequence_length)
    defaults = check_verbatim(checkpoint, [each.folder for each in adapters])
    checkpoint.warn_of_unread_keys()
    return follow_defaults(defaults, model_config, config, checkpoint.source)


def _choose_target(config: NeuronConfig, certify: Certify | None) -> tuple[NeuronConfig, Target]:
    config = dataclasses.replace(config, target=resolve_target(config.target))
    target = get_target(config.target)
    target.check(config)
    if certify is not None and not callable(certify):
        raise TypeError(
            f"certify={certify!r} is no function; pass optimum_neuron.tools.certify.certify_export, or leave it out"
        )
    if certify is not None and config.target not in HLO_TARGETS:
        raise ValueError(
            f"target={config.target!r} has no graphs in HLO to certify, as {', '.join(HLO_TARGETS)} have; leave out --certify (certify)"
        )
    return config, target


def _find_sources(
    model: str | Path, reading: ExportOptions, config: NeuronConfig
) -> tuple[Checkpoint, tuple[PeftAdapter, ...]]:
    """Return a checkpoint, and the adapters that are merged into its weights."""
    if (Path(model).expanduser() / MANIFEST_NAME).is_file():
        refuse_revision(Path(model), reading.revision)
        raise ValueError(f"{model} is an artifact already; name the checkpoint that it was exported from")
    checkpoint = find_checkpoint(model, trust_remote_code=reading.trust_remote_code, **reading.hub)
    codes = _choose_codes(checkpoint, config, dequantize=reading.dequantize)
    hub = {name: value for name, value in reading.hub.items() if name != "revision"}
    return dataclasses.replace(checkpoint, codes=codes), find_adapters(reading.adapter, **hub)


def _load_model(
    checkpoint: Checkpoint, adapters: Sequence[PeftAdapter], config: NeuronConfig
) -> tuple[PreTrainedModel, NeuronConfig]:
    """Return the model, and the config with the type and the codes that it has."""
    with progress.stage("Loading the checkpoint"), tensors_in_files():
        for each in adapters:
            each.warn_of_other_base(checkpoint)
        loaded = checkpoint.load_model(config.dtype, [each.merge for each in adapters])
    config = dataclasses.replace(config, dtype=str(loaded.dtype).removeprefix("torch."))
    if config.quantization is None and weight_formats(loaded):
        config = dataclasses.replace(config, quantization="checkpoint")
    return loaded, config


def _check_model(model: PreTrainedModel, config: NeuronConfig) -> ModelSpec:
    """Return the spec of a model, once its step graphs compute what it does and its states fit into memory."""
    with progress.stage("Checking that step graphs compute what the model does"), giving_back():
        with WritableWhereWritten():
            spec = inspect_model(model)
        check_tables(model, config.sequence_length)
        if config.long_frequencies:
            take_long_frequencies(model, config.sequence_length)
        check_text_length(model, config.sequence_length)
        check_states(model, spec, config)
        keep_frequencies(model)
        if config.target != "eager":
            check_fixed_shapes(model, config.target)
    if config.target in ("cpu", "eager"):  # a device has memory of its own
        check_memory((*state_specs(config, spec), *kept_state_specs(config, spec)))
    return spec


def _choose_codes(checkpoint: Checkpoint, config: NeuronConfig, *, dequantize: bool) -> str | None:
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
            f"{checkpoint.source} is quantized, and --quantization {config.quantization} rounds its weights a second time: the artifact's "
            f"answers differ from the checkpoint's by more than either rounding; leave out --quantization and --dequantize to keep the "
            f"checkpoint's codes, or export the checkpoint before it was quantized"
        )
    is_plain = config.quantization is None and (dequantize or not checkpoint.is_quantized)
    if is_plain and config.activations in ACTIVATIONS:
        raise ValueError(
            f"activations={config.activations!r} meets weights of int8 or int4, and {checkpoint.source} is exported with plain ones; give "
            f"--quantization int8 (quantization='int8') as well, or leave activations out"
        )
    return KEEP if keep else DEQUANTIZE if dequantize else None


def _note_tokenizer(folder: Path) -> None:
    """Note the tokenizer of an artifact, where transformers can build it without the checkpoint's code."""
    if not has_tokenizer(folder):
        return
    try:
        tokenizer = load_tokenizer(folder, str(folder), trust_remote_code=False)
    except ValueError:  # taken over unread, of which the checks have warned
        return
    write_record(tokenizer, folder)


def _describe(
    checkpoint: Checkpoint,
    adapters: Sequence[PeftAdapter],
    job: CompileJob,
    target_data: dict[str, Any],
    calibration: Calibration | None,
) -> dict[str, Any]:
    """Return the manifest, but for the digests of files."""
    sha256 = None if calibration is None else calibration.sha256
    return {
        "config": job.config.to_dict(),
        "model": job.model.to_dict(),
        "source": checkpoint.source,
        "origin": read_origin(checkpoint.folder, dequantized=checkpoint.codes == DEQUANTIZE, calibration=sha256),
        "adapters": [adapter.record() for adapter in adapters],
        "target": job.config.target,
        "target_data": target_data,
        "task": TASKS[0],
        "tied_weights": job.tied_weights,
        "versions": {
            "optimum_neuron": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "graphs": {graph.name: describe_graph(graph, job.model) for graph in job.graphs},
    }
