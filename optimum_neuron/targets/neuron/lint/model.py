# SPDX-License-Identifier: Apache-2.0
"""Lints a model before it is exported: its graphs are lowered from its config alone, and written nowhere."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

from ....checkpoints.checkpoint import find_config
from ....config import NeuronConfig
from ..lowering.lower_all import lower_all
from ..lowering.requirements import check_lowering
from .lint import Finding, lint


def lint_model(
    model: str | Path,
    config: NeuronConfig,
    operators: frozenset[str] | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
) -> list[Finding]:
    """Checks all graphs that an export of a model would compile.

    Args:
        model: a Hub id, of which the config alone is downloaded, a checkpoint folder, or a .gguf file.
        operators: as in `lint`.

    Raises:
        ValueError: the model or the sizes cannot be exported.
        FileNotFoundError: there is no such model.
        RuntimeError: this machine cannot lower graphs.
    """
    check_lowering()
    checkpoint = find_config(model, revision=revision, token=token, trust_remote_code=trust_remote_code)
    model_config = checkpoint.load_config()
    checkpoint.check_length(model_config, config.sequence_length)
    config = dataclasses.replace(config, dtype=checkpoint.resolve_dtype(model_config, config.dtype) or "float32")
    findings = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model_config.save_pretrained(folder)
        if trust_remote_code:
            for path in checkpoint.folder.glob("*.py"):
                shutil.copyfile(path, folder / path.name)
        for graph in lower_all(folder, config, {}, trust_remote_code=trust_remote_code):
            findings += lint(graph.name, graph.hlo, graph.io, config.target, operators)
    return findings
