# SPDX-License-Identifier: Apache-2.0
"""GGUF files: `header` reads a file's facts, `config` makes a config of each key, `weights` parameters of each tensor.

A key or tensor without a use, and that `keys` does not list as one without effect, is refused by name. A new architecture is a row of
`architectures.ARCHITECTURES`, and a row of `weights.CHANGES` for each change that the converter makes to its tensors.
"""
