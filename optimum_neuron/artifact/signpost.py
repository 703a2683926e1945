# SPDX-License-Identifier: Apache-2.0
"""What transformers reads of an artifact that it takes for a checkpoint: an index of weights, by which its error says what to call."""

from __future__ import annotations

import json
from pathlib import Path

from ..checkpoints.files import INDEX_NAME


# The one file that the index names is not there, and transformers' error is its name. It ends as files of weights that are no pickles.
_MISSING = "this is an artifact - load it by optimum_neuron.NeuronModelForCausalLM.from_pretrained, for it has no model.safetensors"


def write_signpost(folder: Path) -> None:
    """Writes the index into a new artifact's folder."""
    index = {"metadata": {"format": "optimum-neuron-runtime"}, "weight_map": {"compiled": _MISSING}}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
