# SPDX-License-Identifier: Apache-2.0
"""NeuronModelForCausalLM: from a folder or Hub id to a model that runs."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..artifact.artifact import Artifact
from ..artifact.find import find_artifact
from ..artifact.skeleton import read_config
from ..config import ExportOptions, NeuronConfig, refuse_unknown, takes_options
from ..engine.continuous_batching.surface import ContinuousBatching
from ..engine.engine import Engine
from ..runtime.arguments import refuse_other_options
from ..runtime.process import OwnProcess, end_idle_workers
from ..runtime.profile import Profile
from ..runtime.runner import GraphRunner
from ..runtime.timing import load_runner
from ..targets import RankOptions
from .auto import load_artifacts_by, make_known, own_options
from .forward import Forward
from .generation import Generation
from .saving import Saving, read_defaults


class NeuronModelForCausalLM(Forward, ContinuousBatching, Generation, Saving):
    """A causal language model with step graphs that were compiled ahead of time.

    Made by `from_pretrained`. `generate` takes up to `neuron_config.batch_size` rows of up to
    `neuron_config.sequence_length` tokens, padded on either side. Calls from several threads run one after another.

    Attributes:
        config: the checkpoint's transformers config.
        generation_config: defaults of `generate`.
        neuron_config: sizes and options of the graphs.
        runner: the slots and graphs, with counters.
    """

    def __init__(
        self,
        artifact: Artifact,
        runner: GraphRunner,
        config: Any,
        generation_config: GenerationConfig,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(config, generation_config, artifact.config)
        self.artifact = artifact
        self.dtype: torch.dtype = getattr(torch, artifact.config.dtype)
        self.runner = runner
        self._trust_remote_code = trust_remote_code
        self._lock = threading.RLock()
        self._engine: Engine | None = None  # kept by generate_batch for the prefixes in its slots
        self._served = False  # a service has the slots

    @classmethod
    @takes_options(ExportOptions, NeuronConfig)
    def from_pretrained(
        cls,
        model_id: str | Path,
        *,
        export: bool | None = None,
        config: NeuronConfig | None = None,
        deterministic: bool = False,
        rank_python: str | Path | None = None,
        rank_timeout: float | None = None,
        profile: Profile | None = None,
        **options: Any,
    ) -> NeuronModelForCausalLM:
        """Load an artifact, or export a checkpoint first.

        Args:
            model_id: an artifact (folder or Hub id) or, with `export=True`, a checkpoint (folder, Hub id or .gguf file).
            export: True exports, False never does; None exports where `model_id` holds no artifact.
            config: sizes and options of an export; `options` may name them one by one instead.
            deterministic: run every step in the largest mixed graph, so that a request's results are the same to the bit
                whatever else is served, also where graphs of different shapes round differently (the cpu target's do
                not, as a rule); every step then costs as much as the largest.
            rank_python: for a Neuron device, the interpreter that holds its ranks, of an environment with numpy and a
                runtime; None for what OPTIMUM_NEURON_RANK_PYTHON names, or this one. NEURON.md lists what fits together.
            rank_timeout: for a Neuron device, the seconds that one step may take; None for what NEURON_RT_EXEC_TIMEOUT
                says, or 600.
            profile: collects each step and each run of a graph, and names where a Neuron device's runtime writes its own
                profile; its context has to be open.
            options: fields of `ExportOptions`, and of `NeuronConfig` for an export. `trust_remote_code` also runs compiled graphs from the
                Hub as they are; without it they are compiled again on this machine. `torch_dtype` is `dtype`; keywords of transformers
                that change nothing here (`device_map`, `low_cpu_mem_usage`, `attn_implementation` and their like) are logged once.

        Raises:
            TypeError: an option that NeuronConfig does not know.
            ValueError: options that contradict each other, or that differ from the artifact's.
            FileNotFoundError: `model_id` names nothing.
            ArtifactError: the artifact is corrupt.
        """
        options = own_options(options)
        named = ExportOptions.option_names()
        reading = ExportOptions(**{name: options.pop(name) for name in named if name in options})
        if not isinstance(config, NeuronConfig | None):
            raise TypeError(
                f"config is a NeuronConfig, not a {type(config).__name__}: the model brings its own; leave it out"
            )
        if config is not None and options:
            raise TypeError(f"pass config or single options, not both: {', '.join(sorted(options))}")
        refuse_unknown(options, (*NeuronConfig.option_names(), *named))
        wanted = NeuronConfig.from_dict(options) if config is None else config
        ranks = RankOptions(None if rank_python is None else str(rank_python), rank_timeout)
        loading: dict[str, Any] = {"deterministic": deterministic, "ranks": ranks, "profile": profile}
        loading["trust_remote_code"] = reading.trust_remote_code
        found = find_artifact(model_id, export=export, native_code=reading.trust_remote_code, **reading.hub)
        if found is None:
            return cls._export_checkpoint(model_id, wanted, reading, **loading)
        artifact, from_hub = found
        reading.refuse_for_artifact(model_id)
        refuse_other_options(artifact, wanted, options if config is None else NeuronConfig.option_names())
        return cls._load_artifact(artifact, trust_native_code=reading.trust_remote_code or not from_hub, **loading)

    @classmethod
    def _export_checkpoint(
        cls, model_id: str | Path, config: NeuronConfig, reading: ExportOptions, **loading: Any
    ) -> NeuronModelForCausalLM:
        from ..export.recipe import export_model

        folder = Path(tempfile.mkdtemp(prefix="optimum-neuron-"))
        try:
            path = export_model(model_id, folder / "artifact", config=config, **vars(reading))
            model = cls._load_artifact(Artifact.open(path), trust_native_code=True, **loading)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(model, _remove_folder, folder, model.runner.process)
        return model

    @classmethod
    def _load_artifact(cls, artifact: Artifact, *, trust_remote_code: bool, **loading: Any) -> NeuronModelForCausalLM:
        # Before transformers reads, or with trust_remote_code runs, any of these files.
        artifact.verify_described()
        config = read_config(artifact.path, trust_remote_code=trust_remote_code)
        defaults = read_defaults(artifact, config)
        runner = load_runner(artifact, trust_remote_code=trust_remote_code, **loading)
        return cls(artifact, runner, config, defaults, trust_remote_code=trust_remote_code)

    @contextmanager
    def _hold_slots(self, *, keep_engine: bool = False) -> Iterator[None]:
        """Hold the slots for one call: calls from several threads run one after another, a manager excludes them."""
        self.runner.process.check_fork()  # before the lock, which another thread may have held in the fork's moment
        with self._lock:
            if self._served:
                raise RuntimeError(
                    "the model's slots are in use by a running service or continuous-batching manager; send the request to "
                    "it, or close it first"
                )
            if not keep_engine:
                self._engine = None  # its knowledge of the slots' contents is void
            try:
                yield
            finally:
                end_idle_workers()  # the next call, or a service, may be another thread's


def _remove_folder(folder: Path, process: OwnProcess) -> None:
    """Remove a folder at the end of the process that made it, and not at that of one that was forked from it."""
    if process.is_here:
        shutil.rmtree(folder, ignore_errors=True)


make_known(NeuronModelForCausalLM.__name__)
load_artifacts_by(NeuronModelForCausalLM.from_pretrained)
