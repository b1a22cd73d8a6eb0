"""State of torch.optim's AdamW and Muon, as MARS's (docs/conformance.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.functional.trees import plain_names
from marsopt.optim.groups import kinds_of, labels, values_of
from marsopt.optim.loading import SOURCE, check_is_of_optimizer, check_kind
from marsopt.optim.state_dict import check_entries, in_order_of_names
from marsopt.rules.component import Algorithm
from marsopt.rules.registry import named


@dataclass(frozen=True, eq=False)
class Format:
    """The state of an optimizer of torch.optim, recognized by all its keys.

    Args:
        writer: the optimizer's name.
        group: keys of its param groups.
        state: keys of a parameter that has had a step: our symbols.
    """

    writer: str
    group: Set[str]
    state: Mapping[str, str]


ADAMW = Format(
    "torch.optim.AdamW",
    {
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
    },
    {"step": "t", "exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max"},
)
MUON = Format(
    "torch.optim.Muon",
    {
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "ns_coefficients",
        "eps",
        "ns_steps",
        "adjust_lr_fn",
    },
    {"momentum_buffer": "m"},
)
OPTIONAL = {"max_exp_avg_sq"}  # AdamW keeps it with amsgrad
# A group of torch's Adam has AdamW's keys.
REQUIRED = {"maximize": False, "decoupled_weight_decay": True}
OF_MARS = {"mars_type", "lr_ratio"}  # keys of every group of MARS


class Record(NamedTuple):
    """A parameter in a state dict of torch.optim."""

    name: str | None
    entry: Mapping[str, Any]
    format: Format

    @property
    def shape(self) -> torch.Size | None:
        """The shape of the parameter, if it has had a step."""
        moments = (value for key, value in self.entry.items() if key != "step")
        return next((m.shape for m in moments if isinstance(m, Tensor)), None)


class Leaf(NamedTuple):
    """A parameter of MARS."""

    p: Tensor
    label: str  # in messages
    name: str | None
    group: int
    values: Mapping[str, Any]  # options of its group, for its kind of tensors
    algorithm: Algorithm

    @property
    def format(self) -> Format | None:
        """The format with the moments of its algorithm."""
        if self.algorithm.is_momentum:
            return MUON
        symbols = self.algorithm.preconditioner.buffers.keys()
        is_adamw = symbols >= {"m", "v"} and not self.algorithm.matrix_only
        return ADAMW if is_adamw else None

    def fits(self, record: Record) -> bool:
        return record.shape in (None, self.p.shape)


def state_of_mars(
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    saved: Any,
    orders: Sequence[Sequence[int]],
) -> Any:
    """Return a state dict of MARS over groups like ours: MARS's own, or made from state
    of torch.optim's AdamW and Muon, then without hyperparameters, unless it is AdamW's
    over the groups of a plain AdamW.

    Parameters are matched by name if all of them have names on both sides. Else the
    order decides: matrices among the records with a momentum, the rest among AdamW's.

    Args:
        groups: the optimizer's param groups.
        options: the constructor's options.
        saved: a state dict, or the list of several optimizers' that share a model.
        orders: the numbers of all parameters, in each order that torch's optimizers may
            have.

    Raises:
        ValueError: an unknown format; names, shapes or numbers of parameters that
            differ; a parameter twice; a rule that does not keep these moments; a count
            that the rule needs, and that is missing; a value that is no tensor.
    """
    is_list = isinstance(saved, list)
    if not is_list:
        check_is_of_optimizer(saved)
        if all(group.keys() >= OF_MARS for group in saved["param_groups"]):
            return _ordered(groups, saved)
    records = [r for each in (saved if is_list else [saved]) for r in _records(each)]
    leaves = leaves_of(groups, options)
    if not is_list and _is_plain_adamw(groups, leaves, saved, records):
        ordered = _ordered(groups, saved)
        if all(map(Leaf.fits, leaves, _records(ordered))):
            return ordered
    names = [leaf.name for leaf in leaves] + [record.name for record in records]
    has_names = None not in names
    pairs = (
        _by_name(leaves, records)
        if has_names
        else _by_order([[leaves[i] for i in order] for order in orders], records)
    )
    ids = {leaf.p: i for i, leaf in enumerate(leaves)}
    entries = {
        ids[leaf.p]: dict(_converted(leaf, record))
        for leaf, record in pairs
        if record.entry
    }
    writers = " and ".join(dict.fromkeys(record.format.writer for record in records))
    by = "name" if has_names else "order"
    return {
        "state": entries,
        "param_groups": [{"params": [ids[p] for p in g["params"]]} for g in groups],
        SOURCE: f"state of {writers}, by {by}; hyperparameters stay",
    }


def _ordered(groups: Sequence[Mapping[str, Any]], saved: Any) -> Any:
    check_entries(labels(groups), saved)
    return in_order_of_names(groups, saved)


def _records(saved: Any) -> Iterator[Record]:
    """Yield the parameters of a state dict, in its order.

    Raises:
        ValueError: it is none, it is no optimizer's that is known, or does not name
            each parameter of a group.
    """
    check_is_of_optimizer(saved)
    for group in saved["param_groups"]:
        num = len(group["params"])
        names = group.get("param_names", [None] * num)
        if len(names) != num:
            raise ValueError(
                f"got {len(names)} param_names in a param group of {num} parameters, "
                "expected one for each: name those that this group has, in its order"
            )
        minimizes = all(group.get(k, v) is v for k, v in REQUIRED.items())
        known = (f for f in (ADAMW, MUON) if minimizes and group.keys() >= f.group)
        format = next(known, None)
        for i, name in zip(group["params"], names, strict=True):
            entry = saved["state"].get(i, {})
            keys = {*entry, *OPTIONAL}
            if format is None or (entry and keys != {*format.state, *OPTIONAL}):
                raise ValueError(
                    "got the state of an optimizer with "
                    f"{sorted(map(str, (*group, *entry)))}, expected MARS's state, or "
                    "torch.optim.AdamW's or Muon's, or a list of these: load only the "
                    "model"
                )
            yield Record(name, entry, format)


def leaves_of(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[Leaf]:
    """Return all parameters with the algorithms that update them.

    Args:
        groups: the optimizer's param groups.
        options: the constructor's options.
    """
    leaves, labelled = list[Leaf](), iter(labels(groups))
    for number, group in enumerate(groups):
        values = {kind: values_of(group, kind) for kind in (True, False)}
        algorithms = {
            kind: named(numbers["mars_type"]).algorithm({**options, **numbers})
            for kind, numbers in values.items()
        }
        names = [*group.get("param_names", ())]
        names += [None] * (len(group["params"]) - len(names))
        kinds = kinds_of(group)
        for name, kind, (p, label) in zip(names, kinds, labelled, strict=False):
            leaf = Leaf(p, label, name, number, values[kind], algorithms[kind])
            leaves.append(leaf)
    return leaves


def _is_plain_adamw(
    groups: Sequence[Mapping[str, Any]],
    leaves: Sequence[Leaf],
    saved: Mapping[str, Any],
    records: Sequence[Record],
) -> bool:
    """Return whether a state dict is torch.optim.AdamW's, over the same groups, for an
    AdamW without a correction: it is loaded with its hyperparameters.
    """
    sizes, ours = (
        [len(g["params"]) for g in gs] for gs in (saved["param_groups"], groups)
    )
    formats = {leaf.format for leaf in leaves} | {r.format for r in records}
    corrects = any(leaf.algorithm.correction is not None for leaf in leaves)
    return sizes == ours and formats == {ADAMW} and not corrects


def _by_name(
    leaves: Sequence[Leaf], records: Sequence[Record]
) -> list[tuple[Leaf, Record]]:
    ours, theirs = (
        plain_names(str(each.name) for each in side) for side in (leaves, records)
    )
    if twice := [name for name, num in Counter(theirs).items() if num > 1]:
        raise ValueError(
            f"got the state of parameter {twice[0]!r} twice, expected once: pass each "
            "optimizer's state dict once, and state of each parameter in one of them"
        )
    if apart := sorted({*ours} ^ {*theirs}):
        side = "MARS" if apart[0] in ours else "the state dict"
        raise ValueError(
            f"got the parameter {apart[0]!r} in {side} only, expected the same names "
            "on both sides: build MARS over the same named parameters"
        )
    by_name = dict(zip(theirs, records, strict=True))
    pairs = [(leaf, by_name[name]) for leaf, name in zip(leaves, ours, strict=True)]
    for leaf, record in pairs:
        if leaf.format is not record.format:
            raise ValueError(
                f"got state of {record.format.writer} for {leaf.label}, which "
                f"{str(leaf.algorithm)!r} updates here, expected a rule with the same "
                "moments: give MARS a param group of such a rule for it, or load only "
                "the model"
            )
    return pairs


def _by_order(
    orders: Sequence[Sequence[Leaf]], records: Sequence[Record]
) -> list[tuple[Leaf, Record]]:
    """Return the pairs of the first order with fitting shapes."""
    if len(records) != len(orders[0]):  # theirs may have left out frozen parameters
        orders = [[leaf for leaf in each if leaf.p.requires_grad] for each in orders]
    theirs = [record for f in (MUON, ADAMW) for record in records if record.format is f]
    every = []
    for leaves in orders:
        ours = [leaf for f in (MUON, ADAMW) for leaf in leaves if leaf.format is f]
        wanted, present = (
            [sum(each.format is f for each in side) for f in (MUON, ADAMW)]
            for side in (records, leaves)
        )
        if wanted != present or len(ours) != len(leaves):
            raise ValueError(
                f"got state of {wanted[0]} parameters with a momentum and {wanted[1]} "
                f"of AdamW, expected {present[0]} and {present[1]} of {len(leaves)}: "
                "load only the model if AdamW has trained all of it; else build MARS "
                "over the same parameters, and let matrix rules and AdamW update the "
                "same of them"
            )
        every.append(list(zip(ours, theirs, strict=True)))
        if all(leaf.fits(record) for leaf, record in every[-1]):
            return every[-1]
    leaf, record = next(pair for pair in every[0] if not pair[0].fits(pair[1]))
    raise ValueError(
        f"got a moment of shape {tuple(record.shape or ())} for {leaf.label}, by "
        f"order, expected {tuple(leaf.p.shape)}: set param_names, the list of names, "
        "in each param group of the state dict, and build MARS over named parameters"
    )


def _converted(leaf: Leaf, record: Record) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a parameter's state."""
    buffers = leaf.algorithm.buffers
    for key, value in record.entry.items():
        check_kind(value, key, leaf.label)
        symbol = record.format.state.get(key)
        if symbol == "t":
            yield "step", value
        elif symbol in buffers:  # the largest v so far may have no use here
            yield buffers[symbol].key, value
    debiased = [buffer.key for buffer in buffers.values() if buffer.is_debiased]
    if debiased and "step" not in record.entry:
        raise ValueError(
            f"got state of {record.format.writer} for {leaf.label}, which counts no "
            f"steps, expected a count, by which {leaf.algorithm} debiases {debiased}: "
            "let nesterov be True or False, and betas numbers"
        )
