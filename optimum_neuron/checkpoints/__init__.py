# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face models, read whole from the Hub, a folder or a GGUF file; nothing of them runs."""
