"""What a GPU is asked, as commands in three parts, and the same in miniature."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PARTS = ("correctness", "speed", "training")
MODELS = ("gpt2-large", "gpt2-small", "gpt2-xl")
RULES = {  # of marsopt.profile
    "mars-adamw": ("--rule", "mars_adamw"),
    "mars-adamw-transport": ("--rule", "mars_adamw", "--correction", "transport"),
    "mars-m": ("--rule", "mars_m"),
    "muon": ("--rule", "muon"),
}
ELEMENTWISE = ("mars-adamw", "mars-adamw-transport", "adamw-fused", "peers")
MATRIX = ("mars-m", "muon", "moonlight", "torch-muon")
TRAINED = (
    "torch-adamw",
    "moonlight",
    "mars-adamw",
    "mars-adamw-transport",
    "mars-m-transport",
)
TINY_STEP = ("--layers", "1", "--vocab", "64", "--rounds", "2", "--eager")
TINY_PROFILE = ("--layers", "1", "--width", "64", "--vocab", "64", "--steps", "1")
TINY_TRAINING = (
    *("--layers", "2", "--width", "64", "--seq-len", "64", "--tokens", "4e3"),
    *("--batch", "8", "--micro-batch", "4", "--held-out", "8", "--validations", "2"),
    *("--vocab", "50304", "--eager"),
)
# rehearsed on a CPU: what compiles is in the tests already, and takes minutes
TINY_TESTS = ("-k", "golden and eager or one_sharded and eager")


@dataclass(frozen=True)
class Job:
    """A command ``python -m MODULE ARGS... --json FILE``.

    Args:
        name: its key in the part's file.
        seconds: about what it takes on an H100; not started where less is left. A
            guess until it has run there.
        resumes: whether it continues from its own file, which then is NAME.json beside
            the part's.
    """

    name: str
    module: str
    args: tuple[str, ...]
    seconds: int
    resumes: bool = False


def correctness(device: str, miniature: bool) -> list[Job]:
    """Return the tests on a GPU, and the machine's rates."""
    own = ("--device", device)
    tests = (*own, *(("--", *TINY_TESTS) if miniature else ()))
    return [
        Job("rates", "benchmarks.rates", own, 20),
        Job("tests", "benchmarks.gpu.tests", tests, 300),
    ]


def speed(device: str, miniature: bool) -> list[Job]:
    """Return steps beside torch's and the peers', Newton-Schulz by shape, profiles; in
    the order of what the budgets ask for.
    """
    own = ("--device", device)
    models = MODELS[1:2] if miniature else MODELS
    tiny = ("--layers", "1", "--width", "64") if miniature else ()
    jobs = [Job("rates", "benchmarks.rates", own, 20)]
    for dtype in ("float32", "bfloat16"):
        if miniature and dtype == "bfloat16":
            continue
        for model in models:
            for kind, only in (("elementwise", ELEMENTWISE), ("matrix", MATRIX)):
                if kind == "matrix" and dtype == "bfloat16" and model != MODELS[0]:
                    continue  # Newton-Schulz, which is most of it, does not see dtypes
                args = ("--model", model, "--dtype", dtype, "--only", *only, *own)
                args += TINY_STEP if miniature else ()
                name = f"step {model} {kind} {dtype}"
                jobs.append(Job(name, "benchmarks.step", args, 45))
        if dtype == "float32":
            for model in models:
                args = ("--model", model, *own, *tiny)
                name = f"newton-schulz {model}"
                jobs.append(Job(name, "benchmarks.newton_schulz_shapes", args, 20))
    for model in models:
        for rule, words in list(RULES.items())[: 1 if miniature else None]:
            args = ("--model", model, *words, *own)
            args += TINY_PROFILE if miniature else ()
            jobs.append(Job(f"profile {model} {rule}", "marsopt.profile", args, 25))
    return jobs


def training(device: str, miniature: bool, data: Path) -> list[Job]:
    """Return GPT-2 small by five methods, each at the best rate of a sweep."""
    args = ("--data", str(data), "--device", device, "--methods", *TRAINED)
    sweep = ("--sweep", "0.5", "1", "2")
    args += TINY_TRAINING if miniature else sweep
    return [Job("pretrain", "benchmarks.pretrain", args, 60, resumes=True)]


def jobs_of(part: str, device: str, miniature: bool, data: Path) -> list[Job]:
    """Return the jobs of a part."""
    if part == "training":
        return training(device, miniature, data)
    return {"correctness": correctness, "speed": speed}[part](device, miniature)
