"""torchtitan's checkpoints, with checksums, read without running code, which leave
alone what the user keeps beside them.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train.engine.titan import MODEL, TRAIN_STATE, CheckpointManager
from train.errors import UserError
from train.runs import checksums
from train.runs.checkpoints import complete_steps, step_folders
from train.runs.safe_dcp import load

log = logging.getLogger(__name__)


class RunCheckpoints(CheckpointManager):
    """torchtitan's manager. Its own search for "step-N" finds that anywhere in a name,
    so that it would read and delete a copy "step-20.bak" or "best-step-20"; and its
    own reader, DCP's, runs code that a checkpoint names.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__(config, **kwargs)
        self.ending = False
        """Whether this step's checkpoint is the last before the run is ended."""
        # beside the steps that follow: hashing holds no lock of Python's
        self._hashing = ThreadPoolExecutor(1)

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load as torchtitan does, by ``safe_dcp.load``."""
        if from_hf:  # safetensors, which hold no code
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        loaded = super()._load(step)
        trainer = self.states[TRAIN_STATE]
        steps, begun = trainer.config.training.steps, self._find_load_step() > 0
        if not begun and trainer.step >= steps:
            raise UserError(
                f"got a checkpoint of step {trainer.step} to start from with "
                f"training.steps={steps}, expected more steps: raise --training.steps"
            )
        return loaded

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.ending or super()._should_save(curr_step, last_step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        # at the end nothing is left to overlap with
        saved = super()._save(curr_step, last_step or self.ending)
        if saved and dist.get_rank() == 0:
            path = Path(self._create_checkpoint_id(curr_step))
            self._hashing.submit(_add_checksums, self.save_future, path)
        return saved

    def _close(self) -> None:
        super()._close()
        self._hashing.shutdown()

    def _find_load_step(self, folder: str = "") -> int:
        return max(complete_steps(Path(folder or self.folder)), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        """Keep what is newer than the oldest complete one to be kept: what was cut off,
        or is not yet written, is none.
        """
        if self._should_purge():
            folder = Path(self.folder)
            oldest = min(complete_steps(folder)[-self.keep_latest_k :], default=0)
            for step, path in step_folders(folder).items():
                if step < oldest:
                    self.purge_queue.put(str(path))


def _add_checksums(saved: Future | None, path: Path) -> None:
    """Write a checkpoint's checksums once it is complete."""
    try:
        if saved is not None:
            saved.result()
        checksums.write(path)
    except Exception as error:  # the run goes on: it is told where it waits for saving
        log.warning("no checksums were written for %s: %s", path, error)
