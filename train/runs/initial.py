"""The weights that a new run starts from (checkpoint.initial_load_path), checked before
processes meet.
"""

from dataclasses import asdict
from pathlib import Path

from train.errors import UserError
from train.files import read_json, write_json
from train.gpt2 import Shape
from train.runs.checkpoints import check, last_step
from train.runs.settings import FROM, SETTINGS, describe, difference, read, settings

NOTE = "shape.json"


def note_shape(folder: Path, shape: Shape) -> None:
    """Write what the sizes of tensors do not tell: heads, and the attention's scale."""
    write_json(folder / NOTE, asdict(shape))


def _settings_of(path: Path) -> Path | None:
    """Return where those of the run lie that wrote the checkpoint: beside it in an
    export, else in the run's folder. None for what was imported.
    """
    places = [path]
    if path.parent.name == "checkpoint":
        places.append(path.parent.parent)
    for folder in places:
        if (folder / SETTINGS).exists():
            return folder
    return None


def shape_of(path: Path, run: Path | None) -> Shape | None:
    if (path / NOTE).exists():
        return read_json(path / NOTE, Shape, "what train.import_hf wrote: restore it")
    return None if run is None else describe(run).shape


def check_initial(config) -> None:
    """Check that the initial checkpoint, where one will be read, fits the model, and
    with initial_load_model_only=False the whole recipe.
    """
    given = config.checkpoint.initial_load_path
    if given is None or last_step(Path(config.dump_folder)) > 0:
        return
    path, shape = Path(given), config.model_spec.model.shape
    whole = not config.checkpoint.initial_load_model_only
    check(path, shape, whole=whole)
    run = _settings_of(path)
    noted = shape_of(path, run)
    if noted is not None and noted != shape:
        raise UserError(
            f"got checkpoint.initial_load_path={path} of {noted}, expected {shape}: "
            "choose a configuration of that shape"
        )
    if not whole:
        return
    if run is None:
        raise UserError(
            f"got checkpoint.initial_load_model_only=False with {path}, expected a "
            "run's whole checkpoint: leave the option out to start from weights alone"
        )
    theirs = read(run / SETTINGS)
    mine = settings(config) | {FROM: theirs.get(FROM)}
    if what := difference(mine, theirs):
        raise UserError(
            f"got {what}, expected the settings of the run that wrote {path}: its "
            "optimizer's state fits these alone; give them, or leave "
            "initial_load_model_only at True"
        )
