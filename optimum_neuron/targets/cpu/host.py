# SPDX-License-Identifier: Apache-2.0
"""What compiled code needs of the machine it runs on, and why code from another machine may not run here.

OPTIMUM_NEURON_CPU names a lower instruction set than this machine's, for code that older machines run, and for tests. It
governs what is compiled. torch's own operators follow variables of their own: `torch_variables`.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


_CPUINFO = Path("/proc/cpuinfo")
# Instruction sets that a compiler told to use the native machine may emit.
_ISA_PREFIXES = (
    "sse",
    "ssse",
    "avx",
    "amx",
    "fma",
    "bmi",
    "f16c",
    "vaes",
    "vpclmul",
    "gfni",
    "sha",
    "movdir",
    "asimd",
    "sve",
)


CPU_VARIABLE = "OPTIMUM_NEURON_CPU"


@dataclass(frozen=True)
class InstructionSet:
    """A level of x86-64 that code can be compiled for.

    Attributes:
        march: the compiler's name of it.
        capability: ATen's, which Inductor follows too; onednn, mkl: those of the libraries behind torch's operators.
        flags: as in /proc/cpuinfo.
    """

    march: str
    capability: str
    onednn: str
    mkl: str
    flags: frozenset[str]


# Levels 3 and 4 of the x86-64 psABI, of their flags those with a prefix above.
_AVX2 = frozenset({"sse", "sse2", "ssse3", "sse4_1", "sse4_2", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
INSTRUCTION_SETS = {
    "avx2": InstructionSet("x86-64-v3", "avx2", "AVX2", "AVX2", _AVX2),
    "avx512": InstructionSet("x86-64-v4", "avx512", "AVX512_CORE", "AVX512", _AVX512),
}


def chosen_instruction_set() -> InstructionSet | None:
    """The lower instruction set that OPTIMUM_NEURON_CPU names; None where code may use all of this machine's.

    Raises:
        ValueError: the name is not known, or this machine lacks the set.
    """
    name = os.environ.get(CPU_VARIABLE, "")
    if not name:
        return None
    if name not in INSTRUCTION_SETS:
        raise ValueError(
            f"{CPU_VARIABLE}={name!r} is not known; choose one of {', '.join(INSTRUCTION_SETS)}, or unset it"
        )
    lacking = sorted(INSTRUCTION_SETS[name].flags - _machine_flags())
    if lacking:
        raise ValueError(f"{CPU_VARIABLE}={name} needs {', '.join(lacking)}, which this CPU lacks; unset it")
    return INSTRUCTION_SETS[name]


def torch_variables(chosen: InstructionSet) -> dict[str, str]:
    """Variables of a process whose torch is to compute and compile with an instruction set, set before it starts."""
    return {
        "ATEN_CPU_CAPABILITY": chosen.capability,
        "ONEDNN_MAX_CPU_ISA": chosen.onednn,
        "MKL_ENABLE_INSTRUCTIONS": chosen.mkl,
        "TORCHINDUCTOR_CPP_MARCH": chosen.march,
    }


def host_requirements() -> dict[str, Any]:
    """What code compiled here needs: recorded in the manifest, and part of the key of the compile cache."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "isa": sorted(_isa_flags()),
    }


def unmet_requirement(required: dict[str, Any]) -> str | None:
    """Why code with these requirements cannot run here, with both values; None if it can."""
    here = host_requirements()
    for key in ("system", "machine", "torch"):
        if required.get(key) != here[key]:
            return f"it was compiled for {key} {required.get(key)}, and this is {key} {here[key]}"
    lacking = sorted(set(required.get("isa", ())) - set(here["isa"]))
    return f"it was compiled for a CPU with {', '.join(lacking)}, which this one lacks" if lacking else None


def _isa_flags() -> set[str]:
    chosen = chosen_instruction_set()
    return _machine_flags() if chosen is None else set(chosen.flags)


def _machine_flags() -> set[str]:
    if not _CPUINFO.is_file():
        return {torch.backends.cpu.get_cpu_capability().lower()}
    for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return {flag for flag in value.split() if flag.startswith(_ISA_PREFIXES)}
    return set()
