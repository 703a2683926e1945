# SPDX-License-Identifier: Apache-2.0
"""Compiles all graphs of an artifact in parallel worker processes, through a cache of compiled code."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import queue
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from ... import progress
from ...graphs.spec import GraphSpec
from .. import CompileJob
from ..cache import CompileCache
from ..processes import TiedProcess, parallel_jobs, run_jobs
from . import kernels
from .host import chosen_instruction_set, host_requirements, torch_variables
from .kernels import check_compiler as check_compiler


logger = logging.getLogger(__name__)

# One worker with its C++ compiler took 1.2 GB on SmolLM2-135M, the weights it maps included; larger models take more.
WORKER_MEMORY = 2 << 30
CACHE_KIND = "cpu"
KERNEL_LIBRARY = "kernels.so"
PACKAGE_SUFFIX, CONSTANTS_SUFFIX = ".pt2", ".safetensors"


def compile_graphs(job: CompileJob) -> dict[str, Any]:
    """Writes a package per graph and, where its kernels are used, the kernel library into the job's `graphs/`; returns `target_data`.

    Raises:
        RuntimeError: a graph could not be compiled; the graph is named.
        OSError: the compile cache cannot be used.
    """
    cache = CompileCache(CACHE_KIND)
    folder = job.folder / "graphs"
    library = kernel_library(cache, folder) if kernels.are_fast_here() else None
    common = _common_key(job, library)
    keys = {spec.name: _digest({"graph": asdict(spec), **common}) for spec in job.graphs}
    missing = [spec for spec in job.graphs if not cache.fetch(keys[spec.name], folder, spec.name, PACKAGE_SUFFIX)]
    found = len(job.graphs) - len(missing)
    logger.info("%d of %d graphs are in the compile cache %s", found, len(job.graphs), cache.folder)
    if missing:
        _compile_missing(job, missing, keys, cache, library)
    return {"requires": host_requirements(), "kernel_namespace": kernels.namespace() if library is not None else None}


def _compile_missing(
    job: CompileJob, specs: list[GraphSpec], keys: dict[str, str], cache: CompileCache, library: Path | None
) -> None:
    workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    started: list[_Worker] = []
    with cache.scratch() as scratch, progress.stage("Compiling graphs", len(specs)) as advance:

        def compile_one(spec: GraphSpec) -> None:
            worker = workers.get()
            try:
                worker.compile(spec, scratch / (spec.name + PACKAGE_SUFFIX))
            finally:
                workers.put(worker)  # else the next graph would wait for ever for a worker
            cache.store(keys[spec.name], scratch, spec.name, job.folder / "graphs")
            advance(spec.name)

        def end_workers() -> None:
            for worker in started:
                worker.end()

        count = parallel_jobs(len(specs), WORKER_MEMORY)
        try:
            for _ in range(count):
                started.append(_Worker(job, library, scratch))
                workers.put(started[-1])
            run_jobs([partial(compile_one, spec) for spec in specs], count, end_workers)
        finally:
            end_workers()


class _Worker:
    """One compiling process; see worker.py for the protocol."""

    def __init__(self, job: CompileJob, library: Path | None, scratch: Path) -> None:
        handle, name = tempfile.mkstemp(dir=scratch, suffix=".log")
        self._log = Path(name)
        package = __package__.split(".")[0]
        root = Path(sys.modules[package].__file__ or "").parents[1]
        chosen = chosen_instruction_set()
        self._process = TiedProcess(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
            env={
                **os.environ,
                **({} if chosen is None else torch_variables(chosen)),
                "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),  # Inductor writes code for as many
            },
        )
        os.close(handle)
        self._send(
            {
                "folder": str(job.folder),
                "config": job.config.to_dict(),
                "model": job.model.to_dict(),
                "tied_weights": job.tied_weights,
                "trust_remote_code": job.trust_remote_code,
                "kernel_library": None if library is None else str(library),
            }
        )

    def compile(self, spec: GraphSpec, output: Path) -> None:
        self._send({"graph": asdict(spec), "output": str(output)})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the compiling process ended{self._exit_status()}"}
        if "error" in answer:
            raise RuntimeError(f"graph {spec.name} could not be compiled: {answer['error']}{self._tail()}")

    def end(self) -> None:
        self._process.end()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"a compiling process ended{self._exit_status()}{self._tail()}") from None

    def _exit_status(self) -> str:
        code = self._process.wait()
        return ", killed (too little memory?)" if code == -9 else f" with status {code}"

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return f"\n{text[-1500:]}" if text else ""


def _common_key(job: CompileJob, library: Path | None) -> dict[str, Any]:
    """Everything but the graph's own spec that its compiled code depends on."""
    code = sorted(job.folder.glob("*.py")) if job.trust_remote_code else []
    package = Path(__file__).parents[2]
    own = sorted((package / "graphs").glob("*.py")) + sorted(Path(__file__).parent.glob("*"))
    return {
        "model_config": json.loads((job.folder / "config.json").read_text(encoding="utf-8")),
        "model": job.model.to_dict(),
        "dtype": job.config.dtype,
        "sources": [_file_digest(path) for path in [*code, *own] if path.is_file()],
        "host": host_requirements(),
        "kernels": None if library is None else _file_digest(library),
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, transformers.__version__, safetensors.__version__, platform.python_version()],
        "compiler": _compiler_version(),
    }


def kernel_library(cache: CompileCache, folder: Path) -> Path:
    """Puts the library of the own kernels into a folder, built if need be.

    Raises:
        RuntimeError: it cannot be built.
    """
    library = folder / KERNEL_LIBRARY
    key = _digest([kernels.namespace(), host_requirements(), torch.__version__, _compiler_version()])
    if not cache.fetch(key, folder, library.stem, library.suffix):
        with progress.stage("Compiling kernels"), cache.scratch() as scratch:
            kernels.build(scratch / library.name)
            cache.store(key, scratch, library.stem, folder)
    return library


def _compiler_version() -> str:
    path = kernels.compiler()
    if path is None:
        return ""
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[0]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
