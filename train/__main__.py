"""python -m train --config NAME [--section.option VALUE ...]; torchrun too."""

from train.errors import command
from train.launch import main

command(main)
