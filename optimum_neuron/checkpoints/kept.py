# SPDX-License-Identifier: Apache-2.0
"""Codes of a quantized checkpoint, put in the place of a model's dequantized weights and compared with them."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .. import progress
from ..step.features.codes.modules import (
    can_be_looked_up,
    is_experts,
    plain_weights,
    replace_module,
    replace_weights,
)
from ..step.features.codes.weight import QuantizedWeight
from ..step.one_thread import one_thread
from .formats.format import CheckpointFormat
from .formats.stored import PLAIN_REMEDY, NotKeptError
from .mapped import in_file
from .read import ReadModel, read_model


logger = logging.getLogger(__name__)

# A layer of a checkpoint that has each expert's weights by themselves, as transformers' modules before they were joined.
_OF_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
# Parts of each parameter of a layer of experts, in order along the outputs.
_JOINED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w1",)),
    "down_proj": (("down_proj",), ("w2",)),
}


def read_dequantized(
    form: CheckpointFormat,
    source: str,
    attention: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    renamed: Mapping[str, str],
) -> ReadModel:
    """Return the model of a checkpoint that transformers does not dequantize, with plain tensors and dequantized ones in `dtype`.

    `renamed` has replacements in the names of tensors, by pattern. Raise ValueError where transformers cannot load it.
    """
    tensors: dict[str, Tensor] = {}
    with progress.stage("Dequantizing the checkpoint", len(form.layers)) as advance:
        for name in form.layers:
            tensors[name] = in_file(form.dequantize(name).to(dtype))
            advance(name)
    tensors |= {name: form.read_plain(name) for name in form.plain}
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ValueError(f"{source} is a {config.model_type} checkpoint, of which quantized weights are not read")
    options: dict[str, Any] = {"state_dict": tensors, "dtype": dtype, "key_mapping": dict(renamed)}
    return read_model(mapping[type(config)], None, source, attention, config, options)


def keep_codes(
    model: PreTrainedModel, form: CheckpointFormat, source: str, *, all_of_them: bool, without: frozenset[str]
) -> None:
    """Replace the linear layers and experts of a model by the checkpoint's codes of their weights, except names in `without`.

    A table of embeddings gets codes of int8 without a shift; a head that shares it gets any. Raise ValueError where codes belong to no layer, or
    stand for other numbers; NotKeptError where `all_of_them` are to be kept and one cannot: otherwise it stays plain, with a warning.
    """
    reasons: list[NotKeptError] | None = None if all_of_them else []
    modules = dict(model.named_modules())
    paths = {module: path for path, module in modules.items()}
    table = model.get_input_embeddings()
    of_experts: dict[str, dict[str, Callable[[], QuantizedWeight]]] = defaultdict(dict)
    layers = [name for name in form.layers if not without.intersection(_names_of(name))]
    with one_thread(), progress.stage("Keeping the checkpoint's codes", len(layers)) as advance:
        for name in _without_experts(form, layers, modules, of_experts):
            path = _module_path(name.removesuffix(".weight"), modules)
            module = modules[path]
            with _plain_unless_kept(reasons):
                if module is table:
                    weight = _compare_weight(source, name, form.read_codes(name), table.weight)
                    head = model.get_output_embeddings()
                    if isinstance(head, nn.Linear) and head.weight is table.weight:
                        replace_module(model, paths[head], weight)
                    if type(table) is nn.Embedding and can_be_looked_up(weight):
                        replace_module(model, path, weight)
                elif type(module) is nn.Linear:
                    replace_module(model, path, _compare_weight(source, name, form.read_codes(name), module.weight))
                else:
                    raise NotKeptError(
                        f"{source} has {name} as codes, and {type(model).__name__} has it in a {type(module).__name__}, which takes "
                        f"none; {PLAIN_REMEDY}"
                    )
            advance(name)
        for path, parts in of_experts.items():
            with _plain_unless_kept(reasons):
                _keep_experts(source, path, modules[path], parts)
            advance(path)
    if reasons:
        reason = str(reasons[0]).removesuffix(f"; {PLAIN_REMEDY}")
        logger.warning("%s: %d quantized weights are exported as plain numbers (%s)", source, len(reasons), reason)


@contextmanager
def _plain_unless_kept(reasons: list[NotKeptError] | None) -> Iterator[None]:
    """Collect the reasons why weights stay plain; without a list, such a weight is an error."""
    try:
        yield
    except NotKeptError as error:
        if reasons is None:
            raise
        reasons.append(error)


def _keep_experts(source: str, path: str, layer: Any, parts: Mapping[str, Callable[[], QuantizedWeight]]) -> None:
    plain = plain_weights(layer)
    if parts.keys() != plain.keys():
        lacking = ", ".join(sorted(plain.keys() - parts.keys()))
        raise NotKeptError(
            f"{source} has {', '.join(sorted(parts))} of {path} as codes, and not {lacking}; {PLAIN_REMEDY}"
        )
    kept = {}
    for own, read in parts.items():
        lying = plain[own].transpose(1, 2) if layer.is_transposed else plain[own]
        kept[own] = _compare_weight(source, f"{path}.{own}", read(), lying)
    replace_weights(layer, kept)


def _names_of(name: str) -> list[str]:
    """Return a weight's own name, and those of the parameters that an expert's weight is joined to."""
    match = _OF_ONE_EXPERT.fullmatch(name)
    return [name, *(f"{match[1]}.{own}" for own, parts in _JOINED.items() if match and match[3] in sum(parts, ()))]


def _without_experts(
    form: CheckpointFormat,
    layers: list[str],
    modules: Mapping[str, nn.Module],
    of_experts: dict[str, dict[str, Callable[[], QuantizedWeight]]],
) -> list[str]:
    """Return the names of linear layers; sort weights of experts by their module and parameter."""
    linear: list[str] = []
    apart: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in layers:
        layer, _, own = name.rpartition(".")
        found = _module_path(layer, modules, needed=False)
        match = _OF_ONE_EXPERT.fullmatch(name)
        joined = _module_path(match[1], modules, needed=False) if match else None
        if found is not None and is_experts(modules[found]):
            of_experts[found][own] = partial(form.read_codes, name)
        elif match and joined is not None and is_experts(modules[joined]):
            apart[joined][match[3]][int(match[2])] = name
        else:
            linear.append(name)
    for path, parts in apart.items():
        for own in plain_weights(modules[path]):
            names = next((each for each in _JOINED.get(own, ()) if set(each) <= parts.keys()), None)
            if names is not None:
                of_experts[path][own] = partial(_stack_experts, form, [parts[one] for one in names])
    return linear


def _stack_experts(form: CheckpointFormat, parts: list[dict[int, str]]) -> QuantizedWeight:
    """Return `[experts, outputs, inputs]` from the weights of each expert; several are joined along the outputs."""
    experts = [[form.read_codes(part[number]) for part in parts] for number in sorted(parts[0])]
    every = [each for expert in experts for each in expert]
    if len({(each.kind, each.scale.dtype, each.group_size, each.shift is None) for each in every}) != 1:
        raise NotKeptError(f"{parts[0][0]} and weights of other experts have codes of several forms; {PLAIN_REMEDY}")

    def join(part: str) -> Tensor:
        return torch.stack([torch.cat([getattr(each, part) for each in expert]) for expert in experts])

    first = experts[0][0]
    return QuantizedWeight(first.kind, join("codes"), join("scale"), None if first.shift is None else join("shift"))


def _module_path(name: str, modules: Mapping[str, nn.Module], *, needed: bool = True) -> Any:
    """Return the module of a checkpoint's name, which may have further parts before it, or lack the first one."""
    parts = name.split(".")
    candidates = [".".join(parts[start:]) for start in range(len(parts))]
    candidates += [f"model.{each}" for each in candidates]
    found = next((each for each in candidates if each in modules), None)
    if found is None and needed:
        raise ValueError(f"the checkpoint has codes of {name}, and the model no such layer; download it again")
    return found


def _compare_weight(source: str, name: str, weight: QuantizedWeight, plain: Tensor) -> QuantizedWeight:
    """Return the weight; raise ValueError where it stands for other numbers than the model loaded, but for their rounding."""
    near = torch.finfo(plain.dtype).eps if plain.dtype != torch.float32 else 0.0
    is_same = (*weight.codes.shape[:-1], weight.inputs) == tuple(plain.shape) and all(
        torch.allclose(part.dequantize(), plain[place].float(), rtol=near, atol=0) for place, part in weight.parts()
    )
    if not is_same:
        raise ValueError(
            f"{source}: the codes of {name} stand for other numbers than transformers loads; pass --dequantize to export its weights as "
            f"plain numbers, and report it"
        )
    return weight
