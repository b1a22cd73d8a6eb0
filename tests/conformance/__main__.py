"""python -m tests.conformance MODULE:CLASS: what a port of MARS does otherwise."""

from __future__ import annotations

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tests.conformance.recordings import AUTHORS, TYPES, Arrays, table
from tests.conformance.verdict import Report, judge


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        "python -m tests.conformance",
        description="Run an optimizer along recordings of the MARS authors' code, and "
        "say in words what it does otherwise. Ends with 0 where it conforms, 1 where "
        "it does not, 2 where nothing could be run.",
    )
    add = parser.add_argument
    # fmt: off
    add("port", metavar="MODULE:CLASS",
        help="a class like those of torch.optim; or FILE.safetensors, the parameters "
        "of a port to another framework: 'param/CASE/NAME', (steps, *shape)")
    add("--type", choices=TYPES, default=TYPES[0],
        help="of the authors' class (%(default)s)")
    add("--option", nargs="+", action="extend", default=[], dest="options",
        metavar="NAME=VALUE",
        help="arguments of the class, by its own names: mars=True foreach=False")
    add("--name", nargs="+", action="extend", default=[], dest="names",
        metavar="THEIRS=ITS",
        help="what the class calls an argument of the authors: gamma=mars_gamma")
    # fmt: on
    return parser.parse_args(argv)


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """Return {name: text} of NAME=VALUE."""
    if wrong := [text for text in texts if "=" not in text]:
        raise ValueError(f"got {option} {' '.join(wrong)}, expected NAME=VALUE each")
    return dict(text.split("=", 1) for text in texts)


def value(text: str) -> object:
    """Return a Python literal; any other text is a string."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def check_class(args: argparse.Namespace) -> Report:
    """Return the verdict on a class of PyTorch."""
    options = {n: value(text) for n, text in pairs(args.options, "--option").items()}
    names = pairs(args.names, "--name")
    if unknown := names.keys() - AUTHORS:
        raise ValueError(
            f"got --name {', '.join(sorted(unknown))}, expected arguments of the "
            f"authors': {', '.join(AUTHORS)}"
        )
    from tests.conformance.port import Port, check  # torch, for seconds

    module, _, name = args.port.partition(":")
    try:
        port = Port(getattr(import_module(module), name), options, names)
    except Exception as error:  # of somebody's module, anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"got {args.port} ({reason}), expected MODULE:CLASS that can be imported: "
            "torch.optim:AdamW"
        ) from error
    if port.lacks:
        print(f"it takes no {', '.join(port.lacks)}")
    print("runs it, and looks for what explains it: up to a minute", flush=True)
    return check(port, args.type)


def trajectories(path: Path) -> dict[str, list[Arrays]]:
    """Return the parameters in a file, by case."""
    if path.exists() and not path.is_file():
        raise ValueError(f"got {path}, which is no file, expected one of safetensors")
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"got {path} ({error}), expected a safetensors file"
        ) from error
    shapes = {name: tuple(shape) for name, shape in table()["shapes"].items()}
    cases: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        prefix, _, rest = key.partition("/")
        case, _, name = rest.rpartition("/")
        if prefix != "param" or name not in shapes or array.shape[1:] != shapes[name]:
            raise ValueError(
                f"got {key} of shape {array.shape}, expected param/CASE/NAME of shape "
                f"(steps, *shape), NAME and shape among {shapes}"
            )
        cases.setdefault(case, {})[name] = array
    for case, tensors in cases.items():
        if missing := shapes.keys() - tensors:
            raise ValueError(f"got {case} without {sorted(missing)}, expected all")
    return {
        case: [
            dict(zip(tensors, step, strict=True))
            for step in zip(*tensors.values(), strict=False)  # judge counts them
        ]
        for case, tensors in cases.items()
    }


def main(argv: list[str]) -> int:
    """Do what the command line says; return the exit status."""
    args = arguments(argv)
    try:
        if args.port.endswith(".safetensors"):
            report = judge(trajectories(Path(args.port)), args.type)
        else:
            report = check_class(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped before its end: run the same command again", file=sys.stderr)
        return 130
    print(report)
    if not report.num_cases:
        return 2
    return 0 if report.conforms else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
