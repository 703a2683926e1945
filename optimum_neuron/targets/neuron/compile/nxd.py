# SPDX-License-Identifier: Apache-2.0
"""neuronx-distributed on torch-neuronx as a compiler: the same HLO, compiled through its functional API.

The work is done by nxd_compile.py in a process of its own: the packages start a runtime when imported, and a compilation that
takes too long can be ended.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..sdk.packages import LIBNEURONXLA, NEURONX_DISTRIBUTED, TORCH_NEURONX, installed_version, package_problem
from .neuron_cc import (
    DISTRIBUTION,
    NEFF_SUFFIX,
    CompilerCall,
    compiler_environment,
    compiler_version,
    find_compiler,
    missing_compiler,
)


METANEFF_SUFFIX = ".metaneff"
PACKAGES = (TORCH_NEURONX, LIBNEURONXLA, NEURONX_DISTRIBUTED)
MODULE = "optimum_neuron.targets.neuron.compile.nxd_compile"


class NeuronxDistributed:
    """Compiles with neuronx-distributed, which also writes what its runtime wants to know of a graph's tensors."""

    name = "neuronx-distributed"
    suffixes = (METANEFF_SUFFIX, NEFF_SUFFIX)
    sources = (Path(__file__).with_name("metaneff.py"), Path(__file__).with_name("nxd_compile.py"))

    def unavailable(self) -> str | None:
        """What this machine lacks to compile, with the remedy; None where it lacks nothing."""
        return missing_packages() or missing_compiler()

    def versions(self) -> dict[str, str]:
        """Versions by distribution; libneuronxla calls the neuronx-cc command."""
        compiler = {DISTRIBUTION: compiler_version(find_compiler())}
        return compiler | {each.distribution: installed_version(each.distribution) or "unknown" for each in PACKAGES}

    def call(self, graph: str, target: str, flags: Sequence[str]) -> CompilerCall:
        """Compiles `<graph>.hlo` and `<graph>.json` to `<graph>.neff` and `<graph>.metaneff`."""
        root = Path(__file__).parents[4]
        environment = compiler_environment(os.environ) | {
            "NEURON_PLATFORM_TARGET_OVERRIDE": target,
            "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        return CompilerCall(("python", "-m", MODULE, graph, *flags), sys.executable, environment)


def missing_packages() -> str | None:
    """Which package is missing for compiling or running with neuronx-distributed; None where none is."""
    return next(filter(None, map(package_problem, PACKAGES)), None)
