# SPDX-License-Identifier: Apache-2.0
"""quantization.json: the quantized weights of an artifact's model and their formats. A model without any has no such file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import nn

from ..config import ACTIVATIONS
from ..step.features.codes.modules import WeightFormat, make_room
from ..step.features.codes.weight import CODE_DTYPES, SCALE_DTYPES
from .schema import choice, flag, named, read_object, record, whole


QUANTIZATION_NAME = "quantization.json"
_DOCUMENT = record(
    {
        "weights": named(
            record(
                {
                    "kind": choice(CODE_DTYPES),
                    "groups": whole(1),
                    "scale": choice([str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES]),
                    "has_shift": flag,
                },
                {"activations": choice(ACTIVATIONS)},
                closed=True,
            )
        )
    },
    closed=True,
)


def write_formats(formats: Mapping[str, WeightFormat], folder: Path) -> None:
    """Write the file if a model has quantized weights, given by name."""
    if formats:
        fields = {name: asdict(each).items() for name, each in formats.items()}
        given = {name: {key: value for key, value in pairs if value is not None} for name, pairs in fields.items()}
        (folder / QUANTIZATION_NAME).write_text(json.dumps({"weights": given}, indent=1) + "\n", encoding="utf-8")


def read_formats(folder: Path) -> Mapping[str, WeightFormat]:
    """Return the quantized weights of a folder's model by name; raise ValueError for another file."""
    path = folder / QUANTIZATION_NAME
    if not path.is_file():
        return {}
    try:
        document = read_object(path)
        _DOCUMENT("it", document)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; restore it or export the model again") from error
    return {name: WeightFormat(**each) for name, each in document["weights"].items()}


def make_room_for_weights(model: nn.Module, folder: Path) -> None:
    """Give a model without weights the quantized weights of a folder, to be filled; raise ValueError for another model's file."""
    formats = read_formats(folder)
    try:
        make_room(model, formats)
    except ValueError as error:
        raise ValueError(
            f"{folder / QUANTIZATION_NAME} does not fit config.json: {error}; restore them or export the model again"
        ) from error
