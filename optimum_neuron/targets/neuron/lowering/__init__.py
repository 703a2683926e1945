# SPDX-License-Identifier: Apache-2.0
"""From a model's config to HLO modules: what a step looks like on Neuron, and how it gets there."""
