"""python -m train --config NAME [--module MODULE] [--section.option VALUE ...]; under
torchrun too.
"""

from train.engine.launch import main
from train.errors import command

command(main)
