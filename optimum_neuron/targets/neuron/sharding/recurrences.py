# SPDX-License-Identifier: Apache-2.0
"""Layers with recurrences that ranks share by heads.

A rank has consecutive heads, and the inputs of the layer's last linear layer that follow from them. The layer's code is not read: it runs
on random numbers, and a rank has of each parameter what its places depend on. So what all heads use is whole on every rank, and every
rank holds the key heads that it uses. Then the layer runs on each rank's parameters, and has to compute the whole's heads.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ....step.cache_needs import keeps_recurrence
from ....step.features.own_code.layers_by_token import keeps_own_state
from ....step.features.recurrence.recurrence import ScanCall
from ....step.features.recurrence.recurrent_functions import set_recurrences
from .plan import Section, ShardedRecurrence, ShardRule, even
from .random_layers import CODE_ERRORS, LayerRun, RandomLayer, Unlimited, is_close, shard_tensors, whole_numbers
from .trace import ModelTrace, is_below, is_linear


logger = logging.getLogger(__name__)

# Of sizes that may be a rank's or the whole's: more than any layer that was seen has to try.
_MOST_TRIALS = 256


@dataclass(frozen=True)
class RecurrentLayer:
    name: str
    rules: Mapping[str, ShardRule]  # cuts of its parameters, by their names in the model
    outer: str  # its last linear layer, which gives partial sums
    norms: Mapping[
        str, Section
    ]  # modules that need their whole inputs, such as a norm over all heads; and the cuts of these
    shared: ShardedRecurrence


def find_recurrences(model: PreTrainedModel, trace: ModelTrace, world_size: int) -> list[RecurrentLayer]:
    """Return layers of a model without data that so many ranks can share; of layers that look the same one is tried."""
    set_recurrences(model)
    found: list[RecurrentLayer] = []
    tried: dict[str, RecurrentLayer | None] = {}
    for name, module in model.named_modules():
        if not keeps_recurrence(module) or keeps_own_state(module) or name not in trace.inputs:
            continue
        sizes = [(each, sorted(whole_numbers(part).items())) for each, part in module.named_modules()]
        look = f"{module!r} {sizes} {[tuple(each.shape) for each in module.parameters()]}"
        if look not in tried:
            below = [each for each in trace.called if is_below(each, name)]
            linears = [each for each in below if is_linear(model.get_submodule(each))]
            tried[look] = _share_layer(name, module, linears[-1], world_size, trace) if linears else None
        layer = tried[look]
        if layer is not None:
            own = len(layer.name)
            rules = {name + member[own:]: rule for member, rule in layer.rules.items()}
            norms = {name + member[own:]: cut for member, cut in layer.norms.items()}
            found.append(RecurrentLayer(name, rules, name + layer.outer[own:], norms, layer.shared))
    return found


def _share_layer(name: str, module: nn.Module, outer: str, ranks: int, trace: ModelTrace) -> RecurrentLayer | None:
    """Return a layer's rules; None without a rule, or where a rank would compute something else."""
    if any(True for _ in module.buffers()):
        return None
    with unset_fake_temporarily():
        try:
            layer = RandomLayer(name, module, outer, trace)
            whole, copy = layer.run_layer(layer.tensors)
            if len(whole.calls) != 1 or len(whole.taken) != 1:
                return None
            places = whole.taken[0].shape[-1]
            if whole.calls[0].heads % ranks or places % ranks:
                return None
            norms = _find_mixing(copy, whole, places, ranks)
            rules = _find_rules(layer, norms, places, ranks)
            shared = None if rules is None else _fit_sizes(layer, whole, norms, rules, places, ranks)
        except CODE_ERRORS as error:
            logger.debug("%s stays whole on every rank (%s: %s)", name, type(error).__name__, error)
            return None
    if rules is None or shared is None:
        return None
    section = even(places, ranks)
    rules[f"{outer}.weight"] = ShardRule(1, (section,))
    return RecurrentLayer(name, rules, outer, {f"{name}.{each}": section for each in norms}, shared)


def _find_mixing(module: nn.Module, whole: LayerRun, places: int, ranks: int) -> list[str]:
    """Return modules from all places to all places that mix a rank's places with another's."""
    found, own = [], places // ranks
    for path, (given, output) in whole.norms.items():
        tensors = [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]
        if not isinstance(output, Tensor) or any(each.shape[-1] != places for each in (*tensors, output)):
            continue
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: torch.cat([x[..., :own], 2 * x[..., own:] + 1], -1), given
        )
        changed = module.get_submodule(path).forward(*args, **kwargs)
        if not torch.equal(changed[..., :own], output[..., :own]):
            found.append(path)
    return found


def _find_rules(layer: RandomLayer, norms: list[str], places: int, ranks: int) -> dict[str, ShardRule] | None:
    """Return cuts of parameters that give each rank what its places depend on, a norm over all of them apart."""

    def add_places(*args: Any, **kwargs: Any) -> Tensor:
        return sum(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor))  # type: ignore[return-value]

    with Unlimited():
        seen, module = layer.run_layer(layer.tensors, norms=dict.fromkeys(norms, add_places), gradients=True)
    (taken,) = seen.taken
    # The output of a linear layer shows the same for its parameters' rows, and is far smaller.
    linears = {path: calls[0] for path, calls in seen.linears.items() if len(calls) == 1}
    parameters = {name: each for name, each in module.named_parameters() if name.rpartition(".")[0] not in linears}
    sources = {**parameters, **linears}
    needed: dict[str, list[list[Tensor]]] = defaultdict(list)
    for part in taken.split(places // ranks, -1):
        weight = torch.randn(part.shape, generator=torch.Generator().manual_seed(1))
        found = torch.autograd.grad((part * weight).sum(), [*sources.values()], retain_graph=True, allow_unused=True)
        for name, gradient in zip(sources, found, strict=True):
            if gradient is not None and name in linears:
                for own, _ in module.get_submodule(name).named_parameters():
                    needed[f"{name}.{own}"].append(_find_places(gradient)[-1:])
            elif gradient is not None:
                needed[name].append(_find_places(gradient))
    rules = {}
    for name, parts in needed.items():
        by_dim = enumerate(map(torch.stack, zip(*parts, strict=True)))
        cut = next(((dim, rows) for dim, rows in by_dim if bool((rows != rows[0]).any())), None)
        if cut is not None:
            rules[f"{layer.name}.{name}"] = ShardRule(cut[0], _find_sections(cut[1]))
    return rules if all(rule.sections for rule in rules.values()) else None


def _find_places(gradient: Tensor) -> list[Tensor]:
    """Return by dimension, `[size]`, where any number is not zero. A random sum of such numbers is not zero either."""
    random = torch.Generator().manual_seed(2)
    stretched = (gradient.movedim(dim, 0).reshape(size, -1) for dim, size in enumerate(gradient.shape))
    return [each.mv(torch.randn(each.shape[1], generator=random)) != 0 for each in stretched]


def _find_sections(rows: Tensor) -> tuple[Section, ...]:
    """Return the stretches of ranks from `[ranks, size]`, what each needs; none where ranks' stretches differ in form."""
    changes = (rows[:, 1:] != rows[:, :-1]).any(0).nonzero().flatten() + 1
    edges = [0, *changes.tolist(), rows.shape[1]]
    held = [[(start, end - start) for start, end in itertools.pairwise(edges) if own[start]] for own in rows]
    if len({len(each) for each in held}) != 1:
        return ()
    sections = []
    for stretches in zip(*held, strict=True):
        starts, lengths = zip(*stretches, strict=True)
        first, block = min(starts), lengths[0]
        if len(set(lengths)) != 1 or any((start - first) % block for start in starts):
            return ()
        order = tuple((start - first) // block for start in starts)
        sections.append(Section(first, max(starts) + block - first, block, order))
    return tuple(sections)


def _fit_sizes(
    layer: RandomLayer, whole: LayerRun, norms: list[str], rules: Mapping[str, ShardRule], places: int, ranks: int
) -> ShardedRecurrence | None:
    """Return the recurrence with the sizes by which the layer's code computes a rank's heads; None where there are none."""
    (call,) = whole.calls
    key_heads, key_dim, value_dim = call.key.shape[1], call.key.shape[2], call.value.shape[2]
    # Sizes of the whole and of a rank: of heads, of cut dimensions, and of their stretches.
    pairs = [(call.heads, call.heads // ranks), (places, places // ranks)]
    pairs.append((key_heads, len(_describe_heads(call, ranks).key_heads_of(0))))
    for name, rule in rules.items():
        pairs.append((layer.tensors[name].shape[rule.dim], rule.local_size(ranks)))
        for each in rule.sections:
            units = (unit for unit in (1, key_dim, value_dim) if each.block % unit == 0)
            pairs += [(each.size // unit, each.block // unit) for unit in units]
    known: dict[int, list[int]] = {}
    for size, part in pairs:
        if part != size and part not in known.setdefault(size, []):
            known[size].append(part)
    read = {key: [*known[size], size] for key, size in whole.read.items() if size in known and key[0] not in norms}

    def fits(sizes: Mapping[tuple[str, str], int], of: Iterable[int] = (0, ranks - 1)) -> bool:
        try:
            return all(_is_computing(layer, whole, norms, rules, sizes, rank, ranks) for rank in of)
        except CODE_ERRORS:
            return False  # these sizes do not go with a rank's parameters

    for sizes in itertools.islice(itertools.product(*read.values()), _MOST_TRIALS):
        chosen = {key: size for key, size in zip(read, sizes, strict=True) if size != whole.read[key]}
        if not fits(chosen):
            continue
        for key in list(chosen):  # what only happens to be as large, and may be either
            fewer = {other: size for other, size in chosen.items() if other != key}
            chosen = fewer if fits(fewer) else chosen
        if fits(chosen, range(ranks)):
            filters = (name for name, each in layer.tensors.items() if each.dim() == 3)
            own = tuple(name.removeprefix(f"{layer.name}.") for name in filters)
            return _describe_heads(call, ranks, tuple((*key, size) for key, size in chosen.items()), own)
    return None


def _describe_heads(
    call: ScanCall, ranks: int, sizes: tuple[tuple[str, str, int], ...] = (), filters: tuple[str, ...] = ()
) -> ShardedRecurrence:
    inputs = tuple((each.shape[1], each[0, 0].numel()) for each in call.inputs())
    return ShardedRecurrence(ranks, call.heads, call.key.shape[1], inputs, sizes, filters)


def _is_computing(
    layer: RandomLayer,
    whole: LayerRun,
    norms: list[str],
    rules: Mapping[str, ShardRule],
    sizes: Mapping[tuple[str, str], int],
    rank: int,
    ranks: int,
) -> bool:
    tensors = shard_tensors(layer.tensors, rules, rank, ranks)
    met: list[bool] = []

    def own(tensor: Tensor) -> Tensor:
        return tensor.chunk(ranks, -1)[rank]

    def gathered(path: str, *args: Any, **kwargs: Any) -> Tensor:
        given, output = whole.norms[path]
        both = zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(given), strict=True)
        met.extend(is_close(part, own(all_of)) for part, all_of in both if isinstance(all_of, Tensor))
        return own(output)

    seen, _ = layer.run_layer(tensors, sizes, {each: partial(gathered, each) for each in norms})
    (call,), (found,), (taken,) = whole.calls, seen.calls, seen.taken
    parts = _describe_heads(call, ranks)
    heads, key_heads = parts.heads_of(rank), parts.key_heads_of(rank)
    pairs = [(taken, own(whole.taken[0]))]
    pairs += [(found.key, call.key[:, key_heads]), (found.query, call.query[:, key_heads])]
    pairs += [(found.value, call.value[:, heads]), (found.decay, call.decay[:, heads])]
    if call.beta is not None and found.beta is not None:
        pairs.append((found.beta, call.beta[:, heads]))
    return all(met) and all(is_close(part, expected) for part, expected in pairs)
