# SPDX-License-Identifier: Apache-2.0
"""GGUF files. A new architecture is a row of `architectures.ARCHITECTURES`, and one of `weights.CHANGES` for each change of tensors."""
