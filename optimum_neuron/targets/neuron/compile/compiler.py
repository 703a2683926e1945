# SPDX-License-Identifier: Apache-2.0
"""Compiles lowered graphs to NEFFs: in parallel, through a cache, each in a folder of its own that is gone afterwards."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .... import progress
from ...cache import CompileCache
from ...processes import Processes, parallel_jobs, run_jobs
from ..graph_files import write_graph
from ..sdk.flags import FLAGS_VARIABLE, LNC_VARIABLE, add_user_flags, compiler_flags, logical_core_size
from .neuron_cc import DISTRIBUTION, NEFF_SUFFIX, CompilerCall, check_neff
from .processes import run_compiler


if TYPE_CHECKING:
    from ..lowering.lower import LoweredGraph

logger = logging.getLogger(__name__)

CACHE_KIND = "neuron"
# A graph of some billions of parameters takes neuronx-cc several GB; it dies by signal 9 where they are not there.
COMPILER_MEMORY = 8 << 30
COMPILE_TIMEOUT = 4 * 3600.0  # seconds per graph; large graphs take an hour


class Provider(Protocol):
    """A way to compile HLO.

    Attributes:
        suffixes: of the files that a call leaves for a graph, the one that stands for all of them last.
        sources: our own code that decides what is in those files, beside the compiler.
    """

    @property
    def name(self) -> str: ...
    @property
    def suffixes(self) -> tuple[str, ...]: ...
    @property
    def sources(self) -> tuple[Path, ...]: ...

    def unavailable(self) -> str | None:
        """What this machine lacks to compile, with the remedy; None where it lacks nothing."""

    def versions(self) -> dict[str, str]:
        """Versions of what compiles, by distribution; neuronx-cc is always among them."""

    def call(self, graph: str, target: str, flags: Sequence[str]) -> CompilerCall:
        """How `<graph>.hlo` is compiled."""


@dataclass(frozen=True)
class _Job:
    graph: LoweredGraph
    call: CompilerCall
    key: str


def compile_graphs(provider: Provider, graphs: Sequence[LoweredGraph], target: str, folder: Path) -> dict[str, Any]:
    """Writes the compiled files of every graph into `folder`: `<graph>.neff`, and what else the provider makes of it.

    Returns:
        What the manifest records: provider, versions, target, LNC, and per graph its kind and the compiler's arguments.

    Raises:
        RuntimeError: a graph could not be compiled; it is named, with the broken rule. Nothing is left running.
        OSError: the compile cache cannot be used.
        ValueError: an environment variable asks for what the target cannot do.
    """
    lnc = logical_core_size(target, os.environ.get(LNC_VARIABLE))
    versions = provider.versions()
    jobs = [_job(provider, graph, target, lnc, versions) for graph in graphs]
    cache = CompileCache(CACHE_KIND)
    missing = [job for job in jobs if not cache.fetch(job.key, folder, job.graph.name, *provider.suffixes)]
    logger.info("%d of %d graphs are in the compile cache %s", len(jobs) - len(missing), len(jobs), cache.folder)
    if missing:
        _compile_missing(provider, missing, cache, folder)
    return {
        "provider": provider.name,
        "versions": versions,
        "target": target,
        "lnc": lnc,
        "graphs": {job.graph.name: {"kind": job.graph.kind, "argv": list(job.call.argv)} for job in jobs},
    }


def check_environment(provider: Provider, target: str) -> None:
    """Raises ValueError where an environment variable asks for what the target cannot do."""
    lnc = logical_core_size(target, os.environ.get(LNC_VARIABLE))
    _flags(target, "token_generation", lnc, provider.versions())


def _flags(target: str, kind: str, lnc: int, versions: dict[str, str]) -> tuple[str, ...]:
    flags = compiler_flags(target, kind, lnc=lnc, compiler_version=versions[DISTRIBUTION])
    return add_user_flags(flags, os.environ.get(FLAGS_VARIABLE, ""), target)


def _job(provider: Provider, graph: LoweredGraph, target: str, lnc: int, versions: dict[str, str]) -> _Job:
    flags = _flags(target, graph.kind, lnc, versions)
    described = json.dumps([provider.name, versions, target, flags, graph.io.to_dict()], sort_keys=True)
    digest = hashlib.sha256(described.encode())
    for part in (graph.hlo, *(source.read_bytes() for source in provider.sources)):
        digest.update(hashlib.sha256(part).digest())
    return _Job(graph, provider.call(graph.name, target, flags), digest.hexdigest())


def _compile_missing(provider: Provider, jobs: Sequence[_Job], cache: CompileCache, folder: Path) -> None:
    processes = Processes()
    with cache.scratch() as scratch, progress.stage("Compiling graphs", len(jobs)) as advance:

        def compile_one(job: _Job) -> None:
            name = job.graph.name
            work = scratch / f"{name}.work"
            work.mkdir()
            _compile(job, work, processes)
            for suffix in provider.suffixes:
                (work / (name + suffix)).rename(scratch / (name + suffix))
            shutil.rmtree(work, ignore_errors=True)
            cache.store(job.key, scratch, name, folder)
            advance(name)

        threads = parallel_jobs(len(jobs), COMPILER_MEMORY)
        run_jobs([partial(compile_one, job) for job in jobs], threads, processes.end)


def _compile(job: _Job, folder: Path, processes: Processes) -> None:
    name = job.graph.name
    write_graph(job.graph, folder)
    try:
        run_compiler(processes, job.call.argv, job.call.executable, folder, job.call.environment, COMPILE_TIMEOUT)
        check_neff(folder / (name + NEFF_SUFFIX))
    except RuntimeError as error:
        raise RuntimeError(f"graph {name} could not be compiled: {error}") from error
