"""Lightning's Trainer with MARS.

    python -m examples.lightning_loop [FOLDER]

Line 1 is the optimizer, for the module that training_step calls. The run goes on from
the newest checkpoint in FOLDER.
"""

import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import marsopt

EPOCHS, LR = 6, 5e-2


def data(num: int) -> DataLoader:
    inputs = torch.randn(num, 16, generator=torch.Generator().manual_seed(num))
    return DataLoader([(x, torch.tanh(x[:4] - x[4:8])) for x in inputs], batch_size=16)


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Tanh())

    def configure_optimizers(self):
        return marsopt.for_model(self.model, lr=LR)  # 1

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        if self.training and self.trainer.is_last_batch:
            print(f"epoch {self.current_epoch}  loss {loss:.6f}")
        return loss

    validation_step = training_step


def build() -> Regression:
    torch.manual_seed(0)
    return Regression()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    run = L.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=ModelCheckpoint(folder, save_top_k=-1),
    )  # fmt: skip
    newest = max(folder.glob("*.ckpt"), default=None)
    run.fit(build(), data(512), data(64), ckpt_path=newest)
    print(f"held-out {run.validate(run.model, data(64), verbose=False)[0]['loss']:.6f}")
