"""Damaged checkpoints and kills, played by the hundreds against the commands as users
call them: ``python -m tests.faults --help``.

Not part of the suite, which plays a miniature. Each case follows from the seed and its
number alone.
"""
