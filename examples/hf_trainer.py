"""Hugging Face's Trainer with MARS, here with correction="transport".

    python -m examples.hf_trainer [FOLDER] [--class]

Line 1 hands over the optimizer: an object or, with --class, a class and its arguments.
Line 2, which transport alone needs, puts the trained model in place of the points where
gradients are taken, to save it; to evaluate, the Trainer itself does that, and it
undoes it to train. The run goes on from the newest checkpoint in FOLDER.
"""

import sys
import tempfile

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from marsopt import MARS


class SaveTheTrainedModel(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, optimizer, **kwargs):
        if control.should_save:
            optimizer.eval()

    on_epoch_end = on_step_end  # with save_strategy="epoch"

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step:3}  loss {float(logs['loss']):.6f}")


def chains(num: int) -> list[dict[str, torch.Tensor]]:
    """Sequences in which a token follows from the one before."""
    start = torch.randint(64, (num, 1), generator=torch.Generator().manual_seed(num))
    return [dict(input_ids=x, labels=x) for x in (start + 5 * torch.arange(17)) % 64]


if __name__ == "__main__":
    torch.manual_seed(0)
    folder = ([a for a in sys.argv[1:] if a != "--class"] or [tempfile.mkdtemp()])[0]
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    options = dict(lr=1e-2, lr_1d=1e-2, correction="transport", gamma=0.1)
    if "--class" in sys.argv:
        how = dict(optimizer_cls_and_kwargs=(MARS, options))  # 1
    else:
        how = dict(optimizers=(MARS(model.parameters(), **options), None))  # 1
    arguments = transformers.TrainingArguments(
        folder, max_steps=120, save_steps=40, logging_steps=20, use_cpu=True,
        per_device_train_batch_size=16, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=chains(512), eval_dataset=chains(64), **how,
        callbacks=[SaveTheTrainedModel()],  # 2
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    print(f"held-out {trainer.evaluate()['eval_loss']:.6f}")
