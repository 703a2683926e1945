# SPDX-License-Identifier: Apache-2.0
"""The repetition of a certificate's checks on any CPU, line by line."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...artifact.artifact import Artifact, ArtifactError, is_weight_file
from ...artifact.filesystem import file_sha256
from ...config import HLO_TARGETS
from ...targets.neuron.lint.rules import RULES_VERSION
from ...targets.neuron.sdk.stacks import check_lowering
from . import CERTIFICATE_NAME, NOT_CERTIFIED, is_certified
from .certify import hlo_files, installed_versions, passed_rules
from .comparison import Comparison, compare
from .document import Certificate
from .expected import Expected
from .recording import digest_steps
from .setup import Setup, make_setup
from .trial import Trial, write_trial


@dataclass(frozen=True)
class Line:
    """One repeated check.

    Attributes:
        certified, found: result at the export, and here.
        holds: whether the artifact is still as certified; another version alone does not count against it.
    """

    subject: str
    certified: str
    found: str
    holds: bool


def verify_certificate(artifact: Artifact, *, trust_remote_code: bool) -> list[Line]:
    """Compare digests, lint, and execute again.

    Raises:
        ArtifactError: a file was changed, the certificate among them.
        ValueError: the artifact has no HLO to certify.
        RuntimeError: this machine cannot execute HLO.
    """
    if artifact.target not in HLO_TARGETS:
        raise ValueError(
            f"{artifact.path} was exported for {artifact.target} and holds no HLO; certificates are of {', '.join(HLO_TARGETS)}"
        )
    if not is_certified(artifact):
        return [Line("certificate", NOT_CERTIFIED, "export the model again with it", False)]
    check_lowering()
    artifact.verify()
    for name in artifact.manifest["files"]:
        if is_weight_file(name):
            artifact.check_digest(name, file_sha256(artifact.file(name)))
    certificate = Certificate.read(artifact.path)
    return [
        *_graph_lines(artifact, certificate),
        _rules_line(artifact, certificate),
        *_executed_lines(artifact, certificate, trust_remote_code=trust_remote_code),
        *_version_lines(certificate),
    ]


def _graph_lines(artifact: Artifact, certificate: Certificate) -> list[Line]:
    found = {path.stem: file_sha256(path) for path in hlo_files(artifact.path)}
    lines = []
    for name in sorted(found.keys() | certificate.graphs.keys()):
        one, other = certificate.graphs.get(name, "none"), found.get(name, "none")
        lines.append(Line(f"{name}: sha256", one[:12], other[:12], one == other))
    return lines


def _rules_line(artifact: Artifact, certificate: Certificate) -> Line:
    passed = passed_rules(artifact.path, artifact.target)
    missing = [name for name in certificate.rules if name not in passed]
    before = f"{len(certificate.rules)} of version {certificate.rules_version}"
    here = f"{len(passed)} of version {RULES_VERSION}" + (f", without {', '.join(missing)}" if missing else "")
    return Line("lint rules passed", before, here, not missing)


def _executed_lines(artifact: Artifact, certificate: Certificate, *, trust_remote_code: bool) -> list[Line]:
    with tempfile.TemporaryDirectory() as scratch:
        folder, config = artifact.path, certificate.config
        if certificate.layers < certificate.all_layers:
            folder, length = Path(scratch), config.sequence_length
            write_trial(artifact.path, certificate.layers, length, folder, trust_remote_code=trust_remote_code)
        trial = Trial(folder, config, artifact.config, certificate.layers, certificate.all_layers)
        setup = make_setup(
            artifact.path, trial, artifact.model, artifact.tied_weights, trust_remote_code=trust_remote_code
        )
        lines = [_steps_line(setup, certificate)]
        if config.kernels or artifact.config.kernels:
            # The references stand for the kernels: this certifies the graphs around them alone.
            before, here = (", ".join(each.kernels) or "none" for each in (config, artifact.config))
            lines.append(Line("kernels, executed by their references", before, here, before == here))
        if not trial.is_whole:
            lines.append(_lowered_line(setup, certificate))
        return lines + _comparison_lines(setup, certificate)


def _steps_line(setup: Setup, certificate: Certificate) -> Line:
    found = digest_steps(setup.steps)
    certified = f"{certificate.steps} steps, {certificate.tokens} tokens, {certificate.steps_sha256[:12]}"
    tokens = sum(len(step.written) for step in setup.steps)
    here = f"{len(setup.steps)} steps, {tokens} tokens, {found[:12]}"
    return Line("recorded inputs", certified, here, found == certificate.steps_sha256)


def _lowered_line(setup: Setup, certificate: Certificate) -> Line:
    """Compare digests, which decide nothing: other versions of torch may lower to other bytes."""
    same = {name: module.io.hlo_sha256 for name, module in setup.modules.items()} == certificate.executed
    here = "the same bytes" if same else "other bytes, executed all the same"
    return Line("modules of the first layers", f"{certificate.layers} of {certificate.all_layers} layers", here, True)


def _comparison_lines(setup: Setup, certificate: Certificate) -> list[Line]:
    certified = {(each.subject, each.dtype): each for each in certificate.comparisons}
    lines = []
    for expected in certificate.expected:
        for each in _compare_record(setup, certificate, expected):
            before = certified.pop((each.subject, each.dtype), None)
            said = "nothing" if before is None else f"{before.difference:.2g} of {before.bound:.2g}"
            holds = before is not None and each.holds
            where = "" if holds else f" at {each.place}"
            found = f"{each.difference:.2g} of {each.bound:.2g}, {each.count} numbers{where}"
            lines.append(Line(f"{each.subject} in {each.dtype}", said, found, holds))
    lines += [Line(f"{subject} in {dtype}", "compared", "no record", False) for subject, dtype in certified]
    return lines


def _compare_record(setup: Setup, certificate: Certificate, expected: Expected) -> list[Comparison]:
    try:
        return compare(expected, setup.execute_steps(expected.dtype, certificate.scales))
    except (IndexError, KeyError) as error:
        raise ArtifactError(
            f"{setup.folder / CERTIFICATE_NAME} records numbers that no step of these graphs makes ({error}); export the model again"
        ) from error


def _version_lines(certificate: Certificate) -> list[Line]:
    before, here = certificate.versions, installed_versions()
    names = dict.fromkeys((*before, *here))
    return [Line(f"version of {name}", before.get(name, "none"), here.get(name, "none"), True) for name in names]
