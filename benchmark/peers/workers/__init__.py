# SPDX-License-Identifier: Apache-2.0
"""One process per runtime. Only `ours` and `transformers` may import this project: the others run in foreign environments."""
