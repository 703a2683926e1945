# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at most: the rate at which memory is read, and that of matrix products, both as torch reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from optimum_neuron.artifact.pages import zeroed


READ_BYTES = 1 << 30
PRODUCT_SIZE = 2048
REPEATS = 7
# Seconds after which nothing is tried again: without products of bfloat16 in hardware, torch would take minutes for all of them.
LONG_ENOUGH = 5.0


@dataclass(frozen=True)
class Limits:
    """Best of several tries, with as many threads as torch has.

    Attributes:
        read: bytes per second out of memory, of a tensor that no cache holds.
        products: operations per second of a product of square matrices, two for each multiplication, by type; bfloat16's
            is float32's where that is higher, as weights can be converted.
    """

    read: float
    products: dict[str, float]

    def best(self, other: Limits) -> Limits:
        """The higher of each: another process can only have lowered them."""
        products = {name: max(rate, other.products[name]) for name, rate in self.products.items()}
        return Limits(max(self.read, other.read), products)


def measure_limits() -> Limits:
    """Takes some seconds and 1 GiB of memory."""
    products = {name: _products(getattr(torch, name)) for name in ("float32", "bfloat16")}
    products["bfloat16"] = max(products.values())
    return Limits(measure_read(), products)


def measure_read() -> float:
    """What Limits has as `read`: takes a second, and 1 GiB of memory in huge pages, as a loaded artifact's weights have them."""
    memory = zeroed(READ_BYTES)
    numbers = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    return READ_BYTES / _fastest(numbers.sum)


def _products(dtype: torch.dtype) -> float:
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype) for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / _fastest(lambda: left @ right)


def _fastest(call: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < LONG_ENOUGH:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
