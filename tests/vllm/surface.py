# SPDX-License-Identifier: Apache-2.0
"""What the plugin takes of vLLM, compared with the sources of any version of it: read by ast, nothing is imported or installed.

`python tests/vllm/surface.py` compares the installed version, the newest one that pyproject.toml allows, and the newest of all. Only
what is allowed has to fit; what the other one lacks is only printed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path


ROOT = Path(__file__).parents[2]
WORKER = "optimum_neuron.vllm.worker.NeuronWorker"
# Stand between the executors and a worker, and take some calls themselves.
WRAPPERS = ("vllm.v1.worker.worker_base.WorkerWrapperBase", "vllm.v1.executor.ray_utils.RayWorkerWrapper")
# What the plugin takes of objects that vLLM hands it, of classes that no syntax names.
TAKEN = {
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "block_pool coordinator watermark_blocks prefix_cache_lookup_enabled "
    "truncate_computed_blocks",
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "find_longest_cache_hit",
    "vllm.v1.core.block_pool.BlockPool": "get_num_free_blocks",
    "vllm.v1.core.sched.scheduler.Scheduler": "_inflight_prefill_reserved_blocks scheduler_reserve_full_isl",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "ref_cnt",
    "vllm.v1.request.Request": "request_id status priority num_tokens num_computed_tokens all_token_ids block_hashes "
    "is_prefill_chunk num_stale_output_tokens drop_stale_output skip_reading_prefix_cache prefill_stats",
    "vllm.v1.core.sched.output.SchedulerOutput": "num_scheduled_tokens total_num_scheduled_tokens finished_req_ids "
    "preempted_req_ids scheduled_new_reqs scheduled_cached_reqs kv_connector_metadata",
    "vllm.v1.core.sched.output.CachedRequestData": "req_ids num_computed_tokens new_block_ids resumed_req_ids all_token_ids",
    "vllm.v1.core.sched.output.NewRequestData": "req_id prompt_token_ids prefill_token_ids sampling_params block_ids "
    "num_computed_tokens",
    "vllm.v1.metrics.stats.PrefillStats": "num_local_cached_tokens num_external_cached_tokens num_cached_tokens",
    "vllm.v1.worker.gpu_input_batch.InputBatch": "add_request remove_request condense refresh_metadata req_ids "
    "req_id_to_index token_ids_cpu is_token_ids num_tokens_no_spec max_model_len sampling_metadata",
}


class Sources:
    """Python files by their path from the folder that `vllm` is in; `read` gives the text of one, or None."""

    def __init__(self, read: Callable[[str], str | None], paths: Sequence[str]) -> None:
        self._read, self._paths = read, paths
        self._known: dict[str, Module | None] = {}

    @classmethod
    def of_folder(cls, folder: Path, package: str) -> Sources:
        paths = [path.relative_to(folder).as_posix() for path in sorted((folder / package).rglob("*.py"))]
        return cls(lambda path: (folder / path).read_text(encoding="utf-8") if path in paths else None, paths)

    @classmethod
    def of_wheel(cls, wheel: Path) -> Sources:
        archive = zipfile.ZipFile(wheel)
        paths = [name for name in archive.namelist() if name.endswith(".py")]
        return cls(lambda path: archive.read(path).decode() if path in paths else None, paths)

    def changed(self, path: str, change: Callable[[str], str]) -> Sources:
        """The same with another text of one file."""
        text = self._read(path)
        assert text is not None and change(text) != text, path
        return Sources(lambda asked: change(text) if asked == path else self._read(asked), self._paths)

    def module(self, name: str) -> Module | None:
        if name not in self._known:
            path = name.replace(".", "/")
            texts = ((self._read(f"{path}{end}"), end) for end in (".py", "/__init__.py"))
            found = next(((text, end) for text, end in texts if text is not None), None)
            self._known[name] = None if found is None else Module(name, *found)
        return self._known[name]

    def modules(self) -> Iterator[Module]:
        for path in self._paths:
            found = self.module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            if found is not None:
                yield found


class Module:
    """A file, and what its names are bound to."""

    def __init__(self, name: str, text: str, end: str) -> None:
        self.name, self.text, self.is_package = name, text, end != ".py"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> dict[str, str]:
        """Names that are imported anywhere in the file: name to what it is, `package.module.Class`."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                parts = self.name.split(".")
                up = parts[: len(parts) - node.level + self.is_package] if node.level else []
                source = ".".join([*up, *([node.module] if node.module else [])])
                found |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    def binds(self, name: str) -> bool:
        """Whether a name is there, or made where it is asked for."""
        if name in self.imports or name in self.classes:
            return True
        nodes = list(ast.walk(self.tree))
        if any(isinstance(node, ast.FunctionDef) and node.name == name for node in nodes):
            return True
        if any(isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name for node in nodes):
            return True
        lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in self.tree.body)
        return lazy and f'"{name}"' in self.text


@dataclass
class Class:
    """What a class has of its own: methods, fields and whatever is set on `self`; idle methods raise NotImplementedError."""

    name: str
    node: ast.ClassDef
    bases: list[Class]
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    abstract: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)

    def lineage(self) -> Iterator[Class]:
        yield self
        for base in self.bases:
            yield from base.lineage()

    def own(self) -> Iterator[Class]:
        """The part of the lineage that is the plugin's."""
        return (each for each in self.lineage() if each.name.startswith("optimum_neuron."))

    def foreign(self) -> list[Class]:
        """The part of the lineage that is vLLM's."""
        return [each for each in self.lineage() if each.name.startswith("vllm.")]


class Surface:
    """The plugin, compared with one version of vLLM."""

    def __init__(self, vllm: Sources, plugin: Sources | None = None) -> None:
        self._vllm = vllm
        self._plugin = plugin or Sources.of_folder(ROOT, "optimum_neuron/vllm")
        self._classes: dict[str, Class | None] = {}

    def problems(self) -> list[str]:
        """What does not fit, one sentence each."""
        return sorted({*self._imports(), *self._derived(), *self._called_with(), *self._taken(), *self._rpc()})

    def find(self, name: str) -> Class | None:
        """A class by its full name, or by one under which a module passes it on."""
        if name not in self._classes:
            self._classes[name] = None  # whoever comes by here again finds no end
            self._classes[name] = self._make(name)
        return self._classes[name]

    def _make(self, name: str) -> Class | None:
        module_name, _, short = name.rpartition(".")
        module = (self._vllm if name.startswith("vllm.") else self._plugin).module(module_name)
        if module is None:
            return None
        if short not in module.classes:
            return self.find(module.imports[short]) if short in module.imports else None
        node = module.classes[short]
        names = [ast.unparse(base).partition("[")[0] for base in node.bases]
        bases = [self.find(module.imports.get(each, f"{module_name}.{each}")) for each in names]
        return _described(Class(name, node, [base for base in bases if base is not None]))

    def _imports(self) -> Iterator[str]:
        for module in self._plugin.modules():
            for full in module.imports.values():
                source, _, name = full.rpartition(".")
                if not full.startswith("vllm."):
                    continue
                there = self._vllm.module(source)
                if self._vllm.module(full) is None and (there is None or not there.binds(name)):
                    yield f"{module.name} imports {full}, which is not there"
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    used = self._vllm.module(module.imports.get(node.value.id, ""))
                    if used is not None and not used.binds(node.attr):
                        yield f"{module.name} takes {node.attr} of {used.name}, which has none"

    def _subclasses(self) -> list[Class]:
        found = [self.find(f"{module.name}.{name}") for module in self._plugin.modules() for name in module.classes]
        return [each for each in found if each is not None and each.foreign()]

    def _derived(self) -> Iterator[str]:
        """Classes that derive from vLLM's: abstract methods, signatures, and names that are taken of them."""
        classes = self._subclasses()
        inner = {base.name for each in classes for base in each.bases}
        for each in classes:
            foreign, own = each.foreign(), list(each.own())
            if each.name not in inner:
                made = {name for base in each.lineage() for name in base.names - base.abstract}
                for name in {name for base in foreign for name in base.abstract} - made:
                    yield f"{each.name} lacks the abstract method {name}"
            for name, method in each.methods.items():
                theirs = next((base.methods[name] for base in foreign if name in base.methods), None)
                if theirs is not None and name != "__init__" and (reason := _refused_call(theirs.args, method.args)):
                    yield f"{each.name}.{name} does not take what vLLM gives it: {reason}"
            known = {name for base in [*foreign, *own] for name in base.names}
            # One of several bases of a class of ours may have it.
            heirs = [other for other in classes if each.name in {base.name for base in other.own()}]
            known |= {name for other in heirs for base in other.own() for name in base.names}
            for name in _of_self(each.node) - known:
                if not name.startswith("__"):
                    yield f"{each.name} takes {name} of vLLM's class, which has none"

    def _called_with(self) -> Iterator[str]:
        """Keywords that the plugin gives to constructors of vLLM's classes."""
        for module in self._plugin.modules():
            for node in ast.walk(module.tree):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                found = self.find(module.imports.get(node.func.id, ""))
                if found is None or not found.name.startswith("vllm."):
                    continue
                known = {name for base in found.lineage() for name in base.names}
                made = [base.methods["__init__"] for base in found.lineage() if "__init__" in base.methods]
                known |= {name for each in made for name in _names(each.args)}
                for keyword in node.keywords:
                    if keyword.arg is not None and keyword.arg not in known:
                        yield f"{module.name} gives {found.name} the argument {keyword.arg}, which it does not take"

    def _taken(self) -> Iterator[str]:
        for name, taken in TAKEN.items():
            found = self.find(name)
            known = set() if found is None else {each for base in found.lineage() for each in base.names}
            for each in taken.split():
                if each not in known:
                    yield f"{name} has no {each}"

    def _rpc(self) -> Iterator[str]:
        """Names that vLLM calls of its workers."""
        worker = self.find(WORKER)
        assert worker is not None
        done = {name for base in worker.lineage() for name in base.names - base.idle}
        done |= {name for each in WRAPPERS if (wrapper := self.find(each)) is not None for name in wrapper.methods}
        refused = self._plugin.module("optimum_neuron.vllm.worker")
        assert refused is not None
        for name in rpc_names(self._vllm) - done - _keys(refused.tree, "REFUSED_CALLS"):
            yield f"vLLM calls {name} of its workers: implement it, or refuse it with a reason"


def rpc_names(vllm: Sources) -> set[str]:
    """The methods that vLLM calls of its workers by their names."""
    found = set()
    for module in vllm.modules():
        if "collective_rpc" not in module.text:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and "collective_rpc" in ast.unparse(node.func).rpartition(".")[2]:
                given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "method")]
                found |= {
                    each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
    return found


def _described(made: Class) -> Class:
    for node in made.node.body:
        if isinstance(node, ast.FunctionDef):
            made.methods[node.name] = node
            if any("abstractmethod" in ast.unparse(each) for each in node.decorator_list):
                made.abstract.add(node.name)
            if isinstance(node.body[-1], ast.Raise) and "NotImplementedError" in ast.unparse(node.body[-1]):
                made.idle.add(node.name)
    for inner in ast.walk(made.node):
        is_stored = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if is_stored and ast.unparse(inner.value) == "self":
            made.names.add(inner.attr)
    fields = [
        target
        for node in made.node.body
        if isinstance(node, ast.AnnAssign | ast.Assign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    made.names |= made.methods.keys() | {node.id for node in fields if isinstance(node, ast.Name)}
    return made


def _of_self(node: ast.ClassDef) -> set[str]:
    """Names that a class reads of itself or of its bases."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Load)
        and ast.unparse(inner.value) in ("self", "super()")
    }


def _names(arguments: ast.arguments) -> list[str]:
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _refused_call(theirs: ast.arguments, ours: ast.arguments) -> str | None:
    """Why a method cannot be called as the one that it stands for; None where it can."""
    places, given = [*ours.posonlyargs, *ours.args], [*theirs.posonlyargs, *theirs.args]
    if ours.vararg is None and len(given) > len(places):
        return f"{given[len(places)].arg}"
    missing = [name for name in _names(theirs) if name not in _names(ours)]
    if ours.vararg is None and ours.kwarg is None and missing:
        return ", ".join(missing)
    needed = [each.arg for each in places[: len(places) - len(ours.defaults)]]
    needed += [each.arg for each, value in zip(ours.kwonlyargs, ours.kw_defaults, strict=True) if value is None]
    if theirs.vararg is None and (extra := [name for name in needed if name not in _names(theirs)]):
        return f"it wants {', '.join(extra)}"
    return None


def _keys(tree: ast.Module, name: str) -> set[str]:
    """The keys of a table that a module writes out."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Dict):
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise KeyError(name)


def installed() -> Sources:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Sources.of_folder(Path(spec.origin).parents[1], "vllm")


def supported() -> str:
    """What pyproject.toml allows, `vllm>=0.32,<0.34`."""
    found = re.search(r'^  "(vllm[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def _fetched(requirement: str, folder: Path) -> Path | None:
    """A wheel of vLLM; None where none can be had here."""
    options = ["-q", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stdout.write(f"{requirement} cannot be had here: {done.stderr.strip().splitlines()[-1:]}\n")
        return None
    return next(folder.glob("vllm-*.whl"))


def main() -> int:
    fits = _tell("the installed vLLM", installed())
    seen: set[str] = set()
    for requirement, has_to_fit in ((supported(), True), ("vllm", False)):
        with tempfile.TemporaryDirectory() as folder:
            wheel = _fetched(requirement, Path(folder))
            if wheel is not None and wheel.name not in seen:
                seen.add(wheel.name)
                fits &= _tell(wheel.name, Sources.of_wheel(wheel)) or not has_to_fit
    return 0 if fits else 1


def _tell(name: str, vllm: Sources) -> bool:
    problems = Surface(vllm).problems()
    sys.stdout.write(
        "\n  ".join([f"{name}: {len(problems)} of its names are not as the plugin takes them", *problems]) + "\n"
    )
    return not problems


if __name__ == "__main__":
    raise SystemExit(main())
