# SPDX-License-Identifier: Apache-2.0
"""Plans: a step graph as a list of calls of the own kernels, and of torch's operators where there is no kernel."""
