# SPDX-License-Identifier: Apache-2.0
"""Continuous batching by transformers' names: the surface of the model class over the engine. Decides nothing itself."""
