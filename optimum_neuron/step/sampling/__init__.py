# SPDX-License-Identifier: Apache-2.0
"""Logits to tokens, exactly."""
