# SPDX-License-Identifier: Apache-2.0
"""Compilation of lowered graphs by neuronx-cc: in parallel, through a cache, each in a folder that is gone afterwards.

A key of the cache is a digest of what the compiler reads: the HLO, the target, the options and the compiler's version. Weights,
folders and the version of this package are in no key: no NEFF depends on them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .... import progress
from ....kernels.host.processes import Processes, parallel_jobs, run_jobs
from ...cache.entries import About
from ...cache.store import CompileCache
from ..graphs import hlo
from ..graphs.io import write_graph
from ..kernels.registry import KERNELS
from ..lowering.kernel_calls import called_kernels, without_references
from ..sdk.flags import FLAGS_VARIABLE, LNC_VARIABLE, add_user_flags, compiler_flags, logical_core_size
from .native_kernels import kernel_versions, with_native_kernels
from .neuron_cc import (
    DISTRIBUTION,
    NEFF_SUFFIX,
    CompilerCall,
    check_compiler,
    check_neff,
    compiler_call,
    compiler_version,
    find_compiler,
    run_compiler,
)


if TYPE_CHECKING:
    from ..graphs.io import LoweredGraph

logger = logging.getLogger(__name__)

CACHE_KIND = "neuron"
# A graph of some billions of parameters takes neuronx-cc several GB; it dies by signal 9 where they are not there.
COMPILER_MEMORY = 8 << 30
COMPILE_TIMEOUT = 4 * 3600.0  # seconds per graph; large graphs take an hour


@dataclass(frozen=True)
class _Job:
    graph: LoweredGraph
    call: CompilerCall
    key: str
    target: str
    lnc: int
    version: str


def compile_graphs(graphs: Sequence[LoweredGraph], target: str, folder: Path) -> dict[str, Any]:
    """Write `<graph>.neff` of every graph into `folder`.

    Returns:
        The manifest's record: the compiler's version, target, LNC, and per graph its kind and the compiler's arguments.

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
        _compile_missing(missing, cache, folder)
    return {
        "versions": {DISTRIBUTION: version}
        | {name: each for job in jobs for name, each in kernel_versions(job.graph.hlo).items()},
        "target": target,
        "lnc": lnc,
        "graphs": {job.graph.name: {"kind": job.graph.kind, "argv": list(job.call.argv)} for job in jobs},
    }


def check_environment(target: str) -> None:
    """Raise RuntimeError without a compiler, and ValueError for a variable that asks for what the target cannot do."""
    check_compiler(target)
    graph_flags(target, "token_generation", *_read_environment(target))


def find_keys(graphs: Sequence[LoweredGraph], target: str) -> dict[str, str]:
    """Return each graph's key in the compile cache by the graph's name."""
    return {graph.name: _make_job(graph, target, *_read_environment(target)).key for graph in graphs}


def _read_environment(target: str) -> tuple[int, str]:
    """Return the size of a logical core, and the compiler's version."""
    return logical_core_size(target, os.environ.get(LNC_VARIABLE)), compiler_version(find_compiler())


def _make_job(graph: LoweredGraph, target: str, lnc: int, version: str) -> _Job:
    has_fp8 = any(each.dtype == "float8_e4m3fn" for each in graph.io.inputs)
    flags = graph_flags(target, graph.kind, lnc, version, has_fp8=has_fp8)
    key = graph_key(graph.hlo, target, flags, version)
    return _Job(graph, compiler_call(graph.name, target, flags), key, target, lnc, version)


def _compile_missing(jobs: Sequence[_Job], cache: CompileCache, folder: Path) -> None:
    processes, seconds = Processes(), list[float]()
    with cache.scratch() as scratch, progress.stage("Compiling graphs", len(jobs)) as advance:

        def compile_one(job: _Job) -> None:
            name = job.graph.name
            work = scratch / f"{name}.work"
            work.mkdir()
            start = time.perf_counter()
            with progress.stage(name, likely_seconds=statistics.median(seconds) if seconds else None):
                _compile_graph(job, work, processes)
            seconds.append(time.perf_counter() - start)
            (work / (name + NEFF_SUFFIX)).rename(scratch / (name + NEFF_SUFFIX))
            shutil.rmtree(work, ignore_errors=True)
            cache.store(job.key, scratch, name, folder, About(name, job.target, f"{DISTRIBUTION} {job.version}"))
            advance(name)

        threads = parallel_jobs(len(jobs), COMPILER_MEMORY)
        run_jobs([partial(compile_one, job) for job in jobs], threads, processes.end)


def _compile_graph(job: _Job, folder: Path, processes: Processes) -> None:
    name = job.graph.name
    try:
        write_graph(replace(job.graph, hlo=with_native_kernels(job.graph.hlo, job.target, job.lnc)), folder)
        run_compiler(processes, job.call.argv, job.call.executable, folder, job.call.environment, COMPILE_TIMEOUT)
        check_neff(folder / (name + NEFF_SUFFIX))
    except RuntimeError as error:
        raise RuntimeError(f"graph {name} could not be compiled: {error}") from error


def graph_flags(target: str, kind: str, lnc: int, version: str, *, has_fp8: bool = False) -> tuple[str, ...]:
    """Return the compiler's options for a graph, with those of NEURON_CC_FLAGS.

    Args:
        has_fp8: whether the graph takes weights of float8_e4m3fn.

    Raises:
        ValueError: the variable asks for what the target cannot do.
    """
    flags = compiler_flags(target, kind, lnc=lnc, compiler_version=version, has_fp8=has_fp8)
    return add_user_flags(flags, os.environ.get(FLAGS_VARIABLE, ""), target)


def graph_key(data: bytes, target: str, flags: Sequence[str], version: str) -> str:
    """Return the key of a graph's NEFF.

    Args:
        data: the graph's HLO, as an artifact has it.
        flags: the compiler's options, with the size of a logical core.
        version: of the compiler.
    """
    described: list[object] = [DISTRIBUTION, version, target, list(flags)]
    kernels = called_kernels(data)
    if kernels:
        # What NKI is given of a kernel is not in the HLO; what is executed in the kernel's place is no part of what is compiled.
        described += [{name: _describe_call(name) for name in sorted(kernels)}, kernel_versions(data)]
        data = hlo.serialize(without_references(hlo.parse(data)))
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def _describe_call(name: str) -> list[object]:
    kernel = KERNELS[name]
    arguments = {argument: repr(value) for argument, value in kernel.arguments.items()}
    return [kernel.module, kernel.function, list(kernel.operands), arguments]
