# SPDX-License-Identifier: Apache-2.0
"""Compilation of lowered graphs by neuronx-cc: in parallel, through a cache, each in a folder that is gone afterwards.

A key of the cache is a digest of what the compiler reads: the HLO, the target, the options and the compiler's version. Weights,
folders and the version of this package are in no key: no NEFF depends on them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from .... import progress
from ....errors import first_line
from ....kernels.host.processes import Processes, parallel_jobs, run_jobs
from ....step.spec import LOGPROBS, GraphKind
from ...cache.entries import About
from ...cache.store import CompileCache
from ..graphs import hlo
from ..graphs.io import COPIES, PROBE, SAMPLERS, write_graph
from ..kernels.kernel import KERNEL_PACKAGES, KERNELS, EnumMember, Kernel
from ..lowering.kernel_calls import called_kernels, kernel_calls, without_references
from ..rank.packages import installed_version
from ..sdk.flags import FLAGS_VARIABLE, FlagFacts, add_user_flags, check_variables, compiler_flags, kind_variable
from ..sdk.hardware import logical_core_size
from . import neuron_cc
from .neuron_cc import DISTRIBUTION, NEFF_SUFFIX


if TYPE_CHECKING:
    from ..graphs.io import LoweredGraph

logger = logging.getLogger(__name__)

CACHE_KIND = "neuron"
KINDS = (*get_args(GraphKind), *SAMPLERS.values(), LOGPROBS, *COPIES, PROBE)
# A graph of some billions of parameters takes neuronx-cc several GB; it dies by signal 9 where they are not there.
COMPILER_MEMORY = 8 << 30
COMPILE_TIMEOUT = 4 * 3600.0  # seconds per graph; large graphs take an hour
# Of the targets in the page of error code EVRF015. NKI compiles a kernel for its operands where neuronx-cc runs, which looks for the file
# there (EVRF059), so no artifact has it. Public ports of vLLM Neuron (nki/nki_compile.py) show which functions of `nki` do so.
NATIVE_CALL = "AwsNeuronCustomNativeKernel"
_Shapes = tuple[tuple[tuple[int, ...], str], ...]


class _Job(NamedTuple):
    graph: LoweredGraph
    arguments: tuple[str, ...]
    key: str


def compile_graphs(graphs: Sequence[LoweredGraph], target: str, folder: Path) -> dict[str, Any]:
    """Write `<graph>.neff` of every graph into `folder`; return the manifest's record of versions and of the compiler's arguments.

    Raises:
        RuntimeError: a graph could not be compiled; the message names it and the broken rule. Nothing is left running.
        OSError: the compile cache cannot be used.
        ValueError: an environment variable asks for what the target cannot do.
    """
    lnc, version = _read_environment(target)
    jobs = [_make_job(graph, target, lnc, version) for graph in graphs]
    cache = CompileCache(CACHE_KIND)
    missing = [job for job in jobs if not cache.fetch(job.key, folder, job.graph.name, NEFF_SUFFIX)]
    logger.info("%d of %d graphs are in the compile cache %s", len(jobs) - len(missing), len(jobs), cache.folder)
    if missing:
        _compile_missing(missing, cache, folder, target, lnc, version)
    versions = {DISTRIBUTION: version}
    for job in jobs:
        versions |= kernel_versions(job.graph.hlo)
    return {
        "versions": versions,
        "target": target,
        "lnc": lnc,
        "graphs": {job.graph.name: {"kind": job.graph.kind, "argv": list(job.arguments)} for job in jobs},
    }


def _compile_missing(
    jobs: Sequence[_Job], cache: CompileCache, folder: Path, target: str, lnc: int, version: str
) -> None:
    processes = Processes()
    with cache.scratch() as scratch, progress.stage("Compiling graphs", len(jobs)) as advance:

        def compile_one(job: _Job) -> None:
            name = job.graph.name
            work = scratch / f"{name}.work"
            work.mkdir()
            try:
                with progress.stage(name):
                    write_graph(replace(job.graph, hlo=with_native_kernels(job.graph.hlo, target, lnc)), work)
                    neuron_cc.run_compiler(processes, job.arguments, work, COMPILE_TIMEOUT)
            except RuntimeError as error:
                raise RuntimeError(f"graph {name} could not be compiled: {error}") from error
            (work / (name + NEFF_SUFFIX)).rename(scratch / (name + NEFF_SUFFIX))
            shutil.rmtree(work, ignore_errors=True)
            cache.store(job.key, scratch, name, folder, About(name, target, f"{DISTRIBUTION} {version}"))
            advance(name)

        threads = parallel_jobs(len(jobs), COMPILER_MEMORY)
        run_jobs([partial(compile_one, job) for job in jobs], threads, processes.end)


def check_environment(target: str) -> None:
    """Raise RuntimeError without a compiler, and ValueError for a variable that asks for what the target cannot do."""
    problem = neuron_cc.missing_compiler()
    if problem is not None:
        raise RuntimeError(
            f"compiling for {target} needs the Neuron compiler, on x86 Linux with or without a device: {problem}; or export "
            f"with target='cpu', which runs on this machine"
        )
    environment = _read_environment(target)
    for kind in KINDS:
        graph_flags(target, FlagFacts(kind), *environment)


def find_keys(graphs: Sequence[LoweredGraph], target: str) -> dict[str, str]:
    return {graph.name: _make_job(graph, target, *_read_environment(target)).key for graph in graphs}


def _read_environment(target: str) -> tuple[int, str]:
    """Return the physical cores of a logical one, and the compiler's version; raise ValueError for a variable of no kind of graph."""
    check_variables(KINDS)
    return logical_core_size(target), neuron_cc.compiler_version(neuron_cc.find_compiler())


def _make_job(graph: LoweredGraph, target: str, lnc: int, version: str) -> _Job:
    flags = graph_flags(target, flag_facts(graph), lnc, version)
    arguments = neuron_cc.compiler_arguments(graph.name, target, flags)
    return _Job(graph, arguments, graph_key(graph.hlo, target, flags, version))


def flag_facts(graph: LoweredGraph) -> FlagFacts:
    """Return what the options of a graph depend on."""
    has_fp8 = any(each.dtype == "float8_e4m3fn" for each in graph.io.inputs)
    module, weights = hlo.parse(graph.hlo), graph.io.names("weight")
    matrices = {each.id for each in hlo.parameters(module) if each.name in weights and len(each.shape.dimensions) > 2}
    gathers = any(
        each.opcode == "gather" and each.operand_ids[0] in matrices for each in hlo.entry(module).instructions
    )
    return FlagFacts(graph.kind, (graph.io.spec or {}).get("sequence_length", 0), has_fp8, gathers)


def graph_flags(target: str, graph: FlagFacts, lnc: int, version: str) -> tuple[str, ...]:
    """Return the compiler's options for a graph, with those of NEURON_CC_FLAGS and of the variable for its kind.

    Raise ValueError where a target cannot do these.
    """
    user = {name: os.environ.get(name, "") for name in (FLAGS_VARIABLE, kind_variable(graph.kind))}
    return add_user_flags(compiler_flags(target, graph, lnc=lnc, compiler_version=version), target, user)


def graph_key(data: bytes, target: str, flags: Sequence[str], version: str) -> str:
    """Return the key of a NEFF, from a graph's HLO as an artifact has it, and the compiler's options and version."""
    described: list[object] = [DISTRIBUTION, version, target, list(flags)]
    kernels = called_kernels(data)
    if kernels:
        # What NKI is given of a kernel is not in the HLO; what is executed in the kernel's place is no part of what is compiled.
        calls = {}
        for name in sorted(kernels):
            kernel = KERNELS[name]
            arguments = {argument: repr(value) for argument, value in kernel.arguments.items()}
            calls[name] = [kernel.module, kernel.name, list(kernel.operands), arguments]
        described += [calls, kernel_versions(data)]
        data = hlo.serialize(without_references(hlo.parse(data)))
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def kernel_versions(data: bytes) -> dict[str, str]:
    """Return the versions of what compiles a graph's kernels, by distribution; nothing where it calls none."""
    packages = KERNEL_PACKAGES if called_kernels(data) else ()
    return {each.distribution: installed_version(each.distribution) or "unknown" for each in packages}


def with_native_kernels(data: bytes, target: str, lnc: int) -> bytes:
    """Return a graph for neuronx-cc here, or raise RuntimeError where NKI does not compile a kernel for its operands."""
    if not called_kernels(data):
        return data
    module = without_references(hlo.parse(data))
    by_id = {each.id: each for _, each in hlo.instructions(module)}
    made: dict[tuple[str, _Shapes], Any] = {}
    for call, name in list(kernel_calls(module)):
        operands = tuple(hlo.array(by_id[operand].shape) for operand in call.operand_ids)
        if (name, operands) not in made:
            try:
                made[name, operands] = _build_config(KERNELS[name], operands, target, lnc)
            except Exception as error:  # a compiler of programs raises what it likes
                named = zip(KERNELS[name].operands, operands, strict=True)
                shapes = ", ".join(f"{operand} {dtype}{list(shape)}" for operand, (shape, dtype) in named)
                raise RuntimeError(
                    f"NKI does not compile {name} for {shapes} ({first_line(error)}); export without --kernels"
                ) from error
        config = made[name, operands]
        found = [tuple(each.shape) for each in config.output_specs]
        taken = [tuple(call.shape.dimensions)]
        if found != taken:
            raise RuntimeError(f"NKI's {name} makes {found}, and the graph takes {taken}; export without --kernels")
        # It names what NKI compiled.
        call.custom_call_target, call.backend_config = NATIVE_CALL, bytes(config.backend_config_b64)
    return hlo.serialize(module)


def _build_config(kernel: Kernel, operands: _Shapes, target: str, lnc: int) -> Any:
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    modules = ("framework.compiled", "language", "language.buffers", "language.tensor")
    compiled, language, buffers, tensor = (importlib.import_module(f"nki.{name}") for name in modules)
    given: dict[str, Any] = {}
    for name, (shape, dtype) in zip(kernel.operands, operands, strict=True):
        place = {"storage": None, "buffer": buffers.shared_hbm}
        given[name] = tensor.NkiTensor(name=name, shape=shape, dtype=getattr(language, dtype), **place)
    for name, each in kernel.arguments.items():
        given[name] = each.value() if isinstance(each, EnumMember) else each
    # What nki.jit returns keeps the function that it was given.
    job = compiled.CompileKernel(func=getattr(function, "func", function), lnc=lnc, target=target)
    return job._cached_compile_to_bir(
        frontend=job._frontend_cls(enable_backend_opt=job._enable_backend_opt),
        inputs=given,
        compile_opts=job._compile_opts(),
    ).build_config()
