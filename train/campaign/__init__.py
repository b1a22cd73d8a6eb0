"""What the application does with what nobody should give it, by the hundreds: malformed
options and files, damaged checkpoints, kills. ``python -m train.campaign --help``.

Not part of the suite, which plays a miniature: it takes a quarter of an hour. Every
case follows from the seed and its number alone.
"""
