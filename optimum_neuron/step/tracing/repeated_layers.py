# SPDX-License-Identifier: Apache-2.0
"""A trace of a few of the layers that are the same; the others become one node each, which program.py replaces.

The model's own code decides what each layer is given. A layer is left out only where it is given the same objects as the layers before,
but for the one tensor that each makes of the last one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..serving import WatchedIndex
from .alike import LayerKind, kinds_of_layers


NAMESPACE = "optimum_neuron_layers"
# The first layer of a kind may compute what all share, and stays apart; so many of the next are traced and compared.
COMPARED = 2

_library = torch.library.Library(NAMESPACE, "DEF")
for _name in ("begin", "end", "repeated"):
    _library.define(f"{_name}(Tensor x, int number) -> Tensor")
    torch.library.register_fake(
        f"{NAMESPACE}::{_name}",
        lambda x, number: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device),
        lib=_library,
    )
operators = getattr(torch.ops, NAMESPACE)


@dataclass(eq=False)
class Template:
    """Layers of a kind in one trace.

    Attributes:
        traced: the layers with all nodes between their `begin` and `end`; `expand_layers` compares them.
        given, returned: what the last layer was given, and the last traced one returned, flat, and its structure; the place of the tensor.
        carried: the place in `given` of the tensor that each layer makes; None until two layers were seen.
        varies: layers return something else than one tensor of the carried one's form, so that all are traced.
    """

    kind: LayerKind
    traced: list[int] = field(default_factory=list)
    given: tuple[list[Any], Any] | None = None
    carried: int | None = None
    returned: tuple[list[Any], Any, int] | None = None
    varies: bool = False

    def carries_on(self, leaves: list[Any], structure: Any) -> bool:
        """Return whether a layer is given what the one before was given, but for one tensor, which is always the same one."""
        before, self.given = self.given, (leaves, structure)
        if before is None or before[1] != structure:
            return False
        pairs = zip(before[0], leaves, strict=True)
        others = [
            place
            for place, (one, other) in enumerate(pairs)
            if one is not other
            and not (type(one) is type(other) and isinstance(one, bool | int | float | str) and one == other)
        ]
        if len(others) != 1 or self.carried not in (None, others[0]):
            return False
        one, other = before[0][others[0]], leaves[others[0]]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or _form_of(one) != _form_of(other):
            return False
        self.carried = others[0]
        return True


@dataclass
class LayerTrace:
    """The layers of one trace: by the number that nodes have, a layer's template and its place in the list."""

    templates: list[Template]
    layers: list[tuple[Template, int]] = field(default_factory=list)
    _watched: list[WatchedIndex] = field(default_factory=list)
    _ran: list[nn.Module] = field(default_factory=list)

    @property
    def is_refused(self) -> bool:
        """Return whether a number was computed with, or a layer ran twice: then the trace cannot be used."""
        return len(set(self._ran)) < len(self._ran) or any(index.used for index in self._watched)

    def run_layer(
        self, template: Template, member: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._ran.append(template.kind.layers[member])
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if not template.carries_on(leaves, structure) or template.varies:
            return forward(*args, **kwargs)
        assert template.carried is not None
        x = leaves[template.carried]
        if len(template.traced) == COMPARED and template.returned is not None:
            returned, form, place = template.returned
            return _replace_leaf(returned, form, place, self._mark_layer("repeated", x, template, member))
        begun = self._mark_layer("begin", x, template, member)
        args, kwargs = _replace_leaf(leaves, structure, template.carried, begun)
        with self._watch_numbers(template.kind, member):
            output = forward(*args, **kwargs)
        returned, form = pytree.tree_flatten(output)
        places = [place for place, each in enumerate(returned) if each is not None]
        if len(places) != 1 or not isinstance(last := returned[places[0]], Tensor) or _form_of(last) != _form_of(x):
            template.varies = True
            return output
        template.traced.append(member)
        template.returned = returned, form, places[0]
        return _replace_leaf(returned, form, places[0], operators.end(last, len(self.layers) - 1))

    def _mark_layer(self, name: str, x: Tensor, template: Template, member: int) -> Tensor:
        self.layers.append((template, member))
        marked: Tensor = getattr(operators, name)(x, len(self.layers) - 1)
        return marked

    @contextmanager
    def _watch_numbers(self, kind: LayerKind, member: int) -> Iterator[None]:
        places = [(kind.layers[member].get_submodule(path), name) for path, name in kind.numbers]
        numbers = [(module, name, getattr(module, name)) for module, name in places]
        for module, name, number in numbers:
            self._watched.append(WatchedIndex(number))
            setattr(module, name, self._watched[-1])
        try:
            yield
        finally:
            for module, name, number in numbers:
                setattr(module, name, number)


@contextmanager
def few_layers(model: nn.Module) -> Iterator[LayerTrace]:
    """Compute only a few layers of each kind in one pass of the model within."""
    templates = [Template(kind) for kind in kinds_of_layers(model) if len(kind.members) > COMPARED + 1]
    trace = LayerTrace(templates)
    changed: list[nn.Module] = []
    for template in templates:
        for member in template.kind.members:
            layer = template.kind.layers[member]
            if "forward" not in vars(layer):
                changed.append(layer)
                layer.forward = partial(trace.run_layer, template, member, layer.forward)
    try:
        yield trace
    finally:
        for layer in changed:
            del layer.forward


def _replace_leaf(leaves: list[Any], structure: Any, place: int, leaf: Tensor) -> Any:
    return pytree.tree_unflatten([*leaves[:place], leaf, *leaves[place + 1 :]], structure)


def _form_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device
