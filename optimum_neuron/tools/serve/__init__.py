# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron serve`: an OpenAI-compatible server over the engine, or vLLM's."""
