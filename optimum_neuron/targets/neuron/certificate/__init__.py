# SPDX-License-Identifier: Apache-2.0
"""The certificate of an artifact: that its HLO modules, executed here by XLA, compute what the eager step does."""
