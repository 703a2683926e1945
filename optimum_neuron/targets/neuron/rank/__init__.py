# SPDX-License-Identifier: Apache-2.0
"""The process of a rank, in an interpreter that may have nothing but numpy and a Neuron runtime.

These files import the standard library, numpy, a runtime where it is used, and each other; `__main__.py` starts them. The parent's side,
which starts the processes and talks to them, is `run/`.
"""
