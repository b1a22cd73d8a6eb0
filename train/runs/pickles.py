"""What a pickle would cost, counted before anything is made of it.

A pickle may hold a tuple of a tuple twice, and so on: a few hundred bytes that take for
ever to hash, compare or print. Here its instructions are followed with sizes in the
place of objects.
"""

import pickle
import pickletools
from collections.abc import Iterator

from train.files import WRITTEN_OUT

# what puts into an object that stays on the stack
INTO = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
PUTS, GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


def check_cost(raw: bytes) -> None:
    """Check that a pickle with each reference written out is within WRITTEN_OUT, so
    that whatever is done with all of it ends.

    Raises:
        pickle.UnpicklingError, ValueError, IndexError, KeyError: it is, or is damaged.
    """
    stack: list[list[int]] = []  # the size of an object, which may still grow
    marks: list[int] = []
    memo: dict[int, list[int]] = {}
    for op, arg, _ in pickletools.genops(raw):
        name, at = op.name, len(stack)
        if name == "MARK":
            marks.append(at)
        elif name == "MEMOIZE" or name in PUTS:
            memo[len(memo) if name == "MEMOIZE" else arg] = stack[-1]
        elif name in GETS:
            stack.append(memo[arg])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            if pickletools.markobject in op.stack_before:
                at = marks.pop()
            pops = [kind for kind in op.stack_before if kind not in OF_MARKS]
            at -= len(pops)
            if at < 0:
                raise pickle.UnpicklingError("it takes what is not there")
            size = sum(part[0] for part in stack[at:])
            if name in INTO:
                stack[at][0] = size
                del stack[at + 1 :]
            else:
                del stack[at:]
                size += 1 + (len(arg) if isinstance(arg, str | bytes) else 0)
                stack += [[size] for _ in op.stack_after]
            if size > WRITTEN_OUT:
                raise pickle.UnpicklingError("it repeats itself beyond all limits")


OF_MARKS = (pickletools.markobject, pickletools.stackslice)


def names(raw: bytes) -> Iterator[str]:
    """Yield what a pickle of torch.save, of protocol 2, names: "module.name"."""
    for op, arg, _ in pickletools.genops(raw):
        if op.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            yield op.name
        elif op.name == "GLOBAL":
            yield arg.replace(" ", ".", 1).removeprefix("__builtin__.")
