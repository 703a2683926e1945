# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests/kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulation import EMULATED, EMULATED_AMX
from kernel_calls import NAMES, Kernels, load_kernels, threads


_SLOW = [pytest.param(each, marks=pytest.mark.full) for each in EMULATED]
# On a machine with more, the kernels of AVX2 are those of `make test-avx2`.
_OWN = [pytest.param(each, marks=pytest.mark.full) if each == "avx2" and each != NAMES[0] else each for each in NAMES]


# AMX computes these otherwise.
_PRODUCTS = ("test_linear_kernels", "test_coded_kernels", "test_attention_kernels")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With the kernels of each instruction set of this machine, the best first, and, slowly, those that an emulator runs."""
    if "kernels" in metafunc.fixturenames:
        names = [*(EMULATED_AMX if metafunc.module.__name__ in _PRODUCTS else ()), *_OWN, *_SLOW]
        metafunc.parametrize("kernels", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest, _compile_cache: None) -> Kernels:
    return load_kernels(request.param)


@pytest.fixture(scope="session")
def best_kernels(_compile_cache: None) -> Kernels:
    return load_kernels(NAMES[0])


@pytest.fixture
def torch_with_one_thread() -> Iterator[None]:
    """For small tensors, which torch's threads would only wait for each other with."""
    with threads(1):
        yield
