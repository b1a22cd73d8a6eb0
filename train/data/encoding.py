"""Texts to token ids on several processes, in the order in which the texts come."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import TypeVar

import numpy as np

from train.data import tokenizers
from train.errors import UserError

Key = TypeVar("Key")
Texts = Iterable[tuple[Key, list[str]]]

_coder = cache(tokenizers.tokenizer)  # one in a process
AHEAD = 4  # batches in flight per process: enough to bridge the opening of a file


def encode(name: str, texts: Iterable[str], mark_first: bool) -> np.ndarray:
    """Return (num_tokens,) uint16 of documents, end of text after each, or before."""
    ids: list[int] = []
    coder = _coder(name)
    mark = [coder.end_of_text]
    for text in texts:
        document = coder.encode(text)
        ids += mark + document if mark_first else document + mark
    return np.array(ids, dtype=np.uint16)


def encoded(
    batches: Texts[Key], tokenizer: str, *, mark_first: bool = False, processes: int = 1
) -> Iterator[tuple[Key, np.ndarray]]:
    """Yield (key, token ids) of (key, texts), in order, a few batches read ahead."""
    if processes == 1:
        for key, texts in batches:
            yield key, encode(tokenizer, texts, mark_first)
        return
    # spawn: a fork would copy the threads' locks of the libraries that stream data
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, _begin)
    pending: deque = deque()
    try:
        for key, texts in batches:
            ids = pool.submit(encode, tokenizer, texts, mark_first)
            pending.append((key, ids))
            if len(pending) == AHEAD * processes:
                done, ids = pending.popleft()
                yield done, ids.result()
        for done, ids in pending:
            yield done, ids.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"got the death of one of {processes} tokenizing processes, expected them "
            "to live: if the memory was full, repeat the command with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Begin as a tokenizing process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End with the parent, even one that was killed and could tell nobody."""
    multiprocessing.parent_process().join()
    os._exit(1)
