"""Recipes by name: functions without arguments that return a complete configuration, in
a module whose ``__all__`` names them. Which module is an option of every command.
"""

import difflib
import importlib
from collections.abc import Callable
from types import ModuleType

from train.errors import UserError

MODULE = "configs"  # unless --module says otherwise


def load(module: str = MODULE) -> ModuleType:
    """Import a module of recipes.

    Raises:
        UserError: there is none of this name, or its ``__all__`` names nothing.
    """
    expected = "expected a module of recipes"
    if not all(part.isidentifier() for part in module.split(".")):
        raise UserError(
            f"got --module {module!r}, {expected}: write its name as in import, such "
            "as mine or mine.recipes, not as a path"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not
        raise UserError(
            f"got --module {module}, of which there is no {error.name}, {expected}: "
            "run from the folder that it lies in, or name that in PYTHONPATH"
        ) from error
    names = getattr(found, "__all__", ())
    lacking = [n for n in names if not callable(getattr(found, f"{n}", None))]
    if lacking:
        raise UserError(
            f"got --module {module}, whose __all__ names {lacking[0]!r:.60}, which is "
            f"no function there, {expected}: define it, or take the name out"
        )
    if not names:
        raise UserError(
            f"got --module {module} without names in __all__, {expected}: list there "
            "the functions that return a configuration, as configs/__init__.py does"
        )
    return found


def make(name: str | None, module: str = MODULE):
    """Return the configuration that the recipe of this name makes.

    Raises:
        UserError: the recipe cannot be had, or returns something else.
    """
    from train.engine.titan import Trainer

    config = recipe(name, module)()
    if not isinstance(config, Trainer.Config):
        raise UserError(
            f"got {type(config).__name__} of --config {name} --module {module}, "
            "expected a configuration: end the function with return config"
        )
    return config


def recipe(name: str | None, module: str = MODULE) -> Callable:
    """Return the function of ``module`` that makes the configuration of this name.

    Raises:
        UserError: the module cannot be had, or does not name this recipe.
    """
    found = load(module)
    if name not in found.__all__:
        near = difflib.get_close_matches(f"{name}", found.__all__, 3, 0.5)
        where = "" if module == MODULE else f" --module {module}"
        raise UserError(
            f"got --config {name}, expected one of the {len(found.__all__)} recipes of "
            f"{module}{', such as ' + ', '.join(near) if near else ''}: python -m train"
            f"{where} --help lists them"
        )
    return getattr(found, name)


def listing(module: str = MODULE) -> str:
    """Return the help that names all recipes of ``module``."""
    names = load(module).__all__
    # which python -OO leaves out
    told = {name: recipe(name, module).__doc__ or "" for name in names}
    first = {name: text.strip().partition("\n")[0] for name, text in told.items()}
    width = max(map(len, first))
    listed = "".join(f"  {name:{width}}  {line}\n" for name, line in first.items())
    return (
        "usage: python -m train --config NAME [--module MODULE] [--section.option "
        f"VALUE ...]\n\nrecipes of {module}:\n{listed}\n"
        "python -m train --config NAME --help lists the options of a recipe; --module "
        f"takes\nrecipes from another module than {MODULE}."
    )
