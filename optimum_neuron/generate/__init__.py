# SPDX-License-Identifier: Apache-2.0
"""NeuronModelForCausalLM: the surface that Hugging Face users expect over an artifact's compiled graphs."""

from .model import NeuronModelForCausalLM as NeuronModelForCausalLM
