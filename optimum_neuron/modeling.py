# SPDX-License-Identifier: Apache-2.0
"""NeuronModelForCausalLM: the surface that Hugging Face users expect over an artifact's compiled graphs."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import PushToHubMixin

from .artifact import Artifact, is_graph_file
from .artifact_writer import copy_artifact, write_artifact
from .config import NeuronConfig
from .continuous_batching.surface import ContinuousBatching
from .engine.engine import Engine
from .loading import find_artifact
from .refusals import check_fits, refuse_other_options, refuse_unsupported
from .runtime.generation import GenerationLoop
from .runtime.prefill import prefill
from .runtime.prompts import unpack, unpad
from .runtime.runner import GraphRunner
from .runtime.threads import end_idle_workers
from .runtime.token_choice import HostChoice, choose_how
from .targets import Executable, get_target


class NeuronModelForCausalLM(ContinuousBatching, GenerationMixin, PushToHubMixin):
    """A causal language model whose step graphs were compiled ahead of time.

    Made by `from_pretrained`. `generate` takes up to `neuron_config.batch_size` rows of up to
    `neuron_config.sequence_length` tokens, padded on either side. Calls from several threads run one after another.

    Attributes:
        config: the checkpoint's transformers config.
        generation_config: defaults of `generate`.
        neuron_config: sizes and options of the graphs.
        runner: the slots and graphs, with counters.
    """

    main_input_name = "input_ids"
    input_modalities = ("text",)
    _is_stateful = True  # the KV cache lives in the graphs: transformers then refuses to rewind it

    def __init__(
        self,
        artifact: Artifact,
        executable: Executable,
        config: Any,
        generation_config: GenerationConfig,
        *,
        deterministic: bool = False,
    ) -> None:
        self.artifact = artifact
        self.config = config
        self.generation_config = generation_config
        self.neuron_config: NeuronConfig = artifact.config
        self.device = torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, artifact.config.dtype)
        self.runner = GraphRunner(
            executable,
            artifact.config,
            artifact.graphs,
            deterministic=deterministic,
            reuses_prefixes=artifact.model.reuses_prefixes,
        )
        self._lock = threading.RLock()
        self._engine: Engine | None = None  # kept by generate_batch for the prefixes in its slots
        self._served = False  # a service has the slots

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | Path,
        *,
        export: bool | None = None,
        config: NeuronConfig | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        adapter: str | Path | Sequence[str | Path] | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> NeuronModelForCausalLM:
        """Loads an artifact, or exports a checkpoint first.

        Args:
            model_id: an artifact (folder or Hub id) or, with `export=True`, a checkpoint (folder, Hub id or .gguf file).
            export: True exports, False never does; None exports where `model_id` holds no artifact.
            config: sizes and options of an export; `options` may name them one by one instead.
            revision, token, cache_dir, force_download, local_files_only: as in transformers.
            trust_remote_code: run native or modeling code from the Hub. Without it, the compiled graphs of a Hub
                artifact are compiled again on this machine.
            adapter: for an export, a folder or Hub id of a PEFT adapter to merge into the weights, or several.
            deterministic: run every step in the largest mixed graph, so that a request's results are the same to the bit
                whatever else is served, also where graphs of different shapes round differently (the cpu target's do
                not, as a rule); every step then costs as much as the largest.
            options: fields of `NeuronConfig`, for an export.

        Raises:
            TypeError: an option that NeuronConfig does not know.
            ValueError: options that contradict each other, or that differ from the artifact's.
            FileNotFoundError: `model_id` names nothing.
            ArtifactError: the artifact is corrupt.
        """
        if config is not None and options:
            raise TypeError(f"pass config or single options, not both: {', '.join(sorted(options))}")
        if isinstance(options.get("dtype"), torch.dtype):
            options["dtype"] = str(options["dtype"]).removeprefix("torch.")
        wanted = NeuronConfig.from_dict(options) if config is None else config
        hub: dict[str, Any] = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
        }
        found = find_artifact(model_id, export=export, native_code=trust_remote_code, **hub)
        if found is None:
            return cls._export(
                model_id,
                wanted,
                trust_remote_code=trust_remote_code,
                adapter=adapter,
                deterministic=deterministic,
                **hub,
            )
        artifact, from_hub = found
        if adapter is not None:
            raise ValueError(
                f"adapter={adapter!r} can be merged by an export only, and {model_id} is an artifact; export its checkpoint "
                f"with the adapter"
            )
        refuse_other_options(artifact, options if config is None else config.to_dict())
        return cls._load(
            artifact,
            trust_native_code=trust_remote_code or not from_hub,
            trust_remote_code=trust_remote_code,
            deterministic=deterministic,
        )

    @classmethod
    def _export(
        cls,
        model_id: str | Path,
        config: NeuronConfig,
        *,
        trust_remote_code: bool,
        deterministic: bool,
        **options: Any,
    ) -> NeuronModelForCausalLM:
        from .export import export_model

        folder = Path(tempfile.mkdtemp(prefix="optimum-neuron-"))
        try:
            path = export_model(
                model_id, folder / "artifact", config=config, trust_remote_code=trust_remote_code, **options
            )
            model = cls._load(
                Artifact.open(path),
                trust_native_code=True,
                trust_remote_code=trust_remote_code,
                deterministic=deterministic,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        return model

    @classmethod
    def _load(
        cls, artifact: Artifact, *, trust_native_code: bool, trust_remote_code: bool, deterministic: bool
    ) -> NeuronModelForCausalLM:
        # Before transformers reads, or with trust_remote_code runs, any of these files.
        artifact.verify(name for name in artifact.manifest["files"] if not is_graph_file(name))
        config = AutoConfig.from_pretrained(artifact.path, trust_remote_code=trust_remote_code)
        if (artifact.path / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(artifact.path)
        else:
            generation_config = GenerationConfig.from_model_config(config)
        executable = get_target(artifact.target).load(
            artifact, trust_native_code=trust_native_code, trust_remote_code=trust_remote_code
        )
        return cls(artifact, executable, config, generation_config, deterministic=deterministic)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes the artifact to a folder, with the present `generation_config`; `push_to_hub` uploads it as well.

        `kwargs` are those of `push_to_hub`; `max_shard_size` and `safe_serialization` are accepted and have no meaning
        for compiled graphs.

        Raises:
            FileExistsError: the folder holds something else.
        """
        for unused in ("max_shard_size", "safe_serialization"):
            kwargs.pop(unused, None)
        if kwargs and not push_to_hub:
            raise TypeError(f"save_pretrained got {', '.join(sorted(kwargs))}, which only push_to_hub=True takes")
        save_directory = Path(save_directory)
        if save_directory.absolute() != self.artifact.path.absolute():
            manifest = {key: value for key, value in self.artifact.manifest.items() if key != "files"}
            with write_artifact(save_directory, overwrite=True) as writer:
                copy_artifact(self.artifact.path, list(self.artifact.manifest["files"]), writer.path)
                self.generation_config.to_json_file(writer.path / "generation_config.json")
                writer.commit(manifest)
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", save_directory.name)
            self.push_to_hub(repo_id, **kwargs)

    def can_generate(self) -> bool:
        return True

    def eval(self) -> NeuronModelForCausalLM:
        return self

    def to(self, *args: Any, **kwargs: Any) -> NeuronModelForCausalLM:
        """Returns self: compiled graphs stay where they were compiled for."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutput:
        return self.forward(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 1,
        cu_seq_lens_q: Tensor | None = None,
    ) -> CausalLMOutput:
        """Logits of each prompt's last real token, `[prompts, 1, vocab]` float32: the graphs compute no others.

        Args:
            input_ids: `[rows, tokens]`, or `[1, tokens]` with prompts packed one behind another.
            attention_mask: which tokens of padded rows are real.
            cu_seq_lens_q: where each packed prompt starts, and the number of tokens, as transformers names it.

        Raises:
            ValueError: `logits_to_keep` is not 1, `cu_seq_lens_q` does not fit, or the prompts do not fit the compiled
                sizes.
        """
        if logits_to_keep != 1:
            raise ValueError(
                f"logits_to_keep={logits_to_keep}: the compiled graphs return the last token's logits only; use 1"
            )
        if cu_seq_lens_q is not None and attention_mask is not None:
            raise ValueError("attention_mask has no meaning for packed prompts; leave it or cu_seq_lens_q out")
        prompts = unpad(input_ids, attention_mask) if cu_seq_lens_q is None else unpack(input_ids, cu_seq_lens_q)
        check_fits(prompts, 1, self.neuron_config)
        with self._slots():
            self.runner.reset_all()
            try:
                _, logits = prefill(self.runner, prompts)
            finally:
                self.runner.reset_all()
        return CausalLMOutput(logits=logits[:, None])

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        """Names the inputs of `generate`; transformers reads the signature to refuse misspelt keywords."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """No cache object: the graphs hold the state."""

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        **_: Any,  # what transformers prepares for models that it runs itself
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Greedy search and sampling, called by `generate`."""
        refuse_unsupported(generation_config, self.neuron_config)
        prompts = unpad(input_ids, attention_mask)
        check_fits(prompts, generation_config.max_length - input_ids.shape[1], self.neuron_config)
        as_dict = generation_config.return_dict_in_generate
        choice = choose_how(
            logits_processor,
            self.neuron_config,
            self.artifact.model.vocab_size,
            do_sample=generation_config.do_sample,
            keep_scores=as_dict and generation_config.output_scores,
            keep_logits=as_dict and generation_config.output_logits,
        )
        pad = generation_config._pad_token_tensor
        loop = GenerationLoop(self.runner, choice, stopping_criteria, None if pad is None else int(pad), streamer)
        with self._slots():
            sequences = loop.run(input_ids, prompts, generation_config.max_length)
        if not as_dict:
            return sequences
        host = choice if isinstance(choice, HostChoice) else None
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(host.scores) if host and host.scores is not None else None,
            logits=tuple(host.logits) if host and host.logits is not None else None,
        )

    @contextmanager
    def _slots(self, *, keep_engine: bool = False) -> Iterator[None]:
        """The slots for one call: calls from several threads run one after another, a manager excludes them."""
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

    def _beam_search(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "beam search is not supported: a slot's cache cannot be copied between beams; use num_beams=1"
        )

    def _assisted_decoding(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "assisted generation is not supported: the graphs advance one token per row and step; call generate() "
            "without assistant_model and prompt_lookup_num_tokens"
        )
