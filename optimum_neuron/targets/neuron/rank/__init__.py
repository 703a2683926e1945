# SPDX-License-Identifier: Apache-2.0
"""What runs in the process of a rank, in an interpreter that may have nothing but numpy and a Neuron runtime.

So these files import the standard library, numpy, a runtime where it is used, and each other; `__main__.py` starts them. The
other side, which starts the processes and talks to them, is `run/`.
"""
