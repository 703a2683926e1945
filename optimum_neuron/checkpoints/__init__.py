# SPDX-License-Identifier: Apache-2.0
"""What an export reads: checkpoints of Hugging Face models, from the Hub, a folder or a GGUF file."""
