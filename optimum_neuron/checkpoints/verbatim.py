# SPDX-License-Identifier: Apache-2.0
"""Files that an artifact takes over from its checkpoint: config, defaults of generation, tokenizer and trusted code."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..errors import first_line
from .checkpoint_config import CheckpointConfig
from .files import CODE_FILES, TOKENIZER_FILES, VERBATIM, matches, read_object
from .gguf.keys import sampling_of
from .tokenizer import check_tokenizer


_OTHERS = ("*.index.json", "neuron_config.json", "neuron_text.json", "neuron_tokenizer.json", "adapter_config.json")


def check_verbatim(checkpoint: CheckpointConfig, adapters: Sequence[Path] = ()) -> GenerationConfig:
    """Read the files that `write_verbatim` will write, and return the defaults of generation; raise ValueError for an unreadable one."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if checkpoint.gguf_file is not None:
            _write_described(checkpoint, checkpoint.load_config(), folder)
        else:
            _copy_files(checkpoint, folder)
        for adapter in adapters:
            _replace_tokenizer(adapter, folder)
        check_tokenizer(folder, checkpoint.source, trust_remote_code=checkpoint.trust_remote_code)
        if not (folder / "generation_config.json").is_file():
            return GenerationConfig.from_model_config(checkpoint.load_config())
        try:
            return GenerationConfig.from_pretrained(folder)
        except Exception as error:  # its code does not expect some values
            raise ValueError(
                f"{checkpoint.source}: its generation_config.json cannot be read ({first_line(error)}); correct or remove it"
            ) from error


def write_verbatim(
    checkpoint: CheckpointConfig, model: PreTrainedModel, folder: Path, adapters: Sequence[Path] = ()
) -> None:
    """Copy config, generation config and tokenizer into a folder, that of the last of the `adapters` with one; write what describes another model."""
    if checkpoint.gguf_file is not None:
        _write_config(model, folder)
        _write_described(checkpoint, model.config, folder)
    else:
        _copy_files(checkpoint, folder)
        if adapters or _describes_another(folder, model):
            _write_config(model, folder)
    for adapter in adapters:
        _replace_tokenizer(adapter, folder)


def write_config_alone(checkpoint: CheckpointConfig, folder: Path) -> None:
    """Write the files of `write_verbatim` into a folder without reading weights; raise ValueError for an unusable config."""
    _copy_files(checkpoint, folder)
    if _describes_another(folder, checkpoint.empty_model):
        _write_config(checkpoint.empty_model, folder)


def _write_described(checkpoint: CheckpointConfig, config: PreTrainedConfig, folder: Path) -> None:
    assert checkpoint.gguf is not None
    defaults = GenerationConfig.from_model_config(config)
    defaults.update(**sampling_of(checkpoint.gguf.values))
    defaults.save_pretrained(folder)
    try:
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise OSError(
            f"the tokenizer cannot be written to {folder} ({first_line(error)}); free some space or name another folder"
        ) from error


def _describes_another(folder: Path, model: PreTrainedModel) -> bool:
    """Return whether a folder's config.json belongs to another model than this one: a multimodal or quantized one."""
    document = read_object(folder / "config.json")
    return document.get("model_type") != model.config.model_type or bool(document.get("quantization_config"))


def _write_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's own config.json, and remove settings for images and sound."""
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    model.config.architectures = [type(model).__name__]  # GGUF has no word for it, and servers read it
    model.config.save_pretrained(folder)


def _replace_tokenizer(adapter: Path, folder: Path) -> None:
    """Take the tokenizer of an adapter that was trained with one of its own."""
    if any(matches(path.name, TOKENIZER_FILES) for path in adapter.iterdir()):
        for path in folder.iterdir():
            if matches(path.name, TOKENIZER_FILES):
                path.unlink()
        _copy_matches(adapter, folder, TOKENIZER_FILES)


def _copy_files(checkpoint: CheckpointConfig, folder: Path) -> None:
    code = CODE_FILES if checkpoint.trust_remote_code else ()
    _copy_matches(checkpoint.folder, folder, VERBATIM + code, _OTHERS)


def _copy_matches(source: Path, folder: Path, patterns: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if not matches(name, patterns) or matches(name, others):
            continue
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(
                f"{path} is a link to {os.readlink(path)}, which does not exist; download it again"
            )
        if path.is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
