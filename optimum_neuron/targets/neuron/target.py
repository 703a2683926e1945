# SPDX-License-Identifier: Apache-2.0
"""The targets with graphs in HLO: Neuron devices, and `hlo`, which runs the same bytes on this CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ... import progress
from ...artifact.artifact import GRAPHS_FOLDER, WEIGHTS_NAME, Artifact, ArtifactError
from ...artifact.filesystem import file_sha256
from ...artifact.tensor_file import stored_tensors
from ...artifact.weights import (
    allocate_states,
    named_tensors,
    rank_weights_name,
    read_layout,
    read_weights,
)
from ...config import NEURON_TARGETS, NeuronConfig
from ...step.state_specs import kept_states
from .. import IN_ENVIRONMENT, CacheKeys, CompileJob, Executable, RankOptions, Target
from ..cache.store import CompileCache
from ..host_states import check_state_memory
from ..recompile import compiled_again
from .graphs.checks import check_graphs, check_weights, graph_names, left_states
from .graphs.io import HLO_SUFFIX, IO_SUFFIX, GraphIO, read_graph_io, write_graph
from .kernels.kernel import check_kernels
from .sdk.errors import INVALID, NeuronRuntimeError
from .sdk.hardware import check_parallel_size
from .sdk.stacks import check_lowering


if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from .graphs.io import LoweredGraph
    from .sharding import ShardPlan

logger = logging.getLogger(__name__)


class NeuronTarget(Target):
    """A target that lowers graphs to HLO, and compiles them where they are for a device.

    A model is written and then compiled by the same object, which traces the first graph once for both.
    """

    keeps_graphs = True

    def __init__(self) -> None:
        self._first: ExportedProgram | None = None

    def check(self, config: NeuronConfig) -> None:
        _check_tools(config)
        if config.target in NEURON_TARGETS:
            from .compile.compiler import CACHE_KIND

            CompileCache(CACHE_KIND)

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        from .lowering.lower_all import trace_first
        from .operators.codes import check_weight_types
        from .sharding import write_sharded_weights

        check_weight_types(model, config.target)
        plan = _make_plan(model, config)
        self._first, layout = trace_first(model, plan, config)
        return write_sharded_weights(named_tensors(model), plan, folder, layout)

    def compile(self, job: CompileJob) -> dict[str, Any]:
        folder, target = job.folder / GRAPHS_FOLDER, job.config.target
        first, self._first = self._first, None
        trusted = job.trust_remote_code
        graphs = lower_and_check(job.folder, job.config, job.tied_weights, trust_remote_code=trusted, first=first)
        path = job.folder / rank_weights_name(0, job.config.tensor_parallel_size)  # all ranks have the same
        stored = stored_tensors(path)
        tied = {alias: stored[name] for alias, name in job.tied_weights.items() if name in stored}
        check_weights(path.name, stored | tied, (graph.io for graph in graphs))
        for graph in graphs:
            write_graph(graph, folder)
        if target not in NEURON_TARGETS:
            return {}
        from .compile.compiler import compile_graphs

        return compile_graphs(graphs, target, folder)

    def cache_keys(
        self, model: PreTrainedModel, config: NeuronConfig, folder: Path, *, trust_remote_code: bool
    ) -> CacheKeys:
        _check_tools(config)
        from .compile.compiler import CACHE_KIND, find_keys
        from .compile.neuron_cc import NEFF_SUFFIX
        from .sharding import tied_names

        tied = tied_names(named_tensors(model), _make_plan(model, config))
        graphs = lower_and_check(folder, config, tied, trust_remote_code=trust_remote_code)
        return CacheKeys(CACHE_KIND, NEFF_SUFFIX, find_keys(graphs, config.target))

    def load(
        self,
        artifact: Artifact,
        *,
        trust_native_code: bool,
        trust_remote_code: bool,
        ranks: RankOptions = IN_ENVIRONMENT,
    ) -> Executable:
        size = artifact.config.tensor_parallel_size
        if artifact.target not in NEURON_TARGETS:
            ranks.refuse(artifact.target)
            if size > 1:
                raise ValueError(
                    f"{artifact.path} has graphs of {size} ranks, and target={artifact.target!r} generates with one; an export with "
                    f"--certify executes all of them, and tensor_parallel_size=1 exports for one"
                )
        found: AbstractContextManager[tuple[Path, dict[str, Any]]]
        if trust_native_code:
            artifact.verify()
            found = nullcontext((artifact.path, artifact.manifest["target_data"]))
        else:
            if size == 1:
                check_state_memory(artifact)
            found = compiled_again(artifact, self.compile, trust_remote_code=trust_remote_code)
        with found as (folder, data):
            if artifact.target in NEURON_TARGETS:
                return _load_on_device(artifact, folder, data, ranks)
            return _load_on_cpu(artifact, folder)


def _check_tools(config: NeuronConfig) -> None:
    check_parallel_size(config.target, config.tensor_parallel_size)
    check_lowering()
    if config.target in NEURON_TARGETS:
        from .compile.compiler import check_environment

        check_environment(config.target)
        check_kernels(config)


def _make_plan(model: PreTrainedModel, config: NeuronConfig) -> ShardPlan:
    from .sharding import shard_plan, whole_plan

    ranks = config.tensor_parallel_size
    return whole_plan(model) if ranks == 1 else shard_plan(model, ranks)


def lower_and_check(
    folder: Path,
    config: NeuronConfig,
    tied_weights: Mapping[str, str],
    *,
    trust_remote_code: bool,
    first: ExportedProgram | None = None,
) -> list[LoweredGraph]:
    """Lower all graphs of an artifact; raise ValueError with the first place that breaks a rule of the lint.

    Args:
        folder, tied_weights, first: as in `lower_all`.
    """
    from .lint.lint import installed_operators, lint
    from .lowering.lower_all import lower_all

    operators = installed_operators() if config.target in NEURON_TARGETS else None
    lowered, errors = [], []
    for graph in lower_all(folder, config, tied_weights, trust_remote_code=trust_remote_code, first=first):
        lowered.append(graph)
        for finding in lint(graph.name, graph.hlo, graph.io, config.target, operators):
            if finding.severity == "error":
                errors.append(finding)
            else:
                logger.warning("%s", finding)
    if errors:
        more = f" ({len(errors) - 1} more: optimum-cli neuron lint lists them)" if len(errors) > 1 else ""
        raise ValueError(f"this model cannot be compiled for {config.target}: {errors[0]}{more}")
    return lowered


def _load_on_cpu(artifact: Artifact, folder: Path) -> Executable:
    check_lowering()
    from .run.executors import HloExecutable, HloProgram

    described = _read_graphs(artifact, folder)
    check_weights(artifact.file(WEIGHTS_NAME), read_layout(artifact), described.values())
    programs = {name: HloProgram(folder / GRAPHS_FOLDER / (name + HLO_SUFFIX), io) for name, io in described.items()}
    states = allocate_states((*kept_states(artifact.config, artifact.model), *left_states(artifact)))
    return HloExecutable(programs, _list_inputs(artifact), read_weights(artifact), states)


def _list_inputs(artifact: Artifact) -> dict[str, tuple[str, ...]]:
    return {spec.name: tuple(tensor.name for tensor in spec.inputs()) for spec in artifact.graphs}


def _read_graphs(artifact: Artifact, folder: Path) -> dict[str, GraphIO]:
    """Read the descriptions of the graphs in a folder; raise ArtifactError where one is missing or another graph's."""
    described = {}
    for name in graph_names(artifact):
        path = folder / GRAPHS_FOLDER / (name + HLO_SUFFIX)
        if folder == artifact.path:
            for suffix in (HLO_SUFFIX, IO_SUFFIX):
                artifact.graph_file(name + suffix)
        described[name] = read_graph_io(path)
        if file_sha256(path) != described[name].hlo_sha256:
            raise ArtifactError(
                f"{path.with_suffix(IO_SUFFIX)} describes another graph than {path.name}; export the model again"
            )
    check_graphs(artifact, described)
    return described


def _load_on_device(artifact: Artifact, folder: Path, data: dict[str, Any], options: RankOptions) -> Executable:
    from .compile.compiler import CACHE_KIND
    from .compile.neuron_cc import NEFF_SUFFIX
    from .run.load_plan import LoadPlan
    from .run.ranks import RankedExecutable

    ranks = artifact.config.tensor_parallel_size
    weights = [rank_weights_name(rank, ranks) for rank in range(ranks)]
    with progress.stage("Verifying weights"):
        for name in weights:
            artifact.check_digest(name, file_sha256(artifact.file(name)))
    if "lnc" not in data:
        raise ArtifactError(f"target_data of {artifact.path} lacks lnc; export the model again")
    plan = LoadPlan(
        folder=folder / GRAPHS_FOLDER,
        target=artifact.target,
        lnc=data["lnc"],
        graphs=_read_graphs(artifact, folder),
        calls=_list_inputs(artifact),
        weights=tuple(artifact.file(name) for name in weights),
        tied_weights=artifact.tied_weights,
    )
    try:
        with progress.stage("Loading graphs onto the device"):
            return RankedExecutable(plan, options)
    except NeuronRuntimeError as error:
        # Another export would find NEFFs in the compile cache that the runtime refuses; a machine that only loads may have none.
        with suppress(OSError):
            cache = CompileCache(CACHE_KIND)
            for path in plan.folder.glob("*" + NEFF_SUFFIX) if error.code == INVALID else ():
                cache.forget(file_sha256(path))
        raise
