# SPDX-License-Identifier: Apache-2.0
"""Runs NEFFs through neuronx-distributed's NxDModel: all ranks in this process (Inferentia2, Trainium1, Trainium2).

The model object is built from NEFF and MetaNeff; its own file format, a pickle that other versions cannot read, is not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compile.metaneff import build_metaneff
from ..compile.nxd import METANEFF_SUFFIX
from ..graph_io import COPY_SLOT, GraphIO
from ..sdk.runtime_errors import NeuronRuntimeError, starting, translated
from .load_plan import LoadPlan, slot_copy_inputs
from .rank_weights import read_rank_weights
from .state_parts import join_states, split_state


class NxDExecutable:
    """Loaded graphs of all ranks; see `Executable`.

    A state as `read_state` gives it is what all ranks hold, joined along the heads.
    """

    def __init__(self, plan: LoadPlan) -> None:
        with starting("neuronx_distributed"):
            from neuronx_distributed import NxDModel
            from neuronx_distributed.trace.nxd_model.base_nxd_model import StateInitializer
        self._plan = plan
        states = plan.states()
        shapes = {name: list(binding.shape) for name, binding in states.items()}
        dtypes = {name: getattr(torch, binding.dtype) for name, binding in states.items()}
        initializer = StateInitializer(shapes, dtypes, plan.world_size) if states else None
        self._model = NxDModel(plan.world_size, state_initializer=initializer)
        for name, io in plan.graphs.items():
            with translated(f"loading graph {name}"):
                self._add(name, io)
        with translated("loading the weights"):
            self._model.set_weights([_rank_weights(plan, rank) for rank in range(plan.world_size)])
            self._model.to_neuron()
        self._ended: NeuronRuntimeError | None = None
        # Per graph, which of a call's tensors it takes, and under which name.
        self._taken = {
            name: [(index, each) for index, each in enumerate(plan.call(name)) if each in io.names("input")]
            for name, io in plan.graphs.items()
        }

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """As `Executable.run`.

        Raises:
            NeuronRuntimeError: the device failed; where it cannot recover, all later calls raise the same.
        """
        if self._ended is not None:
            raise self._ended
        named = {name: inputs[index] for index, name in self._taken[graph]}
        try:
            with translated(f"graph {graph}"):
                outputs: Sequence[Tensor] = self._model(model_name=graph, **named)
                return outputs
        except NeuronRuntimeError as error:
            self._ended = None if error.recoverable else error
            raise

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        self.run(COPY_SLOT, slot_copy_inputs(source, destination, length))

    def read_state(self, name: str) -> Tensor:
        with translated(f"reading {name}"):
            parts = [self._model.read_from_neuron_buffer(name, rank) for rank in range(self._plan.world_size)]
        return join_states(parts)

    def write_state(self, name: str, tensor: Tensor) -> None:
        parts = split_state(tensor, self._plan.world_size)
        with translated(f"writing {name}"):
            for rank, part in enumerate(parts):
                self._model.write_to_neuron_buffer(part, name, rank)

    def _add(self, name: str, io: GraphIO) -> None:
        from neuronx_distributed.trace import model_builder_utils as artifacts

        neff = self._plan.neff(name)
        every = input_names(self._plan.graphs.values())
        examples = {
            each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype))
            for each in io.inputs
            if each.role == "input"
        }
        given = [each for each in every if each in examples]
        traced = artifacts.TraceArtifacts(
            hlo=None,
            metaneff=self._metaneff(name, io),
            flattener=_Reorder([given.index(each) for each in examples]),
            packer=list,
            weight_name_to_idx={},
            weight_names_to_skip=set(),
            provided_args=[artifacts.ProvidedArgInfo(each, False, examples[each]) for each in given],
            model_params=[artifacts.ModelParamInfo(each, False) for each in every],
        )
        self._model.add(name, traced, artifacts.CompilationArtifacts(str(neff)))

    def _metaneff(self, name: str, io: GraphIO) -> Any:
        """The description that the compilation left, or one made now for a NEFF that neuronx-cc made."""
        from torch_neuronx.proto import metaneff_pb2

        path = self._plan.folder / (name + METANEFF_SUFFIX)
        if not path.is_file():
            return build_metaneff(io, b"", metaneff_pb2)
        message = metaneff_pb2.MetaNeff()
        message.ParseFromString(path.read_bytes())
        return message


class _Reorder:
    """Puts a step's inputs, which NxDModel passes in the order of all graphs' inputs, into the graph's own order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.layout: Sequence[int] = tuple(order)
        self.exclude = None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [inputs[index] for index in self.layout]


def input_names(graphs: Iterable[GraphIO]) -> list[str]:
    """The inputs of all graphs by name, each once: NxDModel has one signature for all of them."""
    return list(dict.fromkeys(itertools.chain.from_iterable(io.names("input") for io in graphs)))


def _rank_weights(plan: LoadPlan, rank: int) -> Mapping[str, Tensor]:
    return {name: tensor for names, tensor in read_rank_weights(plan, rank) for name in names}
