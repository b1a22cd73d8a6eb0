"""To Hugging Face's format and back: logits, tokens, what is refused, and training that
continues.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from tests.application.made import SHAPE as SMALL
from tests.application.made import STEP, called, refused, training
from tests.application.runs import ROOT, STEPS, train_tiny
from tests.library.test_master_weights import rounded
from train import import_hf, sample
from train.data import tokenizer_files
from train.data.tokenizers import Bytes, tokenizer
from train.export import STATE, export
from train.export import main as export_command
from train.gpt2 import GPT2, Shape, huggingface
from train.runs import safe_dcp
from train.runs.checkpoints import save_model, steps
from train.runs.initial import note_shape
from train.runs.settings import SETTINGS, claim
from train.runs.trained import of_run

pytestmark = pytest.mark.application

# a vocabulary padded beyond the tokenizer's 257, as the recipes pad GPT-2's
SHAPE = Shape(num_layers=2, num_heads=3, width=24, block_size=16, vocab_size=264)


def scattered(shape: Shape) -> GPT2:
    """A model none of whose weights is near its initial value."""
    model = GPT2(shape)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    """An exported model."""
    out = tmp_path / "hf"
    out.mkdir()
    huggingface.save(scattered(SHAPE), out, Bytes.end_of_text)
    tokenizer_files.save(Bytes(), out, SHAPE.block_size)
    return out


@pytest.mark.parametrize("inverse", [True, False], ids=["inverse layer scale", "plain"])
def test_logits_are_those_of_transformers(tmp_path, inverse):
    from transformers import AutoModelForCausalLM, GenerationConfig, GPT2LMHeadModel

    shape = Shape(**{**vars(SHAPE), "inverse_layer_scale": inverse})
    model = scattered(shape)
    huggingface.save(model, tmp_path, 256)
    theirs, told = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert isinstance(theirs, GPT2LMHeadModel)
    assert not any(told.values()), told
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    tokens = torch.randint(shape.vocab_size, (3, shape.block_size))
    with torch.no_grad():
        ours, other = model(tokens), theirs(tokens).logits
    assert ours.shape == other.shape
    assert ours.abs().max() > 1
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-5)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 256
    # in training mode too: dropout is 0
    with torch.no_grad():
        torch.testing.assert_close(theirs.train()(tokens).logits, other)


def test_back_again_is_the_same(folder):
    model = scattered(SHAPE)
    huggingface.save(model, folder, 256)
    back = huggingface.load(folder)
    assert back.shape == SHAPE
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name


def test_what_transformers_saves_is_read(folder, tmp_path):
    """In several files, without the prefix, in half precision."""
    from transformers import GPT2LMHeadModel, GPT2Model

    want = huggingface.load(folder).state_dict()
    theirs = GPT2LMHeadModel.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    GPT2Model.from_pretrained(folder).save_pretrained(tmp_path / "base")
    theirs.bfloat16().save_pretrained(tmp_path / "half")
    for name in ("shards", "base"):
        found = huggingface.load(tmp_path / name).state_dict()
        assert all(torch.equal(found[k], want[k]) for k in want), name
    found = huggingface.load(tmp_path / "half").state_dict()
    assert all(torch.equal(found[k], want[k].bfloat16().float()) for k in want)


# ---- tokenizers ----------------------------------------------------------------------

TEXT = (ROOT / "README.md").read_text() + "Größe 東京 🚀\t\r\n  \x00 it's 12,345  end "


def auto_tokenizer(coder, folder):
    from transformers import AutoTokenizer

    tokenizer_files.save(coder, folder, block_size=1 << 20)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["bytes", "bpe1024"])
def test_auto_tokenizer_has_our_ids(name, tmp_path):
    coder = tokenizer(name)
    theirs = auto_tokenizer(coder, tmp_path)
    again = tokenizer_files.FromFolder(tmp_path)
    ids = coder.encode(TEXT)
    assert theirs(TEXT)["input_ids"] == ids
    assert again.encode(TEXT) == ids
    assert theirs.decode(ids) == again.decode(ids) == coder.decode(ids) == TEXT
    assert len(theirs) == coder.vocab_size == again.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == coder.end_of_text
    assert again.end_of_text == coder.end_of_text
    assert again.decode([*coder.encode("a"), coder.vocab_size + 3]) == "a"


# ---- from a run, and on --------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run on two processes with checkpoints after steps 4 and 8; its losses."""
    folder = tmp_path_factory.mktemp("carry") / "run"
    losses, _, _ = train_tiny(data, folder, ranks=2)
    assert steps(folder) == [4, STEPS]
    return folder, losses


@pytest.fixture(scope="module")
def carried(trained, tmp_path_factory):
    """Its step 4 exported with the training state."""
    out = tmp_path_factory.mktemp("carry") / "hf"
    export(of_run(trained[0], 4), out, training_state=True)
    return out


def told(main, *args):
    """What a command prints, called in this process."""
    code, out, err = called(main, *args)
    assert (code, err) == (0, "")
    return out


def test_the_export_command(trained, tmp_path):
    out = tmp_path / "hf"
    args = (export_command, "--run", trained[0], "--out", out, "--training-state")
    said = told(*args)
    assert f"836,864 parameters after step 8 of {trained[0]}" in said
    assert f"--checkpoint.initial-load-path {out / STATE}" in said
    assert re.fullmatch(r"error: got --out .*, which is not empty, .*", refused(*args))


def test_a_run_of_two_ranks_is_exported(trained, carried):
    from transformers import AutoTokenizer, GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(carried)
    ids = AutoTokenizer.from_pretrained(carried)("def f(x):")["input_ids"]
    assert ids == list(b"def f(x):")
    for step, same in ((4, True), (8, False)):
        ours = of_run(trained[0], step).model
        with torch.no_grad():
            logits = ours(torch.tensor([ids])), theirs(torch.tensor([ids])).logits
        assert torch.allclose(*logits, rtol=0, atol=1e-5) is same


def test_the_weights_of_a_run_in_bfloat16_are_exported(data, tmp_path):
    """And not its parameters; and a run that resumes has them."""
    options = "--training.dtype", "bfloat16", "--optimizer.master-weight-bits", "32"
    run = tmp_path / "run"
    whole, _, _ = train_tiny(data, run, *options)
    export(of_run(run, 4), tmp_path / "hf", training_state=True)
    parameters = GPT2(of_run(run, 4).model.shape).bfloat16().state_dict()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        safe_dcp.load(parameters, run / "checkpoint/step-4", no_dist=True)
    for name, weight in huggingface.load(tmp_path / "hf").state_dict().items():
        assert torch.equal(rounded(weight), parameters[name])
        assert not torch.equal(weight.bfloat16().float(), weight)
    path = "--checkpoint.initial-load-path", tmp_path / "hf" / STATE
    path += ("--checkpoint.no-initial-load-model-only",)
    losses, _, _ = train_tiny(data, tmp_path / "on", *options, *path)
    assert losses == {step: whole[step] for step in range(5, STEPS + 1)}


def test_sample_from_either_format(trained, carried):
    options = ["--prompt", "import ", "--tokens", 30]
    found = [
        told(sample.main, *place, *options)
        for place in (
            ["--run", trained[0], "--step", 4],
            ["--model", carried],
            ["--run", trained[0]],
        )
    ]
    assert found[0] == found[1] != found[2]
    assert found[0].startswith("import ")
    said = refused(sample.main, "--model", carried, "--step", 4)
    assert "got --step 4 with --model" in said


def test_training_goes_on_from_imported_weights(data, trained, carried, tmp_path):
    """As from the run's own, with a new optimizer: to the last printed digit."""
    imported = tmp_path / "im ported"
    said = told(import_hf.main, "--model", carried, "--out", imported)
    assert f"--checkpoint.initial-load-path '{imported}'" in said
    assert f"{carried / STATE} holds the optimizer's state" in said
    own = trained[0] / "checkpoint" / "step-4"
    losses = [
        train_tiny(data, tmp_path / place.name, "--checkpoint.initial-load-path", place,
            steps=3)[0]
        for place in (imported, own)
    ]  # fmt: skip
    assert losses[0] == losses[1]
    # the first of these batches again, but after four steps of learning
    assert float(losses[0][1]) < float(trained[1][1]) - 0.1


def test_training_goes_on_from_an_exported_state(data, trained, carried, tmp_path):
    """As if it had never been carried away: on another number of ranks, elsewhere."""
    losses, _, _ = train_tiny(
        data,
        tmp_path / "on",
        "--checkpoint.initial-load-path",
        carried / STATE,
        "--checkpoint.no-initial-load-model-only",
    )
    assert losses == {step: trained[1][step] for step in range(5, STEPS + 1)}


def test_an_export_is_made_whole(trained, tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space left on device")

    found = of_run(trained[0], 4)
    with monkeypatch.context() as broken:
        broken.setattr(tokenizer_files, "save", full)
        with pytest.raises(OSError, match="no space"):
            export(found, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export(found, tmp_path / "out", tokenizer=False)
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / STATE).exists()


def test_initial_weights_are_checked(place):
    def told(path, folder="out", **more):
        given = dict(initial_load_path=str(path)) | more
        return refused(lambda: claim(training(place, folder, **given)))

    whole = dict(initial_load_model_only=False)
    other, heads = place / "other", place / "heads"
    save_model(GPT2(replace(SMALL, width=16)), other)
    assert "it is of another model" in told(other)
    save_model(GPT2(SMALL), heads)
    note_shape(heads, replace(SMALL, num_heads=4))  # does not show in the sizes
    assert "num_heads=4" in told(heads)
    note_shape(heads, SMALL)
    assert "expected a run's whole checkpoint" in told(heads, **whole)
    # of another recipe, and by a run that has begun, for which there is no other start
    known = json.loads((place / "run" / SETTINGS).read_text()) | {"optimizer.lr": 1.0}
    (place / "run" / SETTINGS).write_text(json.dumps(known))
    said = told(place / STEP, **whole)
    assert re.search(r"got optimizer.lr=0.006 where it has 1", said)
    assert "got initial_load_path='" in told(heads, "run")
