# SPDX-License-Identifier: Apache-2.0
"""A model with one layer of each kind: a decision about a layer holds for all that are alike."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ...targets.neuron.sharding.trace import data_free_copy, no_data


@dataclass(frozen=True)
class LayerKinds:
    """A model's short copy, and the layer of it that stands for each of the model's.

    Attributes:
        model: the copy, without data; or the model itself.
        path: path of the list of layers, in both.
        places: by layer of the model, the copy's layer of its kind.
    """

    model: PreTrainedModel
    path: str
    places: tuple[int, ...]

    def short_name(self, name: str) -> str:
        """Return the copy's name for a module or tensor of the model; `name` may begin outside of it."""
        before, separator, inside = name.partition(f"{self.path}.")
        place, dot, rest = inside.partition(".")
        return f"{before}{self.path}.{self.places[int(place)]}{dot}{rest}" if self.places and separator else name


def whole_model(model: PreTrainedModel) -> LayerKinds:
    return LayerKinds(model, "", ())


def one_of_each_kind(model: PreTrainedModel) -> LayerKinds:
    """Shorten a model with one list of layers. Layers are alike by modules, tensors and types in the config."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    with no_data():
        short = data_free_copy(model)
    found = [
        (name, each) for name, each in short.named_modules() if isinstance(each, nn.ModuleList) and len(each) == count
    ]
    if len(found) != 1:
        return whole_model(model)
    path, layers = found[0]
    config = short.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [None] * count
    kinds = [(types[place], _layer_kind(layer)) for place, layer in enumerate(layers)]
    distinct = list(dict.fromkeys(kinds))
    kept = [kinds.index(kind) for kind in distinct]
    parent, _, attribute = path.rpartition(".")
    setattr(short.get_submodule(parent), attribute, nn.ModuleList([layers[place] for place in kept]))
    config.num_hidden_layers = len(kept)
    if types[0] is not None and not isinstance(getattr(type(config), "layer_types", None), property):
        config.layer_types = [types[place] for place in kept]
    return LayerKinds(short, path, tuple(distinct.index(kind) for kind in kinds))


def _layer_kind(layer: nn.Module) -> tuple[object, ...]:
    modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return modules, tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
