"""Lightning's Trainer with MARS, here with correction="transport".

    python -m examples.lightning_loop [FOLDER]

Line 1 is the optimizer. Line 2, which transport alone needs, puts the trained model in
place of the points where gradients are taken, for validation and the checkpoint after
it. The run goes on from the newest checkpoint in FOLDER.
"""

import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from marsopt import MARS


def data(num: int) -> DataLoader:
    inputs = torch.randn(num, 16, generator=torch.Generator().manual_seed(num))
    return DataLoader([(x, torch.tanh(x[:4] - x[4:8])) for x in inputs], batch_size=16)


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Tanh())

    def configure_optimizers(self):
        return MARS(self.parameters(), lr=1e-2, correction="transport", gamma=0.1)  # 1

    def on_validation_start(self):
        self.trainer.optimizers[0].eval()  # 2

    def on_train_batch_start(self, *args):
        self.trainer.optimizers[0].train()

    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        if self.training and self.trainer.is_last_batch:
            print(f"epoch {self.current_epoch}  loss {loss:.6f}")
        return loss

    validation_step = training_step


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    run = L.Trainer(
        accelerator="cpu", max_epochs=6, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=ModelCheckpoint(folder, save_top_k=-1),
    )  # fmt: skip
    newest = max(folder.glob("*.ckpt"), default=None)
    run.fit(Regression(), data(512), data(64), ckpt_path=newest)
    print(f"held-out {run.validate(run.model, data(64), verbose=False)[0]['loss']:.6f}")
