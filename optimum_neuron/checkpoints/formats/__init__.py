# SPDX-License-Identifier: Apache-2.0
"""Formats of quantized checkpoints: from a format's own tensors to `QuantizedWeight`, to the bit."""
