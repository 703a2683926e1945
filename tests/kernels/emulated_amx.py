# SPDX-License-Identifier: Apache-2.0
"""The kernels for AMX on a machine that has its other instructions: built from the same sources, with tile registers in C++."""

from __future__ import annotations

import hashlib
from pathlib import Path

from optimum_neuron.kernels.host import instruction_sets as host


_HEADER = Path(__file__).with_name("emulated_amx.h")
_WITHOUT = next(each for each in host._X86_64 if each.name == "avx512_bf16")
# The header's digest is in the flags, so that a kept cache holds no kernels of another one.
AMX = host.InstructionSet(
    "amx_bf16-emulated",
    (
        *_WITHOUT.flags,
        f"-DSTEP_AMX_EMULATED=0x{hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:8]}",
        "-include",
        str(_HEADER),
    ),
    _WITHOUT.needs,
)
EMULATED_AMX = (AMX.name,) if _WITHOUT in host.list_instruction_sets() else ()
