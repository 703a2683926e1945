# SPDX-License-Identifier: Apache-2.0
"""The executed part of a model: all of it where that is little work, else its first layers, with the artifact's own weights.

Layers of one kind (step/tracing/alike.py) are the same code at the same shapes. So the first ones of each kind are lowered
again, by the code that lowered the artifact's graphs, as a model of so many layers. Slots and columns are fewer too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedConfig

from ...artifact.quantization import read_formats, write_formats
from ...artifact.skeleton import empty_model, read_config
from ...artifact.weights import named_tensors
from ...config import SMALLEST_BLOCK, NeuronConfig
from ...step.model_spec import ModelSpec
from ...step.state_specs import state_specs
from ...step.tracing.alike import kinds_of_layers
from ...targets.neuron.graphs.state_graphs import snapshot_states
from .recording import RecordedStep


# Products of the linear layers; more would take longer than to lower the graphs.
LARGEST_WORK = 2e10
LARGEST_STATES = 1 << 28  # bytes
_FEWEST_LAYERS, _FEW_SLOTS, _FEW_COLUMNS, _SHORT_CHUNK, _FEW_SNAPSHOTS = 2, 4, 512, 128, 2


@dataclasses.dataclass(frozen=True)
class Trial:
    """A model that is executed.

    Attributes:
        folder: folder with its config.json.
        config: config of its graphs; they compute experts in the form of the artifact's, which follow `artifact_config`.
        layers: number of its layers, of `all_layers`.
    """

    folder: Path
    config: NeuronConfig
    artifact_config: NeuronConfig
    layers: int
    all_layers: int

    @property
    def is_whole(self) -> bool:
        """True where it is the artifact's own model, so that the artifact's own modules are executed."""
        return self.layers == self.all_layers


def choose_trial(
    folder: Path,
    config: NeuronConfig,
    spec: ModelSpec,
    steps: Sequence[RecordedStep],
    scratch: Path,
    *,
    trust_remote_code: bool,
) -> Trial:
    """Return the whole model, or one of fewer layers with a config.json in `scratch`.

    Args:
        folder: folder with the artifact's config.json.
        steps: steps of the whole model.
    """
    model = empty_model(folder, config.dtype, trust_remote_code=trust_remote_code)
    count = _count_layers(read_config(folder, trust_remote_code=trust_remote_code))
    parameters = sum(tensor.numel() for tensor in named_tensors(model).values())
    tokens = sum(len(step.written) for step in steps)
    states = (*state_specs(config, spec), *snapshot_states(config, spec))
    state_bytes = sum(4 * math.prod(each.shape) for each in states)
    whole = Trial(folder, config, config, count, count)
    if parameters * tokens <= LARGEST_WORK and state_bytes <= LARGEST_STATES:
        return whole
    kinds = [kind for kind in kinds_of_layers(model) if len(kind.layers) == count]
    covered = sum(len(kind.members) for kind in kinds) == count
    layers = max(_FEWEST_LAYERS, *(kind.members[0] + 1 for kind in kinds)) if covered else count
    if layers >= count:
        return whole
    small = smaller_config(config)
    write_trial(folder, layers, small.sequence_length, scratch, trust_remote_code=trust_remote_code)
    return Trial(scratch, small, config, layers, count)


def write_trial(folder: Path, layers: int, columns: int, scratch: Path, *, trust_remote_code: bool) -> None:
    """Write the config.json of a model of the first layers, the modeling code that it names, and its weights' formats.

    A window that is longer than the columns becomes one that is shorter, so that its edge is tried.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    count = _count_layers(config)
    text = cast(Any, config.get_text_config(decoder=True))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window >= columns:
        text.sliding_window = columns // 2
    config.save_pretrained(scratch)
    for path in folder.glob("*.py"):
        (scratch / path.name).write_bytes(path.read_bytes())
    formats = read_formats(folder)
    if formats:
        model = empty_model(scratch, "float32", trust_remote_code=trust_remote_code)
        names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
        write_formats({name: each for name, each in formats.items() if name in names}, scratch)


def _count_layers(config: PreTrainedConfig) -> int:
    return int(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0))


def smaller_config(config: NeuronConfig) -> NeuronConfig:
    """Return few slots, columns and tokens per chunk; every kind of graph stays, and so does an equal split of tokens."""
    ranks = config.tensor_parallel_size
    few = min(config.batch_size, max(_FEW_SLOTS, config.ctx_batch_size))
    slots = few + (config.batch_size - few) % ranks
    length = min(config.sequence_length, max(_FEW_COLUMNS, 2 * slots))
    short = min(config.prefill_chunk_size, _SHORT_CHUNK, (length - slots) // config.ctx_batch_size)
    chunk = short - (short - config.prefill_chunk_size) % ranks
    return dataclasses.replace(
        config,
        batch_size=slots,
        sequence_length=length,
        prefill_chunk_size=chunk if chunk > 0 else short,
        prefill_chunk_buckets=(),
        context_buckets=(length,),
        kv_block_size=None if config.kv_block_size is None else SMALLEST_BLOCK,
        kv_cache_tokens=None,
        state_snapshots=min(config.snapshot_places, _FEW_SNAPSHOTS),
        state_snapshot_interval=None,
    )
