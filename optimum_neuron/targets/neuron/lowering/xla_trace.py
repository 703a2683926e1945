# SPDX-License-Identifier: Apache-2.0
"""Tracing: a program's nodes run one by one on placeholders of torch-xla, which gives its HLO module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ..graphs import hlo
from ..kernels.kernel import KERNEL, KERNEL_CALL
from ..kernels.registry import KERNELS
from ..operators import codes as quantized_product
from ..operators import collectives, sampler
from .decompositions import can_compute, compute_pairs, has_complex, has_pairs


# Over all dimensions where none is named; torch-xla takes that for none.
_REDUCTIONS = {torch.ops.aten.sum.dim_IntList, torch.ops.aten.amax.default, torch.ops.aten.amin.default}


class _Tracer(torch.fx.Interpreter):
    """An interpreter on torch-xla's device that notes the module of each operator for error messages and profiles."""

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
            return _trace_collective(target, args, self._world_size)
        if target is KERNEL:
            return _kernel_call(*args)
        if has_pairs(target, args):
            return compute_pairs(target, args, kwargs)
        if target is sampler.SAMPLE:
            with torch.device(self._device):  # of the tensors that it makes
                return sampler.written_out(self._gather_columns, *args)
        if target is quantized_product.STORED_PRODUCT:
            return quantized_product.written_out(_wide_product, *args)
        if target in _REDUCTIONS and not (len(args) > 1 and args[1]):
            args = (args[0], list(range(args[0].dim())), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._device}
        return super().call_function(target, args, kwargs)

    def _gather_columns(self, own: Tensor) -> Tensor:
        return _trace_collective(collectives.ALL_GATHER, (own, 1), self._world_size)


def _kernel_call(name: str, operands: Sequence[Tensor]) -> list[Tensor]:
    import torch_xla

    results = KERNELS[name].results([torch.empty(each.shape, dtype=each.dtype, device="meta") for each in operands])
    shapes, dtypes = [list(each.shape) for each in results], [each.dtype for each in results]
    call = torch_xla._XLAC._xla_custom_call
    return cast(list[Tensor], call(list(operands), KERNEL_CALL, shapes, dtypes, False, name, 0, {}))


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Take one product, or one for each number of the first dimension."""
    import torch_xla

    batch, last = list(range(left.dim() - 2)), left.dim() - 1
    dims = (([last], [last - 1]), (batch, batch))
    product: Tensor = torch_xla._XLAC._xla_dot_general(left, right, dims, None, torch.float32)
    return product


def _trace_collective(target: Any, args: Any, world_size: int) -> Tensor:
    """Trace a collective; all ranks are one group, so no rank is named."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    groups = [list(range(world_size))]
    if target is collectives.ALL_REDUCE:
        return torch_xla._XLAC._xla_all_reduce("sum", args[0], 1.0, groups, False)
    gathered: Tensor = xm.all_gather(args[0], args[1], groups=groups, pin_layout=False)
    return gathered


def trace(program: ExportedProgram, world_size: int) -> tuple[Any, list[int], dict[int, Tensor]]:
    """Return torch-xla's module, the parameter number of each placeholder (-1 without), and constants by number."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla

    _check_operators(program)
    backend = torch_xla._XLAC
    backend._set_ir_debug(True)  # else instructions do not say which module they come from
    backend._clear_pending_irs(str(torch_xla.device()))
    parameters = [_make_placeholder(node.meta["val"]) for node in placeholders(program)]
    with torch.no_grad():
        values = _Tracer(program.graph_module, world_size).run(*parameters, enable_io_processing=False)
    context = backend.lowering.LoweringContext("graph")
    context.build(_order_results(program, values))
    numbers = [context.tensor_parameter_id(tensor) for tensor in parameters]
    known = set(numbers)
    constants = {
        number: tensor.cpu()
        for number, tensor in context.device_parameter_id_tensor_mapping().items()
        if number not in known
    }
    return hlo.parse(context.hlo()), numbers, constants


def _make_placeholder(like: Tensor) -> Tensor:
    """Make a tensor without data, also of a type that torch-xla's table of types leaves out."""
    import torch_xla
    from torch_xla.core import xla_builder

    if like.dtype != torch.float8_e4m3fn:
        made: Tensor = xla_builder.create_placeholder_tensor(tuple(like.shape), like.dtype)
        return made
    shape = xla_builder.mkshape("f8e4m3fn", tuple(like.shape)).shape
    of_bytes: Tensor = torch_xla._XLAC._xla_create_placeholder_tensor(shape)
    return of_bytes


# An operator without a kernel of torch-xla's may be made of others that have one.
_KERNELS = ("XLA", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
# These are made of others that have none.
_COMPUTED_ELSEWHERE = frozenset({
    torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default,
    torch.ops.aten.cummin.default, torch.ops.aten.frexp.Tensor, torch.ops.aten.linalg_lstsq.default,
    torch.ops.aten.logcumsumexp.default, torch.ops.aten.median.dim, torch.ops.aten.mode.default,
    torch.ops.aten.nanmedian.dim,
})  # fmt: skip
# By a mask they look for its places.
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)


def _check_operators(program: ExportedProgram) -> None:
    """Refuse what torch-xla would compute on the CPU: placeholders have no values, so the process would end there."""
    for node in program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            continue
        if not _has_lowering(node):
            raise ValueError(
                f"{node.target} of {_module_path(node) or 'the step'} has no lowering to HLO; use target='cpu', or express it "
                f"in other operators"
            )


def _has_lowering(node: torch.fx.Node) -> bool:
    if node.target is torch.ops.aten._assert_tensor_metadata.default:
        return True
    if has_complex(node):
        return can_compute(node)
    if node.target in _COMPUTED_ELSEWHERE:
        return False
    if node.target in _INDEXED and any(map(_is_mask, cast(Sequence[Any], node.args[1]))):
        return False
    name = cast(torch._ops.OpOverload, node.target).name()
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _KERNELS)


def _is_mask(index: torch.fx.Node | None) -> bool:
    return index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _module_path(node: torch.fx.Node) -> str:
    """Return the dotted name of the module that a node comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return path


def _order_results(program: ExportedProgram, values: Sequence[Tensor]) -> list[Tensor]:
    """Put the step's outputs first; torch.export returns mutated buffers first, in an order of its own."""
    user, states = [], {}
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            states[spec.target] = value
        else:
            user.append(value)
    targets = [spec.target for spec in program.graph_signature.input_specs if spec.target in states]
    return [*user, *(states[target] for target in targets)]


def placeholders(program: ExportedProgram) -> list[torch.fx.Node]:
    """Return a program's placeholders in order."""
    return [node for node in program.graph.nodes if node.op == "placeholder"]
