# SPDX-License-Identifier: Apache-2.0
"""Compiles all graphs of an artifact in parallel worker processes, through a cache of compiled code."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from ... import progress
from ...graphs.spec import GraphSpec
from ...partial import partial_folder
from .. import CompileJob
from ..compiling import cache_folder, parallel_jobs
from . import kernels
from .host import host_requirements
from .kernels import check_compiler as check_compiler


logger = logging.getLogger(__name__)

# One worker with its C++ compiler took 1.2 GB on SmolLM2-135M, the weights it maps included; larger models take more.
WORKER_MEMORY = 2 << 30
KERNEL_LIBRARY = "kernels.so"
PACKAGE_SUFFIX = ".pt2"


def compile_graphs(job: CompileJob) -> dict[str, Any]:
    """Writes a package per graph and, where its kernels are used, the kernel library into the job's `graphs/`; returns `target_data`.

    Raises:
        RuntimeError: a graph could not be compiled; the graph is named.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    folder = job.folder / "graphs"
    common = _common_key(job)
    library = cached_kernel_library(cache) if kernels.are_fast_here() else None
    if library is not None:
        shutil.copyfile(library, folder / KERNEL_LIBRARY)
    keys = {spec.name: _digest({"graph": asdict(spec), **common}) for spec in job.graphs}
    missing = [spec for spec in job.graphs if not (cache / (keys[spec.name] + PACKAGE_SUFFIX)).is_file()]
    logger.info("%d of %d graphs are in the compile cache %s", len(job.graphs) - len(missing), len(job.graphs), cache)
    if missing:
        _compile_missing(job, missing, keys, cache, library)
    for name, key in keys.items():
        for suffix in (PACKAGE_SUFFIX, ".safetensors"):
            if (cache / (key + suffix)).is_file():
                shutil.copyfile(cache / (key + suffix), folder / (name + suffix))
    return {"requires": host_requirements(), "kernel_namespace": kernels.namespace() if library is not None else None}


def _compile_missing(
    job: CompileJob, specs: list[GraphSpec], keys: dict[str, str], cache: Path, library: Path | None
) -> None:
    workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    started: list[_Worker] = []
    with partial_folder(cache, "compile") as scratch, progress.stage("Compiling graphs", len(specs)) as advance:

        def compile_one(spec: GraphSpec) -> None:
            worker = workers.get()
            output = scratch / (spec.name + PACKAGE_SUFFIX)
            try:
                worker.compile(spec, output)
            finally:
                workers.put(worker)  # else the next graph would wait for ever for a worker
            # The package last: where it is present, its constants are.
            for file in sorted(scratch.glob(spec.name + ".*"), key=lambda file: file.suffix == PACKAGE_SUFFIX):
                os.replace(file, cache / (keys[spec.name] + file.suffix))
            advance(spec.name)

        count = parallel_jobs(len(specs), WORKER_MEMORY)
        try:
            for _ in range(count):
                started.append(_Worker(job, library, scratch))
                workers.put(started[-1])
            with ThreadPoolExecutor(count) as pool:
                try:  # from here on: leaving the pool waits for what has started
                    futures = [pool.submit(compile_one, spec) for spec in specs]
                    for future in futures:
                        future.result()
                except BaseException:
                    for worker in started:
                        worker.kill()
                    pool.shutdown(cancel_futures=True)
                    raise
        finally:
            for worker in started:
                worker.kill()


class _Worker:
    """One compiling process; see worker.py for the protocol."""

    def __init__(self, job: CompileJob, library: Path | None, scratch: Path) -> None:
        handle, name = tempfile.mkstemp(dir=scratch, suffix=".log")
        self._log = Path(name)
        package = __package__.split(".")[0]
        root = Path(sys.modules[package].__file__ or "").parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
            start_new_session=True,  # a Ctrl-C reaches the parent alone, which ends its workers and their compilers
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
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

    def kill(self) -> None:
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, 9)
            except ProcessLookupError:
                return
        self._process.wait()

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


def _common_key(job: CompileJob) -> dict[str, Any]:
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
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, transformers.__version__, safetensors.__version__, platform.python_version()],
        "compiler": _compiler_version(),
    }


def cached_kernel_library(cache: Path) -> Path:
    """The library of the own kernels in the cache, built if need be."""
    key = _digest([kernels.namespace(), host_requirements(), torch.__version__, _compiler_version()])
    library = cache / f"{key}.so"
    if not library.is_file():
        with progress.stage("Compiling kernels"), partial_folder(cache, "kernels") as scratch:
            kernels.build(scratch / library.name)
            os.replace(scratch / library.name, library)
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
