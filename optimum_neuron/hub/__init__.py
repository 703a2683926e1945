# SPDX-License-Identifier: Apache-2.0
"""An artifact in a repository of the Hub: its facts and model card, and the upload of all in one commit."""
