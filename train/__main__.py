"""python -m train --config NAME [--section.option VALUE ...], alone or under torchrun."""

from train.errors import command
from train.launch import main

command(main)
