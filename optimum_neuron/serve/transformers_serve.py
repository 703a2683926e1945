# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` over artifacts: python -m optimum_neuron.serve.transformers_serve ARTIFACT, with all of its options.

transformers chooses a model's class by its config, which an artifact has of its checkpoint. So the one thing that differs here is how
a model is loaded, where its folder is an artifact's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

from ..artifacts.artifact import MANIFEST_NAME
from ..modeling import NeuronModelForCausalLM


class NeuronModelManager(model_manager.ModelManager):
    """Loads folders of artifacts as they are, and all else as transformers does."""

    def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
        name = model_id_and_revision.rpartition("@")[0]
        if not (Path(name) / MANIFEST_NAME).is_file():
            return super()._load_model(model_id_and_revision, *args, **kwargs)
        given = {
            "--attn-implementation": self.attn_implementation,
            "--dtype": None if self.dtype == "auto" else self.dtype,
            "--quantization": self.quantization,
        }
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} {value} is decided when {name} is exported; leave it out")
        return NeuronModelForCausalLM.from_pretrained(name, export=False, trust_remote_code=self.trust_remote_code)


def serve() -> None:
    """The command."""
    model_manager.ModelManager = NeuronModelManager
    command = typer.Typer(add_completion=False)
    command.command()(Serve)
    command()


if __name__ == "__main__":
    serve()
