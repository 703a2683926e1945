# SPDX-License-Identifier: Apache-2.0
"""Instruction sets that kernels are compiled for: the best one that this machine has, or the one that OPTIMUM_NEURON_CPU names."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path


CPU_VARIABLE = "OPTIMUM_NEURON_CPU"
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set that kernels can be compiled for, with these `flags` of the compiler.

    A machine `needs` these features, by Linux's names in /proc/cpuinfo. With `rounded_is_faster`, codes of weights meet activations of int8
    faster than plain ones; it is False for sets where no whole model was measured both ways.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    rounded_is_faster: bool = False


# Levels 3 and 4 of the x86-64 psABI.
_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# All CPUs with products of bfloat16 have those of int8, and so have those with AMX.
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AVX512_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
# Linux gives a process tile registers only when it asks (Documentation/arch/x86/xstate.rst).
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# The best first.
_X86_64 = (
    InstructionSet("amx_bf16", (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _AVX512_BF16 | _AMX),
    InstructionSet("avx512_bf16", _AVX512_BF16_FLAGS, _AVX512_BF16, True),
    InstructionSet("avx512", ("-march=x86-64-v4",), _AVX512, True),
    InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2, True),
    InstructionSet("baseline", (), frozenset()),
)
_ARMV8_2 = frozenset({"asimd", "asimdrdm", "atomics", "crc32", "dcpop"})
# SVE of 128 bits is NEON's width. Where its vectors are longer, there are fewer units for them, so products of bfloat16 go first.
_AARCH64 = (
    InstructionSet("neon_bf16", ("-march=armv8.2-a+bf16+dotprod",), _ARMV8_2 | {"bf16", "asimddp"}),
    InstructionSet("sve512", ("-march=armv8.2-a+sve", "-msve-vector-bits=512"), _ARMV8_2 | {"sve", "sve512"}),
    InstructionSet("sve256", ("-march=armv8.2-a+sve", "-msve-vector-bits=256"), _ARMV8_2 | {"sve", "sve256"}),
    InstructionSet("neon", ("-march=armv8-a",), frozenset()),
)
# Linux gives the length of this process's vectors in bytes (Documentation/arch/arm64/sve.rst).
_PR_SVE_GET_VL, _SVE_VL_LEN_MASK = 51, 0xFFFF
_OTHERS = (InstructionSet("baseline", (), frozenset()),)
_KNOWN = {"x86_64": _X86_64, "amd64": _X86_64, "aarch64": _AARCH64, "arm64": _AARCH64}
# macOS has no /proc/cpuinfo. All of its arm64 machines have what is needed but bfloat16, which those before the M2 lack.
_MACOS_BF16 = b"hw.optional.arm.FEAT_BF16"


def list_platform_sets() -> tuple[InstructionSet, ...]:
    """Return the sets of this kind of CPU, the best first."""
    known = _KNOWN.get(platform.machine().lower(), _OTHERS)
    return tuple(each for each in known if sys.platform != "darwin" or "sve" not in each.needs)  # no Mac has it


def list_instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the sets that this machine lets this process use, the best first."""
    has = _machine_flags()
    if has >= _AMX and not _may_use_tiles():
        has -= _AMX
    if "sve" in has:
        has |= {f"sve{8 * _sve_bytes()}"}
    return tuple(each for each in list_platform_sets() if each.needs <= has)


def choose_instruction_set() -> InstructionSet:
    """Return the set that kernels are compiled for.

    Raises:
        ValueError: OPTIMUM_NEURON_CPU names one that is not known here, or that this machine lacks.
    """
    available = {each.name: each for each in list_instruction_sets()}
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
    if sys.platform == "darwin":
        return _ARMV8_2 | {"bf16", "asimddp"} if _sysctl(_MACOS_BF16) else _ARMV8_2
    if not _CPUINFO.is_file():
        return frozenset()
    for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _may_use_tiles() -> bool:
    """Ask Linux for the tile registers of AMX, for all threads of this process and of those that it forks."""
    numbers = (ctypes.c_long(each) for each in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    return _syscall(*numbers) == 0


def _sve_bytes() -> int:
    return int(ctypes.CDLL(None).prctl(_PR_SVE_GET_VL)) & _SVE_VL_LEN_MASK


def _syscall(*numbers: ctypes.c_long) -> int:
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    return int(function(*numbers))


def _sysctl(name: bytes) -> int:
    """Return a number that macOS knows of the machine; 0 where it does not know the name."""
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value
