# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests/kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_amx import EMULATED_AMX
from emulation import EMULATED, close_emulators
from kernel_calls import NAMES, Kernels, load_kernels, threads


_SLOW = [pytest.param(each, marks=pytest.mark.full) for each in EMULATED]
# On a machine with more, the kernels of AVX2 are those of `make test-avx2`.
_OWN = [pytest.param(each, marks=pytest.mark.full) if each == "avx2" and each != NAMES[0] else each for each in NAMES]


@pytest.fixture(scope="session", params=[*_OWN, *_SLOW])
def kernels(request: pytest.FixtureRequest, _compile_cache: None) -> Kernels:
    """The kernels of each instruction set of this machine, the best first, and, slowly, those that an emulator runs."""
    return load_kernels(request.param)


@pytest.fixture(scope="session", params=[*EMULATED_AMX, *_OWN, *_SLOW])
def product_kernels(request: pytest.FixtureRequest, _compile_cache: None) -> Kernels:
    """The same for linear layers and attention, which AMX computes otherwise."""
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


@pytest.fixture(scope="session", autouse=True)
def _ended_emulators() -> Iterator[None]:
    yield
    close_emulators()
