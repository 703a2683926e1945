# SPDX-License-Identifier: Apache-2.0
"""The arguments of vLLM that a user gave. vLLM fills in the others, and checks some, before its platform sees any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from vllm.engine.arg_utils import EngineArgs

from .options import refuse_arguments


class GivenArguments(NamedTuple):
    """The values that are a user's own. A configuration that is not made of arguments has no others.

    Attributes:
        prefix_caching: whether it was asked for; None where no argument says.
    """

    max_num_seqs: bool = True
    max_num_batched_tokens: bool = True
    dtype: bool = True
    cache_dtype: bool = True
    prefix_caching: bool | None = None


_given: ContextVar[GivenArguments | None] = ContextVar("given", default=None)


def given() -> GivenArguments:
    """Return which values of the configuration that vLLM is making were given."""
    return _given.get() or GivenArguments()


def watched(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `EngineArgs.create_engine_config` as one that notes what it was given, and refuses what vLLM would refuse with another
    remedy than ours."""

    @functools.wraps(make)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        refuse_arguments(self)
        # Kept with the arguments: vLLM writes its defaults into them, and may be asked again.
        found = GivenArguments(
            self.max_num_seqs is not None,
            self.max_num_batched_tokens is not None,
            self.dtype != "auto",
            self.kv_cache_dtype != "auto",
            self.enable_prefix_caching,
        )
        before = _given.set(vars(self).setdefault("given", found))
        try:
            return make(self, *args, **kwargs)
        finally:
            _given.reset(before)

    return create_engine_config
