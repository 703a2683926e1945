# SPDX-License-Identifier: Apache-2.0
"""A few telling modules for whoever has the Neuron compiler, and what it made of them."""
