# SPDX-License-Identifier: Apache-2.0
"""The own CPU kernels, built from C++ at export and loaded as torch operators: `linears`, `expert_linear`, `attend`.

at::linear reaches half of the memory bandwidth when a few rows meet weights in their natural layout, prepacked weights
cannot be shared between graphs, and how it rounds depends on the number of rows. torch's attention cannot read a slot
of the cache in place, nor skip the keys that a mask hides. Measurements are in benchmark/README.md.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library
from torch.utils import cpp_extension

from ..processes import Processes, run_jobs
from .host import host_requirements


logger = logging.getLogger(__name__)

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


def missing_instructions() -> list[str]:
    """Instruction sets that the kernels were written for and this machine lacks."""
    return sorted(set(REQUIRED_ISA) - set(host_requirements()["isa"]))


def are_fast_here() -> bool:
    """Whether this machine has the instructions that the kernels were written for."""
    return not missing_instructions()


def advise(dtype: str) -> None:
    """Logs a line where the kernels are left out: what that costs weights of this type, and the best setting.

    Measured with SmolLM2-135M on two cores with AVX2: prompts 67 tokens/s in bfloat16 and 335 in float32, a generated
    token 39 and 55 ms.
    """
    missing = missing_instructions()
    if not missing:
        return
    advice = (
        "float32 is the best setting for it"
        if dtype == "float32"
        else f"in {dtype} a prompt takes several times as long as in float32, and a generated token about as long: export with "
        "--dtype float32 unless prompts are short"
    )
    logger.warning(
        "this CPU lacks %s, so torch's operators replace the project's own kernels; %s", ", ".join(missing), advice
    )


def build(output: Path) -> None:
    """Compiles the kernel library.

    Raises:
        RuntimeError: the compiler failed, or what it made cannot be loaded; the message is included.
    """
    check_compiler()
    command = [str(compiler()), "-O3", "-std=c++20", "-fPIC", *([] if sys.platform == "darwin" else ["-fopenmp"])]
    options = [
        f"-DOPTIMUM_NEURON_NAMESPACE={namespace()}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in cpp_extension.include_paths()),
    ]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    processes = Processes()
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        objects = {source: str(Path(scratch, source.stem + ".o")) for source in SOURCES}
        compilations = [
            partial(_run, processes, [*command, *options, "-c", str(source), "-o", target])
            for source, target in objects.items()
        ]
        run_jobs(compilations, len(SOURCES), processes.end)
        _run(processes, [*command, *objects.values(), "-shared", "-o", str(output), *libraries])
    # The linker leaves open what torch is to bring; here, a library that crashes would take this process along.
    _run(processes, [sys.executable, "-c", "import sys, torch; torch.ops.load_library(sys.argv[1])", str(output)])


def _run(processes: Processes, command: list[str]) -> None:
    with processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed on the CPU kernels:\n{output.strip()[-2000:]}")


_loaded: set[str] = set()


def load(path: Path, name: str) -> None:
    """Registers the operators of a built library under its namespace, once per process.

    One that an earlier version of this package built may lack some of them, and its graphs do without.

    Raises:
        RuntimeError: it cannot be loaded.
    """
    if name in _loaded:
        return
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise RuntimeError(f"the kernels in {path} cannot be loaded: {error}") from error
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
