# SPDX-License-Identifier: Apache-2.0
"""Names that users bring along from transformers: `AutoModelForCausalLM` and `pipeline` load an artifact's folder, and keywords of
`from_pretrained` are honoured, without effect, or refused with what does the same here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..artifact.artifact import MANIFEST_NAME
from ..config import read_dtype
from ..runtime.refused import warn_once


# What pipelines pass to whatever class they load: transformers' config, which an artifact brings, and notes of their own.
_OF_TRANSFORMERS = ("config", "_from_pipeline", "_commit_hash", "_from_auto")


def make_known(name: str) -> None:
    """Register a class as one that generates text; else pipelines log the names of all classes that do."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("neuron", name)


def load_artifacts_by(load: Callable[..., Any]) -> None:
    """Have `AutoModelForCausalLM` give the folders that hold an artifact to `load`; all else it does as before.

    transformers chooses a class by the model's type, and an artifact's is its checkpoint's: there is nothing to register a class for.
    """
    theirs = AutoModelForCausalLM.from_pretrained.__func__

    @functools.wraps(theirs)
    def from_pretrained(
        cls: type, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **options: Any
    ) -> Any:
        if not (Path(pretrained_model_name_or_path) / MANIFEST_NAME).is_file():
            return theirs(cls, pretrained_model_name_or_path, *args, **options)
        own = {name: value for name, value in options.items() if name not in _OF_TRANSFORMERS}
        return load(pretrained_model_name_or_path, export=False, **own)

    AutoModelForCausalLM.from_pretrained = classmethod(from_pretrained)


_MEMORY = "weights are mapped from their file"
# Why each changes nothing about compiled graphs.
_INERT = {
    "attn_implementation": "attention is compiled into the graphs",
    "experts_implementation": "experts are compiled into the graphs",
    **dict.fromkeys(("device", "device_map"), "graphs run where they were compiled for"),
    **dict.fromkeys(
        ("low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "offload_state_dict"), _MEMORY
    ),
    **dict.fromkeys(("use_safetensors", "weights_only"), "weights are always read from safetensors"),
    "use_cache": "each graph reads and writes its cache",
}
_REFUSED_FALSE = {
    "use_safetensors": "asks for pickled weights, which may run code",
    "use_cache": "asks for steps without a cache, of which there are no graphs",
}
_ROUNDED = "name quantization='int8', 'int4' or 'fp8'"
# What does the same here, of keywords that ask for something else than transformers' defaults.
_INSTEAD = {
    "gguf_file": "name the file in the model, as in 'folder/name.gguf' or 'org/repo:name.gguf'",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), _ROUNDED),
    "subfolder": "name that folder as the model",
    "variant": "the files without a variant are read; leave it out",
    "use_auth_token": "name it token",
    "output_loading_info": "tensors that are missing or left over are refused; leave it out",
    "ignore_mismatched_sizes": "tensors of other shapes are refused; leave it out",
    **dict.fromkeys(("num_cores", "tp_plan"), "name tensor_parallel_size, the number of devices"),
    "instance_type": "name target",
    "neuron_config": "name config",
    "auto_cast_type": "name dtype",
}


def own_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an export among the keywords of a call. What has no effect is logged once.

    Raises TypeError if a keyword of transformers or optimum-neuron has another name here, or no meaning; ValueError
    if `torch_dtype` and `dtype` differ, or a value asks for another file or graph than the artifact has.
    """
    options = dict(given)
    for name, remedy in _INSTEAD.items():
        value = options.pop(name, None)
        if value not in (None, False, ""):
            raise TypeError(f"{name}={value!r} is not understood: {remedy}")
    for name, reason in _INERT.items():
        value = options.pop(name, None)
        if value is False and name in _REFUSED_FALSE:
            raise ValueError(f"{name}=False {_REFUSED_FALSE[name]}; leave it out")
        if value not in (None, False):
            warn_once(f"{name}={value!r} has no effect: {reason}")
    other = options.pop("torch_dtype", None)
    if other is not None:
        dtype = options.setdefault("dtype", other)
        if read_dtype(dtype) != read_dtype(other):
            raise ValueError(f"torch_dtype={other} and dtype={dtype} differ; give one of them")
    return {name: value for name, value in options.items() if name != "dtype" or value is not None}
