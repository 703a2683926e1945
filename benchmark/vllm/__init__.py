# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: what its steps cost beside the graphs, and what its way to reuse prefixes costs."""
