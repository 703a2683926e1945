# SPDX-License-Identifier: Apache-2.0
"""Certificates: an export with --certify executes its HLO on this CPU and compares it with the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import progress
from ...hub.collect import CERTIFICATE_NAME as CERTIFICATE_NAME


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...artifact.artifact import Artifact
    from ...targets import CompileJob

NOT_CERTIFIED = "no: it was exported without --certify"


def is_certified(artifact: Artifact) -> bool:
    """Return whether the export executed the graphs and recorded the result."""
    return CERTIFICATE_NAME in artifact.manifest["files"]


def certify_export(model: PreTrainedModel, job: CompileJob) -> None:
    """Write the certificate of an export. Raise ValueError where a graph computes something else, RuntimeError where XLA fails."""
    from .certify import make_certificate

    with progress.stage("Comparing executed graphs with the eager step"):
        make_certificate(model, job)
