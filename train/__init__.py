"""The application: pretrain a GPT-2 with marsopt on torchtitan."""

import sys

from train.errors import begin

if sys.argv[:1] == ["-m"]:  # python -m train..., which is still being looked for
    begin()
