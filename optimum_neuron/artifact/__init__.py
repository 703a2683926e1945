# SPDX-License-Identifier: Apache-2.0
"""What an export writes and a runtime loads: the artifact folder. Knows no target."""
