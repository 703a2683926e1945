# SPDX-License-Identifier: Apache-2.0
"""What some models add to a step, each kind in a folder of its own."""
