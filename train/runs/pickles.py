"""What a pickle would cost, counted before anything is made of it.

A pickle may hold a tuple of a tuple twice, and so on: a few hundred bytes that take for
ever to hash, compare or print. Here its instructions are followed with sizes in the
place of objects.
"""

import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass

from train.files import WRITTEN_OUT

# what puts into an object that stays on the stack
INTO = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
PUTS, GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
OF_MARKS = (pickletools.markobject, pickletools.stackslice)


@dataclass
class _Object:
    size: int
    is_shared: bool = False  # others count it, so that it may grow no more


def check_cost(raw: bytes) -> None:
    """Check that a pickle with each reference written out is within WRITTEN_OUT, so
    that whatever is done with all of it ends.

    Raises:
        pickle.UnpicklingError, ValueError, IndexError, KeyError: it is not, or is
            damaged.
    """
    stack: list[_Object] = []
    marks: list[int] = []
    memo: dict[int, _Object] = {}
    for op, arg, _ in pickletools.genops(raw):
        name, at = op.name, len(stack)
        if name == "MARK":
            marks.append(at)
        elif name == "MEMOIZE" or name in PUTS:
            memo[len(memo) if name == "MEMOIZE" else arg] = stack[-1]
        elif name in GETS or name == "DUP":
            stack.append(memo[arg] if name in GETS else stack[-1])
            stack[-1].is_shared = True
        else:
            if pickletools.markobject in op.stack_before:
                at = marks.pop()
            at -= sum(kind not in OF_MARKS for kind in op.stack_before)
            if at < 0:
                raise pickle.UnpicklingError("it takes what is not there")
            size = sum(part.size for part in stack[at:])
            if size > WRITTEN_OUT or (name in INTO and stack[at].is_shared):
                raise pickle.UnpicklingError("it repeats itself beyond all limits")
            if name in INTO:
                stack[at].size = size
                del stack[at + 1 :]
            else:
                size += 1 + (len(arg) if isinstance(arg, str | bytes) else 0)
                stack[at:] = [_Object(size) for _ in op.stack_after]


def names(raw: bytes) -> Iterator[str]:
    """Yield what a pickle of torch.save, of protocol 2, names: "module.name"."""
    for op, arg, _ in pickletools.genops(raw):
        if op.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            yield op.name
        elif op.name == "GLOBAL":
            yield arg.replace(" ", ".", 1).removeprefix("__builtin__.")
