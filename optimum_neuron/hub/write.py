# SPDX-License-Identifier: Apache-2.0
"""Writes the card into an artifact's folder, and beside it what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..artifacts.artifact import Artifact
from ..artifacts.filesystem import replace_file
from ..artifacts.measurements import Measurements, identity, read_measurements, with_bench, with_quality
from ..checkpoints.card_facts import CARD_NAME
from ..inspect.collect import collect
from .card import is_made, make_card
from .push import read_card


def write_card(
    artifact: Artifact,
    *,
    bench: Path | None = None,
    quality: Path | None = None,
    base_model: str | None = None,
    tags: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes README.md, and with `bench` or `quality` measurements.json before it; each whole or not at all.

    Args:
        bench, quality: as in `artifacts.measurements`.
        base_model, tags: as in `make_card`.
        overwrite: also replace a README.md that was not made here, or was changed since.

    Returns:
        The path of the card.

    Raises:
        FileExistsError: somebody wrote the README.md that is there; nothing is written.
        ArtifactError: a file was changed after the export, or recorded measurements are of another artifact.
        ValueError: a file of measurements is none, or of another artifact.
    """
    path = artifact.path / CARD_NAME
    written = None if overwrite else read_card(artifact.path)
    if written is not None and not is_made(written):
        raise FileExistsError(
            f"{path} was written or changed by somebody; pass --overwrite (overwrite=True) to replace it, or move it"
        )
    recorded = read_measurements(artifact)
    measured = recorded or Measurements(identity(artifact))
    if bench is not None:
        measured = with_bench(measured, bench, artifact)
    if quality is not None:
        measured = with_quality(measured, quality, artifact)
    card = make_card(collect(artifact, measured), base_model=base_model, tags=tags)
    if measured != recorded and (measured.speeds or measured.quality):
        measured.write(artifact.path)
    replace_file(path, card)
    return path
