"""What the application does with what nobody should give it, by the hundreds: malformed
options and files, damaged checkpoints, kills. ``python -m tests.campaign --help``.

Not part of the suite: it takes the better part of an hour. Every case follows from the
seed and its number alone.
"""
