# SPDX-License-Identifier: Apache-2.0
"""Several servers of one artifact behind one address: a front that routes requests and has those replaced that die."""
