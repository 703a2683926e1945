# SPDX-License-Identifier: Apache-2.0
"""Servers over HTTP, driven by vLLM's own client."""
