"""Loading a state dict: checks before anything is written, and the line in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsopt.functional.collectives import Collectives
from marsopt.functional.step_types import scalar_dtype
from marsopt.rules.registry import REGISTRY, STATE_KEYS

log = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# The key of a text in a state dict that was converted: where its state comes from.
SOURCE = "marsopt_source"
MAX_STEP = 2**24  # where float32, in which steps are counted, has no next number


class Item(NamedTuple):
    """A tensor of the state, and its value in a state dict."""

    p: Tensor
    key: str
    tensor: Tensor
    value: Any


def check_is_mapping(saved: Any) -> None:
    """Check that ``saved`` is a dict.

    Raises:
        ValueError: another type.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"got a {type(saved).__name__}, expected an optimizer's state dict: load "
            "the result of its state_dict()"
        )


def check_groups(groups: Sequence[Any]) -> list[Any]:
    """Return the ids of the parameters in the param groups of a state dict.

    Raises:
        ValueError: a group without a list of ids, or with other names than ids.
    """
    ids: list[Any] = []
    for group in groups:
        present = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(present, list | tuple):
            raise ValueError(
                "got a state dict with a param group without 'params', expected the "
                "ids of its parameters there: load the result of an optimizer's "
                "state_dict()"
            )
        names = group.get("param_names", [""] * len(present))
        is_list = isinstance(names, list | tuple) and len(names) == len(present)
        if not is_list or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"got param_names={names!r} in a state dict, expected {len(present)} "
                "names, of the parameters of their group: load the result of an "
                "optimizer's state_dict(), or delete param_names"
            )
        ids += present
    if not all(isinstance(i, int | str) for i in ids) or len(set(ids)) != len(ids):
        raise ValueError(
            f"got the ids {ids!r} in a state dict, expected an int or a name for each "
            "parameter, all different: load the result of an optimizer's state_dict()"
        )
    return ids


def check_form(value: Any, key: str, label: str) -> None:
    """Check that a value of a state dict is a tensor that loses nothing in the state.

    Raises:
        ValueError: another type, layout or kind of number; a step out of its range.
    """
    is_empty = isinstance(value, Mapping) and not value
    if is_empty:  # torch's loader of flattened state dicts has {} for a missing tensor
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if key == "step" and is_number:
        if not 0 <= value <= MAX_STEP or not float(value).is_integer():
            raise _refused(key, label)
        return
    if isinstance(value, float):  # of a parameter without dims
        return
    got = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        got = f"a tensor of {value.dtype} and layout {value.layout} on {value.device}"
        dtypes = FLOATS + (INTEGERS if key == "step" else ())
        is_dense = value.layout is torch.strided and not value.is_nested
        if is_dense and not value.is_meta and value.dtype in dtypes:
            return
    raise ValueError(
        f"got {got} as {key!r} of {label}, expected a dense tensor of floats of 16 to "
        "64 bits: load the result of an optimizer's state_dict()"
    )


def _refused(key: str, label: str) -> ValueError:
    """Return the error of a value that no step leaves in the state."""
    expected = "finite numbers"
    if key == "step":
        expected = f"a whole number from 0 to {MAX_STEP}"
    elif key in _nonnegative_keys():
        expected = "finite numbers from zero up"
    return ValueError(
        f"got a value in {key!r} of {label} that no step leaves there, expected "
        f"{expected}: load an earlier checkpoint, or no state but the model's"
    )


def _nonnegative_keys() -> set[str]:
    kinds = {row.preconditioner for row in REGISTRY.values()}
    buffers = [buffer for kind in kinds for buffer in kind.keeps.values()]
    return {"step", *(b.key for b in buffers if b.is_nonnegative)}


@torch.no_grad()
def check_values(
    items: Sequence[Item],
    labelled: Sequence[tuple[Tensor, str]],
    leaves: Sequence[Tensor],
    collectives: Collectives,
) -> None:
    """Check that values are numbers that a step can leave in the state. Ranks decide
    together, by one sum over the shards of ``leaves``. Costs a sync.

    Raises:
        ValueError: NaN, infinity, a negative square, a step that is no count; a whole
            tensor where state is sharded, or the other way round.
    """
    rows = {p: i for i, p in enumerate(leaves)}
    keys = ["step", *sorted(STATE_KEYS)]  # in one order on all ranks
    nonnegative, device = _nonnegative_keys(), leaves[0].device if leaves else None
    places, flags = list[tuple[int, int]](), list[Tensor]()
    for p, key, tensor, value in items:
        if p not in rows:
            continue
        whole = torch.as_tensor(value)
        piece = collectives.local(whole)
        if (piece is whole) != (collectives.local(tensor) is tensor):
            raise ValueError(
                f"got {key} of {dict(labelled)[p]} as a {type(value).__name__}, "
                f"expected a {type(tensor).__name__}, cut as the parameter is: load a "
                "whole one by torch.distributed.tensor.distribute_tensor"
            )
        cast = piece.to(tensor.dtype)
        is_wrong = ~cast.isfinite()
        if key in nonnegative:
            is_wrong |= cast < 0
        if key == "step":
            is_wrong |= (piece > MAX_STEP) | (piece != piece.round())
        places.append((rows[p], keys.index(key)))
        flags.append(is_wrong.any().to(device))
    if device is None:
        return
    num_wrong = torch.zeros(
        (len(leaves), len(keys)), dtype=scalar_dtype(device), device=device
    )
    if flags:
        row, column = torch.tensor(places, device=device).unbind(1)
        num_wrong[row, column] = torch.stack(flags).to(num_wrong.dtype)
    wrong = collectives.sum(num_wrong, leaves).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        raise _refused(keys[column], dict(labelled)[leaves[row]])


def has_other_names(
    groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]
) -> bool:
    """Return whether ``saved`` has other names of some parameters, or another order."""
    names, others = (
        [name for group in each for name in group.get("param_names", ())]
        for each in (groups, saved["param_groups"])
    )
    return bool(set(names) & set(others)) and names != others


@dataclass
class LoadReport:
    """A load's counts, for one line in the log."""

    num_tensors: int = 0
    num_params: int = 0
    restarted: dict[str, list[str]] = field(default_factory=dict)  # labels, by key
    without: list[str] = field(default_factory=list)  # labels of parameters
    is_by_position: bool = False  # though both sides have names
    source: str | None = None  # of state that another library saved

    def restart(self, key: str, label: str) -> None:
        """Note that a tensor of a parameter starts as before its first step."""
        self.restarted.setdefault(key, []).append(label)

    def write(self) -> None:
        """Write the line: a warning where something restarted, though MARS had saved
        it, or where parameters are absent.
        """
        news = [f"restarted {k} of {_few(ps)}" for k, ps in self.restarted.items()]
        if self.without:
            news.append(f"restarted {_few(self.without)}, absent from the state dict")
        if self.is_by_position:
            news.append("matched by position, since the names of parameters differ")
        is_expected = not news or (self.source is not None and not self.without)
        news = news if self.source is None else [self.source, *news]
        log.log(
            logging.INFO if is_expected else logging.WARNING,
            "marsopt: load_state_dict restored %d tensors of %d parameters%s",
            self.num_tensors,
            self.num_params,
            "".join(f"; {line}" for line in news),
        )


def _few(labels: Sequence[str]) -> str:
    """Return the first label and the number of further ones."""
    return labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")
