"""--module: recipes of a module of the user's."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from train import plan
from train.engine.launch import announce, parse
from train.engine.resolve import resolve
from train.errors import UserError

MINE = """
from configs import tiny_mars_adamw

__all__ = ["stronger"]


def stronger():
    '''MARS-AdamW with a stronger correction.'''
    config = tiny_mars_adamw()
    config.optimizer.gamma = 0.05
    config.dump_folder = "runs/stronger"
    return config
"""
OPTION = ["--module", "house.mine"]


@pytest.fixture
def house(tmp_path, monkeypatch):
    (tmp_path / "house").mkdir()
    (tmp_path / "house/mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_recipe_of_ones_own_is_listed_resolved_and_planned(house, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help", *OPTION])
    assert ended.value.code == 0
    listed = re.findall(r"^  (\w+)  +\S", capsys.readouterr().out, re.MULTILINE)
    assert listed == ["stronger"]
    config = parse(["--config", "stronger", *OPTION, "--training.steps", "200"])
    assert (config.optimizer.gamma, config.training.steps) == (0.05, 200)
    assert plan.job_of("stronger", "house.mine").mars_type == "mars-adamw"
    for other in ("tiny_adamw", "strongr"):
        with pytest.raises(UserError, match="one of the 1 recipes of house.mine"):
            parse(["--config", other, *OPTION])
    with pytest.raises(UserError, match="recipes of configs"):
        parse(["--config", "stronger"])
    (house / "house/forgot.py").write_text(MINE.replace("    return config\n", ""))
    forgot = ["--config", "stronger", "--module", "house.forgot"]
    with pytest.raises(UserError, match="got NoneType of .* end .* return config"):
        parse(forgot)


def test_the_recipe_that_the_page_shows(house, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    shown = re.search(
        r"^    # mine.py\n(?:(?:    .*)?\n)+?(?=    torchrun)", page, re.M
    )
    (house / "house/page.py").write_text(textwrap.dedent(shown.group()))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    config = parse(["--config", "mine", "--module", "house.page"])
    assert capsys.readouterr().err == "importing torch and torchtitan: seconds\n"
    job = plan.job_of("mine", "house.page")
    assert 30e6 < sum(math.prod(shape) for shape in job.shapes.values()) < 30.5e6
    config.dataloader.dataset_path = str(house / "data")
    config.dump_folder = str(house / "run")
    (house / "data").mkdir()
    for name, size in (("train", 9000), ("val", 70_000)):
        np.zeros(size, dtype=np.uint16).tofile(house / f"data/{name}.bin")
    for world in (1, 8):
        resolve(deepcopy(config), world)
    announce(config, 8)
    assert re.search("20000 steps; the first .* compiles", capsys.readouterr().out)


@pytest.mark.parametrize(
    "module, said",
    [
        ("none_here", "got --module none_here, of which there is no none_here"),
        ("json.mine", "of which there is no json.mine, expected a module of recipes"),
        ("mine.py/x", "write its name as in import"),
        ("bare", "got --module bare without names in __all__"),
        ("absent", "got --module absent, whose __all__ names 'mine', which is no fun"),
    ],
)
def test_modules_without_recipes(tmp_path, monkeypatch, module, said):
    (tmp_path / "bare.py").write_text("x = 1")
    (tmp_path / "absent.py").write_text("__all__ = ['mine']")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=re.escape(said)):
        parse(["--config", "tiny_adamw", "--module", module])
