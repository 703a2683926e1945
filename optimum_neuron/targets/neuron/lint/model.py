# SPDX-License-Identifier: Apache-2.0
"""A model's graphs before it is exported: lowered from its config alone, and written nowhere."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from ....artifact.quantization import write_formats
from ....artifact.skeleton import empty_model
from ....checkpoints.find import find_config
from ....checkpoints.quantize.quantize import formats_of
from ....config import NeuronConfig
from ..lowering.lower import LoweredGraph
from ..lowering.lower_all import lower_all
from ..lowering.requirements import check_lowering
from ..sdk.devices import resolve_lowered_target
from ..sdk.hardware import check_parallel_size


def model_graphs(
    model: str | Path,
    config: NeuronConfig,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
) -> Iterator[LoweredGraph]:
    """Yields all graphs that an export of a model would compile, as they are lowered.

    Args:
        model: a Hub id, of which the config alone is downloaded, a checkpoint folder, or a .gguf file.

    Raises:
        ValueError: the model or the sizes cannot be exported, or "auto" finds no Neuron device.
        FileNotFoundError: there is no such model.
        RuntimeError: this machine cannot lower graphs.
    """
    # Sizes follow from the target that "auto" stands for.
    config = dataclasses.replace(config, target=resolve_lowered_target(config.target))
    check_parallel_size(config.target, config.tensor_parallel_size)
    check_lowering()
    checkpoint = find_config(model, revision=revision, token=token, trust_remote_code=trust_remote_code)
    model_config = checkpoint.load_config()
    checkpoint.check_length(model_config, config.sequence_length)
    config = dataclasses.replace(config, dtype=checkpoint.resolve_dtype(model_config, config.dtype) or "float32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_config.save_pretrained(folder)
        if trust_remote_code:
            for path in checkpoint.folder.glob("*.py"):
                shutil.copyfile(path, folder / path.name)
        plain = empty_model(folder, config.dtype, trust_remote_code=trust_remote_code)
        write_formats(formats_of(cast(PreTrainedModel, plain), config), folder)
        yield from lower_all(folder, config, {}, trust_remote_code=trust_remote_code)
