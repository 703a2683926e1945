# SPDX-License-Identifier: Apache-2.0
"""Artifacts by transformers' own names: `AutoModelForCausalLM.from_pretrained("artifact/")` and `pipeline(model="artifact/")`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from ..artifact.artifact import MANIFEST_NAME


# What pipelines pass to whatever class they load: transformers' config, which an artifact brings, and notes of their own.
_OF_TRANSFORMERS = ("config", "_from_pipeline", "_commit_hash", "_from_auto")


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
