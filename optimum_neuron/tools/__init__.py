# SPDX-License-Identifier: Apache-2.0
"""What stands behind the commands. No room of the core imports a tool."""
