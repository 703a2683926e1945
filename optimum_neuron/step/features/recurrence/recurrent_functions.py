# SPDX-License-Identifier: Apache-2.0
"""Our functions in place of those by which transformers' layers compute recurrences, which they call by a name of their module
(`use_kernel_func_from_hub_with_fallback`). Ours take and return the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import UnsupportedModelError
from ...serving import Backends, replace_in_steps
from .recurrence import RecurrenceBackend, ScanCall
from .state import RecurrentState


class LastState:
    """A stand-in for the state after a layer's last token: the step has kept it already."""

    def to(self, *_: Any, **__: Any) -> LastState:
        return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> LastState:
        if func is not torch.stack:
            raise UnsupportedModelError(f"it passes the state of a recurrence to {getattr(func, '__name__', func)}")
        return cls()  # of several heads, each with a recurrence of its own


def _gated_delta_rule(
    backend: RecurrenceBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, LastState]:
    """Compute with `g` of `[1, tokens, heads]`, or of `[1, tokens, heads, key_dim]` (Kimi's)."""
    _refuse_given(initial_state=initial_state, cu_seqlens=cu_seqlens)
    dtype = query.dtype
    query, key, value, g, beta = (each[0].float() for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    call = ScanCall(query * query.shape[-1] ** -0.5, key, value, g, beta)
    return backend.scan("delta_rule", call).to(dtype)[None], LastState()


def _mamba2_chunk_scan(
    backend: RecurrenceBackend,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int = 0,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Compute `hidden_states [1, tokens, heads, value_dim]`, `dt [1, tokens, heads]`, `B` and `C` `[1, tokens, groups, key_dim]`."""
    _refuse_given(initial_states=initial_states, z=z)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = nn.functional.softplus(dt) if dt_softplus else dt
    # In float32, as fused kernels do: a 16-bit type would round the limits.
    dt = torch.clamp(dt[0].float(), min=dt_limit[0], max=dt_limit[1])
    x = hidden_states[0].float()
    call = ScanCall(C[0].float(), B[0].float(), x * dt[..., None], A.float() * dt)
    output = backend.scan("state_space_scan", call)
    output = (output if D is None else output + x * D[:, None])[None]
    return (output, LastState()) if return_final_states else output


def _selective_scan(
    backend: RecurrenceBackend,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Compute `hidden_states`, `dt` and `z` `[1, channels, tokens]`, `A [channels, key_dim]`, `B` and `C` `[1, key_dim, tokens]`."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    dt = nn.functional.softplus(dt) if delta_softplus else dt
    x, step = hidden_states[0].t().float(), dt[0].t().float()
    query, key = C[0].t().float(), B[0].t().float()
    call = ScanCall(query[:, None], key[:, None], (step * x)[:, None], step[:, None], rates=A.float().t())
    output = backend.scan("selective_scan", call)[:, 0].t()[None].to(hidden_states.dtype)
    output = output if D is None else output + hidden_states * D[:, None]
    output = output if z is None else output * nn.functional.silu(z)
    return (output, LastState()) if return_last_state else output


def _refuse_given(**arguments: Any) -> None:
    for name in (name for name, value in arguments.items() if value is not None):
        raise UnsupportedModelError(f"it computes a recurrence with {name}=, which steps do not")


# By what modelling files call them. Forms for one token with a state are left out: no layer learns that there is one.
_OURS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "mamba_selective_scan": _selective_scan,
}
REPLACED = frozenset(_OURS)


def set_recurrences(model: nn.Module) -> None:
    """Make the files that a model's modules are from call our functions while a step runs."""
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules[name]
        for function in _OURS.keys() & vars(file).keys():
            replace_in_steps(file, function, partial(_compute_ours, _OURS[function]))


def _compute_ours(ours: Callable[..., Any], backends: Backends, theirs: object, *args: Any, **kwargs: Any) -> Any:
    return ours(backends[RecurrentState], *args, **kwargs)
