# SPDX-License-Identifier: Apache-2.0
"""What a model is asked once costs no pass over its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_neuron.parity.inspect import inspect_model, look_at


class Called(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["llama", "gemma2", "lfm2"])
def test_a_look_at_a_model_computes_no_product_with_its_weights(
    name: str, tiny_models: dict[str, Any], tiny_specs: dict[str, Any]
) -> None:
    with Called() as called:
        spec = look_at(tiny_models[name])
    assert "embedding" in called.names and not called.names & {"mm", "addmm", "linear", "matmul"}
    assert spec == replace(tiny_specs[name], num_embeddings=spec.num_embeddings)
    with torch.inference_mode(), Called() as called:
        tiny_models[name].lm_head(torch.zeros(1, tiny_models[name].lm_head.in_features))
    assert called.names & {"mm", "addmm", "linear", "matmul"}


def test_a_few_rows_are_compared_by_one_thread(tiny_models: dict[str, Any]) -> None:
    counts: set[int] = set()
    hook = tiny_models["llama"].lm_head.register_forward_hook(lambda *_: counts.add(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inspect_model(tiny_models["llama"])
        assert counts == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        hook.remove()
