# SPDX-License-Identifier: Apache-2.0
"""What compiled code needs of the machine it runs on, and why code from another machine may not run here."""

from __future__ import annotations

import platform
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
    if not _CPUINFO.is_file():
        return {torch.backends.cpu.get_cpu_capability().lower()}
    for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return {flag for flag in value.split() if flag.startswith(_ISA_PREFIXES)}
    return set()
