"""Advice in the log: keys and arguments without effect, and values that are legal and
seldom meant.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from marsopt.functional.routing import (
    Choice,
    algorithm_of,
    all_hyperparameters,
    rules_with,
)
from marsopt.optim.compiled import once
from marsopt.optim.groups import OF_REST
from marsopt.optim.roles import by_name
from marsopt.rules.algorithm import Algorithm
from marsopt.rules.correction import Approximate
from marsopt.rules.hyperparameters import ELSEWHERE, HOW, INSTEAD, table
from marsopt.rules.matrices import Matrices
from marsopt.rules.registry import canonical, named

Groups = Sequence[Mapping[str, Any]]
Say = Callable[[int, str], None]  # takes a level of ``logging`` and a message

# What torch itself keeps in param groups, its schedulers and averages, and a group's
# name: they are no hyperparameters.
CARRIED = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
    | {"params", "param_names", "name"}
    | HOW - {"differentiable"}
)
# Keys of torch.optim's that change nothing with these values.
IDLE = dict(maximize=False, differentiable=False, decoupled_weight_decay=True)

# A tensor without a name looks like an embedding or a head if it has so many rows, so
# many times its columns, and if at most so many have its shape (a table and a head).
# Vocabularies have 32000 rows and more, of some 1000 to 8000 columns. Hidden matrices
# are as tall, too, in models with wide MLPs (Gemma, T5), with projections from a low
# rank (MLA) and with LoRA, but those are there once for each block.
ROWS, ASPECT, TWINS = 8192, 8, 2
NUM_TOLD = 4  # of the parameters that a message names

once_per_process = once()  # for advice that a sweep over many optimizers repeats


def advise_on_groups(
    new: Groups,
    groups: Groups,
    options: Mapping[str, Any],
    bookkeeping: Set[str],
    say: Say,
) -> None:
    """Log advice on param groups that come in.

    Args:
        new: the groups that come in, complete.
        groups: all groups of the optimizer, the new ones among them.
        options: the constructor's options.
        bookkeeping: keys that MARS keeps in groups beside hyperparameters.
        say: logs a message once.
    """
    for group in new:
        for message in unknown_keys(group, bookkeeping):
            say(logging.WARNING, message)
    warn_of_embeddings(groups, say)
    warn_of_half_precision(groups, options, say)


def advise_on_loaded(
    before: Groups, loaded: Groups, bookkeeping: Set[str], say: Say
) -> None:
    """Log advice on the param groups that a state dict brings.

    Args:
        before: the optimizer's groups so far, in the same order.
        loaded: the groups that take their place.
        bookkeeping, say: as in ``advise_on_groups``.
    """
    messages = [*replaced_rules(before, loaded)]
    for old, new in zip(before, loaded, strict=True):
        messages += unknown_keys(new, bookkeeping, old.keys())
    for message in messages:
        say(logging.WARNING, message)


# ---- keys and arguments without effect -----------------------------------------------


def unknown_keys(
    group: Mapping[str, Any], bookkeeping: Set[str], carried: Set[str] = frozenset()
) -> Iterator[str]:
    """Yield a warning per key of a param group that MARS does not read.

    Args:
        group: complete, or loaded.
        bookkeeping: keys that MARS keeps in groups beside hyperparameters.
        carried: keys that other tools are known to keep there.
    """
    known = {*bookkeeping, *all_hyperparameters()}
    for key, value in group.items():
        if not isinstance(key, str) or key in known | CARRIED | carried:
            continue
        if key in IDLE and value == IDLE[key]:
            continue
        near = [ELSEWHERE.get(key), *get_close_matches(key, known, n=1, cutoff=0.75)]
        if meant := next((name for name in near if name in known), None):
            do = f"if {meant!r} was meant, spell it so"
        else:
            do = INSTEAD.get(key, "leave it out, unless another tool reads it")
        yield f"a param group has the key {key!r}, which MARS does not read: {do}"


def unused_arguments(
    groups: Groups,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    correction: str | None,
) -> Iterator[str]:
    """Yield a warning per argument without effect: hyperparameters of the constructor
    that every group sets itself, hyperparameters that no rule of their groups reads,
    and MARS's correction where all rules are baselines.

    Args:
        groups: the optimizer's, complete.
        options: the constructor's options.
        arguments: the constructor's that may differ from group to group.
        correction: as the constructor got it.
    """
    lines = all_hyperparameters()
    filled = [
        (g, _reads(algorithm_of({**options, **g}))) for g in groups if g["params"]
    ]
    if not filled:  # yet
        return
    rows = [named(group["mars_type"]) for group, _ in filled]
    if correction == Approximate.name and not any(row.is_mars for row in rows):
        yield (
            f"correction={correction!r} has no effect: no param group has a MARS rule. "
            "Leave it out, or choose one (mars-...)"
        )
    usual = {(name, _key(line.default)) for name, line in lines.items()}
    for row in rows:
        usual |= {(name, _key(value)) for name, value in row.hyperparameters.items()}
    # whether a group that has this value reads it
    is_read: dict[tuple[str, Any], bool] = {}
    for group, reads in filled:
        for name, value in group.items():
            if name in lines:
                pair = name, _key(value)
                is_read[pair] = is_read.get(pair, False) or name in reads
    several = chain(arguments.items(), *(group.items() for group, _ in filled))
    for name, value in several:
        if name not in lines or name in OF_REST:
            continue
        if (pair := (name, _key(value))) in usual:
            continue
        usual.add(pair)  # once
        is_off = not isinstance(value, Tensor) and value in (None, 0)
        if pair not in is_read:
            yield (
                f"{name}={value!r} has no effect: every param group sets its own. "
                "Leave it out, or change it in the groups"
            )
        elif not is_off and not is_read[pair]:
            readers = ", ".join(rules_with(name))
            yield (
                f"{name}={value!r} has no effect: only {readers} read "
                "it, and no param group does. Leave it out, or choose one of these"
            )


def _reads(algorithm: Algorithm) -> set[str]:
    """Return the names of the hyperparameters that a group's algorithm reads."""
    names = {*table(Choice), *table(Matrices)}
    lines = table(type(algorithm.preconditioner)).values()
    names |= {"betas" if line.beta is not None else line.name for line in lines}
    correction = algorithm.correction
    if correction is not None:
        off = {"clip", "clip_per"} if correction.clip is None else set()
        names |= table(type(correction)).keys() - off
    return names


def _key(value: Any) -> Any:
    """Return a hashable value that equal hyperparameters share; a tensor equals only
    itself.
    """
    if isinstance(value, list):
        value = tuple(value)
    parts = value if isinstance(value, tuple) else (value,)
    return id(value) if any(isinstance(part, Tensor) for part in parts) else value


def replaced_rules(before: Groups, loaded: Groups) -> Iterator[str]:
    """Yield a warning per group whose rule a checkpoint replaces."""
    for old, new in zip(before, loaded, strict=True):
        if (was := canonical(old["mars_type"])) != (now := canonical(new["mars_type"])):
            yield (
                f"the state dict's mars_type {now!r} replaces {was!r}: hyperparameters "
                "come from the state dict, as in torch.optim. For another rule set "
                "them in the param groups after loading"
            )


# ---- values that are legal and seldom meant ------------------------------------------


def warn_of_two_rates(groups: Groups) -> None:
    """Log that vectors of a new group have a learning rate of their own, which is the
    rule's default.

    Args:
        groups: the groups that the new one has become.
    """
    for group in groups:
        if (ratio := group["lr_ratio"]) == 1:
            continue
        once_per_process(
            logging.WARNING,
            f"tensors that are not matrices take {group['mars_type']!r} at "
            f"lr_1d={group['lr'] * ratio:g}, a default; lr={group['lr']} is the "
            "learning rate of matrices only. Pass lr_1d to choose the other tensors' "
            "learning rate",
        )


def warn_of_half_precision(
    groups: Groups, options: Mapping[str, Any], say: Say
) -> None:
    """Log that state of bfloat16 parameters is bfloat16, where ``state_dtype`` and
    stochastic rounding are left out.
    """
    if options["state_dtype"] is not None:
        return
    dtypes = {p.dtype for g in groups for p in g["params"] if p.requires_grad}
    if torch.bfloat16 in dtypes and not options.get("stochastic_rounding", False):
        say(
            logging.WARNING,
            "the state of bfloat16 parameters is kept in bfloat16, which loses small "
            "changes of the moments. state_dtype=torch.float32 keeps them, "
            "stochastic_rounding=True keeps them on average",
        )


def warn_of_embeddings(groups: Groups, say: Say) -> None:
    """Log that a matrix rule has embeddings or output heads together with hidden
    matrices.

    Names tell them in groups with names, else shapes. A group whose matrices are
    only embeddings and heads is meant so, as in the authors' recipes of Muon.
    """
    twins = Counter(p.shape for group in groups for p in group["params"])
    suspects = {
        what: group["mars_type"]
        for number, group in enumerate(groups)
        if named(group["mars_type"]).matrix_only
        for what in _tables_among_matrices(group, number, twins)
    }
    if not suspects:
        return
    listed, rules = ", ".join([*suspects][:NUM_TOLD]), dict.fromkeys(suspects.values())
    more = f" and {len(suspects) - NUM_TOLD} more" if len(suspects) > NUM_TOLD else ""
    say(
        logging.WARNING,
        f"{' and '.join(rules)} orthogonalizes the steps of what looks like embeddings "
        f"or an output head: {listed}{more}. AdamW is the usual rule for these: "
        f"marsopt.param_groups(model, {next(iter(rules))!r}, lr=...) makes such param "
        "groups. To keep this rule, put these parameters into a group of their own",
    )


def _tables_among_matrices(
    group: Mapping[str, Any], number: int, twins: Mapping[torch.Size, int]
) -> list[str]:
    """Return the names, for a message, of a group's embeddings and heads that stand
    beside hidden matrices; ``twins`` counts the optimizer's tensors by shape.
    """
    kind, names = Matrices(kind=group.get("matrices", "2d")), group.get("param_names")
    tables, num_matrices = [], 0
    for i, p in enumerate(group["params"]):
        frozen = not p.requires_grad and p.grad is None
        if frozen or not kind.takes(p.shape):
            continue
        num_matrices += 1
        if names and by_name(names[i]) in ("embedding", "head"):
            tables.append(repr(names[i]))
        elif not names and _is_tall(p) and twins[p.shape] <= TWINS:
            tables.append(f"parameter {i} of group {number}, of shape {tuple(p.shape)}")
    return tables if len(tables) < num_matrices else []


def _is_tall(p: Tensor) -> bool:
    return p.ndim == 2 and p.shape[0] >= max(ROWS, ASPECT * p.shape[1])
