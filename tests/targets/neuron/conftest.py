# SPDX-License-Identifier: Apache-2.0
"""What lowers graphs needs torch-xla, which needs an older torch: `make test-neuron` has an environment of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import export_tiny


collect_ignore = [] if importlib.util.find_spec("torch_xla") else ["compile", "lint", "lowering", "run", "sdk"]


@pytest.fixture(scope="session")
def hlo_artifact(
    sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Artifacts of the hlo target by architecture; not to be changed."""
    made: dict[str, Path] = {}

    def export(name: str) -> Path:
        if name not in made:
            made[name] = export_tiny(sharp_checkpoints[name], tmp_path_factory.mktemp("hlo") / name, target="hlo")
        return made[name]

    return export
