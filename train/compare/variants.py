"""A recipe with options of its own: CONFIG:OPTION=VALUE, as a comparison names it."""

from train.errors import UserError


def command_line(name: str) -> list[str]:
    """Return the arguments of ``python -m train`` for CONFIG[:OPTION=VALUE...], with
    options of the optimizer, e.g. tiny_adamw:betas=0.95,0.99.
    """
    config, *options = name.split(":")
    arguments = ["--config", config]
    for option in options:
        key, equals, value = option.partition("=")
        if not (key and equals and value) or "/" in option:
            raise UserError(
                f"got {name}, expected CONFIG:OPTION=VALUE with an option of the "
                "optimizer: write e.g. tiny_mars_m:gamma=0.05"
            )
        arguments += [f"--optimizer.{key.replace('_', '-')}", *value.split(",")]
    return arguments
