# SPDX-License-Identifier: Apache-2.0
"""A step's operators in the form that the Neuron compiler takes, and the choice between forms."""
