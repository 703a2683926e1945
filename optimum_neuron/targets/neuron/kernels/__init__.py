# SPDX-License-Identifier: Apache-2.0
"""Kernels of the SDK that may stand for an operator of a step: what each computes is known by a reference, which can be executed anywhere."""
