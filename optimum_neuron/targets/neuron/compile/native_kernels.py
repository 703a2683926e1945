# SPDX-License-Identifier: Apache-2.0
"""Calls of kernels as neuronx-cc takes them: NKI compiles each for its operands.

Public ports of vLLM Neuron (nki/nki_compile.py) show which functions of `nki` do so; its documents name none. neuronx-cc looks for the
file on this machine (error code EVRF059), so it is made where that runs and is no part of an artifact.
"""

from __future__ import annotations

import importlib
from typing import Any

from ....errors import first_line
from ..graphs import hlo
from ..kernels.kernel import EnumMember, Kernel
from ..kernels.registry import KERNELS
from ..lowering.kernel_calls import called_kernels, kernel_calls, without_references
from ..rank.packages import installed_version


# Of the targets in the page of error code EVRF015.
NATIVE_CALL = "AwsNeuronCustomNativeKernel"
_Shapes = tuple[tuple[tuple[int, ...], str], ...]


def kernel_versions(data: bytes) -> dict[str, str]:
    """Return the versions of what compiles a graph's kernels, by distribution; nothing where it calls none."""
    packages = dict.fromkeys(each for name in sorted(called_kernels(data)) for each in KERNELS[name].packages)
    return {each.distribution: installed_version(each.distribution) or "unknown" for each in packages}


def with_native_kernels(data: bytes, target: str, lnc: int) -> bytes:
    """Return a graph for neuronx-cc here, or raise RuntimeError where NKI does not compile a kernel for its operands."""
    if not called_kernels(data):
        return data
    module = without_references(hlo.parse(data))
    by_id = {each.id: each for _, each in hlo.instructions(module)}
    made: dict[tuple[str, _Shapes], bytes] = {}
    for call, name in list(kernel_calls(module)):
        operands = tuple(hlo.array(by_id[operand].shape) for operand in call.operand_ids)
        key = name, operands
        if key not in made:
            results = tuple(map(hlo.array, call.shape.tuple_shapes or [call.shape]))
            made[key] = _compile_kernel(KERNELS[name], operands, results, target, lnc)
        call.custom_call_target, call.backend_config = NATIVE_CALL, made[key]
    return hlo.serialize(module)


def _compile_kernel(kernel: Kernel, operands: _Shapes, results: _Shapes, target: str, lnc: int) -> bytes:
    """Return the configuration of a call, which names what NKI compiled."""
    try:
        config = _call_nki(kernel, operands, target, lnc)
    except Exception as error:  # a compiler of programs raises what it likes
        named = zip(kernel.operands, operands, strict=True)
        shapes = ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in named)
        raise RuntimeError(
            f"NKI does not compile {kernel.name} for {shapes} ({first_line(error)}); export without --kernels"
        ) from error
    found, taken = [tuple(each.shape) for each in config.output_specs], [shape for shape, _ in results]
    if found != taken:
        raise RuntimeError(
            f"NKI's {kernel.name} makes {found}, and the graph takes {taken} of it; export without --kernels"
        )
    return bytes(config.backend_config_b64)


def _call_nki(kernel: Kernel, operands: _Shapes, target: str, lnc: int) -> Any:
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    compiled, language, buffers, tensor = (
        importlib.import_module(f"nki.{name}")
        for name in ("framework.compiled", "language", "language.buffers", "language.tensor")
    )
    inputs: dict[str, Any] = {
        name: tensor.NkiTensor(
            name=name, shape=shape, dtype=getattr(language, dtype), storage=None, buffer=buffers.shared_hbm
        )
        for name, (shape, dtype) in zip(kernel.operands, operands, strict=True)
    }
    arguments = {
        name: each.value() if isinstance(each, EnumMember) else each for name, each in kernel.arguments.items()
    }
    # What nki.jit returns keeps the function that it was given.
    job = compiled.CompileKernel(func=getattr(function, "func", function), lnc=lnc, target=target)
    return job._cached_compile_to_bir(
        frontend=job._frontend_cls(enable_backend_opt=job._enable_backend_opt),
        inputs=inputs | arguments,
        compile_opts=job._compile_opts(),
    ).build_config()
