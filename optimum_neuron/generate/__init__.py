# SPDX-License-Identifier: Apache-2.0
"""Models over an artifact's compiled graphs: the surface of transformers, and one that streams text without it."""
