# SPDX-License-Identifier: Apache-2.0
"""generate() of this runtime against generate() of transformers: prefill, the first token, decoding, memory."""
