# SPDX-License-Identifier: Apache-2.0
"""Files that an artifact takes over from its checkpoint: config, defaults of generation, tokenizer and trusted code."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .checkpoint import Adapter
from .checkpoint_config import CheckpointConfig
from .files import copy_files, describes_another, read_generation_config, replace_tokenizer, write_config
from .gguf.keys import sampling_of
from .tokenizer import check_tokenizer, save_tokenizer


def check_verbatim(checkpoint: CheckpointConfig, adapters: Sequence[Adapter] = ()) -> GenerationConfig:
    """Read the files that `write_verbatim` will write, and return the defaults of generation.

    Raises:
        ValueError: the generation config or the tokenizer cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if checkpoint.gguf_file is not None:
            _write_described(checkpoint, checkpoint.load_config(), folder)
        else:
            copy_files(checkpoint.folder, folder, with_code=checkpoint.trust_remote_code)
        for adapter in adapters:
            replace_tokenizer(adapter.folder, folder)
        check_tokenizer(folder, checkpoint.source, trust_remote_code=checkpoint.trust_remote_code)
        found = read_generation_config(folder, checkpoint.source)
    return GenerationConfig.from_model_config(checkpoint.load_config()) if found is None else found


def write_verbatim(
    checkpoint: CheckpointConfig, model: PreTrainedModel, folder: Path, adapters: Sequence[Adapter] = ()
) -> None:
    """Copy config, generation config and tokenizer into a folder; transformers writes those that describe another model."""
    if checkpoint.gguf_file is not None:
        write_config(model, folder)
        _write_described(checkpoint, model.config, folder)
    else:
        copy_files(checkpoint.folder, folder, with_code=checkpoint.trust_remote_code)
        if adapters or describes_another(folder, model):
            write_config(model, folder)
    for adapter in adapters:
        replace_tokenizer(adapter.folder, folder)


def write_config_alone(checkpoint: CheckpointConfig, folder: Path) -> None:
    """Write the files of `write_verbatim` into a folder without reading weights; raise ValueError for an unusable config."""
    copy_files(checkpoint.folder, folder, with_code=checkpoint.trust_remote_code)
    if describes_another(folder, checkpoint.empty_model):
        write_config(checkpoint.empty_model, folder)


def _write_described(checkpoint: CheckpointConfig, config: PreTrainedConfig, folder: Path) -> None:
    """Write the defaults and the tokenizer that a GGUF file has apart from its model."""
    assert checkpoint.gguf is not None
    defaults = GenerationConfig.from_model_config(config)
    defaults.update(**sampling_of(checkpoint.gguf.values))
    defaults.save_pretrained(folder)
    if checkpoint.tokenizer is not None:
        save_tokenizer(checkpoint.tokenizer, folder)
