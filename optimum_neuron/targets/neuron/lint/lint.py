# SPDX-License-Identifier: Apache-2.0
"""The lint: lowered graphs against what the Neuron compiler and device take, before the slow compiler runs.

Every rule looks at HLO alone, so it holds for any model. A known failure is an error and stops an export. What is only not documented
as supported is a warning, unless the installed compiler's own list of operators decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ....artifact.artifact import Artifact
from ..compile.neuron_cc import find_compiler, list_operators, missing_compiler
from ..graphs import hlo
from ..graphs.io import HLO_SUFFIX, IO_SUFFIX, GraphIO, read_graph_io, read_hlo
from ..lowering.kernel_calls import without_references
from ..sdk.devices import resolve_lowered_target
from ..sdk.hardware import check_parallel_size
from .graph import LintGraph, Severity
from .operator_rules import normalize_operators
from .rules import RULES


@dataclass(frozen=True)
class Finding:
    """A place in a graph that breaks a rule.

    Attributes:
        rule: the rule's name.
        code: the compiler's or runtime's own code for it, as far as it has one.
        instruction: name of the HLO instruction; empty for the whole graph.
        module: dotted name of the module in the model, as far as it is known.
        problem, remedy: a sentence each.
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
    """Check one graph by all rules.

    Args:
        name: of the graph, for the findings.
        data: the serialized HloModuleProto; ValueError where it is none.
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
    return None if missing_compiler() is not None else normalize_operators(list_operators(find_compiler()))


def lint_artifact(
    artifact: Artifact, target: str | None = None, operators: frozenset[str] | None = None
) -> list[Finding]:
    """Check all graphs of an artifact.

    Args:
        target: the target of the rules, "auto" for this machine's; default, the artifact's own.

    Raises:
        ValueError: the artifact has no HLO, or no host of the target takes its tensor parallel size.
        ArtifactError: a graph was changed after the export, or is none.
    """
    target, findings = artifact_target(artifact, target), []
    for name, data, io in artifact_graphs(artifact):
        findings += lint(name, data, io, target, operators)
    return findings


def artifact_target(artifact: Artifact, target: str | None) -> str:
    """Return the target of an artifact's rules; raise ValueError without a device for "auto", or a host for its parallel size."""
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
