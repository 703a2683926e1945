# SPDX-License-Identifier: Apache-2.0
"""What lowers graphs needs torch-xla, which needs an older torch: `make test-neuron` has an environment of its own."""

from __future__ import annotations

import importlib.util

from neuron_fixtures import hlo_artifact, lowered_once, recurrent_artifact  # noqa: F401 - fixtures


HAS_XLA = importlib.util.find_spec("torch_xla") is not None
collect_ignore = [] if HAS_XLA else ["compile", "kernels", "lint", "lowering", "run", "sdk"]
