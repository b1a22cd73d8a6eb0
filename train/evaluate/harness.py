"""EleutherAI's lm-evaluation-harness on an exported folder: named tasks to results."""

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path

from train.errors import UserError

INSTALL = "pip install --group evaluate -c constraints.txt"


def _harness():
    """Return what is used of the harness; imported here because that takes seconds."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"got no package {error.name}, expected lm_eval with transformers and "
            f"accelerate for --tasks: {INSTALL}"
        ) from error
    return simple_evaluate, HFLM, TaskManager


def _index(names: list[str], include_path: Path | None):
    """Return the tasks known by name: those in ``include_path`` first, since indexing
    the harness's own thousands takes seconds.
    """
    _, _, manager = _harness()
    if include_path is not None:
        if not include_path.is_dir():
            raise UserError(
                f"got --include-path {include_path}, expected a folder of YAML: name it"
            )
        local = manager(include_path=include_path, include_defaults=False)
        if set(names) <= set(local.all_tasks):
            return local
    known = manager(include_path=include_path)
    for name in names:
        if name not in known.all_tasks:
            near = difflib.get_close_matches(name, known.all_tasks, 3, 0.5)
            raise UserError(
                f"got --tasks {name}, expected a task of the harness or of "
                f"--include-path{', like ' + ', '.join(near) if near else ''}: "
                "lm_eval ls tasks lists them"
            )
    return known


def load_tasks(names: list[str], include_path: Path | None) -> dict:
    """Return tasks and groups with their data, which the harness downloads once, and
    their index, as its arguments.

    Relative names of files in a YAML count from ``include_path``.
    """
    # absolute, since the tasks are read from within the folder
    folder = Path.cwd() if include_path is None else include_path.resolve()
    index = _index(names, None if include_path is None else folder)
    from datasets.exceptions import DatasetsError

    loaded = []
    for name in names:
        try:
            with contextlib.chdir(folder):
                found = index.load([name])
        except (OSError, ValueError, RuntimeError, DatasetsError) as error:
            what = " ".join(str(error).split())
            raise UserError(
                f"got --tasks {name}, whose data cannot be loaded here ({what}), "
                "expected a network or a copy in the cache: run where there is one, "
                "or give a local task with --include-path"
            ) from error
        group = found["groups"].get(name)
        loaded += list(found["tasks"].values()) if group is None else [group]
    return dict(tasks=loaded, task_manager=index)  # without one it makes another


def evaluate(
    folder: Path, tasks: dict, *, batch: int, device: str, **options: int | None
) -> dict:
    """Return the harness's results: {"results": {task: {"acc,none": ...}}, ...}.

    Args:
        folder: a Hugging Face folder with its tokenizer.
        tasks: of ``load_tasks``.
        batch: examples per forward pass.
        device: "cpu" or "cuda".
        options: limit, examples per task, None = all; num_fewshot, examples shown
            before each, None = as the task says.
    """
    if not any(folder.glob("tokenizer*.json")):
        raise UserError(
            f"got {folder} without a tokenizer, expected tokenizer.json: export it "
            "again without --no-tokenizer"
        )
    simple_evaluate, hugging_face_model, _ = _harness()
    # an absolute path cannot be taken for a name on the hub
    where = str(folder.resolve())
    model = hugging_face_model(pretrained=where, device=device, batch_size=batch)
    found = simple_evaluate(model, **tasks, **options, log_samples=False)
    kept = ("results", "groups", "versions", "n-shot", "n-samples")
    return {key: found[key] for key in kept if key in found}


def lines(results: dict) -> Iterator[str]:
    """Yield a line per task and metric; its own table needs a newer pytablewriter."""
    for task, row in results["results"].items():
        for key, value in row.items():
            metric, _, kept = key.partition(",")
            if not kept or metric.endswith("_stderr"):
                continue
            error = row.get(f"{metric}_stderr,{kept}", "N/A")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            yield f"{task:24} {metric:12} {value:.4f}{spread}"
