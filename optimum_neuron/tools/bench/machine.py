# SPDX-License-Identifier: Apache-2.0
"""Facts that speeds depend on besides the artifact: the machine and the versions. Imports torch late."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from ...version import __version__


def describe_machine() -> dict[str, Any]:
    """Return CPU, instruction sets of torch and of the kernels, usable cores, threads that compute, and versions."""
    import torch
    import transformers

    from ...kernels.host.instruction_sets import choose_instruction_set
    from ...kernels.host.machine import usable_cpus

    return {
        "cpu": cpu_model(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "kernels": choose_instruction_set().name,
        "cores": usable_cpus(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "optimum_neuron": __version__,
    }


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def peak_bytes() -> int | None:
    """Return the most host memory of this process so far, with mapped weights that were read; None where it is unknown."""
    try:
        import resource
    except ImportError:  # as on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
