"""In the all-reduce of norms: do all ranks take the step with the same numbers?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .differences import by_rank, message

NUM_BITS = 48  # of the digest: ranks that differ by chance pass for equal once in 2^48


class Agreement:
    """Compares the digests of ranks by rows that are summed beside their norms.

    The rows hold the chunks c of a digest, and their squares. All n ranks have the same
    chunk if and only if n sum(c^2) = (sum c)^2 (Cauchy-Schwarz). Every rank has the
    same sums, and so the same decision. Chunks are so small that both sums are exact in
    the dtype of the all-reduce.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], Tensor] = {}
        self._same: Tensor | None = None  # 0-D bool on a GPU: all that was found
        self._copy: Tensor | None = None  # of it, on the host, after ``_copied``
        self._copied: torch.cuda.Event | None = None
        self._copied_text = self._agreed_text = ""  # of the copy, of the last that held

    def digest_rows(self, what: str, num_ranks: int, like: Tensor) -> Tensor | None:
        """Return rows of the width of ``like``, to be summed beside it. None while a
        CUDA graph is captured: it must not copy them from the host.
        """
        key = what, num_ranks, like.shape[1], like.dtype, like.device
        if key not in self._known:
            if like.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            if len(self._known) > 8:  # of schedules that have passed
                self._known.clear()
            rows = _rows(what, num_ranks, like.shape[1], like.dtype)
            self._known[key] = rows.to(like.device, non_blocking=True)
        return self._known[key]

    def judged(
        self,
        sums: Tensor,
        rows: Tensor,
        num_ranks: int,
        what: str,
        groups: Iterable[dist.ProcessGroup],
    ) -> Tensor:
        """Return ``sums``, or NaN where the complete ``rows`` show that ranks of the
        ``groups`` differ.

        Raises:
            RuntimeError: ranks differ, on a CPU. The host does not wait for a GPU:
                there ``check`` raises later.
        """
        totals, squares = rows.double().view(-1, 2).unbind(1)
        same = (num_ranks * squares == totals.square()).all()
        if not sums.is_cuda:
            if not same:
                raise _differ(by_rank(what, groups))
            return sums
        self._note(same, what)
        return torch.where(same, sums, torch.nan)

    def _note(self, same: Tensor, what: str) -> None:
        if self._same is None:
            self._same = torch.ones_like(same)
        self._same.logical_and_(same)
        if self._copied is None and not torch.cuda.is_current_stream_capturing():
            self._copy = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._copy.copy_(self._same, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            self._copied_text = what

    def check(self, what: str) -> None:
        """Check what earlier steps found on a GPU, as far as the host knows it.

        Raises:
            RuntimeError: ranks differed. Ranks know it at different steps, and so do
                not meet: each says which fields have changed here since all agreed.
        """
        if self._copied is None or torch.cuda.is_current_stream_capturing():
            return
        if self._copied.query():
            self._copied = None
            if not self._copy:
                self._same = None
                present = {self._agreed_text: "all ranks before", what: "this rank"}
                raise _differ({label: text for text, label in present.items()})
            self._agreed_text = self._copied_text


def _rows(what: str, num_ranks: int, width: int, dtype: torch.dtype) -> Tensor:
    exact = round(2 / torch.finfo(dtype).eps)  # whole numbers up to it are
    # n times a square stays below
    bits = max(1, int(math.log2(max(1, exact // num_ranks)) / 2))
    digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[: NUM_BITS // 8])
    chunks = [digest >> at & (1 << bits) - 1 for at in range(0, NUM_BITS, bits)]
    flat = [n for chunk in chunks for n in (chunk, chunk**2)]
    flat += [0] * (-len(flat) % math.lcm(2, width))
    return torch.tensor(flat, dtype=dtype).view(-1, width)


def _differ(texts: Mapping[str, str]) -> RuntimeError:
    return RuntimeError(
        message(
            "got hyperparameters that differ between the ranks ({}), expected the same "
            "everywhere: the step has changed nothing; set equal ones on every rank, "
            "schedules and max_norm too",
            texts,
        )
    )
