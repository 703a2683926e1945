# SPDX-License-Identifier: Apache-2.0
"""Keys of plans in the compile cache: digests of all that a plan depends on.

The compiler of plans is this package and torch, and what it reads are a model's config and code, a graph's sizes, and of the
weights their names, shapes and types, and which of them are one tensor. No weight's values, no folder and no version of this
package are in a key; the sources that make plans are.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from ...arrays import dtype_name
from ...artifact.quantization import read_formats
from ...artifact.skeleton import read_config
from ...artifact.tensor_file import TensorLike
from ...step.state_specs import state_specs
from .. import CompileJob


# Of a config: its origin, its author, and a type in the place of which the artifact has its own.
_NOT_READ = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def imported_sources(path: Path) -> frozenset[Path]:
    """Return a file of this package, and all files of the package that it imports, however far away."""
    found: set[Path] = set()
    left = {path}
    while left:
        path = left.pop()
        found.add(path)
        left |= _imports(path) - found
    return frozenset(found)


@cache
def _imports(path: Path) -> frozenset[Path]:
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found |= {each for name in node.names for each in _module_files(folder, name.name)}
    return frozenset(found)


def _module_files(folder: Path, name: str) -> list[Path]:
    """Return the files that `from folder import name` runs, but of packages above them."""
    candidates = (
        folder / f"{name}.py",
        folder / name / "__init__.py",
        folder.with_suffix(".py"),
        folder / "__init__.py",
    )
    return [next(path for path in candidates if path.is_file())]


def plan_keys(job: CompileJob, tensors: Mapping[str, TensorLike]) -> dict[str, str]:
    """Return the key of each graph's plan, by the graph's name.

    Args:
        job: its folder holds config.json, the formats of quantized layers, and the model's code where that is trusted; weights are
            not read.
        tensors: what the file of weights holds, by name.

    Raises:
        ValueError: config.json or quantization.json cannot be read.
    """
    config = read_config(job.folder, trust_remote_code=job.trust_remote_code).to_dict()
    code = sorted(job.folder.glob("*.py")) if job.trust_remote_code else []
    sources = sorted(imported_sources(Path(__file__).with_name("compiler.py")))
    common = {
        "model_config": {name: value for name, value in config.items() if name not in _NOT_READ},
        "model": job.model.to_dict(),
        "dtype": job.config.dtype,
        "quantized": {name: asdict(each) for name, each in read_formats(job.folder).items()},
        # A graph's own spec lacks those of a cache of blocks: what takes padding is as long as the artifact's largest step.
        "states": [asdict(state) for state in state_specs(job.config, job.model)],
        "tensors": {name: [dtype_name(each.dtype), list(each.shape)] for name, each in tensors.items()},
        "tied": job.tied_weights,
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in [*code, *sources]],
        "versions": [torch.__version__, transformers.__version__, *sys.version_info[:2]],
    }
    return {spec.name: _digest({"graph": asdict(spec), **common}) for spec in job.graphs}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()
