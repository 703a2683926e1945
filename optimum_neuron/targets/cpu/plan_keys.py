# SPDX-License-Identifier: Apache-2.0
"""Keys of plans in the compile cache: digests of all that a plan depends on.

Those are a model's config and code, a graph's sizes, the names, shapes and types of weights, and which of them are one tensor, torch,
and the sources that make plans. No weight's values, no folder and no version of this package are in a key.
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
            for each in node.names:  # the file that it runs, but of packages above
                own = folder / f"{each.name}.py", folder / each.name / "__init__.py"
                candidates = (*own, folder.with_suffix(".py"), folder / "__init__.py")
                found.add(next(file for file in candidates if file.is_file()))
    return frozenset(found)


def plan_keys(job: CompileJob, tensors: Mapping[str, TensorLike]) -> dict[str, str]:
    """Return the key of each graph's plan, by the graph's name; `tensors` are what the file of weights holds, which is not read.

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
    texts = {
        spec.name: json.dumps(common | {"graph": asdict(spec)}, sort_keys=True, default=list) for spec in job.graphs
    }
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
