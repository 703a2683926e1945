# SPDX-License-Identifier: Apache-2.0
"""Tracing: a program's nodes run one by one on placeholders of torch-xla, which gives its HLO module."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ..graphs import hlo
from ..kernels.kernel import KERNEL, KERNEL_CALL, KERNELS
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

        self._backend, self._device = torch_xla._XLAC, torch_xla.device()
        self._groups = [list(range(world_size))]  # all ranks are one group, so no rank is named

    def run_node(self, node: torch.fx.Node) -> Any:
        scope = self._backend.profiler.scope_pusher(_module_path(node) or "step")
        try:
            return super().run_node(node)
        finally:
            del scope

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        if target is collectives.ALL_REDUCE:
            return self._backend._xla_all_reduce("sum", args[0], 1.0, self._groups, False)
        if target is collectives.ALL_GATHER:
            return self._gather_along(args[0], args[1])
        if target is collectives.REDUCE_SCATTER:
            return self._scatter_along(*args)
        if target is KERNEL:
            name, operands = args
            given = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in operands]
            like, call = KERNELS[name].reference(*given), self._backend._xla_custom_call
            (made,) = call(list(operands), KERNEL_CALL, [list(like.shape)], [like.dtype], False, name, 0, {})
            return made
        if has_pairs(target, args):
            return compute_pairs(target, args, kwargs)
        if target is sampler.SAMPLE:
            with torch.device(self._device):  # of the tensors that it makes
                return sampler.written_out(partial(self._gather_along, dim=1), *args)
        if target is quantized_product.STORED_PRODUCT:
            return quantized_product.written_out(self._take_product, *args)
        if target in _REDUCTIONS and not (len(args) > 1 and args[1]):
            args = (args[0], list(range(args[0].dim())), *args[2:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._device}
        return super().call_function(target, args, kwargs)

    def _gather_along(self, own: Tensor, dim: int) -> Tensor:
        import torch_xla.core.xla_model as xm

        gathered: Tensor = xm.all_gather(own, dim, groups=self._groups, pin_layout=False)
        return gathered

    def _scatter_along(self, part: Tensor, dim: int, ranks: int) -> Tensor:
        import torch_xla.core.xla_model as xm

        scattered: Tensor = xm.reduce_scatter("sum", part, 1.0, dim, ranks, groups=self._groups, pin_layout=False)
        return scattered

    def _take_product(self, left: Tensor, right: Tensor) -> Tensor:
        batch, last = list(range(left.dim() - 2)), left.dim() - 1
        dims = (([last], [last - 1]), (batch, batch))
        product: Tensor = self._backend._xla_dot_general(left, right, dims, None, torch.float32)
        return product


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
    # The step's outputs first; torch.export returns mutated buffers first, in an order of its own.
    signature = program.graph_signature
    results = list(zip(signature.output_specs, values, strict=True))
    states = {spec.target: value for spec, value in results if spec.kind == OutputKind.BUFFER_MUTATION}
    outputs = [value for spec, value in results if spec.kind != OutputKind.BUFFER_MUTATION]
    outputs += [states[spec.target] for spec in signature.input_specs if spec.target in states]
    context = backend.lowering.LoweringContext("graph")
    context.build(outputs)
    numbers = [context.tensor_parameter_id(tensor) for tensor in parameters]
    known, given = set(numbers), context.device_parameter_id_tensor_mapping()
    constants = {number: tensor.cpu() for number, tensor in given.items() if number not in known}
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
        if not _has_lowering(node):
            where, remedy = _module_path(node) or "the step", "use target='cpu', or express it in other operators"
            raise ValueError(f"{node.target} of {where} has no lowering to HLO; {remedy}")


def _has_lowering(node: torch.fx.Node) -> bool:
    target = node.target
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    if not is_aten or target is torch.ops.aten._assert_tensor_metadata.default:
        return True
    if has_complex(node):
        return can_compute(node)
    indices = [each for each in cast(Sequence[Any], node.args[1]) if each is not None] if target in _INDEXED else []
    by_mask = any(each.meta["val"].dtype in (torch.bool, torch.uint8) for each in indices)
    if target in _COMPUTED_ELSEWHERE or by_mask:
        return False
    name = cast(torch._ops.OpOverload, target).name()
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _KERNELS)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return path


def placeholders(program: ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]
