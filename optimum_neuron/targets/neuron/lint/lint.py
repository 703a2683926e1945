# SPDX-License-Identifier: Apache-2.0
"""The lint: lowered graphs against what the Neuron compiler and device take, before the slow compiler runs.

Every rule looks at HLO alone, so it holds for any model. A known failure is an error and stops an export. What is only not documented
as supported is a warning, unless the installed compiler's own list of operators decides. The docstring of each rule names its source:
the Neuron SDK's error-code pages, its runtime's status codes, or a public report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ....artifact.artifact import Artifact
from ..compile.neuron_cc import find_compiler, list_operators, missing_compiler
from ..graphs import hlo
from ..graphs.io import HLO_SUFFIX, IO_SUFFIX, GraphIO, read_graph_io, read_hlo
from ..lowering.kernel_calls import without_references
from ..sdk.devices import resolve_lowered_target
from ..sdk.hardware import check_parallel_size
from . import memory_rules as memory
from . import operator_rules
from . import value_rules as values
from .graph import LintGraph, Place, Severity


@dataclass(frozen=True)
class Rule:
    """A rule: its name, the compiler's or runtime's codes for it, and the function that finds the places that break it."""

    name: str
    code: str
    check: Callable[[LintGraph], Iterable[Place]]


# Raised with every change of what graphs pass: what an earlier version let pass is to be checked again.
RULES_VERSION = 9

RULES = (
    Rule("opcode", "EVRF001", operator_rules.opcodes),
    Rule("control-flow", "EVRF001", operator_rules.control_flow),
    Rule("host-transfer", "EVRF001", operator_rules.host_transfers),
    Rule("random", "EVRF006", operator_rules.random),
    Rule("reduce-window", "EVRF017-019", operator_rules.reduce_windows),
    Rule("sort", "EVRF029", operator_rules.sorts),
    Rule("top-k-call", "EVRF013, EVRF014", operator_rules.top_k_calls),
    Rule("custom-call", "EVRF015", operator_rules.custom_calls),
    Rule("dynamic-slice", "EVRF001", operator_rules.slices),
    Rule("convolution", "EVRF010, EVRF011", operator_rules.convolutions),
    Rule("reduction", "EVRF001", operator_rules.reductions),
    Rule("strided-store", "", operator_rules.strided_stores),
    Rule("type", "EVRF004, EVRF005, EVRF051, ESPP004", values.types),
    Rule("dynamic-shape", "EMOD025", values.dynamic_shapes),
    Rule("integer-compute", "EVRF016, EVRF022, EVRF035, EVRF060-063", values.integer_compute),
    Rule("unsigned", "", values.unsigned),
    Rule("index-range", "EVRF031, EVRF056, NRT 1006", values.index_ranges),
    Rule("constant", "NRT 1003", values.constants),
    Rule("mask-sum", "NRT 1003", values.mask_sums),
    Rule("dead-operand", "", values.dead_operands),
    Rule("alias", "EVRF064", memory.aliases),
    Rule("collective", "", memory.collectives),
    Rule("order-token", "NRT 1003", memory.order_tokens),
    Rule("scores", "", memory.attention_scores),
    Rule("memory", "EVRF009, EOOM001", memory.memory),
    Rule("transposed-weight", "", memory.transposed_weights),
    Rule("copied-codes", "", memory.copied_codes),
)


@dataclass(frozen=True)
class Finding:
    """A place in a graph that breaks a rule: an HLO instruction, or the whole graph, of a module of the model, as far as it is known.

    `code` is the compiler's or runtime's own for the rule, as far as it has one.
    """

    graph: str
    rule: str
    code: str
    severity: Severity
    instruction: str
    module: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        where = " of ".join(part for part in (self.instruction, self.module) if part)
        code = f" ({self.code})" if self.code else ""
        return f"{self.graph}: {where + ': ' if where else ''}{self.problem}{code}; {self.remedy}"


def lint(name: str, data: bytes, io: GraphIO, target: str, operators: frozenset[str] | None = None) -> list[Finding]:
    """Check one graph by all rules; raise ValueError where `data` is no serialized HloModuleProto.

    Args:
        operators: from `neuronx-cc list-operators`, if there is a compiler: see `normalize_operators`.
    """
    graph = LintGraph(name, without_references(hlo.parse(data)), io, target, operators)
    findings = []
    for rule in RULES:
        for instruction, problem, remedy, severity in rule.check(graph):
            where, module = ("", "") if instruction is None else (instruction.name, graph.module_path(instruction))
            findings.append(Finding(name, rule.name, rule.code, severity, where, module, problem, remedy))
    return findings


def passed_rules(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the rules that no error among these findings breaks, by name and in the order of RULES_VERSION."""
    broken = {finding.rule for finding in findings if finding.severity == "error"}
    return tuple(rule.name for rule in RULES if rule.name not in broken)


def installed_operators() -> frozenset[str] | None:
    """Return the operators that the neuronx-cc on PATH lists; None where there is none."""
    if missing_compiler() is not None:
        return None
    return operator_rules.normalize_operators(list_operators(find_compiler()))


def lint_artifact(
    artifact: Artifact, target: str | None = None, operators: frozenset[str] | None = None
) -> list[Finding]:
    """Check all graphs of an artifact by the rules of a target; raise as `artifact_target` and `artifact_graphs`."""
    target = artifact_target(artifact, target)
    checked = (lint(name, data, io, target, operators) for name, data, io in artifact_graphs(artifact))
    return [finding for findings in checked for finding in findings]


def artifact_target(artifact: Artifact, target: str | None) -> str:
    """Return the target of an artifact's rules, its own by default; raise ValueError without a device for "auto", or a host for its size."""
    resolved = resolve_lowered_target(target or artifact.target)
    check_parallel_size(resolved, artifact.config.tensor_parallel_size)
    return resolved


def artifact_graphs(artifact: Artifact) -> Iterator[tuple[str, bytes, GraphIO]]:
    """Yield the name, the HLO and the description of each graph of an artifact.

    Raises:
        ValueError: the artifact has no HLO.
        ArtifactError: a graph was changed after the export, or is none.
    """
    names = [name for name in artifact.manifest["files"] if name.endswith(HLO_SUFFIX)]
    if not names:
        raise ValueError(
            f"{artifact.path} was exported for {artifact.target} and holds no HLO; lint its checkpoint: --model"
        )
    artifact.verify(name for name in artifact.manifest["files"] if name.endswith((HLO_SUFFIX, IO_SUFFIX)))
    for name in names:
        path = artifact.file(name)
        yield path.stem, read_hlo(path), read_graph_io(path)
