# SPDX-License-Identifier: Apache-2.0
"""Certificates: graphs in HLO, executed on this CPU and compared with the model. An export makes one where it is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import progress


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...artifact.artifact import Artifact
    from ...targets import CompileJob

CERTIFICATE_NAME = "certificate.json"
NOT_CERTIFIED = "no: it was exported without --certify"


def is_certified(artifact: Artifact) -> bool:
    """Return whether the export executed the graphs and recorded the result."""
    return CERTIFICATE_NAME in artifact.manifest["files"]


def certify_export(model: PreTrainedModel, job: CompileJob) -> None:
    """Write the certificate of an export, as the `certify` of `export_model`.

    Raises:
        ValueError: a graph computes something else than the model does; what, and where, is named.
        RuntimeError: XLA cannot execute a graph.
    """
    from .certify import certify

    with progress.stage("Comparing executed graphs with the eager step"):
        certify(model, job).write(job.folder)
