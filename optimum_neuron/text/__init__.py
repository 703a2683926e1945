# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and chat template of an artifact, by `tokenizers` and jinja2 alone. Imports neither torch nor transformers."""
