# SPDX-License-Identifier: Apache-2.0
"""Key/value blocks that several slots share."""
