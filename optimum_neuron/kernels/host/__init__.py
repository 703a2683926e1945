# SPDX-License-Identifier: Apache-2.0
"""The machine that kernels are built and run for: its instruction sets, cores and memory, and the library."""
