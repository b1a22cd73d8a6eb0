"""State that other libraries and earlier versions saved, as a state dict of MARS
(docs/conformance.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.functional.routing import algorithm_of
from marsopt.functional.trees import plain_names
from marsopt.optim.groups import labels
from marsopt.optim.loading import SOURCE, check_is_of_optimizer, check_kind
from marsopt.optim.state_dict import STAGE_COUNT, check_entries, in_order_of_names
from marsopt.rules.algorithm import Algorithm

# The count of steps: dion's on the device, then its group's; else in the entry.
COUNTS = "step_dev", "step"


class Format(NamedTuple):
    """How a library keeps the state of one parameter.

    Args:
        writer: the name of its optimizer.
        fields: keys of its param group, or of its entry in the state, with their
            values; ... is any value.
        moments: {its key: our symbol}.
        absent: the same as ``fields``, of state that is not in this format.
        decay: the key of mu in the group, if the momentum is a sum, b <- mu b + g;
            None: it is an average.
        sorts: whether the parameters of a group may be sorted by falling shape.
    """

    writer: str
    fields: Mapping[str, Any]
    moments: Mapping[str, str]
    absent: Mapping[str, Any] = {}
    decay: str | None = None
    sorts: bool = False

    @property
    def is_momentum(self) -> bool:
        """Whether it is the state of a matrix rule, and not of AdamW."""
        return "v" not in self.moments.values()

    def has(self, group: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
        """Return whether a param group, and an entry in the state, are in this form."""
        known = {*self.moments, *COUNTS, *self.fields}
        values = {**group, **entry}
        return (
            set(entry) <= known
            and all(_agrees(values, *field) for field in self.fields.items())
            and not any(_agrees(values, *field) for field in self.absent.items())
        )


def _agrees(values: Mapping[str, Any], key: str, value: Any) -> bool:
    found = values.get(key, ...)
    return key in values and (
        value is ... or (type(found) is type(value) and found == value)
    )


ADAM = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "v_max"}
MUON = {"momentum_buffer": "m"}
TORCH_ADAMW = Format(
    "torch.optim.AdamW",
    dict(betas=..., amsgrad=...),
    ADAM,
    absent=dict(maximize=True, decoupled_weight_decay=False),
)
FORMATS = (
    TORCH_ADAMW,
    Format(
        "torch.optim.Muon", dict(momentum=..., ns_coefficients=..., ns_steps=...), MUON
    ),
    Format(
        "K. Jordan's Muon",  # averages since May 2025; before, its groups have nesterov
        dict(momentum=..., weight_decay=...),
        MUON,
        absent=dict(nesterov=..., use_muon=False),
        sorts=True,
    ),
    Format("K. Jordan's AdamW", dict(betas=..., use_muon=False), ADAM),
    Format(
        "Moonlight's Muon",
        dict(wd=..., adamw_betas=..., use_muon=True),
        MUON,
        decay="momentum",
    ),
    Format(
        "Moonlight's AdamW",
        dict(wd=..., adamw_betas=..., use_muon=False),
        {"moment1": "m", "moment2": "v"},
    ),
    Format("dion's Muon", dict(algorithm="muon"), {"momentum": "m"}, decay="mu"),
    Format(
        "dion's NorMuon",
        dict(algorithm="normuon"),
        {"momentum": "m", "variance_neuron": "r"},
        decay="mu",
    ),
    Format("dion's AdamW", dict(algorithm="adamw"), {"momentum": "m", "variance": "v"}),
)


class Record(NamedTuple):
    """A parameter in a state dict of another library."""

    name: str | None
    group: Mapping[str, Any]
    entry: Mapping[str, Any]
    format: Format | None  # None: of no library that is known here


class Leaf(NamedTuple):
    """A parameter of MARS."""

    p: Tensor
    label: str  # in messages
    name: str | None
    algorithm: Algorithm

    @property
    def is_adamw(self) -> bool:
        """Whether an AdamW moves it."""
        symbols = self.algorithm.preconditioner.buffers.keys()
        return symbols >= {"m", "v"} and not self.algorithm.matrix_only

    def takes(self, format: Format) -> bool:
        """Return whether its rule keeps these moments."""
        return self.algorithm.is_momentum if format.is_momentum else self.is_adamw


def own_state(
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    saved: Any,
    given: Sequence[Sequence[int]],
    order: Sequence[int],
) -> Any:
    """Return a state dict of MARS over groups like ours, from any that is known: MARS's
    own; one of undivided groups (marsopt 0.4, the authors' class); one of another
    library, then without hyperparameters, but for torch.optim's AdamW over the groups
    of a plain AdamW.

    Parameters are matched by name if all of them have names on both sides. Else the
    state of another library is matched by order: matrices among its records with a
    momentum, the rest among AdamW's. A sum of gradients becomes their average, times
    1 - mu.

    Args:
        groups: the optimizer's param groups.
        options: the constructor's options.
        saved: a state dict with int or str ids; a flat one of torchtitan's, {"state.
            NAME.KEY": ...}; or a list of such, of optimizers that share a model.
        given: of each group as it was given to MARS, the numbers of its parameters.
        order: the numbers of all parameters, as ``model.parameters()`` has them if
            ``for_model`` knows it.

    Raises:
        ValueError: an unknown format; names, shapes or numbers of parameters that
            differ; a parameter twice; a rule that does not keep these moments; a count
            that the rule needs, and that is missing; a value that is no tensor.
    """
    several = saved if isinstance(saved, list) else [saved]
    if saved is not several and not _is_foreign(saved):
        return _ordered(groups, _from_undivided(groups, saved, given))
    records = [record for each in several for record in _records(each)]
    if strange := [record.group for record in records if record.format is None]:
        writers = [format.writer for format in FORMATS]
        raise ValueError(
            f"got the state of an optimizer with {sorted(map(str, strange[0]))} in a "
            f"param group, expected MARS's state, or one of {', '.join(writers)}: load "
            "only the model"
        )
    every = _leaves(groups, options)
    orders = [[every[i] for i in order], [every[i] for each in given for i in each]]
    if saved is not several and _is_plain_adamw(groups, every, saved, records):
        ordered = _ordered(groups, saved)
        if all(map(_fits, every, _records(ordered))):
            return ordered
    if len(records) != len(every):  # theirs may have left out frozen parameters
        orders = [[leaf for leaf in each if leaf.p.requires_grad] for each in orders]
    names = [leaf.name for leaf in every] + [record.name for record in records]
    has_names = None not in names
    match = _by_name if has_names else _by_order
    ids, done = {leaf.p: i for i, leaf in enumerate(every)}, dict[str, None]()
    entries = {
        ids[leaf.p]: dict(_converted(leaf, record, done))
        for leaf, record in match(orders, records)
        if record.entry
    }
    found = dict.fromkeys(r.format.writer for r in records if r.format is not None)
    text = (
        f"state of {' and '.join(found)}, by {'name' if has_names else 'order'}: "
        f"{', '.join(done)}; hyperparameters stay"
    )
    own = [{"params": [ids[p] for p in group["params"]]} for group in groups]
    return {"state": entries, "param_groups": own, SOURCE: text}


def _ordered(groups: Sequence[Mapping[str, Any]], saved: Any) -> Any:
    check_entries(labels(groups), saved)
    return in_order_of_names(groups, saved)


# ---- state of undivided groups -------------------------------------------------------


def _from_undivided(
    groups: Sequence[Mapping[str, Any]], saved: Any, given: Sequence[Sequence[int]]
) -> Any:
    """Return the state of groups that hold matrices beside other tensors, as marsopt
    0.4 and the authors' class have them, over groups like ours, without
    hyperparameters. Any other state dict is returned as it is.

    Raises:
        ValueError: parameters ahead of those that were trained, by a correction that
            has gone.
    """
    if not isinstance(saved, Mapping) or not _is_undivided(saved, given):
        return saved
    if any(group.get("train_mode", False) for group in saved["param_groups"]):
        raise ValueError(
            "got a state dict of correction='transport' in train mode, expected one in "
            "eval mode: let marsopt 0.4 load it, call optimizer.eval(), and save it "
            "and the model again"
        )
    names = [name for group in groups for name in group.get("param_names", ())]
    if len(names) == sum(map(len, given)):
        in_given = [{"param_names": [names[i] for i in numbers]} for numbers in given]
        saved = in_order_of_names(in_given, dict(saved))
    ids, stages = dict[int, Any](), dict[int, dict[str, Any]]()
    for numbers, group in zip(given, saved["param_groups"], strict=True):
        ids |= dict(zip(numbers, group["params"], strict=True))
        kept = {key: group[key] for key in (STAGE_COUNT,) if key in group}
        stages |= dict.fromkeys(numbers, kept)
    every, like_ours = iter(range(len(ids))), []
    for group in groups:
        own = list(islice(every, len(group["params"])))
        stage = stages[own[0]] if own else {}
        like_ours.append({**stage, "params": [ids[i] for i in own]})
    text = "state of undivided groups; hyperparameters stay"
    return {"state": saved["state"], "param_groups": like_ours, SOURCE: text}


def _is_undivided(saved: Mapping[str, Any], given: Sequence[Sequence[int]]) -> bool:
    """Return whether a state dict has groups like those that were given, and none with
    a ratio of learning rates: a malformed one has not.
    """
    groups = saved.get("param_groups")
    if not isinstance(groups, list | tuple) or not groups:
        return False
    if not all(isinstance(g, Mapping) and "mars_type" in g for g in groups):
        return False
    lists = [group.get("params") for group in groups]
    sizes = [len(ids) if isinstance(ids, list | tuple) else None for ids in lists]
    has_ratio = any("lr_ratio" in group for group in groups)
    return not has_ratio and sizes == [len(numbers) for numbers in given]


# ---- state dicts of all forms --------------------------------------------------------


def _is_flat(saved: Any) -> bool:
    if not isinstance(saved, Mapping) or not saved:
        return False
    prefixes = "state.", "param_groups."
    return all(isinstance(key, str) and key.startswith(prefixes) for key in saved)


def _is_foreign(saved: Any) -> bool:
    """Return whether a state dict may be another library's: a malformed one is refused
    as MARS's own is.
    """
    if not isinstance(saved, Mapping):
        return False
    groups = saved.get("param_groups")
    if not isinstance(groups, Sequence) or not isinstance(saved.get("state"), Mapping):
        return _is_flat(saved)
    own = {"amsgrad", "lr_ratio"}  # timm's Mars has only mars_type
    kinds = [
        g.keys() & own for g in groups if isinstance(g, Mapping) and "mars_type" in g
    ]
    return not any(kinds)


def _records(saved: Any) -> Iterator[Record]:
    """Yield the parameters of a state dict, in its order.

    Raises:
        ValueError: it is none, or does not name each parameter of a group.
    """
    if _is_flat(saved):
        nested: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
        for path, value in saved.items():
            kind, _, rest = path.partition(".")
            name, _, key = rest.rpartition(".")
            nested[kind].setdefault(name, {})[key] = value
        for name, group in nested["param_groups"].items():
            yield _record(name, group, nested["state"].get(name, {}))
        return
    check_is_of_optimizer(saved)
    for group in saved["param_groups"]:
        num = len(group["params"])
        names = group.get("param_names", [None] * num)
        if len(names) != num:
            raise ValueError(
                f"got {len(names)} param_names in a param group of {num} parameters, "
                "expected one for each: name those that this group has, in its order"
            )
        for i, name in zip(group["params"], names, strict=True):
            yield _record(name, group, saved["state"].get(i, {}))


def _record(name: str | None, group: Mapping[str, Any], entry: Any) -> Record:
    is_entry = isinstance(entry, Mapping)
    known = (f for f in FORMATS if is_entry and f.has(group, entry))
    return Record(name, group, entry, next(known, None))


# ---- which parameter of MARS it is ---------------------------------------------------


def _leaves(
    groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[Leaf]:
    """Return all parameters with the algorithms that move them."""
    algorithms: list[Algorithm] = []
    names: list[str | None] = []
    for group in groups:
        num = len(group["params"])
        algorithms += [algorithm_of({**options, **group})] * num
        names += group.get("param_names", [None] * num)
    columns = zip(labels(groups), names, algorithms, strict=True)
    return [Leaf(p, label, name, a) for (p, label), name, a in columns]


def _is_plain_adamw(
    groups: Sequence[Mapping[str, Any]],
    leaves: Sequence[Leaf],
    saved: Mapping[str, Any],
    records: Sequence[Record],
) -> bool:
    """Return whether a state dict is torch.optim.AdamW's, over the same groups, for an
    AdamW without a correction: it is loaded with its hyperparameters.
    """
    if "param_groups" not in saved:
        return False
    sizes, own = (
        [len(g["params"]) for g in gs] for gs in (saved["param_groups"], groups)
    )
    return (
        sizes == own
        and all(record.format is TORCH_ADAMW for record in records)
        and all(leaf.is_adamw and leaf.algorithm.correction is None for leaf in leaves)
    )


def _by_name(
    orders: Sequence[Sequence[Leaf]], records: Sequence[Record]
) -> list[tuple[Leaf, Record]]:
    leaves, saved_names = orders[0], plain_names(str(r.name) for r in records)
    by_name = dict(zip(saved_names, records, strict=True))
    if twice := [n for n, num in Counter(saved_names).items() if num > 1]:
        raise ValueError(
            f"got the state of parameter {twice[0]!r} twice, expected once: pass each "
            "optimizer's state dict once, and state of each parameter in one of them"
        )
    ours = plain_names(str(leaf.name) for leaf in leaves)
    if apart := sorted({*ours} ^ by_name.keys()):
        side = "MARS" if apart[0] in ours else "the state dict"
        raise ValueError(
            f"got the parameter {apart[0]!r} in {side} only, expected the same names "
            "on both sides: build MARS over the same named parameters"
        )
    pairs = [(leaf, by_name[name]) for leaf, name in zip(leaves, ours, strict=True)]
    for leaf, record in pairs:
        assert record.format is not None
        if not leaf.takes(record.format):
            raise ValueError(
                f"got state of {record.format.writer} for {leaf.label}, which "
                f"{str(leaf.algorithm)!r} moves here, expected a rule with the same "
                "moments: give MARS a param group of such a rule for it, or load only "
                "the model"
            )
    return pairs


def _by_order(
    orders: Sequence[Sequence[Leaf]], records: Sequence[Record]
) -> list[tuple[Leaf, Record]]:
    """Return the pairs of the first order with fitting shapes: of an order that the
    optimizer knows, or of matrices by falling shape, of a format that ``sorts``.
    """
    momenta, moments = list[Record](), list[Record]()
    for record in records:
        assert record.format is not None
        (momenta if record.format.is_momentum else moments).append(record)
    theirs = [*momenta, *moments]
    first: list[tuple[Leaf, Record]] = []
    for leaves in orders:
        matrices = [leaf for leaf in leaves if leaf.algorithm.is_momentum]
        rest = [leaf for leaf in leaves if leaf.is_adamw]
        nums, own = (len(momenta), len(moments)), (len(matrices), len(rest))
        if nums != own or sum(own) != len(leaves):
            raise ValueError(
                f"got state of {nums[0]} parameters with a momentum and {nums[1]} of "
                f"AdamW, expected {own[0]} and {own[1]} of {len(leaves)}: build MARS "
                "over the same parameters, and let matrix rules and AdamW move the "
                "same of them, or load only the model"
            )
        falling = sorted(matrices, key=lambda leaf: leaf.p.size(), reverse=True)
        may_sort = any(r.format is not None and r.format.sorts for r in momenta)
        for sides in ([*matrices, *rest], [*falling, *rest])[: 1 + may_sort]:
            pairs = list(zip(sides, theirs, strict=True))
            if all(_fits(*pair) for pair in pairs):
                return pairs
            first = first or pairs
    leaf, record = next(pair for pair in first if not _fits(*pair))
    raise ValueError(
        f"got a moment of shape {tuple(_shape(record) or ())} for {leaf.label}, by "
        f"order, expected {tuple(leaf.p.shape)}: set param_names, the list of names, "
        "in each param group of the state dict, and build MARS over named parameters"
    )


def _shape(record: Record) -> torch.Size | None:
    """Return the shape of the parameter that a record is of, if its state tells it."""
    known = record.format.moments if record.format is not None else {}
    moments = [record.entry.get(key) for key, symbol in known.items() if symbol != "r"]
    return next((m.shape for m in moments if isinstance(m, Tensor)), None)


def _fits(leaf: Leaf, record: Record) -> bool:
    return _shape(record) in (None, leaf.p.shape)


# ---- its tensors ---------------------------------------------------------------------


def _converted(
    leaf: Leaf, record: Record, done: dict[str, None]
) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a parameter's state; note each key of theirs in
    ``done``.
    """
    format, buffers = record.format, leaf.algorithm.buffers
    assert format is not None
    for key, symbol in format.moments.items():
        if key not in record.entry:
            continue
        value = record.entry[key]
        check_kind(value, key, leaf.label)
        if symbol not in leaf.algorithm.preconditioner.buffers:
            done[f"left out {key}"] = None
            continue
        own = buffers[symbol].key
        text = key if key == own else f"{key} as {own}"
        if symbol == "m" and format.decay is not None:
            factor = 1 - _mu(record.group.get(format.decay), format, leaf.label)
            text += f" (a sum) times {factor:g}"
            value = _scaled(value, factor)
        if symbol == "r" and isinstance(value, Tensor) and value.shape[-1:] == (1,):
            value = value.squeeze(-1)  # (..., rows, 1) there
        done[text] = None
        yield own, value
    values = {**record.group, **record.entry}
    count = next((key for key in COUNTS if key in values), None)
    if count is not None:
        check_kind(values[count], "step", leaf.label)
        done[count if count == "step" else f"{count} as step"] = None
        yield "step", values[count]
    elif debiased := [b.key for b in buffers.values() if b.is_debiased]:
        raise ValueError(
            f"got state of {format.writer} for {leaf.label}, which counts no steps, "
            f"expected a count, by which {leaf.algorithm} debiases {debiased}: let "
            "nesterov be True or False, and betas numbers"
        )


def _mu(value: Any, format: Format, label: str) -> float:
    is_number = isinstance(value, float | int) or (
        isinstance(value, Tensor) and value.numel() == 1
    )
    if not is_number or not 0 <= float(value) < 1:
        raise ValueError(
            f"got {format.decay}={value!r} in the param group of {label}, expected a "
            "number in [0, 1), by which a sum of gradients becomes their average: load "
            f"a file that {format.writer} has written"
        )
    return float(value)


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Tensor):
        return value.to(torch.promote_types(value.dtype, torch.float32)) * factor
    return value * factor if isinstance(value, float) else value
