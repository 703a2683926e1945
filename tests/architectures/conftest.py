# SPDX-License-Identifier: Apache-2.0
"""Tiny models are fastest on one thread: sharing their sums takes longer than adding them up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
