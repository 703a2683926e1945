# SPDX-License-Identifier: Apache-2.0
"""The targets whose graphs are lowered to HLO: Neuron devices, and `hlo`, which runs the same bytes on this CPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ... import progress
from ...artifact import GRAPHS_FOLDER, Artifact
from ...config import NeuronConfig
from ...graphs.kv_cache import KVCache
from ...graphs.spec import state_specs
from ...weights import allocate_states, named_tensors, read_weights, write_weights
from .. import CompileJob, Executable, check_one_device
from ..recompile import compiled_again
from .graph_io import GraphIO
from .requirements import check_lowering


if TYPE_CHECKING:
    from .lowering import LoweredGraph

logger = logging.getLogger(__name__)

HLO_SUFFIX, IO_SUFFIX = ".hlo", ".json"


class NeuronTarget:
    """Compiling needs torch-xla; a device target needs its compiler besides, and the device only to run."""

    def check(self, config: NeuronConfig) -> None:
        check_one_device(config)
        check_lowering()

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        return write_weights(named_tensors(model), folder)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        for graph in lower_and_check(job):
            write_graph(graph, job.folder / GRAPHS_FOLDER)
        return {}

    def load(self, artifact: Artifact, *, trust_native_code: bool, trust_remote_code: bool) -> Executable:
        if trust_native_code:
            artifact.verify()
            return _bind(artifact, artifact.path)
        with compiled_again(artifact, self.compile, trust_remote_code=trust_remote_code) as (folder, _):
            return _bind(artifact, folder)


def lower_and_check(job: CompileJob) -> list[LoweredGraph]:
    """All graphs of an artifact, none of which breaks a rule of the lint.

    Raises:
        ValueError: a graph does; the first place is named.
    """
    from .lint import lint

    lowered, errors = [], []
    for graph in lower_all(job):
        lowered.append(graph)
        for finding in lint(graph.name, graph.hlo, graph.io, job.config.target):
            if finding.severity == "error":
                errors.append(finding)
            else:
                logger.warning("%s", finding)
    if errors:
        more = f" ({len(errors) - 1} more: optimum-cli neuron lint lists them)" if len(errors) > 1 else ""
        raise ValueError(f"this model cannot be compiled for {job.config.target}: {errors[0]}{more}")
    return lowered


def lower_all(job: CompileJob) -> Iterator[LoweredGraph]:
    """Lowers all graphs of an artifact, and the one that copies slots, one by one."""
    from .lowering import lower_slot_copy, lower_step
    from .ops import NEURON_OPS
    from .rank_model import rank_model

    model = rank_model(job.folder, job.config, job.tied_weights, trust_remote_code=job.trust_remote_code)
    states = state_specs(job.config, job.model)
    cache = KVCache(states)
    with progress.stage("Lowering graphs", len(job.graphs) + 1) as advance:
        for spec in job.graphs:
            yield lower_step(model, cache, spec, NEURON_OPS, job.model.vocab_size)
            advance(spec.name)
        yield lower_slot_copy(states)
        advance("copy_slot")


def write_graph(graph: LoweredGraph, folder: Path) -> None:
    """Writes a graph's HLO, and what its parameters and results are."""
    (folder / (graph.name + HLO_SUFFIX)).write_bytes(graph.hlo)
    text = json.dumps(graph.io.to_dict(), indent=1) + "\n"
    (folder / (graph.name + IO_SUFFIX)).write_text(text, encoding="utf-8")


def read_graph_io(path: Path) -> GraphIO:
    """What the parameters and results of a graph file are."""
    return GraphIO.from_dict(json.loads(path.with_suffix(IO_SUFFIX).read_text(encoding="utf-8")))


def _bind(artifact: Artifact, folder: Path) -> Executable:
    from .hlo_executor import HloExecutable, HloProgram

    programs = {
        path.stem: HloProgram(path.stem, path.read_bytes(), read_graph_io(path))
        for path in sorted((folder / GRAPHS_FOLDER).glob("*" + HLO_SUFFIX))
    }
    return HloExecutable(programs, read_weights(artifact), allocate_states(artifact.states()))
