# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels: a program becomes a plan, and native code runs it."""
