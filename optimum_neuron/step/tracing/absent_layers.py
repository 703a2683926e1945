# SPDX-License-Identifier: Apache-2.0
"""Tensors of layers that a trace leaves out.

torch.export takes time for each tensor of a module, whether the graph reads it or not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from ..attention.kv_cache import KVCache
from .alike import NotAlikeError, belongs_to, make_renaming
from .repeated_layers import LayerTrace


@dataclass(frozen=True)
class _Absent:
    """A tensor of a layer that is left out.

    Attributes:
        like: the name of the same tensor of a layer that is traced.
    """

    tensor: Tensor
    role: InputKind
    like: str


class AbsentLayers:
    """The tensors of layers that a trace need not run.

    Args:
        module: a whole step module.
        cache: its states.
        trace: of its model; learns which layers are absent.

    Raises:
        NotAlikeError: it is open which tensors are a layer's.
    """

    def __init__(self, module: nn.Module, cache: KVCache, trace: LayerTrace) -> None:
        self._module, self._cache = module, cache
        parameters, buffers = (
            dict(tensors(remove_duplicate=False)) for tensors in (module.named_parameters, module.named_buffers)
        )
        named: dict[str, Tensor] = parameters | buffers
        self._order = {name: place for place, name in enumerate(named)}
        absent, present = dict[str, _Absent](), set[str]()
        for template in trace.templates:
            kind, first = template.kind, template.traceable[0]
            own = [name for name in named if belongs_to(kind, first, name)]
            for member in template.left_out:
                rename = make_renaming(kind, first, member)
                for name in own:
                    role = InputKind.PARAMETER if name in parameters else InputKind.BUFFER
                    absent[rename(name)] = _Absent(named[rename(name)], role, name)
            present |= {name for name in named for member in template.traceable if belongs_to(kind, member, name)}
            template.absent = frozenset(template.left_out)
        known = {id(named[name]) for name in named.keys() - absent.keys()}
        self._absent = {
            name: each for name, each in absent.items() if name not in present and id(each.tensor) not in known
        }

    @contextmanager
    def take_away(self) -> Iterator[None]:
        """Take them from the module within; a look-up of a state raises an error."""
        names = defaultdict[str, set[str]](set)
        for name in self._absent:
            path, _, own = name.rpartition(".")
            names[path].add(own)
        whole = []
        for path, own_names in names.items():
            part = self._module.get_submodule(path)
            for members in ("_parameters", "_buffers"):
                tensors = getattr(part, members)
                whole.append((part, members, tensors))
                setattr(part, members, {name: each for name, each in tensors.items() if name not in own_names})
        self._cache.away = names["kv_cache"]
        try:
            yield
        finally:
            self._cache.away = set()
            for part, members, tensors in whole:
                setattr(part, members, tensors)

    def restore_inputs(self, program: ExportedProgram) -> None:
        """Give a program that was traced while they were away their inputs, where a whole trace has them; `expand_layers` uses them.

        Raises:
            NotAlikeError: the program has other inputs than the module has tensors.
        """
        graph, signature = program.graph_module.graph, program.graph_signature
        nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        own = {spec.target: spec for spec in signature.input_specs if spec.target in self._order}
        if list(own) != sorted(own, key=lambda name: self._order[name or ""]):
            raise NotAlikeError
        persistent = self._module.state_dict(keep_vars=True).keys()
        following = defaultdict[str, list[InputSpec]](list)
        last = ""  # of each kind a layer that is traced comes first
        for name in self._order:
            if name in own:
                last, node = name, nodes[own[name].arg.name]
            elif name in self._absent:
                each = self._absent[name]
                with graph.inserting_after(node):
                    node = graph.placeholder(_placeholder_name(each.role, name))
                like = own[each.like]
                node.meta = dict(nodes[like.arg.name].meta)
                following[last].append(InputSpec(each.role, TensorArgument(node.name), name, like.persistent))
                (program.state_dict if name in persistent else program.constants)[name] = each.tensor
        signature.input_specs[:] = [
            each for spec in signature.input_specs for each in (spec, *following.pop(spec.target or "", ()))
        ]


def _placeholder_name(role: InputKind, name: str) -> str:
    """Return the name that torch.export gives."""
    return ("p_" if role is InputKind.PARAMETER else "b_") + re.sub(r"[^a-zA-Z0-9]+", "_", name).lower()
