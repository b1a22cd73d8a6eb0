"""What this project found out: studies, their stores, and the commands that made them.

README.md lists each question with its answer and its command. None of it is delivered.
"""

import train  # noqa: F401  (Ctrl-C during imports is one line, as in its commands)
