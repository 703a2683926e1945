# SPDX-License-Identifier: Apache-2.0
"""A transformers model from an artifact's folder: its classes without memory, and tensors bound to them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..arrays import dtype_name
from ..checkpoints.language_model import register_language_model
from ..parity.inspect import look_at
from ..parity.text_length import keep_frequencies
from ..step.features.codes.modules import QuantizedEmbedding
from ..step.interface import ATTENTION_NAME, with_attention
from ..step.model_spec import ModelSpec
from .artifact import MANIFEST_NAME, Artifact
from .quantization import make_room_for_weights
from .schema import first_difference, shown
from .tensor_file import TensorLike
from .weights import named_tensors


GENERATION_CONFIG_NAME = "generation_config.json"
_LONGEST_REASON = 400


def read_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Return a folder's config.json; raise ValueError where transformers cannot read it."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # any class of transformers may read the file
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"{folder} brings the code of its model; pass trust_remote_code=True (--trust-remote-code) to run it"
            ) from error
        raise ValueError(
            f"{folder / 'config.json'} cannot be read: {_one_line(error)}; restore it or export the model again"
        ) from error
    return config


def read_generation_config(artifact: Artifact, config: PreTrainedConfig) -> GenerationConfig:
    """Return an artifact's defaults of generation; raise ValueError where transformers cannot read them."""
    if GENERATION_CONFIG_NAME not in artifact.manifest["files"]:
        return GenerationConfig.from_model_config(config)
    try:
        return GenerationConfig.from_pretrained(artifact.path)
    except Exception as error:  # any field may be wrong
        raise ValueError(
            f"{artifact.path / GENERATION_CONFIG_NAME} cannot be read: {_one_line(error)}; restore it or export the "
            f"model again"
        ) from error


def empty_model(folder: Path, dtype: str, *, trust_remote_code: bool, coded: bool = True) -> nn.Module:
    """Return the model of a folder's config.json without weights, to be filled by `assign`; if `coded`, with its quantized ones.

    Raises:
        ValueError: transformers cannot read the file or build the model, or its quantized layers belong to another model.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if not (trust_remote_code and hasattr(config, "auto_map")):
        register_language_model(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    try:
        with torch.device("meta"):
            model = with_attention(
                lambda name: AutoModelForCausalLM.from_config(config, attn_implementation=name, **options),
                ATTENTION_NAME,
            )
    except Exception as error:  # the sizes may reach any code of transformers
        raise ValueError(
            f"{folder / 'config.json'} describes no model: {_one_line(error)}; restore it or export the model again"
        ) from error
    keep_frequencies(model)
    # Some tensors stay in float32, as transformers loads them: for instance the correction of a router's scores.
    names = (re.escape(name).replace(r"\*", ".*") for name in model._get_dtype_plan(options["dtype"]))
    stays = re.compile("|".join(names) or "(?!)")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if stays.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()
    if coded:
        with torch.device("meta"):
            make_room_for_weights(model, folder)
    return model.eval().requires_grad_(False)


def model_for(artifact: Artifact, layout: Mapping[str, TensorLike], *, trust_remote_code: bool) -> nn.Module:
    """Return the model of an artifact without weights; raise ValueError where its config.json describes no such model.

    Each layer has a tensor of its own in `layout`, that of the file of weights: no model is built that has more.
    """
    config = read_config(artifact.path, trust_remote_code=trust_remote_code).get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(layout):
        raise ValueError(
            f"{artifact.path / 'config.json'} has num_hidden_layers={layers}, and the artifact's weights are "
            f"{len(layout)} tensors; export the model again"
        )
    return empty_model(artifact.path, artifact.config.dtype, trust_remote_code=trust_remote_code)


def check_tensors(model: nn.Module, tensors: Mapping[str, TensorLike], dtype: str) -> None:
    """Raise ValueError where a tensor of an artifact's model, as `weights.named_tensors` names it, is missing or another one.

    More may be in float32 than transformers keeps so, whatever the model's type is.
    """
    expected = named_tensors(model)
    found = {name: dtype_name(each.dtype) for name, each in tensors.items()}
    for name, member in expected.items():
        if name not in tensors:
            raise ValueError(f"the artifact's weights lack {name}; export the model again")
        shape, takes = tuple(tensors[name].shape), dtype_name(member.dtype)
        floats = member.is_floating_point() and found[name] in ("float32", dtype)
        if shape != tuple(member.shape) or not (found[name] == takes or floats):
            raise ValueError(
                f"the artifact's weights have {name} as {found[name]} {list(shape)}, and the model of its config.json takes "
                f"{takes} {list(member.shape)}; export the model again"
            )
    types = {found[name] for name, member in expected.items() if member.is_floating_point()}
    if types and dtype not in types:
        raise ValueError(
            f"{MANIFEST_NAME} says dtype={dtype!r}, and the artifact's weights are {', '.join(sorted(types))}; export the "
            f"model again"
        )


def check_spec(model: nn.Module, spec: ModelSpec) -> None:
    """Raise ValueError where a model keeps something else per slot than its manifest says, or has other logits or fewer tokens."""
    pretrained = cast(PreTrainedModel, model)
    # An artifact may take fewer ids than there are rows: a model may look them up in several tables.
    table = cast(nn.Embedding | QuantizedEmbedding, pretrained.get_input_embeddings())
    rows = table.num_embeddings if isinstance(table, QuantizedEmbedding) else table.weight.shape[0]
    taken = min(spec.num_embeddings, rows)
    without: dict[str, Any] = {"convolutions": [], "recurrences": [], "selections": [], "compressions": []}
    found = replace(look_at(pretrained), num_embeddings=taken)
    difference = first_difference(without | spec.to_dict(), without | found.to_dict())
    if difference is not None:
        field, said, has = difference
        raise ValueError(
            f"{MANIFEST_NAME} says {field}={shown(said)}, and the model of config.json has {shown(has)}; export "
            f"the model again"
        )


def assign(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Bind tensors, named as in `weights.named_tensors`, to a model's parameters and buffers without copying.

    Names that share a tensor share a parameter: torch.export then gives it one input.

    Raises ValueError if the model has a parameter or buffer that `tensors` lacks.
    """
    parameters: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for members in (module._parameters, module._buffers):
            for name, member in members.items():
                full = ".".join(part for part in ("model", prefix, name) if part)
                if member is None:
                    continue
                if full not in tensors:
                    raise ValueError(f"the artifact's weights lack {full}; export the model again")
                tensor = tensors[full]
                if isinstance(member, nn.Parameter):
                    members[name] = parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
                else:
                    members[name] = tensor


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, _LONGEST_REASON, placeholder=" …")
