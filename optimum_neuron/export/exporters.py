# SPDX-License-Identifier: Apache-2.0
"""The format "neuron" of transformers' exporters: importing this module registers it, and a model in memory becomes an artifact."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.exporters import HfExporter, register_export_config, register_exporter
from transformers.exporters.configs import ExportConfigMixin

from ..config import NeuronConfig
from ..targets import CompileJob
from .recipe import export_model


FORMAT = "neuron"
# The one component of a model for generation: prefill and decode are graphs of one artifact, over one cache.
COMPONENT = "model"
_INPUTS = ("input_ids", "attention_mask")


@register_export_config(FORMAT)
class NeuronExportConfig(ExportConfigMixin):
    """The output folder of an artifact, and fields of `NeuronConfig` as `neuron_config`, with its errors; `overwrite` replaces an artifact."""

    def __init__(
        self, output_path: str | PathLike[str], *, overwrite: bool = False, export_format: str = FORMAT, **options: Any
    ) -> None:
        if export_format != FORMAT:
            raise ValueError(f"export_format={export_format!r} is not {FORMAT!r}; use the config of that format")
        self.export_format = FORMAT
        self.output_path = fspath(output_path)
        self.overwrite = overwrite
        self.neuron_config = NeuronConfig.from_dict(options)
        self._options = options | ({"dtype": self.neuron_config.dtype} if "dtype" in options else {})

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict that `from_dict` turns into an equal config; options that were left out stay so."""
        named = {name: list(value) if isinstance(value, tuple) else value for name, value in self._options.items()}
        own = {name: getattr(self, name) for name in ("export_format", "output_path", "overwrite")}
        return copy.deepcopy(own | named)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeuronExportConfig) and self.to_dict() == other.to_dict()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


@register_exporter(FORMAT)
class NeuronExporter(HfExporter):
    """An exporter of a `PreTrainedModel` as it is in memory, in its own dtype.

    The `tokenizer` goes into the artifact, for the commands and the servers. `trust_remote_code` runs modeling code that the model brings, and
    `certify` is that of `export_model`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        trust_remote_code: bool = False,
        *,
        certify: Callable[[PreTrainedModel, CompileJob], None] | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.trust_remote_code = trust_remote_code
        self.certify = certify

    def export(
        self,
        model: PreTrainedModel,
        sample_inputs: MutableMapping[str, Any] | None,
        config: NeuronExportConfig | dict[str, Any],
        *,
        generation_config: GenerationConfig | None = None,
    ) -> Path:
        """Write the artifact of a causal language model, which is not changed, and return its absolute path.

        Args:
            sample_inputs: `input_ids` and `attention_mask`, both `[rows, tokens]`, of a call that the artifact has to take; None for none.
            config: a `NeuronExportConfig`, or its dict; graphs are traced by its sizes.
            generation_config: defaults of the artifact's `generate`, in place of the model's.

        Raises:
            TypeError: `model` or `config` has another type.
            ValueError: the model or the sizes cannot be exported, or `sample_inputs` does not fit them.
            FileExistsError, RuntimeError: the output folder is taken; compiling failed.
        """
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"the model is a {type(model).__name__}; give a transformers model, and of a PEFT model what merge_and_unload() returns"
            )
        if not isinstance(config, NeuronExportConfig | Mapping):
            raise TypeError(f"config is a {type(config).__name__}; give a NeuronExportConfig or a dict of its values")
        settings = config if isinstance(config, NeuronExportConfig) else NeuronExportConfig(**config)
        wanted = settings.neuron_config
        _check_inputs(sample_inputs, wanted)
        with tempfile.TemporaryDirectory(prefix="optimum-neuron-") as folder:
            model.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            if generation_config is not None:
                _of_slots(generation_config, wanted).save_pretrained(folder)
            return export_model(
                folder,
                settings.output_path,
                config=wanted,
                trust_remote_code=self.trust_remote_code,
                certify=self.certify,
                overwrite=settings.overwrite,
            )

    def export_for_generation(
        self,
        model: PreTrainedModel,
        sample_inputs: MutableMapping[str, Any] | None,
        config: NeuronExportConfig | dict[str, Any],
        generation_config: GenerationConfig | None = None,
        multi_token_decode: bool = False,
    ) -> dict[str, Path]:
        """Export a model as `export` does, and return the artifact's path by component, of which there is one, "model".

        `config` may be by component, too. Whatever `multi_token_decode` is, an artifact decodes a token, and takes in a chunk after any context.
        """
        if isinstance(config, Mapping) and "export_format" not in config:
            if set(config) != {COMPONENT}:
                raise ValueError(
                    f"config names the components {', '.join(sorted(map(str, config)))}, and an artifact is one; give one config, or one of "
                    f"{COMPONENT!r}"
                )
            config = config[COMPONENT]
        return {COMPONENT: self.export(model, sample_inputs, config, generation_config=generation_config)}


def _check_inputs(inputs: Mapping[str, Any] | None, config: NeuronConfig) -> None:
    given = {name: value for name, value in (inputs or {}).items() if value is not None}
    others = sorted(given.keys() - set(_INPUTS))
    if others:
        raise ValueError(
            f"sample_inputs has {', '.join(others)}, and an artifact takes {' and '.join(_INPUTS)} alone: the cache is its own; leave the "
            f"others out"
        )
    for name, value in given.items():
        shape = tuple(value.shape)
        if len(shape) != 2 or shape[0] > config.batch_size or shape[1] > config.sequence_length:
            raise ValueError(
                f"sample_inputs[{name!r}] has the shape {list(shape)}, and the artifact takes up to batch_size={config.batch_size} rows of "
                f"sequence_length={config.sequence_length} tokens; raise them, or give fewer"
            )


def _of_slots(generation_config: GenerationConfig, config: NeuronConfig) -> GenerationConfig:
    """Return a config without the size of a static cache, which slots are: `generate` would refuse another one."""
    kind, length = generation_config.cache_implementation, generation_config.max_cache_len
    if kind not in (None, "static"):
        raise ValueError(
            f"cache_implementation={kind!r} is no cache of an artifact, which has slots of a fixed size; leave it out, or use 'static'"
        )
    if length is not None and length != config.sequence_length:
        raise ValueError(
            f"max_cache_len={length} differs from sequence_length={config.sequence_length}, which sizes an artifact's cache; set that to it"
        )
    plain = copy.deepcopy(generation_config)
    plain.cache_implementation = plain.max_cache_len = None
    return plain
