"""torchtitan's checkpoints of the model that is trained, which leave alone what the
user keeps beside them.
"""

from dataclasses import dataclass
from pathlib import Path

from train.engine.titan import MarsCheckpointManager
from train.runs.checkpoints import complete_steps, step_folders


class RunCheckpoints(MarsCheckpointManager):
    """torchtitan's manager. Its own search for "step-N" finds that anywhere in a name,
    so that it would read and delete a copy "step-20.bak" or "best-step-20".
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MarsCheckpointManager.Config):
        pass

    def _find_load_step(self, folder: str = "") -> int:
        return max(complete_steps(Path(folder or self.folder)), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        if self._should_purge():
            found = list(step_folders(Path(self.folder)).values())
            for path in found[: -self.keep_latest_k]:
                self.purge_queue.put(str(path))
