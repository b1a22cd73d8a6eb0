"""What a GPU is asked, as commands in three parts, and the same in miniature."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PARTS = ("correctness", "speed", "training")
FIRST, *OTHERS = MODELS = ("gpt2-large", "gpt2-small", "gpt2-xl")
RULES = {  # of python -m marsopt.profile
    "mars-adamw": ("--rule", "mars_adamw"),
    "mars-m": ("--rule", "mars_m"),
    "muon": ("--rule", "muon"),
}
CONTENDERS = {
    "elementwise": ("adamw", "mars-adamw", "adamw-fused"),
    "matrix": ("mars-m", "muon", "moonlight", "torch-muon"),
    "peers": ("mars-adamw", "peers"),
}
TESTS = ("-p", "xdist", "-n", "6")
TINY_STEP = ("--layers", "1", "--vocab", "64", "--rounds", "2", "--eager")
TINY_PROFILE = ("--layers", "1", "--width", "64", "--vocab", "64", "--steps", "1")
TINY_TRAINING = (
    *("layers=2", "width=64", "heads=1", "seq_len=64", "batch=8", "micro_batch=4"),
    *("steps=8", "held_out=8", "points=2", "compile=false"),
)
# rehearsed on a CPU: what compiles is in the tests already, and takes minutes
TINY_TESTS = ("-k", "eager and (golden or one_sharded)")


@dataclass(frozen=True)
class Job:
    """A command ``python -m MODULE ARGS... --json FILE``, or a study.

    Args:
        name: its key in the part's file.
        seconds: about what it takes on an H200 beside 16 cores, at GPT-2 large; not
            started where less is left. Of a study a guess.
        resumes: whether it is a study of ``research.compare``, which continues from its
            store, a folder NAME beside the part's file.
    """

    name: str
    module: str
    args: tuple[str, ...]
    seconds: int
    resumes: bool = False


def correctness(device: str, miniature: bool) -> list[Job]:
    """Return the tests on a GPU, and the machine's rates."""
    own = ("--device", device)
    words = TINY_TESTS if miniature else TESTS
    return [
        Job("rates", "benchmarks.rates", own, 30),
        Job("tests", "benchmarks.gpu.tests", (*own, "--", *words), 150),
    ]


def step(model: str, kind: str, dtype: str, device: str, miniature: bool) -> Job:
    """Return steps of ``CONTENDERS`` beside torch's clip and fused AdamW."""
    args = ("--model", model, "--dtype", dtype, "--device", device)
    if miniature:
        args += TINY_STEP
    elif model == "gpt2-xl":
        args += ("--memory", "75")  # GiB: what a group is planned with is near to it
    name, args = f"step {model} {kind} {dtype}", (*args, "--only", *CONTENDERS[kind])
    return Job(name, "benchmarks.step", args, 75)


def orthogonal(model: str, device: str, miniature: bool) -> Job:
    """Return Newton-Schulz by shape."""
    args = ("--model", model, "--device", device)
    args += ("--layers", "1", "--width", "64") if miniature else ()
    return Job(f"newton-schulz {model}", "benchmarks.newton_schulz_shapes", args, 15)


def profile(model: str, rule: str, device: str, miniature: bool) -> Job:
    """Return the profile of a rule's step."""
    args = ("--model", model, *RULES[rule], "--device", device)
    args += TINY_PROFILE if miniature else ()
    return Job(f"profile {model} {rule}", "marsopt.profile", args, 60)


def speed(device: str, miniature: bool) -> list[Job]:
    """Return steps beside torch's and the peers', Newton-Schulz by shape, profiles:
    first what the budgets ask for, on one model; then steps of the others.
    """
    own = (device, miniature)
    elementwise, *matrix_rules = RULES
    jobs = [
        Job("rates", "benchmarks.rates", ("--device", device), 30),
        profile(FIRST, elementwise, *own),
        step(FIRST, "elementwise", "float32", *own),
        orthogonal(FIRST, *own),
        step(FIRST, "matrix", "float32", *own),
    ]
    if miniature:
        return jobs
    kinds = "elementwise", "matrix"
    jobs += [step(model, kind, "float32", *own) for model in OTHERS for kind in kinds]
    jobs += [profile(FIRST, rule, *own) for rule in matrix_rules]
    for model in MODELS:
        jobs.append(step(model, "elementwise", "bfloat16", *own))
    for model in OTHERS:
        jobs.append(orthogonal(model, *own))
        jobs += [profile(model, rule, *own) for rule in RULES]
    # other people's code on a GPU that it may not know: last
    return [*jobs, step(FIRST, "peers", "float32", *own)]


def training(device: str, miniature: bool, data: Path) -> list[Job]:
    """Return GPT-2 small by five methods at the recipes' rates; then the same at the
    best rates of searches, at a quarter of the tokens.
    """
    changes = ("--set", f"data={data}", f"device={device}")
    if miniature:
        args = ("gpu", *changes, *TINY_TRAINING)
        return [Job("pretrain", "research.compare", args, 1, True)]
    return [
        Job("pretrain", "research.compare", ("gpu", *changes), 300, resumes=True),
        Job("swept", "research.compare", ("gpu_swept", *changes), 200, resumes=True),
    ]


def jobs_of(part: str, device: str, miniature: bool, data: Path) -> list[Job]:
    """Return the jobs of a part."""
    if part == "training":
        return training(device, miniature, data)
    return {"correctness": correctness, "speed": speed}[part](device, miniature)
