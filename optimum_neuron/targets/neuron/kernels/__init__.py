# SPDX-License-Identifier: Apache-2.0
"""Kernels of the SDK in place of operators of a step; each has a reference that runs anywhere."""
