"""What was found for a list of leaves, without keeping the leaves alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from .placement import Placement

Found = TypeVar("Found")


class LayoutCache(Generic[Found]):
    """A cache keyed by shapes, dtypes and placements, with a fast path for the tensor
    objects that came last.

    An optimizer comes with the same tensors at every step; the functional API with new
    ones of the same layout.
    """

    def __init__(self) -> None:
        self._by_value: dict[Hashable, Found] = {}
        self._last: dict[Hashable, tuple[list[weakref.ref[Tensor]], Found]] = {}

    def every(self) -> list[Found]:
        """Return all that was found."""
        return list(self._by_value.values())

    def of(
        self,
        leaves: Sequence[Tensor],
        key: Hashable,
        find: Callable[[Sequence[Tensor]], Found],
    ) -> Found:
        """Return what ``find`` returned for leaves laid out as these, under ``key``."""
        if key in self._last:
            seen, found = self._last[key]
            same = len(seen) == len(leaves)
            if same and all(r() is x for r, x in zip(seen, leaves, strict=True)):
                return found
        layout = [(tuple(x.shape), x.dtype, Placement.of(x)) for x in leaves]
        value = (key, *layout)
        if value not in self._by_value:
            self._by_value[value] = find(leaves)
        found = self._by_value[value]
        self._last[key] = ([weakref.ref(x) for x in leaves], found)
        return found
