"""Commands of the application as children of one process that has imported all that
they import, as in the campaign: of the ten seconds of a ``python -m train`` of a few
steps, imports are seven, and each rank of several spends them.

For tests of what a command does and says. That a real ``python -m`` does and says the
same has to stay the subject of one test of each command.

Run as a module, it reads [module, [arguments], ranks] from each line of its standard
input, and answers with [exit code, stdout, stderr].
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 240.0  # seconds

_server: list[subprocess.Popen] = []  # none or one


@atexit.register
def _end() -> None:
    while _server:
        _server.pop().communicate()  # the end of its input ends it


def forked(*args: object, ranks: int = 1) -> tuple[int, str, str]:
    """Run a module of the application with these arguments on ``ranks`` processes;
    (exit code, stdout, stderr).

    As under torchrun, other ranks end with the first that fails, whose exit code it is;
    torchrun itself, which would say so, is not there.
    """
    if not _server:
        # each command has a working folder of its own
        env = dict(OMP_NUM_THREADS="1", PYTHONWARNINGS="default", PYTHONPATH=str(ROOT))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        _server.append(process)
    (server,) = _server
    module, *options = map(str, args)
    server.stdin.write(json.dumps([module, options, ranks]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that forks commands has ended"
    code, out, err = json.loads(answer)
    return code, out, err


def main() -> None:
    from train.campaign.children import POLL, Command, Running, import_all

    import_all()
    with os.fdopen(os.dup(1), "w") as answers:  # children have 1 for themselves
        for line in sys.stdin:
            module, args, ranks = json.loads(line)
            with tempfile.TemporaryDirectory() as folder:
                command = Command(module, tuple(args), ranks=ranks, limit=LIMIT)
                running = Running(command, Path(folder), 0)
                running.start()
                while not running.poll():
                    time.sleep(POLL)
                ended = running.ended()
            in_time = sorted(zip(ended.times, ended.codes, strict=True))
            code = next((code for _, code in in_time if code), 0)
            err = f"did not end in {LIMIT} s\n" * ended.hung + ended.err
            print(json.dumps([code, ended.out, err]), file=answers, flush=True)


if __name__ == "__main__":
    main()
