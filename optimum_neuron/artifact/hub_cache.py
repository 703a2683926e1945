# SPDX-License-Identifier: Apache-2.0
"""Whether a file lies in a cache of the Hub's client, wherever that is and whatever links lead there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path


# A cache holds a folder per repository, and in it the files and folders of links to them.
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
_IN_REPOSITORY = ("snapshots", "blobs")
# As many links as the system follows.
_MOST_LINKS = 40


def is_in_hub_cache(path: Path) -> bool:
    """Whether a path, or one that a link on its way leads to, is in a repository's folder of such a cache."""
    return any(
        _REPOSITORY.fullmatch(parent) and name in _IN_REPOSITORY
        for place in _followed(path)
        for parent, name in pairwise(place.parts)
    )


def _followed(path: Path) -> Iterator[Path]:
    """An absolute path, and what it becomes as each link on the way is followed."""
    path = Path.cwd() / path
    for _ in range(_MOST_LINKS):
        yield path
        link = next((part for part in (*reversed(path.parents), path) if part.is_symlink()), None)
        if link is None:
            return
        path = link.parent / os.readlink(link) / path.relative_to(link)
