# SPDX-License-Identifier: Apache-2.0
"""Kernels of AWS's library in place of a step's operators. Each registers itself in `kernel.KERNELS`."""

from . import attention, moe_tkg


__all__ = ["attention", "moe_tkg"]
