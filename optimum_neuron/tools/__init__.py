# SPDX-License-Identifier: Apache-2.0
"""The work of the commands. No room of the core imports a tool."""
