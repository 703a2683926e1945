# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class ModelParamInfo:
    param_name: str
    is_positional: bool


@dataclass
class ProvidedArgInfo:
    param_name: str
    is_positional: bool
    tensor: torch.Tensor


@dataclass
class TraceArtifacts:
    hlo: Any
    metaneff: Any
    flattener: Any
    packer: Any
    weight_name_to_idx: dict[str, int]
    weight_names_to_skip: set
    provided_args: list[ProvidedArgInfo]
    model_params: list[ModelParamInfo]


class CompilationArtifacts:
    def __init__(self, neff_filepath: str) -> None:
        self.neff_filepath = neff_filepath

    def get_neff_bytes(self) -> bytes:
        return Path(self.neff_filepath).read_bytes()
