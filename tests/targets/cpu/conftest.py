# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests/targets/cpu."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_calls import NAMES, Kernels, load_kernels, threads


@pytest.fixture(scope="session", params=NAMES)
def kernels(request: pytest.FixtureRequest, _compile_cache: None) -> Kernels:
    """The kernels of each instruction set of this machine, the best first."""
    return load_kernels(request.param)


@pytest.fixture(scope="session")
def best_kernels(_compile_cache: None) -> Kernels:
    """Those that the cpu target uses here."""
    return load_kernels(NAMES[0])


@pytest.fixture
def torch_with_one_thread() -> Iterator[None]:
    """For small tensors, which torch's threads would only wait for each other with."""
    with threads(1):
        yield
