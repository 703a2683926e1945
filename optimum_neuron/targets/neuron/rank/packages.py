# SPDX-License-Identifier: Apache-2.0
"""Packages of the Neuron SDK that are installed: found by their files, as importing one starts its runtime.

The public package index has placeholders of these names, which hold an `__init__.py` that raises, or are no module at all.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path


SETUP = "install it from the Neuron repository of AWS, as the setup guide of the AWS Neuron SDK says"


@dataclass(frozen=True)
class Package:
    """A Python package of the Neuron SDK, and its name for pip; `evidence` is a submodule or name that the real package has."""

    module: str
    distribution: str
    evidence: str


TORCH_NEURONX = Package("torch_neuronx", "torch-neuronx", "xla_impl")
NEURONX_DISTRIBUTED = Package("neuronx_distributed", "neuronx-distributed", "trace")
NRTPY = Package("nrtpy", "nrtpy", "NrtpyModel")
RUNTIME_PACKAGES = (NRTPY, TORCH_NEURONX, NEURONX_DISTRIBUTED)


def package_problem(package: Package) -> str | None:
    """Return why a package cannot be used, with the remedy; None where it can. Imports and raises nothing."""
    spec = importlib.util.find_spec(package.module)
    folders = [Path(path) for path in (spec.submodule_search_locations or ())] if spec is not None else []
    if not folders:
        if installed_version(package.distribution) is None:
            return f"{package.distribution} is not installed; {SETUP}"
        return f"the installed {package.distribution} is a placeholder without code; {SETUP}"
    for folder in folders:
        source = folder / "__init__.py"
        if (folder / package.evidence).is_dir() or (folder / f"{package.evidence}.py").is_file():
            return None
        if source.is_file() and package.evidence in source.read_text(encoding="utf-8", errors="replace"):
            return None
    if {entry.name for folder in folders for entry in folder.iterdir()} <= {"__init__.py", "__pycache__"}:
        return f"the installed {package.distribution} is a placeholder without code ({folders[0]}); {SETUP}"
    return f"the installed {package.distribution} ({folders[0]}) has no {package.evidence}; upgrade: {SETUP}"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
