# SPDX-License-Identifier: Apache-2.0
"""The engine under each policy, and transformers' continuous batching, on the same requests, in one process."""
