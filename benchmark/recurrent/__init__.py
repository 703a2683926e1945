# SPDX-License-Identifier: Apache-2.0
"""Models with recurrences against transformers: prefill, decoding, and what of a step their states take."""
