# SPDX-License-Identifier: Apache-2.0
"""The own CPU kernels, built from C++ at export and loaded as torch operators: `linears`, `expert_linear`, `attend`.

at::linear reaches half of the memory bandwidth when a few rows meet weights in their natural layout, prepacked weights
cannot be shared between graphs, and how it rounds depends on the number of rows. torch's attention cannot read a slot
of the cache in place, nor skip the keys that a mask hides. Measurements are in ARCHITECTURE.md.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library
from torch.utils import cpp_extension

from .host import host_requirements


SOURCES = tuple(Path(__file__).with_name(name) for name in ("linear.cpp", "experts.cpp", "attention.cpp"))
# The element types that the kernels take.
DTYPES = (torch.bfloat16, torch.float32)
# The kernels are written for these; elsewhere torch's own operators stay in the graphs.
REQUIRED_ISA = ("avx512_bf16", "avx512bw", "avx512dq", "avx512f", "avx512vl")


def check_compiler() -> None:
    """Raises RuntimeError where no C++ compiler is found: the cpu target needs one to compile, not to load."""
    if compiler() is None:
        raise RuntimeError(
            "the cpu target compiles C++ and found no g++ or clang++; install one (apt-get install g++), or name it "
            "in the environment variable CXX"
        )


def compiler() -> str | None:
    """The C++ compiler that torch's own compiler also uses."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


@cache
def namespace() -> str:
    """Operator namespace: it carries the sources' digest, so that two builds can live in one process."""
    files = [*SOURCES, *sorted(Path(__file__).parent.glob("*.h"))]
    return "optimum_neuron_" + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def are_fast_here() -> bool:
    """Whether this machine has the instructions that the kernels were written for."""
    return set(REQUIRED_ISA) <= set(host_requirements()["isa"])


def build(output: Path) -> None:
    """Compiles the kernel library.

    Raises:
        RuntimeError: the compiler failed; its message is included.
    """
    check_compiler()
    command = [str(compiler()), "-O3", "-std=c++20", "-fPIC", *([] if sys.platform == "darwin" else ["-fopenmp"])]
    options = [
        f"-DOPTIMUM_NEURON_NAMESPACE={namespace()}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in cpp_extension.include_paths()),
    ]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch, ThreadPoolExecutor(len(SOURCES)) as pool:
        objects = [str(Path(scratch, source.stem + ".o")) for source in SOURCES]

        def compile_one(source: Path, target: str) -> None:
            _run([*command, *options, "-c", str(source), "-o", target])

        list(pool.map(compile_one, SOURCES, objects))
        _run([*command, *objects, "-shared", "-o", str(output), *libraries])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed to compile the CPU kernels:\n{done.stderr.strip()[-2000:]}")


_loaded: set[str] = set()


def load(path: Path, name: str) -> None:
    """Registers the operators of a built library under its namespace, once per process.

    One that an earlier version of this package built may lack some of them, and its graphs do without.
    """
    if name in _loaded:
        return
    torch.ops.load_library(str(path))
    fakes: dict[str, Callable[..., Any]] = {
        "linears": _fake_linears,
        "expert_linear": _fake_expert_linear,
        "attend": _fake_attend,
    }
    for operator, fake in fakes.items():
        if hasattr(getattr(torch.ops, name), operator):
            library.register_fake(f"{name}::{operator}", fake)
    _loaded.add(name)


def _fake_linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _fake_expert_linear(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*index.shape, weight.shape[1]))


def _fake_attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seq_ids: Tensor | None,
    position_ids: Tensor,
    scaling: float,
    sliding_window: int,
) -> Tensor:
    rows, heads, tokens, dim = query.shape
    return query.new_empty((rows, tokens, heads, dim))
