# SPDX-License-Identifier: Apache-2.0
"""Which exported artifacts a benchmark may use again."""

from __future__ import annotations

from pathlib import Path

import pytest

import optimum_neuron
from benchmark.model import _fingerprint, serving_config


@pytest.mark.parametrize("suffix", ["py", "cpp", "h"])
def test_an_artifact_of_other_sources_is_not_used_again(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimum_neuron, "__file__", str(tmp_path / "__init__.py"))
    source = tmp_path / "targets" / f"kernel.{suffix}"
    source.parent.mkdir()
    source.write_text("one")
    config = serving_config(2, 100, 16, "float32")
    assert config.sequence_length == 256
    before = _fingerprint("model", config)
    assert before == _fingerprint("model", config)
    assert before != _fingerprint("another", config)
    source.write_text("two")
    assert before != _fingerprint("model", config)
