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
    """A Python package of the Neuron SDK.

    Attributes:
        distribution: its name for pip.
        evidence: a submodule or public name that the real package has.
    """

    module: str
    distribution: str
    evidence: str


TORCH_NEURONX = Package("torch_neuronx", "torch-neuronx", "xla_impl")
NEURONX_DISTRIBUTED = Package("neuronx_distributed", "neuronx-distributed", "trace")
TORCH_LITE = Package("libtorch_neuronx_lite", "libtorch-neuronx-lite", "compile")
NRTPY = Package("nrtpy", "nrtpy", "NrtpyModel")
RUNTIME_PACKAGES = (NRTPY, TORCH_LITE, TORCH_NEURONX, NEURONX_DISTRIBUTED)


def package_problem(package: Package) -> str | None:
    """Return why a package cannot be used, with the remedy; None where it can. Imports and raises nothing."""
    folders = _find_folders(package.module)
    if not folders:
        if installed_version(package.distribution) is None:
            return f"{package.distribution} is not installed; {SETUP}"
        return f"the installed {package.distribution} is a placeholder without code; {SETUP}"
    if any(_has_evidence(folder, package.evidence) for folder in folders):
        return None
    if all(_is_placeholder(folder) for folder in folders):
        return f"the installed {package.distribution} is a placeholder without code ({folders[0]}); {SETUP}"
    return f"the installed {package.distribution} ({folders[0]}) has no {package.evidence}; upgrade: {SETUP}"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_folders(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    return [Path(path) for path in (spec.submodule_search_locations or ())] if spec is not None else []


def _has_evidence(folder: Path, evidence: str) -> bool:
    if (folder / evidence).is_dir() or (folder / f"{evidence}.py").is_file():
        return True
    source = folder / "__init__.py"
    return source.is_file() and evidence in source.read_text(encoding="utf-8", errors="replace")


def _is_placeholder(folder: Path) -> bool:
    return not any(entry.name not in ("__init__.py", "__pycache__") for entry in folder.iterdir())
