"""Transport in Hugging Face's Trainer, which trains between optimizer.train() and
optimizer.eval() by itself.

    python -m examples.hf_trainer [FOLDER]

Two lines of it are MARS's: the optimizer, and the callback. Without the callback a
checkpoint that no evaluation precedes holds the points where gradients are taken,
ahead of the model that is trained. The run goes on from a checkpoint in FOLDER.
"""

import sys
import tempfile

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from marsopt import MARS

VOCAB, LENGTH, STEPS = 64, 16, 120


class SaveTheTrainedModel(TrainerCallback):
    """Put x into the model before it is saved; the next step calls train()."""

    def on_step_end(self, args, state, control, optimizer, **kwargs):
        if control.should_save:
            optimizer.eval()

    on_epoch_end = on_step_end  # with save_strategy="epoch"

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step:3}  loss {float(logs['loss']):.6f}")


def chains(num: int) -> list[dict[str, torch.Tensor]]:
    """Sequences in which a token follows from the one before."""
    ids = [torch.randint(VOCAB, (num,), generator=torch.Generator().manual_seed(num))]
    for _ in range(LENGTH):
        ids.append((5 * ids[-1] + 3) % VOCAB)
    return [{"input_ids": row, "labels": row} for row in torch.stack(ids, 1)]


def trainer(folder: str, steps: int = STEPS) -> Trainer:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    none |= dict(bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **none))
    optimizer = MARS(  # 1
        model.parameters(), lr=1e-2, lr_1d=1e-2, correction="transport", gamma=0.1
    )
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=40, logging_steps=20, report_to=[],
        per_device_train_batch_size=16, lr_scheduler_type="constant", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    return Trainer(
        model,
        arguments,
        train_dataset=chains(512),
        eval_dataset=chains(64),
        optimizers=(optimizer, None),
        callbacks=[SaveTheTrainedModel()],  # 2
    )


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    run = trainer(folder)
    run.train(resume_from_checkpoint=get_last_checkpoint(folder))
    print(f"held-out {run.evaluate()['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
