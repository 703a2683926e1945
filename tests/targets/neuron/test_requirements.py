# SPDX-License-Identifier: Apache-2.0
"""What graphs in HLO need is named where it is missing, with the remedy."""

from __future__ import annotations

import pytest

from optimum_neuron.targets.neuron.sdk import stacks as requirements


def test_what_reads_graphs_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "_is_there", lambda module: module != "google.protobuf")
    with pytest.raises(RuntimeError, match="takes protobuf, which is not installed here; pip install protobuf"):
        requirements.check_reading()
    with pytest.raises(RuntimeError, match="graphs in HLO need protobuf, which is not installed with torch"):
        requirements.check_lowering()
