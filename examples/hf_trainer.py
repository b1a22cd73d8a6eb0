"""Hugging Face's Trainer with MARS.

    python -m examples.hf_trainer [FOLDER] [--object]

Line 1 is the optimizer: a factory, which the Trainer calls with its model, or an object
with --object. The run goes on from the newest checkpoint in FOLDER.
"""

import sys
import tempfile

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

import marsopt

STEPS, BATCH, LR = 120, 16, 2e-2


class Print(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs, optimizer, **kwargs):
        if "loss" in logs:
            loss, skipped = float(logs["loss"]), optimizer.optimizer.num_skipped
            print(f"step {state.global_step:3}  loss {loss:.6f}  {skipped} skipped")


def chains(num: int) -> list[dict[str, torch.Tensor]]:
    """Sequences in which a token follows from the one before."""
    start = torch.randint(64, (num, 1), generator=torch.Generator().manual_seed(num))
    return [dict(input_ids=x, labels=x) for x in (start + 5 * torch.arange(17)) % 64]


def build() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


if __name__ == "__main__":
    folder = ([a for a in sys.argv[1:] if a != "--object"] or [tempfile.mkdtemp()])[0]
    model = build()
    if "--object" in sys.argv:
        how = {"optimizers": (marsopt.for_model(model, lr=LR), None)}  # 1
    else:
        how = {"optimizer_cls_and_kwargs": (lambda: marsopt.for_model, {"lr": LR})}  # 1
    arguments = transformers.TrainingArguments(
        folder, max_steps=STEPS, save_steps=40, logging_steps=20, use_cpu=True,
        per_device_train_batch_size=BATCH, disable_tqdm=True, report_to=[],
        train_sampling_strategy="sequential", lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, max_grad_norm=0.0,  # MARS clips
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=chains(512), eval_dataset=chains(64),
        callbacks=[Print()], **how,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    print(f"held-out {trainer.evaluate()['eval_loss']:.6f}")
