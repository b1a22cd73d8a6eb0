"""torchtitan's checkpoints of the model that is trained, which leave alone what the
user keeps beside them.
"""

from dataclasses import dataclass
from pathlib import Path

from train.engine.titan import CheckpointManager
from train.runs.checkpoints import complete_steps, step_folders


class RunCheckpoints(CheckpointManager):
    """torchtitan's manager. Its own search for "step-N" finds that anywhere in a name,
    so that it would read and delete a copy "step-20.bak" or "best-step-20".
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Write the model without its lookahead, and the state that belongs to it."""
        if not self._should_save(curr_step, last_step):
            return False
        with self.states["optimizer"].evaluating():
            saved = super().save(curr_step, last_step)
            self.maybe_wait_for_staging()
        return saved

    def _find_load_step(self, folder: str = "") -> int:
        return max(complete_steps(Path(folder or self.folder)), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        if self._should_purge():
            found = list(step_folders(Path(self.folder)).values())
            for path in found[: -self.keep_latest_k]:
                self.purge_queue.put(str(path))
