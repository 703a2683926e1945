# SPDX-License-Identifier: Apache-2.0
"""Fakes of the Neuron SDK: a compiler command and packages with the documented signatures, which execute the HLO.

`plugin.py` has the fixtures. The packages in `site/` are found through PYTHONPATH, so that child processes see them too.
"""
