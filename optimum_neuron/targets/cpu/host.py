# SPDX-License-Identifier: Apache-2.0
"""Which instruction set the kernels are compiled for: the best that this machine has, or the one that OPTIMUM_NEURON_CPU names."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


CPU_VARIABLE = "OPTIMUM_NEURON_CPU"
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class InstructionSet:
    """What kernels can be compiled for.

    Attributes:
        flags: of the compiler.
        needs: what a machine must have, as in /proc/cpuinfo.
        torch: variables that hold torch's own operators to it, for processes that play such a machine.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    torch: tuple[tuple[str, str], ...] = ()


def _torch(capability: str, onednn: str, mkl: str) -> tuple[tuple[str, str], ...]:
    return (("ATEN_CPU_CAPABILITY", capability), ("ONEDNN_MAX_CPU_ISA", onednn), ("MKL_ENABLE_INSTRUCTIONS", mkl))


# Levels 3 and 4 of the x86-64 psABI.
_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The best first.
_X86_64 = (
    InstructionSet("avx512_bf16", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    InstructionSet("avx512", ("-march=x86-64-v4",), _AVX512, _torch("avx512", "AVX512_CORE", "AVX512")),
    InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2, _torch("avx2", "AVX2", "AVX2")),
    InstructionSet("baseline", (), frozenset(), _torch("default", "SSE41", "SSE4_2")),
)
_OTHERS = (InstructionSet("baseline", (), frozenset()),)


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Those that this machine has, the best first."""
    known = _X86_64 if platform.machine() in ("x86_64", "AMD64") else _OTHERS
    has = _machine_flags()
    return tuple(each for each in known if each.needs <= has)


def instruction_set() -> InstructionSet:
    """The one that kernels are compiled for.

    Raises:
        ValueError: OPTIMUM_NEURON_CPU names one that is not known here, or that this machine lacks.
    """
    available = {each.name: each for each in instruction_sets()}
    name = os.environ.get(CPU_VARIABLE, "")
    if not name:
        return next(iter(available.values()))
    if name not in available:
        raise ValueError(
            f"{CPU_VARIABLE}={name!r} is not an instruction set of this machine; choose one of {', '.join(available)}, or "
            f"unset it"
        )
    return available[name]


def _machine_flags() -> frozenset[str]:
    if not _CPUINFO.is_file():
        return frozenset()
    for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
