"""python -m marsopt.conformance MODULE:CLASS: what a port of MARS does otherwise."""

from __future__ import annotations

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from marsopt.conformance import AUTHORS, Adapted, Report, check, judge
from marsopt.conformance.recordings import TYPES, Arrays, table


class Unusable(Exception):
    """What was given cannot be used."""


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        "python -m marsopt.conformance",
        description="Run an optimizer along recordings of the MARS authors' code, and "
        "say in words what it does otherwise. Ends with 0 where it conforms, 1 where "
        "it does not, 2 where nothing could be run.",
    )
    add = parser.add_argument
    # fmt: off
    add("port", metavar="MODULE:CLASS",
        help="a class like those of torch.optim; or FILE.safetensors, what a port in "
        "another framework came to: 'param/CASE/NAME', (steps, *shape)")
    add("--type", choices=TYPES, default=TYPES[0],
        help="of the authors' class (%(default)s)")
    add("--option", nargs="+", action="extend", default=[], dest="options",
        metavar="NAME=VALUE",
        help="arguments of the class, by its own names: mars=True mars_type=adamw")
    add("--name", nargs="+", action="extend", default=[], dest="names",
        metavar="THEIRS=ITS",
        help="what it calls an argument of the authors: gamma=mars_gamma")
    # fmt: on
    return parser.parse_args(argv)


def pairs(texts: list[str], of: str) -> dict[str, str]:
    """Return {name: text} of NAME=VALUE."""
    found = dict(text.partition("=")[::2] for text in texts if "=" in text)
    if len(found) != len(texts):
        raise Unusable(f"got {of} {' '.join(texts)}, expected NAME=VALUE each")
    return found


def value(text: str) -> object:
    """Return a Python literal; what is none is a string."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def adapted(args: argparse.Namespace) -> Adapted:
    """Return the class that was named, as a factory."""
    module, _, name = args.port.partition(":")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unusable(
            f"got {args.port} ({type(error).__name__}: {error}), expected MODULE:CLASS "
            "that can be imported: torch.optim:AdamW"
        ) from error
    options = {n: value(text) for n, text in pairs(args.options, "--option").items()}
    names = pairs(args.names, "--name")
    if unknown := set(names) - set(AUTHORS):
        raise Unusable(
            f"got --name {', '.join(sorted(unknown))}, expected arguments of the "
            f"authors': {', '.join(AUTHORS)}"
        )
    try:
        return Adapted(made, options, names)
    except (TypeError, ValueError) as error:  # it has no signature
        raise Unusable(f"got {args.port} ({error}), expected a class") from error


def trajectories(path: Path) -> dict[str, list[Arrays]]:
    """Return the parameters that a file holds, by case."""
    if path.exists() and not path.is_file():
        raise Unusable(f"got {path}, which is no file, expected one of safetensors")
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Unusable(
            f"got {path} ({error}), expected a file of safetensors"
        ) from error
    shapes = {name: tuple(shape) for name, shape in table()["shapes"].items()}
    cases: dict[str, dict[str, np.ndarray]] = {}
    for key, array in found.items():
        kind, _, rest = key.partition("/")
        case, _, name = rest.rpartition("/")
        if kind != "param" or name not in shapes or array.shape[1:] != shapes[name]:
            raise Unusable(
                f"got {key} of shape {array.shape}, expected param/CASE/NAME of shape "
                f"(steps, *shape), NAME and shape among {shapes}"
            )
        cases.setdefault(case, {})[name] = array
    for case, arrays in cases.items():
        if missing := set(shapes) - set(arrays):
            raise Unusable(
                f"got {case} without {sorted(missing)}, expected all tensors"
            )
    return {
        case: [
            {name: array[t] for name, array in arrays.items()}
            for t in range(min(len(array) for array in arrays.values()))
        ]
        for case, arrays in cases.items()
    }


def report(args: argparse.Namespace) -> Report:
    """Return the verdict."""
    if args.port.endswith(".safetensors"):
        try:
            return judge(trajectories(Path(args.port)), args.type)
        except ValueError as error:
            raise Unusable(str(error)) from error
    factory = adapted(args)
    if factory.lacks:
        print(f"it takes no {', '.join(factory.lacks)}")
    print("runs it, and looks for what explains it: up to a minute", flush=True)
    return check(factory, args.type)


def main(argv: list[str]) -> int:
    """Do what the command line says; return the exit status."""
    try:
        found = report(arguments(argv))
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before its end: run the same command again", file=sys.stderr)
        return 130
    print(found)
    if not found.num_cases:
        return 2
    return 0 if found.conforms else 1


if __name__ == "__main__":
    sys.path.insert(0, "")  # modules of the working folder, too
    sys.exit(main(sys.argv[1:]))
