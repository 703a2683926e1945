# SPDX-License-Identifier: Apache-2.0
"""Lowers step graphs to HLO on this machine's CPU, whatever the device they are for: torch-xla traces placeholders.

A graph is exported by torch.export, decomposed, and its nodes run one by one on torch-xla placeholders. Tracing the
transformers module itself would crash: its mask code reads values. No weight is read, so shapes are enough.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ....graphs import collectives
from ....graphs.kv_cache import KVCache
from ....graphs.ops import StepOps
from ....graphs.program import export_graph
from ....graphs.scores import Scores
from ....graphs.spec import GraphSpec, TensorSpec
from .. import sampler
from ..graph_io import CACHE, COPY_SLOT, NARROW, SAMPLERS, SCORES, GraphIO, InputBinding, OutputBinding, Role
from ..sharding import ShardPlan
from . import hlo, passes, weight_uses
from .decompositions import decompositions
from .sampler_graph import Sampler
from .slot_copy import SlotCopy


# That of torch-neuronx's own graphs, whose runtime counts on it.
_ROLE_ORDER: tuple[Role, ...] = ("input", "state", "weight")


@dataclass(frozen=True)
class LoweredGraph:
    """One graph as the compiler takes it: serialized HloModuleProto, and what its parameters and results are."""

    name: str
    kind: str
    hlo: bytes
    io: GraphIO


def lower_step(
    model: nn.Module,
    cache: KVCache,
    spec: GraphSpec,
    ops: StepOps,
    vocab_size: int,
    world_size: int = 1,
    columns: int | None = None,
) -> LoweredGraph:
    """Lowers one step graph.

    Args:
        model: with parameters of any contents, also uninitialized ones; with `world_size` above 1, one rank's shard.
        vocab_size: of the logits that the graph returns.
        columns: of the logits that it leaves for a sampler; None: as many.

    Raises:
        ValueError: the graph computes something that no HLO module of ours can express.
    """
    program = export_graph(model, cache, spec, ops, Scores.of(spec, columns or vocab_size))
    graph = lower_program(program, spec.name, spec.kind, spec.inputs(), spec.outputs(vocab_size), world_size)
    return replace(graph, io=replace(graph.io, spec=asdict(spec)))


def lower_slot_copy(states: Sequence[TensorSpec], world_size: int = 1) -> LoweredGraph:
    """Lowers the graph that copies cache columns from one slot to another on the device."""
    module = SlotCopy(KVCache(states)).eval()
    with torch.no_grad():
        program = torch.export.export(module, module.example_inputs(), strict=False)
    return lower_program(program, COPY_SLOT, COPY_SLOT, module.inputs(), (), world_size)


def lower_sampler(group: str, rows: int, columns: int, vocab_size: int, plan: ShardPlan | None = None) -> LoweredGraph:
    """Lowers the graph that draws the tokens of a group of rows, from so many columns of each on a rank."""
    module = Sampler(group, Scores([(group, rows)], columns), vocab_size, plan).eval()
    with torch.no_grad():
        program = torch.export.export(module, module.example_inputs(), strict=False)
    name, ranks = SAMPLERS[group], 1 if plan is None else plan.world_size
    return lower_program(program, name, name, module.inputs(), module.outputs(), ranks)


def lower_program(
    program: ExportedProgram,
    name: str,
    kind: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    world_size: int,
) -> LoweredGraph:
    """Lowers an exported program: its user inputs and outputs get the names of `inputs` and `outputs`, in order.

    Raises:
        ValueError: a buffer named `kv_cache.*` is not updated, or a weight is.
    """
    program = decomposed(program)
    bindings, literals = _bindings(program, [spec.name for spec in inputs])
    _lay_out(program, bindings)
    results = _results(program, outputs, bindings)
    module, numbers, constants = _trace(program, world_size)
    constants |= {numbers[index]: tensor for index, tensor in literals.items() if numbers[index] >= 0}
    passes.inline_constants(module, constants)
    passes.narrow_types(module)
    passes.drop_tokens(module)
    passes.fold_trivial(module)
    passes.make_finite(module)
    kept = _finish(module, name, bindings, numbers, results)
    data = hlo.serialize(module)
    io = GraphIO(
        inputs=kept,
        outputs=results,
        unused_inputs=tuple(each.name for each in bindings if each is not None and each not in kept),
        hlo_sha256=hashlib.sha256(data).hexdigest(),
        world_size=world_size,
    )
    return LoweredGraph(name, kind, data, io)


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """The program in operators that torch-xla lowers, and linear layers."""
    return program.run_decompositions(decompositions())


def _bindings(
    program: ExportedProgram, input_names: Sequence[str]
) -> tuple[list[InputBinding | None], dict[int, Tensor]]:
    """What each placeholder is: a binding, or None for a literal tensor, which comes by its index."""
    bindings: list[InputBinding | None] = []
    literals: dict[int, Tensor] = {}
    names = iter(input_names)
    placeholders = _placeholders(program)
    for index, (spec, node) in enumerate(zip(program.graph_signature.input_specs, placeholders, strict=True)):
        target = spec.target or ""
        if spec.kind == InputKind.USER_INPUT:
            bindings.append(_binding(next(names), "input", node))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            # torch.export lifts tensors that the model's code makes; they are no part of the checkpoint.
            literals[index] = program.constants[target]
            bindings.append(None)
        else:
            bindings.append(_binding(target, "state" if target.startswith((CACHE, SCORES)) else "weight", node))
    return bindings, literals


def _lay_out(program: ExportedProgram, bindings: list[InputBinding | None]) -> None:
    """Replaces weights by what is stored of them; their placeholders stay, without a user or a binding."""
    numbers = {node: index for index, node in enumerate(_placeholders(program))}
    stored, left = weight_uses.use_stored_weights(program)
    for node in left:
        bindings[numbers[node]] = None
    bindings += [_binding(name, "weight", node) for node, name in stored.items()]


def _placeholders(program: ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def _binding(name: str, role: Role, node: torch.fx.Node) -> InputBinding:
    value = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    return InputBinding(name, role, tuple(value.shape), NARROW.get(dtype, dtype))


def _results(
    program: ExportedProgram, outputs: Iterable[TensorSpec], bindings: Sequence[InputBinding | None]
) -> tuple[OutputBinding, ...]:
    """The step's outputs, then the new values of states, in the order of the module's result tuple."""
    states = {each.name: each for each in bindings if each is not None and each.role == "state"}
    results = [OutputBinding(spec.name, spec.shape, spec.dtype, None) for spec in outputs]
    mutated = {spec.target for spec in program.graph_signature.output_specs if spec.kind == OutputKind.BUFFER_MUTATION}
    results += [
        OutputBinding(each.name, each.shape, each.dtype, name) for name, each in states.items() if name in mutated
    ]
    # A sampler reads scores.
    different = {name for name in mutated ^ set(states) if not str(name).startswith(SCORES)}
    if different:
        names = ", ".join(sorted(map(str, different)))
        raise ValueError(f"the graph must update the cache's states once and nothing else; it differs in {names}")
    return tuple(results)


# Over all dimensions where none is named; torch-xla takes that for none.
_REDUCTIONS = {torch.ops.aten.sum.dim_IntList, torch.ops.aten.amax.default, torch.ops.aten.amin.default}


class _Tracer(torch.fx.Interpreter):
    """Runs a graph on torch-xla's device, noting the module of each operator for error messages and profiles."""

    def __init__(self, module: torch.fx.GraphModule, world_size: int) -> None:
        super().__init__(module)
        import torch_xla

        self._scope = torch_xla._XLAC.profiler.scope_pusher
        self._device = torch_xla.device()
        self._world_size = world_size

    def run_node(self, node: torch.fx.Node) -> Any:
        scope = self._scope(_module_path(node) or "step")
        try:
            return super().run_node(node)
        finally:
            del scope

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        if target in (collectives.ALL_REDUCE, collectives.ALL_GATHER):
            return _collective(target, args, self._world_size)
        if target is sampler.SAMPLE:
            with torch.device(self._device):  # of the tensors that it makes
                return sampler.written_out(self._gather_columns, *args)
        if target in _REDUCTIONS and not (len(args) > 1 and args[1]):
            args = (args[0], list(range(args[0].dim())), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._device}
        return super().call_function(target, args, kwargs)

    def _gather_columns(self, own: Tensor) -> Tensor:
        return _collective(collectives.ALL_GATHER, (own, 1), self._world_size)


def _collective(target: Any, args: Any, world_size: int) -> Tensor:
    """All ranks are one group, so no rank is named."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    groups = [list(range(world_size))]
    if target is collectives.ALL_REDUCE:
        return torch_xla._XLAC._xla_all_reduce("sum", args[0], 1.0, groups, False)
    gathered: Tensor = xm.all_gather(args[0], args[1], groups=groups, pin_layout=False)
    return gathered


def _trace(program: ExportedProgram, world_size: int) -> tuple[Any, list[int], dict[int, Tensor]]:
    """The module as torch-xla builds it, the parameter number of each placeholder (-1 without), and constants by number."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla
    from torch_xla.core import xla_builder

    _check_operators(program)
    backend = torch_xla._XLAC
    backend._set_ir_debug(True)  # else instructions do not say which module they come from
    backend._clear_pending_irs(str(torch_xla.device()))
    placeholders = [
        xla_builder.create_placeholder_tensor(tuple(node.meta["val"].shape), node.meta["val"].dtype)
        for node in _placeholders(program)
    ]
    with torch.no_grad():
        values = _Tracer(program.graph_module, world_size).run(*placeholders, enable_io_processing=False)
    context = backend.lowering.LoweringContext("graph")
    context.build(_ordered(program, values))
    numbers = [context.tensor_parameter_id(tensor) for tensor in placeholders]
    known = set(numbers)
    constants = {
        number: tensor.cpu()
        for number, tensor in context.device_parameter_id_tensor_mapping().items()
        if number not in known
    }
    return hlo.parse(context.hlo()), numbers, constants


# An operator without a kernel of torch-xla's may be made of others that have one.
_KERNELS = ("XLA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def _check_operators(program: ExportedProgram) -> None:
    """Refuses what torch-xla would compute on the CPU: placeholders have no values, so the process would end there."""
    for node in program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            continue
        name = node.target.name()
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _KERNELS):
            raise ValueError(
                f"{node.target} of {_module_path(node) or 'the step'} has no lowering to HLO; use target='cpu', or express it "
                f"in other operators"
            )


def _module_path(node: torch.fx.Node) -> str:
    """The dotted name of the module that a node comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return path


def _ordered(program: ExportedProgram, values: Sequence[Tensor]) -> list[Tensor]:
    """torch.export returns mutated buffers first, in an order of its own: here the step's outputs are first."""
    user, states = [], {}
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            states[spec.target] = value
        else:
            user.append(value)
    targets = [spec.target for spec in program.graph_signature.input_specs if spec.target in states]
    return [*user, *(states[target] for target in targets)]


def _finish(
    module: Any,
    name: str,
    bindings: Sequence[InputBinding | None],
    numbers: Sequence[int],
    results: Sequence[OutputBinding],
) -> tuple[InputBinding, ...]:
    """Removes what nothing needs, orders, names and aliases; returns the inputs that are left, in their order."""
    passes.remove_unused(module)
    left = {parameter.parameter_number for parameter in hlo.parameters(module)}
    numbered = [
        (number, each) for number, each in zip(numbers, bindings, strict=True) if each is not None and number in left
    ]
    numbered.sort(key=lambda pair: _ROLE_ORDER.index(pair[1].role))  # stable
    kept = tuple(binding for _, binding in numbered)
    names = [binding.name for binding in kept]
    passes.order_parameters(module, [number for number, _ in numbered], names)
    passes.name_outputs(module, len(results))
    passes.alias_outputs(
        module,
        {index: names.index(result.alias_of) for index, result in enumerate(results) if result.alias_of is not None},
    )
    passes.canonicalize(module, name)
    return kept
