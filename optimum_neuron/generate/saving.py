# SPDX-License-Identifier: Apache-2.0
"""From a model that runs back to a folder, and to the Hub."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import GenerationConfig
from transformers.utils import PushToHubMixin

from ..artifact.artifact import Artifact
from ..artifact.skeleton import read_generation_config
from ..artifact.writer import copy_artifact, write_artifact
from ..checkpoints.origin import CARD_NAME
from ..hub.collect import BENCH_NAME
from ..runtime.defaults import in_vocabulary, usable


def read_defaults(artifact: Artifact, config: Any) -> GenerationConfig:
    """Return the artifact's `generation_config`, as far as its graphs can follow it."""
    return in_vocabulary(usable(read_generation_config(artifact, config), artifact.config)[0], artifact.model)


class Saving(PushToHubMixin):
    """The part of `NeuronModelForCausalLM` that writes its artifact."""

    artifact: Artifact
    config: Any
    generation_config: GenerationConfig

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write the artifact to a folder, with the present `generation_config`; `push_to_hub` uploads it as well.

        `kwargs` are those of `push_to_hub`; `max_shard_size` and `safe_serialization` are accepted and have no meaning
        for compiled graphs. Raises FileExistsError if the folder holds something else.
        """
        for unused in ("max_shard_size", "safe_serialization"):
            kwargs.pop(unused, None)
        if kwargs and not push_to_hub:
            raise TypeError(f"save_pretrained got {', '.join(sorted(kwargs))}, which only push_to_hub=True takes")
        save_directory = Path(save_directory)
        if save_directory.resolve() != self.artifact.path.resolve():
            manifest = {key: value for key, value in self.artifact.manifest.items() if key != "files"}
            with write_artifact(save_directory, overwrite=True) as writer:
                copy_artifact(self.artifact, writer.path)
                self.generation_config.to_json_file(writer.path / "generation_config.json")
                writer.commit(manifest)
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", save_directory.name)
            self.push_to_hub(repo_id, **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = None,
        tags: list[str] | None = None,
        base_model: str | None = None,
    ) -> CommitInfo:
        """Upload the artifact to a repository of the Hub, with the present `generation_config` and a model card; see `hub.push`.

        Args:
            private: whether the repository is; default: as it is, or where it is made here, as its owner has chosen.
            revision: the branch, which is made where there is none.
            create_pr: ask for the files to be taken over, in place of a commit to the branch.
            max_shard_size: accepted as in transformers; compiled graphs have no shards.
            base_model: Hub id of the checkpoint, for the card; default: the repository that the export read.

        Raises ArtifactError if a file was changed after the export; ValueError, FileNotFoundError or RuntimeError if the Hub refuses,
        fails, or cannot be reached.
        """
        from ..hub.push import push_artifact

        with self._open_current() as artifact:
            return push_artifact(
                artifact,
                repo_id,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message,
                commit_description=commit_description,
                base_model=base_model,
                tags=tags,
            )

    @contextmanager
    def _open_current(self) -> Iterator[Artifact]:
        """Yield the artifact, or a copy of it where `generation_config` was changed since it was read."""
        if read_defaults(self.artifact, self.config).to_dict() == self.generation_config.to_dict():
            yield self.artifact
            return
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / self.artifact.path.resolve().name
            self.save_pretrained(folder)
            for extra in (CARD_NAME, BENCH_NAME):
                if (self.artifact.path / extra).is_file():
                    shutil.copyfile(self.artifact.path / extra, folder / extra)
            yield Artifact.open(folder)
