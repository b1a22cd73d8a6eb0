"""python -m train --config NAME [--section.option VALUE ...]; torchrun too."""

from train.engine.launch import main
from train.errors import command

command(main)
