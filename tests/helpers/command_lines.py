# SPDX-License-Identifier: Apache-2.0
"""Command lines that must be refused, as a table: what is wrong with the words, with the paths, or with the files that they name.

A word such as `{checkpoint}` stands for a path that `broken_files.Files` makes.
"""

from __future__ import annotations


USAGE, REFUSED = 2, 1
HUGE = str(2**40)
EXPORT = (
    *("export", "neuron", "{out}", "--model", "{checkpoint}", "--target", "eager", "--sequence-length", "64"),
    *("--prefill-chunk-size", "8", "--dtype", "float32"),
)
GENERATE = ("neuron", "generate", "{artifact}", "--prompt", "Hi", "--max-new-tokens", "2")
ESTIMATE = ("neuron", "estimate", "--model", "{checkpoint}", "--sequence-length", "64", "--target", "trn2")
SIZES = ("batch-size", "sequence-length", "prefill-chunk-size", "ctx-batch-size", "tensor-parallel-size")
LISTS = ("prefill-chunk-buckets", "context-buckets")


class Line:
    """Words, the exit code of a process that is given them, and what its error tells."""

    def __init__(self, words: tuple[str, ...], code: int, *tells: str) -> None:
        self.words, self.code, self.tells = words, code, tells

    def __str__(self) -> str:
        return " ".join(word if word.isprintable() and word else repr(word) for word in self.words)


def _sizes() -> list[Line]:
    """Words that are no size, one of them for each option; which sizes fit is tested with NeuronConfig."""
    lines = []
    for option, value in zip(SIZES, ("x", "1.5", "", "1e3", "½"), strict=True):
        flag, name = f"--{option}", option.replace("-", "_")
        lines.append(Line((*EXPORT, flag, value), USAGE, f"argument {flag}: invalid int value: {value!r}"))
        lines.append(Line((*EXPORT, flag, "0"), REFUSED, f"{name}=0 must be at least 1"))
    lines.append(Line((*EXPORT, "--batch-size", HUGE), REFUSED, f"batch_size={HUGE} is above", "lower it"))
    for option, values in zip(LISTS, (("x", "8,x"), ("8;16", "1.5")), strict=True):
        flag, name = f"--{option}", option.replace("-", "_")
        lines += [Line((*EXPORT, flag, value), USAGE, f"{value!r} is not a list of whole numbers") for value in values]
        lines.append(Line((*EXPORT, f"{flag}=16,8"), REFUSED, name, "sort it as (8, 16)"))
    return lines


CONTRADICTIONS = [
    Line((*EXPORT, "--prefill-chunk-size", "128"), REFUSED, "prefill_chunk_size=128", "sequence_length=64"),
    Line((*EXPORT, "--batch-size", "64"), REFUSED, "64 + 1 * 8 = 72 tokens exceeds sequence_length=64"),
    Line((*EXPORT, "--context-buckets", ""), REFUSED, "context_buckets=() must end with sequence_length=64"),
    Line((*EXPORT, "--tensor-parallel-size", "2"), REFUSED, "tensor_parallel_size=2 needs as many devices"),
    Line((*EXPORT, "--sequence-length", "512"), REFUSED, "max_position_embeddings=256", "lower --sequence-length"),
    Line((*EXPORT, "--target", "trn2"), REFUSED, "need torch-xla"),
    Line((*EXPORT, "--certify"), REFUSED, "target='eager' has no graphs in HLO to certify", "leave out --certify"),
    Line((*EXPORT, "--no-certificate"), USAGE, "--no-certificate"),
    Line((*EXPORT, "--revision", "v1"), REFUSED, "revision='v1'", "leave --revision out"),
    Line(("export", "neuron", "{out}"), USAGE, "-m/--model"),
    Line(("export", "neuron", "--model", "{checkpoint}"), USAGE, "output"),
    Line((*EXPORT, "--no-such-option"), USAGE, "--no-such-option"),
    Line((*EXPORT, "--batch", "2"), USAGE, "--batch; did you mean --batch-size?"),
    Line((*EXPORT, "--torch_dtype=float16"), USAGE, "--torch_dtype; did you mean --dtype?"),
    Line((*EXPORT, "--batch-size", "100000", "--sequence-length", "100000"), REFUSED, "10,000,000,000 tokens"),
    Line((*EXPORT, "--batch-size", "2000000000", "--kv-block-size", "64"), REFUSED, "KV cache takes 66,560.0 GB"),
    Line((*EXPORT, "--model", "{artifact}"), REFUSED, "is an artifact already; name the checkpoint"),
    Line((*EXPORT, "--target", "trn9"), USAGE, "invalid choice: 'trn9'", "did you mean trn"),
    Line((*EXPORT, "--task", "fill-mask"), USAGE, "invalid choice: 'fill-mask'"),
]  # fmt: skip

# A name of a model that is none.
NAMES = {
    "no-such-folder": "no-such-folder", "someone/missing": "someone/missing", "": "", "no such name!": "no such name!",
    "/no/such/path": "/no/such/path", "[red]": "[red]", "[/]": "[/]", ":smile:": ":smile:", "größe/模型": "größe/模型",
    "two\nlines": "two lines", "x" * 300: "File name too long", "x/" * 3000: "File name too long", "a.gguf": "a.gguf",
    "~no-such-user/x": "home directory", "{empty_folder}": "holds no config.json", "{text_file}": "a file of another kind",
    "{link_circle}": "{link_circle}", "/dev/null": "/dev/null", ".": "holds no config.json", "{artifact}/weights": "holds no config.json",
}  # fmt: skip


def _names() -> list[Line]:
    lines = []
    for number, (name, words) in enumerate(NAMES.items()):
        command = ("neuron", "estimate") if number % 2 else ("export", "neuron", "{out}", "--target", "eager")
        lines.append(Line((*command, f"--model={name}"), REFUSED, words))
    return lines


# Output folders that cannot be written.
OUTPUTS = [
    Line((*EXPORT[:2], "{text_file}", *EXPORT[3:]), REFUSED, "is a file; name a folder"),
    Line((*EXPORT[:2], "{full_folder}", *EXPORT[3:]), REFUSED, "is not empty and holds no artifact"),
    Line((*EXPORT[:2], "{full_folder}", *EXPORT[3:], "--overwrite"), REFUSED, "is not empty and holds no artifact"),
    Line((*EXPORT[:2], "{artifact}", *EXPORT[3:]), REFUSED, "already holds an artifact", "--overwrite"),
    Line((*EXPORT[:2], "{text_file}/out", *EXPORT[3:]), REFUSED, "{text_file}"),
    Line((*EXPORT[:2], "{link_circle}", *EXPORT[3:]), REFUSED, "{link_circle}"),
    Line((*EXPORT[:2], "/proc/none/out", *EXPORT[3:]), REFUSED, "/proc has"),
    Line((*EXPORT[:2], "x" * 300, *EXPORT[3:]), REFUSED, "File name too long"),
    Line((*EXPORT[:2], "~no-such-user/out", *EXPORT[3:]), REFUSED, "home directory"),
]

# A change of config.json, and what is told of it; the same is told where a model is estimated, unless weights tell.
CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "zero heads": ({"num_attention_heads": 0}, "num_attention_heads=0"),
    "no whole heads": ({"num_attention_heads": 3}, "multiple of the number of attention heads"),
    "negative heads": ({"num_key_value_heads": -1}, "num_key_value_heads=-1"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    "many layers": ({"num_hidden_layers": 100_000}, "num_hidden_layers=100000, and no model has more than 1000"),
    "countless layers": ({"num_hidden_layers": 2**40}, f"num_hidden_layers={HUGE}"),
    "countless width": ({"hidden_size": 2**40}, f"hidden_size={HUGE}"),
    "negative width": ({"intermediate_size": -1}, "negative dimension"),
    "words for a number": ({"hidden_size": "64"}, "hidden_size"),
    "nothing for a number": ({"vocab_size": None}, "vocab_size"),
    "a list for a number": ({"rms_norm_eps": [1]}, "rms_norm_eps"),
    "unknown activation": ({"hidden_act": "zzz"}, "zzz"),
    "unknown frequencies": ({"rope_parameters": {"rope_type": "zzz"}}, "zzz"),
    "half of frequencies": ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
    "unknown dtype": ({"dtype": "zzz"}, "zzz"),
    "padding outside": ({"pad_token_id": 10**6}, "adding_idx"),
    "unknown model": ({"model_type": "zzz"}, "zzz"), "no model": ({"model_type": None}, "None"),
    "encoder and decoder": ({"model_type": "t5"}, "t5"),
    "a number for a part": ({"text_config": 5}, "holds 5 in place"),
    "a number for quantization": ({"quantization_config": 5}, "quantization_config=5, which is no object"),
    "unknown quantization": ({"quantization_config": {"quant_method": "zzz"}}, "is quantized by zzz"),
    "layers of no kind": ({"layer_types": ["zzz", "zzz"]}, "layer_types"),
    "own code": ({"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}}, "--trust-remote-code"),
}  # fmt: skip
# The same, where only weights tell that it is wrong.
MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "encoder": ({"model_type": "bert"}, "bert"),
    "more layers": ({"num_hidden_layers": 3}, "lacks model.layers.2."),
    "ten times the layers": ({"num_hidden_layers": 999}, "names 999 layers, and its weights are 21 tensors"),
    "another width": ({"hidden_size": 2**20}, "parameters, and its weights hold"),
    "one word more": ({"vocab_size": 301}, "has the shape [300, 64]"),
    "other heads": ({"num_key_value_heads": 4}, "has the shape [32, 64]"),
    "infinite frequencies": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "its logits are not finite"),
}
NO_OBJECT = {
    "list": b"[]", "number": b"1", "nothing": b"", "half": b'{"a": ', "bytes": b"\xff\xfe\x00", "deep": b"[" * 100_000,
}  # fmt: skip
OBJECTS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "adapter_config.json",
)  # fmt: skip
# Of a GGUF file: see broken_files.
GGUF = {
    "empty": "is no GGUF file", "magic": "is no GGUF file", "version": "version 99", "header": "truncated or corrupt",
    "half": "truncated or corrupt", "counts": "truncated or corrupt", "no_tensors": "holds no weights",
    "no_heads": "llama.attention.head_count", "layers": "block_count=100000", "zero_heads": "attention.head_count=0",
    "countless": f"embedding_length={2**32 - 1}", "many_words": "its weights hold",
}  # fmt: skip
WEIGHTS = {
    "nan": "model.embed_tokens.weight holds NaN or infinity in 19,200 of 19,200 places", "inf": "mlp.up_proj.weight holds NaN or infinity",
    "truncated": "truncated or corrupt", "missing": "holds no weights", "pickled": "a format that may run code", "none": "0 tensors",
    "index_list": "instead of an object", "index_empty": "is no index of weights", "index_numbers": "is no index of weights",
    "index_missing": "lacks x.safetensors", "index_outside": "do not use this checkpoint", "dangling": "holds no weights",
}  # fmt: skip
TOKENIZERS = {
    "tokenizer.json": [b"[]", b"{}", b"", b'{"model": 5}', b"\xff"], "chat_template.jinja": [b"\xff"],
    "tokenizer_config.json": [b'{"tokenizer_class": 5}', b'{"added_tokens_decoder": 5}'],
}  # fmt: skip
ADAPTERS = {
    "no_config": "holds no adapter_config.json", "no_weights": "holds no adapter_model.safetensors", "truncated": "truncated or corrupt",
    "rank": f"names the rank {HUGE}", "kind": "no configuration that the installed PEFT knows", "list": "instead of an object",
    "empty_object": "names no peft_type", "pickled": "holds its weights as adapter_model.bin, a format that may run code",
}  # fmt: skip


def _checkpoints() -> list[Line]:
    lines = []
    for number, (name, (_, told)) in enumerate((CONFIGS | MISFITS).items()):
        command = ESTIMATE if number % 2 and name in CONFIGS else EXPORT
        lines.append(Line((*command, "--model", f"{{config:{name}}}"), REFUSED, told))
    for number, file in enumerate(OBJECTS):
        for kind in list(NO_OBJECT)[number % 2 :: 2]:
            lines.append(Line((*EXPORT, "--model", f"{{object:{file}:{kind}}}"), REFUSED, file))
    for option, broken, kinds in (
        ("model", "gguf", GGUF),
        ("model", "weights", WEIGHTS),
        ("adapter", "adapter", ADAPTERS),
    ):
        for kind, told in kinds.items():
            lines.append(Line((*EXPORT, f"--{option}", f"{{{broken}:{kind}}}"), REFUSED, told))
    for file, contents in TOKENIZERS.items():
        for number in range(len(contents)):
            words = (*EXPORT, "--model", f"{{tokenizer:{file}:{number}}}")
            lines.append(Line(words, REFUSED, "tokenizer cannot be read"))
    lines.append(Line((*EXPORT, "--adapter", "no-such-adapter"), REFUSED, "no-such-adapter"))
    lines.append(Line((*EXPORT, "--adapter", ""), REFUSED, ""))
    told = ("is a PEFT adapter, not a checkpoint", "--adapter {adapter:good}")
    lines.append(Line((*EXPORT, "--model", "{adapter:good}"), REFUSED, *told))
    return lines


MANIFESTS = {
    "missing": "holds no neuron_config.json", "list": "it is a list, not an object", "nothing": "is not valid JSON", "half": "is not valid JSON",
    "object": "has format None", "bytes": "is not valid JSON",
}  # fmt: skip


def _artifacts() -> list[Line]:
    lines = [
        Line(("neuron", "inspect"), USAGE, "artifact"),
        Line(("neuron", "inspect", "{artifact}", "--html", "{full_folder}"), REFUSED, "is a folder; name a file"),
        Line(("neuron", "inspect", "{artifact}", "--html", "{text_file}/x"), REFUSED, "{text_file}"),
        Line(("neuron", "card"), USAGE, "artifact"),
        Line(("neuron", "card", "{artifact}", "--base-model", "no such"), REFUSED, "base_model='no such' is no name"),
        Line(("neuron", "push", "{artifact}"), USAGE, "REPO"),
        Line(("neuron", "push", "{artifact}", "no such name!"), REFUSED, "'no such name!' is no name of a Hub"),
        Line(("neuron", "push", "{artifact}", "org/x"), REFUSED, "HF_HUB_OFFLINE is set", "org/x"),
        Line(("neuron", "generate"), USAGE, "MODEL"), Line(("neuron", "check"), USAGE, "artifact"),
        Line(("neuron", "serve"), USAGE, "MODEL"),
        Line(("neuron", "serve", "{artifact}", "--port", "-1"), REFUSED, "--port -1"),
        Line(("neuron", "serve", "{artifact}", "--backend", "tgi"), USAGE, "invalid choice: 'tgi'"),
        Line(("neuron", "check", "{artifact}", "--runs", "0"), REFUSED, "runs"),
        Line(("neuron", "check", "{artifact}"), REFUSED, "was exported for", "export the model for one of"),
        Line(("neuron", "unknown"), USAGE, "unknown"),
        Line(("neuron", "generat"), USAGE, "'generat'", "did you mean generate?"),
        Line(("neuron", "serve", "{artifact}", "--max-model-len", "5"), USAGE, "--max-model-len; optimum-cli"),
    ]  # fmt: skip
    for path in (
        "no-such-folder",
        "",
        "[red]",
        "{text_file}",
        "{checkpoint}",
        "{link_circle}",
        "{gguf:empty}",
        "x" * 300,
    ):
        # Generating and serving take a checkpoint.
        commands = ("inspect", "check") if path == "{checkpoint}" else ("lint", "generate", "serve")
        lines += [Line(("neuron", each, path), REFUSED, path if 0 < len(path) < 300 else "") for each in commands]
    for kind, told in MANIFESTS.items():
        for command in ("inspect", *(("serve",) if kind != "missing" else ("check", "card"))):
            lines.append(Line(("neuron", command, f"{{manifest:{kind}}}"), REFUSED, told))
    return lines


ANSWERS = [
    Line((*GENERATE, "--prompt", ""), REFUSED, "the prompt is empty"),
    Line((*GENERATE, "--prompt", "\udcff"), REFUSED, "a text holds what utf-8 cannot hold; write it in UTF-8"),
    Line((*GENERATE, "--prompt", "x" * 200), REFUSED, "does not fit sequence_length=64"),
    Line((*GENERATE, "--max-new-tokens", "0"), REFUSED, "--max-new-tokens 0"),
    Line((*GENERATE, "--max-new-tokens", HUGE), REFUSED, "sequence_length=64"),
    Line((*GENERATE, "--temperature", "-1"), REFUSED, "--temperature -1.0 must be 0 or more"),
    Line((*GENERATE, "--top-k", "3"), REFUSED, "--top-k shapes sampling"),
    Line((*GENERATE, "--top-p", "0.5"), REFUSED, "--top-p shapes sampling"),
    Line((*GENERATE, "--temperature", "1", "--top-k", "0"), REFUSED, "--top-k 0"),
    Line((*GENERATE, "--temperature", "1", "--top-p", "2"), REFUSED, "--top-p 2.0"),
    Line((*GENERATE, "--seed", "-1"), REFUSED, "seed"), Line((*GENERATE, "--seed", HUGE), REFUSED, "seed"),
    Line((*GENERATE, "--no-chat-template", "--system", "Be brief."), REFUSED, "--system needs a chat template"),
    Line(("neuron", "generate", "{template:syntax}", "--prompt", "Hi"), REFUSED, "the chat template of", "fails ("),
    Line(("neuron", "generate", "{template:raises}", "--prompt", "Hi"), REFUSED, "the chat template of", "no such role"),
    Line(("neuron", "generate", "{vocabulary:list}", "--prompt", "Hi"), REFUSED, "tokenizer.json"),
    Line(("neuron", "generate", "{vocabulary:missing}", "--prompt", "Hi"), REFUSED, "tokenizer.json cannot be read"),
]  # fmt: skip
CHATS = [
    Line(("neuron", "chat"), USAGE, "MODEL"),
    Line(("neuron", "chat", "{artifact}", "--top-k", "3"), REFUSED, "--top-k shapes sampling"),
    Line(("neuron", "chat", "{artifact}", "--max-new-tokens", "0"), REFUSED, "--max-new-tokens 0"),
    Line(("neuron", "chat", "{vocabulary:missing}"), REFUSED, "tokenizer.json cannot be read"),
]
ESTIMATES = [
    Line(("neuron", "estimate"), USAGE, "-m/--model"),
    Line((*ESTIMATE, "--target", "cpu"), USAGE, "invalid choice: 'cpu'"),
    Line((*ESTIMATE, "--sequence-length", "512"), REFUSED, "max_position_embeddings=256"),
    Line((*ESTIMATE, "--tensor-parallel-size", HUGE), REFUSED, HUGE),
    Line((*ESTIMATE, "--context-length", "0"), REFUSED, "context_length=0"),
    Line((*ESTIMATE, "--context-length", "65"), REFUSED, "context_length=65"),
    Line((*ESTIMATE, "--context-buckets", "8"), REFUSED, "context_buckets=(8,)"),
    Line((*ESTIMATE, "--revision", "v1"), REFUSED, "revision='v1'"),
    Line((*ESTIMATE, "--json", "{full_folder}"), REFUSED, "{full_folder}"),
]
TUNE = ("neuron", "tune", "--model", "{checkpoint}", "--trace")
TUNES = [
    Line(TUNE[:-1], USAGE, "--trace"),
    Line((*TUNE, "no-such.csv"), REFUSED, "no-such.csv does not exist; check the name"),
    Line((*TUNE, ""), REFUSED, ". is a folder; name a file"),
    Line((*TUNE, "{text_file}"), REFUSED, "{text_file}"),
    Line((*TUNE, "no-such.csv", "--requests", "-1"), REFUSED, "--requests -1 must be at least 0"),
    Line((*TUNE, "no-such.csv", "--slo", "zzz"), REFUSED, "zzz"),
    Line((*TUNE, "no-such.csv", "--compile-budget", "4"), USAGE, "'4' is no time above 0"),
    Line((*TUNE, "no-such.csv", "--trce", "x"), USAGE, "--trce; did you mean --trace?"),
]
LINTS = [
    Line(("neuron", "lint"), REFUSED, "name either an artifact's folder or --model"),
    Line(("neuron", "lint", "{artifact}", "--model", "x"), REFUSED, "name either an artifact's folder or --model"),
    Line(("neuron", "lint", "{artifact}", "--batch-size", "2"), REFUSED, "has its own batch_size"),
    Line(("neuron", "lint", "--model", "{checkpoint}", "--batch-size", "0"), REFUSED, "batch_size=0"),
    Line(("neuron", "lint", "--model", "{checkpoint}"), REFUSED, "need"),
]
BENCH = ("neuron", "bench", "{artifact}", "--new-tokens", "2")
BENCHES = [
    Line(("neuron", "bench"), USAGE, "MODEL"),
    Line(("neuron", "bench", "{empty_folder}"), REFUSED, "{empty_folder}"),
    Line((*BENCH, "--prompt-lengths", "65"), REFUSED, "65 tokens", "sequence_length=64"),
    Line((*BENCH, "--prompt-lengths", "0"), REFUSED, "--prompt-lengths 0 must be whole numbers of at least 1"),
    Line((*BENCH, "--batch", "1", "9"), REFUSED, "--batch 9 rows are more than the batch_size=3"),
    Line((*BENCH, "--batch-size", "9"), REFUSED, "batch_size=9 differs from the 3"),
    Line((*BENCH, "--context-length", "-1"), REFUSED, "--context-length -1 must be at least 1"),
    Line((*BENCH, "--new-tokens", "1"), REFUSED, "--new-tokens 1 must be at least 2"),
    Line((*BENCH, "--new-tokens", "99"), REFUSED, "99 new tokens do not fit sequence_length=64"),
    Line((*BENCH, "--repeat", "0"), REFUSED, "--repeat 0 must be at least 1"),
    Line((*BENCH, "--json", "{text_file}"), REFUSED, "--json {text_file} exists already"),
    Line((*BENCH, "--json", "{text_file}/x"), REFUSED, "--json {text_file}/x cannot be written"),
]
LOOKUP = (
    "neuron", "cache", "lookup", "--model", "{checkpoint}", "--target", "cpu", "--sequence-length", "64", "--prefill-chunk-size", "8",
)  # fmt: skip
SYNC = ("neuron", "cache", "sync", "--repo", "org/compiled")
CACHES = [
    Line(("neuron", "cache", "unknown"), USAGE, "unknown"),
    Line(("neuron", "cache", "prune"), REFUSED, "nothing says what to remove; give --max-size or --older-than"),
    Line(("neuron", "cache", "prune", "--max-size", "many"), USAGE, "'many' is no size"),
    Line(("neuron", "cache", "prune", "--older-than", "30"), USAGE, "'30' is no age"),
    Line(("neuron", "cache", "sync"), USAGE, "--repo"),
    Line((*SYNC, "--download-only", "--upload-only"), USAGE, "not allowed with argument"),
    Line(SYNC, REFUSED, "HF_HUB_OFFLINE is set", "org/compiled"),
    Line(("neuron", "cache", "sync", "--repo", "no such name!"), REFUSED, "'no such name!' is no name of a Hub repository"),
    Line(LOOKUP[:3], USAGE, "-m/--model"),
    Line((*LOOKUP, "--target", "eager"), REFUSED, "target='eager' compiles nothing that is kept"),
    Line((*LOOKUP, "--target", "trn2"), REFUSED, "need torch-xla"),
    Line((*LOOKUP, "--tensor-parallel-size", "2"), REFUSED, "tensor_parallel_size=2 needs as many devices"),
    Line((*LOOKUP, "--adapter", "lora"), REFUSED, "--adapter lora", "leave --adapter out"),
    Line((*LOOKUP, "--repo", "org/compiled"), REFUSED, "HF_HUB_OFFLINE is set", "org/compiled"),
    Line((*LOOKUP, "--repo-revision", "v1"), REFUSED, "--repo-revision v1", "name it by --repo"),
    Line((*LOOKUP, "--revision", "v1"), REFUSED, "revision='v1'", "leave --revision out"),
    Line((*LOOKUP, "--model", "{empty_folder}"), REFUSED, "holds no config.json"),
    Line((*LOOKUP, "--model", "{gguf:empty}"), REFUSED, "which are not read"),
    Line((*LOOKUP, "--model", "{config:unknown activation}"), REFUSED, "zzz"),
]  # fmt: skip
LINES = [
    *_sizes(), *CONTRADICTIONS, *_names(), *OUTPUTS, *_checkpoints(), *_artifacts(), *ANSWERS, *CHATS, *ESTIMATES, *TUNES, *LINTS, *BENCHES, *CACHES,
]  # fmt: skip
