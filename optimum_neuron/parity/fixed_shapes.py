# SPDX-License-Identifier: Apache-2.0
"""A check that a model's shapes do not depend on values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import PreTrainedModel

from .inspect import look_at


def check_fixed_shapes(model: PreTrainedModel, target: str) -> None:
    """Run a token through the model's shapes alone; no weight is read.

    Args:
        target: named in the message.

    Raises:
        ValueError: shapes, or which code runs, depend on the values of tensors; the module is named.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}

    def call_model(**kwargs: Any) -> Any:
        return torch.func.functional_call(model, shapes, (), kwargs)

    with _track_running(model) as names, mode:
        try:
            look_at(model, call_model)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            kinds = "experts outside of transformers' experts interface, or another choice by value"
            raise ValueError(
                f"{type(model).__name__} cannot be exported for target={target!r}: what {names[-1] or 'it'} computes depends on "
                f"the values of tensors ({kinds}: {error.func}), and graphs have fixed shapes; target='eager' runs it"
            ) from error


@contextmanager
def _track_running(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the modules that run, the innermost last; those that failed stay."""
    names: list[str] = []

    def enter_module(name: str, *_: Any) -> None:
        names.append(name)

    def leave_module(*_: Any) -> None:
        names.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(partial(enter_module, name)).remove)
            hooks.callback(module.register_forward_hook(leave_module).remove)
        yield names
