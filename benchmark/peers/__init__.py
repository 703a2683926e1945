# SPDX-License-Identifier: Apache-2.0
"""The runtimes that a user would choose instead of this one on a CPU, each in an environment and a process of its own."""
