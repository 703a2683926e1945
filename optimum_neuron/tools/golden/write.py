# SPDX-License-Identifier: Apache-2.0
"""The folder that travels: modules, the compiler's arguments for each, and the script that calls it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ... import progress
from ...artifact.partial import partial_folder
from ...config import NeuronConfig
from ...targets.neuron.compile.compiler import flag_facts
from ...targets.neuron.compile.neuron_cc import NEFF_SUFFIX, compiler_arguments
from ...targets.neuron.graphs.io import HLO_SUFFIX, LoweredGraph
from ...targets.neuron.lowering.lower_all import model_graphs
from ...targets.neuron.sdk.flags import INT64_OPTIONS_SINCE, compiler_flags
from ...targets.neuron.sdk.hardware import logical_core_size
from ...version import __version__
from . import run_compiler
from .modules import MODELS, RUNS, SIZES, GoldenRun


MODULES = "modules.json"


def write_golden(folder: Path, target: str) -> list[str]:
    """Lower the modules for a target into a new folder; return their names.

    Raises:
        FileExistsError: the folder is there already.
        RuntimeError: this machine cannot lower graphs.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; name a new folder")
    with partial_folder(folder.absolute().parent, folder.name) as partial:
        inside = partial / "golden"
        inside.mkdir()
        modules = {}
        with progress.stage("Lowering modules", len(RUNS)) as advance:
            for run in RUNS:
                for name, graph in _lower(run, target):
                    (inside / (name + HLO_SUFFIX)).write_bytes(graph.hlo)
                    modules[name] = _describe(name, graph, target)
                advance(run.name)
        document = {"version": __version__, "target": target, "modules": modules}
        (inside / MODULES).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        shutil.copy(run_compiler.__file__, inside / "run_compiler.py")
        inside.rename(folder)
    return list(modules)


def _lower(run: GoldenRun, target: str) -> Iterator[tuple[str, LoweredGraph]]:
    """Yield the first graph of each kind that a run names."""
    config = NeuronConfig.from_dict({**SIZES, **run.options, "target": target})
    wanted = set(run.modules)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(MODELS[run.model]), encoding="utf-8")
        for graph in model_graphs(scratch, config):
            if graph.kind in wanted:
                wanted.remove(graph.kind)
                yield f"{run.name}_{graph.kind}", graph
            if not wanted:
                return
    assert not wanted, f"{run.name} has no graph of the kinds {wanted}"


def _describe(name: str, graph: LoweredGraph, target: str) -> dict[str, Any]:
    version = ".".join(map(str, INT64_OPTIONS_SINCE))
    flags = compiler_flags(target, flag_facts(graph), lnc=logical_core_size(target), compiler_version=version)
    return {
        "file": name + HLO_SUFFIX,
        "neff": name + NEFF_SUFFIX,
        "sha256": graph.io.hlo_sha256,
        "arguments": list(compiler_arguments(name, target, flags)[1:]),
    }
