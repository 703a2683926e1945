# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` over artifacts: python -m optimum_neuron.tools.serve.transformers_serve ARTIFACT, with all of its options.

transformers chooses a model's class by its config, which an artifact has of its checkpoint. So one thing differs here: the class of a model
in an artifact's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from transformers import GenerationConfig
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager, utils

from ...artifact.artifact import MANIFEST_NAME
from ...engine.continuous_batching.manager import ContinuousBatchingManager
from ...generate.model import NeuronModelForCausalLM


class NeuronModelManager(model_manager.ModelManager):
    """transformers' manager, which also loads folders of artifacts."""

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
        model = NeuronModelForCausalLM.from_pretrained(name, export=False, trust_remote_code=self.trust_remote_code)
        model.lengths_are_defaults = True  # 1,024 tokens by default
        return model


class NeuronBatches(utils.CBGenerateManager):
    """Continuous batching in which each client's request chooses tokens in its own way; in transformers all follow the first one's."""

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        super().init_cb(model, model.generation_config if isinstance(model, NeuronModelForCausalLM) else gen_config)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str, **options: Any
    ) -> Any:
        self._set_config(request_id, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, **options)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, request_id: str
    ) -> Any:
        self._set_config(request_id, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def _set_config(self, request_id: str, gen_config: GenerationConfig) -> None:
        if isinstance(self._cb, ContinuousBatchingManager):
            self._cb.configure(request_id, gen_config)


def take_over() -> None:
    """Make `transformers serve` load artifacts in this process."""
    model_manager.ModelManager, utils.CBGenerateManager = NeuronModelManager, NeuronBatches


if __name__ == "__main__":
    take_over()
    command = typer.Typer(add_completion=False)
    command.command()(Serve)
    command()
