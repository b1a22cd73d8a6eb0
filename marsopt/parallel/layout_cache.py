"""Before anything is planned: is there a plan for leaves that lie like these?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from marsopt.parallel.placement import Placement

Found = TypeVar("Found")


class LayoutCache(Generic[Found]):
    """A cache keyed by shapes, dtypes and placements, with a fast path for the layout
    that came last.

    It keeps no reference to a leaf, not even weakly: modules exchange DTensors by
    ``swap_tensors``, which refuses tensors that have weak references.
    """

    def __init__(self) -> None:
        self._by_value: dict[Hashable, Found] = {}
        self._last: dict[Hashable, tuple[list[object], Found]] = {}

    def of(
        self,
        leaves: Sequence[Tensor],
        key: Hashable,
        find: Callable[[Sequence[Tensor]], Found],
    ) -> Found:
        """Return the result of ``find`` for leaves laid out as these, under ``key``."""
        forms = [_form(x) for x in leaves]
        if key in self._last:
            last_forms, result = self._last[key]
            if forms == last_forms:  # an optimizer comes with the same objects again
                return result
        layout = [(tuple(x.shape), x.dtype, Placement.of(x)) for x in leaves]
        value = (key, *layout)
        if value not in self._by_value:
            self._by_value[value] = find(leaves)
        result = self._by_value[value]
        self._last[key] = (forms, result)
        return result


def _form(x: Tensor) -> object:
    """Return shape, dtype and placement. A DTensor keeps them as one object, ``_spec``:
    a step would read and compare each of its public parts, tensor by tensor.
    """
    return x._spec if isinstance(x, DTensor) else (x.shape, x.dtype)
