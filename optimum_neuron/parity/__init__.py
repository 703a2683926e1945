# SPDX-License-Identifier: Apache-2.0
"""The comparison of step graphs with the model: exact, or refused with the reason."""
