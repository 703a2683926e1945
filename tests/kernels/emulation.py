# SPDX-License-Identifier: Apache-2.0
"""Kernels of aarch64 on any machine that has a cross compiler and qemu, run in an emulator; and those for AMX, without its registers."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from optimum_neuron.kernels.host import instruction_sets as host
from optimum_neuron.kernels.steps.operands import Buffer
from optimum_neuron.targets.cpu.native_library import fetch_library


_COMPILER, _EMULATOR, _ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
# Each on a CPU with vectors as long as it asks for.
_CPUS = {"neon": "cortex-a53", "neon_bf16": "max,sve=off", "sve256": "max,sve-max-vq=2", "sve512": "a64fx"}
_CAN_RUN = shutil.which(_COMPILER) is not None and shutil.which(_EMULATOR) is not None
EMULATED = tuple(_CPUS) if _CAN_RUN and "neon" not in {each.name for each in host.list_instruction_sets()} else ()

# The kernels for AMX on a machine that has its other instructions: the same sources, with tile registers in C++.
_HEADER = Path(__file__).with_name("emulated_amx.h")
_WITHOUT = next(each for each in host._X86_64 if each.name == "avx512_bf16")
# The header's digest is in the flags, so that a kept cache holds no kernels of another one.
_DIGEST = f"-DSTEP_AMX_EMULATED=0x{hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:8]}"
AMX = host.InstructionSet("amx_bf16-emulated", (*_WITHOUT.flags, _DIGEST, "-include", str(_HEADER)), _WITHOUT.needs)
EMULATED_AMX = (AMX.name,) if _WITHOUT in host.list_instruction_sets() else ()

_Region = tuple[int, int]  # address, bytes


def _regions(addresses: Sequence[int], sizes: Sequence[int]) -> list[_Region]:
    """What buffers cover; those that overlap stay one region."""
    regions: list[_Region] = []
    for address, size in sorted(zip(addresses, sizes, strict=True)):
        if regions and address < sum(regions[-1]):
            begin, length = regions[-1]
            regions[-1] = (begin, max(length, address + size - begin))
        else:
            regions.append((address, size))
    return regions


class Emulator:
    """A process that runs plans in the emulator."""

    def __init__(self, name: str) -> None:
        """Builds the driver, and the library of an instruction set of aarch64 or finds it in the compile cache."""
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        chosen = next(each for each in host._AARCH64 if each.name == name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", _COMPILER)
            patch.setattr(platform, "machine", lambda: "aarch64")
            kernels = fetch_library(folder / "kernels.so", chosen)
        driver, source = folder / "driver", Path(__file__).with_name("emulated_driver.cpp")
        subprocess.run([_COMPILER, "-O1", "-std=c++20", source, "-o", driver], check=True)
        command = [_EMULATOR, "-L", _ROOT, "-cpu", _CPUS[name], driver, kernels]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin and self._process.stdout
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout

    def send(self, *numbers: int) -> None:
        self._to.write(struct.pack(f"<{len(numbers)}q", *numbers))

    def send_memory(self, address: int, size: int) -> None:
        self._to.write(ctypes.string_at(address, size))

    def answer(self) -> int:
        self._to.flush()
        (number,) = struct.unpack("<q", self._read(8))
        return int(number)

    def take_memory(self, address: int, size: int) -> None:
        ctypes.memmove(address, self._read(size), size)

    def _read(self, size: int) -> bytes:
        found = self._from.read(size)
        if len(found) != size:
            raise RuntimeError(f"the emulated kernels ended with {self._process.wait(10)}")
        return found

    @property
    def closed(self) -> bool:
        return self._to.closed

    def close(self) -> None:
        self._to.close()
        self._process.wait(10)
        self._from.close()
        self._folder.cleanup()


class EmulatedLibrary:
    """The C functions of the library for plans over buffers of known sizes, which the emulator gets copies of."""

    def __init__(self, emulator: Emulator, buffers: Sequence[Buffer]) -> None:
        self._emulator = emulator
        self._sizes = [buffer.bytes for buffer in buffers]

    def step_plan(self, words: int, count: int) -> int:
        self._emulator.send(0, count)
        self._emulator.send_memory(words, count * 8)
        return self._emulator.answer()

    def step_free(self, plan: int) -> None:
        if not self._emulator.closed:  # a plan may live longer than all tests
            self._emulator.send(1, plan)

    def step_run(self, plan: int, begin: int, end: int, buffers: int, live: int, threads: int) -> int:
        pointers = (ctypes.c_void_p * len(self._sizes)).from_address(buffers)
        addresses = [int(each or 0) for each in pointers]
        regions = _regions(addresses, self._sizes)
        send = self._emulator.send
        send(2, plan, begin, end, live, threads, len(regions), len(addresses))
        for address, size in regions:
            send(size, address % 64)
        for address in addresses:
            number = max(i for i, region in enumerate(regions) if region[0] <= address)
            send(number, address - regions[number][0])
        for region in regions:
            self._emulator.send_memory(*region)
        result = self._emulator.answer()
        for region in regions:
            self._emulator.take_memory(*region)
        return result


@cache
def emulator(name: str) -> Emulator:
    started = Emulator(name)
    atexit.register(started.close)
    return started
