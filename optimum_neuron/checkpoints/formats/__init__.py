# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints as they are: from a format's own tensors to `QuantizedWeight`, to the bit."""
