# SPDX-License-Identifier: Apache-2.0
"""Lower a program of operators to a plan of native calls."""
