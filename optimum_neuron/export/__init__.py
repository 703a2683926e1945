# SPDX-License-Identifier: Apache-2.0
"""Checkpoint in, artifact out."""
