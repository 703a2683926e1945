# SPDX-License-Identifier: Apache-2.0
"""A certificate executes HLO, which needs torch-xla: `make test-neuron` has an environment of its own."""

from __future__ import annotations

import importlib.util

from neuron_fixtures import hlo_artifact, lowered_once, recurrent_artifact  # noqa: F401 - fixtures


collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]
