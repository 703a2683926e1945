# SPDX-License-Identifier: Apache-2.0
"""Keywords of transformers' `from_pretrained` that users bring along: honoured, without effect, or refused with what does the same here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import option_checks as check
from ..runtime.defaults import warn_once


_MEMORY = "weights are mapped from their file"
# Why each changes nothing about compiled graphs.
_INERT = {
    "attn_implementation": "attention is compiled into the graphs",
    "device_map": "graphs run where they were compiled for",
    **dict.fromkeys(
        ("low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "offload_state_dict"), _MEMORY
    ),
    "use_safetensors": "weights are always read from safetensors",
}


def own_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an export among the keywords of a call. What has no effect is logged once.

    Raises:
        ValueError: `torch_dtype` and `dtype` differ, or a value asks for another file than the artifact has.
    """
    options = dict(given)
    for name, reason in _INERT.items():
        value = options.pop(name, None)
        if name == "use_safetensors" and value is False:
            raise ValueError("use_safetensors=False asks for pickled weights, which may run code; leave it out")
        if value not in (None, False):
            warn_once(f"{name}={value!r} has no effect: {reason}")
    other = options.pop("torch_dtype", None)
    if other is not None:
        dtype = options.setdefault("dtype", other)
        if check.dtype(dtype) != check.dtype(other):
            raise ValueError(f"torch_dtype={other} and dtype={dtype} differ; give one of them")
    return {name: value for name, value in options.items() if name != "dtype" or value is not None}
