"""Whatever files and command lines hold, a command ends with one line and exit code 2,
or does what it says: no traceback, no hang, no wrong file taken for a right one.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from marsopt.profiling import command as profile
from tests.application.test_files import bind
from train import export, import_hf, plan, prepare, sample
from train.data import tokenizer_files
from train.data.shards import Ledger
from train.data.tokenizers import Bytes
from train.engine.resolve import _what_divides
from train.errors import UserError, command
from train.evaluate import __main__ as evaluate
from train.files import check_folder, read_json
from train.gpt2 import GPT2, Shape, huggingface
from train.runs import checkpoints, initial, settings

SHAPE = Shape(num_layers=1, num_heads=2, width=8, block_size=16, vocab_size=257)
LONG = "9" * 20  # of a number on a command line
SECONDS = 20  # of one command, on a busy machine
# what a value in a JSON file is replaced by; raw text where json.dumps has no word
VALUES = {
    "null": "null",
    "true": "true",
    "negative": "-5",
    "huge": "9" * 30,
    "hundreds of digits": "9" * 5000,
    "infinite": "1e400",
    "nan": "NaN",
    "text": '"x"',
    "empty text": '""',
    "sampled": '"sampled:"',
    "parent": '"../x.safetensors"',
    "NUL": '"a\\u0000.bin"',
    "surrogate": '"\\ud800"',
    "list": "[1]",
    "object": '{"a": 1}',
    "nested": "[" * 5000 + "]" * 5000,
}
FILES = {
    "empty": b"",
    "torn": b"{",
    "no UTF-8": b"\xff\xfe",
    "a number": b"3",
    "null": b"null",
    "a list": b"[1]",
    "an empty object": b"{}",
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a": ' * 5000,
}


def refused(main, *args):
    """The one line with which a command ends that exits with 2."""
    code, out, err = called(main, *args)
    assert code == 2, (code, out, err)
    lines = [line for line in err.splitlines() if "SHA256SUMS" not in line]
    if lines[0].startswith("usage: "):  # argparse's own
        return lines[-1]
    assert len(lines) == 1 and lines[0].startswith("error: got "), err
    return lines[0]


def called(main, *args):
    """Exit code and what was said, of a command called in this process."""
    began, out, err = time.monotonic(), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *map(str, args)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = 0
        try:
            command(main)
        except SystemExit as ended:
            code = ended.code
    assert time.monotonic() - began < SECONDS
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Data, a run, and a Hugging Face folder of one small model."""
    root = tmp_path_factory.mktemp("made")
    (root / "a.txt").write_text("hello world\n" * 40)
    prepare.prepare(
        "text", "bytes", root / "data", files=[root / "a.txt"], val_fraction=0.3
    )
    model = GPT2(SHAPE)
    model.init_weights()
    (root / "run").mkdir()
    checkpoints.save_model(model, root / "run/checkpoint/step-4")
    known = {
        "model_spec.model": {"shape": asdict(SHAPE)},
        "training.seq_len": 16,
        "tokenizer.name": "bytes",
    }
    (root / "run/settings.json").write_text(json.dumps(known))
    (root / "hf").mkdir()
    huggingface.save(model, root / "hf", 256)
    tokenizer_files.save(Bytes(), root / "hf", 16)
    return root


@pytest.fixture
def place(made, tmp_path):
    """A copy to damage."""
    return shutil.copytree(made, tmp_path / "place")


def losses(place):
    return evaluate.main, "--run", place / "run", "--loss", "--data", place / "data"


def imports(place):
    return import_hf.main, "--model", place / "hf", "--out", place / "imported"


def samples(place, *options):
    return sample.main, "--model", place / "hf", "--tokens", 2, *options


def prepares(place):
    return (
        *(prepare.main, "--source", "text", "--val-fraction", 0.3),
        *("--out", place / "data", place / "a.txt"),
    )


def test_what_is_damaged_below_works_whole(place):
    for act in (losses, imports, samples, prepares):
        assert called(*act(place))[0] == 0


# ---- JSON files ----------------------------------------------------------------------


def damage(path, at, text):
    """Replace the value at a place in a JSON file by a text; None removes it."""
    found = json.loads(path.read_text())
    parent = found
    for key in at[:-1]:
        parent = parent[key]
    parent[at[-1]] = "@"
    if text is None:
        del parent[at[-1]]
    path.write_text(json.dumps(found).replace('"@"', str(text)))


# each file, who reads it, and places in it with the values that are right there
JSON = {
    "meta": (
        "data/meta.json",
        losses,
        {
            ("tokenizer",): {},
            ("vocab_size",): {},
            ("source",): {"object"},
            ("val", "tokens"): {},
            ("val", "text_bytes"): {"null"},
            ("val", "sha256"): {},
            ("val",): {},
        },
    ),
    "meta, recognised": (
        "data/meta.json",
        prepares,
        {("source", "files"): {"true"}, ("source", "val_fraction"): {}},
    ),
    "settings": (
        "run/settings.json",
        losses,
        {
            ("training.seq_len",): {},
            ("tokenizer.name",): {},
            ("model_spec.model",): {},
            ("model_spec.model", "shape"): {},
            ("model_spec.model", "shape", "num_layers"): {},
            ("model_spec.model", "shape", "num_heads"): {},
            ("model_spec.model", "shape", "width"): {},
            ("model_spec.model", "shape", "block_size"): {},
            ("model_spec.model", "shape", "inverse_layer_scale"): {"true", "absent"},
        },
    ),
    "config": (
        "hf/config.json",
        imports,
        {
            ("n_layer",): {},
            ("n_head",): {},
            ("n_embd",): {},
            ("n_positions",): {},
            ("vocab_size",): {},
            ("n_inner",): {"null", "absent"},
            ("model_type",): {},
            ("activation_function",): {"absent"},
            ("layer_norm_epsilon",): {"absent"},
            ("tie_word_embeddings",): {"true", "absent"},
            ("scale_attn_by_inverse_layer_idx",): {"true", "absent"},
        },
    ),
}


@pytest.mark.parametrize("name", JSON)
def test_a_wrong_value_in_a_json_file_is_one_line(name, place):
    file, act, places = JSON[name]
    whole = (place / file).read_bytes()
    for at, right in places.items():
        for what, text in {**VALUES, "absent": None}.items():
            (place / file).write_bytes(whole)
            damage(place / file, at, text)
            code, out, err = called(*act(place))
            assert code == (0 if what in right else 2), (at, what, out, err)
            assert what in right or len(err.splitlines()) <= 2, err
            shutil.rmtree(place / "imported", ignore_errors=True)


@pytest.mark.parametrize("what", FILES)
def test_a_json_file_that_is_none_is_one_line(what, place):
    for file, act, _ in JSON.values():
        whole = (place / file).read_bytes()
        (place / file).write_bytes(FILES[what])
        assert file in refused(*act(place))
        (place / file).write_bytes(whole)


@pytest.fixture
def in_time():
    """Fails a test that waits for a FIFO."""

    def late(*_):
        raise TimeoutError("waits for what will never come")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


ODD = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/null"),
    "dead link": lambda path: path.symlink_to("/none/none"),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("what", ODD)
def test_a_json_file_that_is_no_file_is_one_line(what, place, in_time):
    for file, act, _ in JSON.values():
        whole = (place / file).read_bytes()
        (place / file).unlink()
        ODD[what](place / file)
        said = refused(*act(place))
        assert f"{file}, which is a folder, a FIFO, a device or a link to " in said
        shutil.rmtree(place / file) if what == "folder" else (place / file).unlink()
        (place / file).write_bytes(whole)


def sparse(path):
    path.touch()
    os.truncate(path, 1 << 41)


STEP = "run/checkpoint/step-4"
# each file of whatever kind, and who reads it
READ = {
    "data/meta.json": losses,
    "data/val.bin": losses,
    "run/settings.json": losses,
    f"{STEP}/.metadata": losses,
    f"{STEP}/__0_0.distcp": losses,
    f"{STEP}/SHA256SUMS": losses,
    "hf/config.json": imports,
    "hf/model.safetensors": imports,
    "hf/model.safetensors.index.json": imports,
    "hf/tokenizer.json": samples,
    "a.txt": prepares,
}
KINDS = ODD | {
    "socket": bind,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "sparse": sparse,
}


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("file", READ)
def test_whatever_lies_in_the_place_of_a_file_is_one_line(file, what, place, in_time):
    (place / file).unlink(missing_ok=True)
    KINDS[what](place / file)
    act = READ[file](place)
    if "index" in file and what == "dead link":
        assert called(*act)[0] == 0  # one file of weights, without an index
        return
    code, _, err = called(*act)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error: got ")]
    assert str((place / file).resolve()) in line or (place / file).name in line


@pytest.mark.parametrize("command", ["export", "import", "prepare"])
def test_a_link_in_the_place_of_unfinished_work_is_not_followed(command, place):
    acts = {
        "export": (export.main, "--run", place / "run", "--out", place / "out"),
        "import": (import_hf.main, "--model", place / "hf", "--out", place / "out"),
        "prepare": (*prepares(place)[:-2], place / "out", place / "a.txt"),
    }
    (place / "user").mkdir()
    (place / "user/thesis").write_text("years")
    link = place / ".out.unfinished"
    link.symlink_to("user")
    assert f"got {link}, which is a link or a file" in refused(*acts[command])
    assert (place / "user/thesis").read_text() == "years"
    link.unlink()
    assert called(*acts[command])[0] == 0


def test_an_export_copies_no_link(place):
    (place / "secret").write_text("secret")
    (place / STEP / "more.distcp").symlink_to(place / "secret")
    act = (export.main, "--run", place / "run", "--out", place / "out")
    said = refused(*act, "--training-state")
    assert "more.distcp, which is a link, expected a file" in said
    assert not (place / "out").exists()
    assert called(*act)[0] == 0


@pytest.mark.parametrize("name", ["evaluation.json", ".evaluation.json.tmp"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_an_evaluation_is_written_through_no_link(link, name, place):
    (place / "thesis").write_text("years")
    link(place / "thesis", place / "run" / name)
    through = link is os.symlink and not name.startswith(".")
    assert called(*losses(place))[0] == (2 if through else 0)
    assert (place / "thesis").read_text() == "years"


def test_a_byte_order_mark_is_no_part_of_a_json_file(place):
    for file, act, _ in JSON.values():
        whole = (place / file).read_bytes()
        (place / file).write_bytes(codecs.BOM_UTF8 + whole)
        code, _, err = called(*act(place))
        assert code == 0, err
        (place / file).write_bytes(whole)


def test_a_key_that_nobody_knows_is_one_line(place):
    path = place / "data/meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"a\nb": 1}))
    assert "a b=1 in" in refused(*losses(place))


def test_checksums_are_no_option_of_the_data(place):
    """A meta.json could say that its data was found, and nobody looked at it."""
    damage(place / "data/meta.json", ("val", "sha256"), '"sampled:"')
    with (place / "data/val.bin").open("r+b") as file:
        file.write(b"\0\0")
    assert "got val.sha256='sampled:' in" in refused(*losses(place))


def test_shards_lie_in_their_folder(place):
    digest = "0" * 64
    for name in ("../run/val.bin", "/etc/passwd", "a/b.bin", "a\0.bin", ".."):
        shards = json.dumps({name: digest})
        damage(place / "data/meta.json", ("val", "shards"), shards)
        assert "shards" in refused(*losses(place)), name


def test_what_import_noted_of_a_shape(tmp_path):
    path = tmp_path / initial.NOTE
    initial.note_shape(tmp_path, SHAPE)
    assert initial.shape_of(tmp_path, None) == SHAPE
    for text in ("{}", "[]", json.dumps(asdict(SHAPE) | {"width": 9})):
        path.write_text(text)
        with pytest.raises(UserError, match="shape.json"):
            initial.shape_of(tmp_path, None)


# ---- unfinished work of prepare ------------------------------------------------------


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """A command that was stopped after its second shard, and its folder."""
    (tmp_path / "corpus").mkdir()
    texts = pa.table({"text": [f"some text {i}" for i in range(60)]})
    pq.write_table(texts, tmp_path / "corpus/a.parquet")

    def call(source):
        return (
            *(prepare.main, "--source", source, "--dataset", tmp_path / "corpus"),
            *("--tokenizer", "bytes", "--shard-tokens", 200, "--processes", 1),
            *("--out", tmp_path / "out"),
        )

    save = Ledger.save

    def stopped(self, work):
        save(self, work)
        if len(self.shards) == 2:
            raise KeyboardInterrupt

    def begin(source):
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "save", stopped)
            assert called(*call(source))[0] == 130
        return call(source), tmp_path / ".out.unfinished"

    return begin


@pytest.mark.parametrize("source", ["openwebtext", "fineweb-edu"])
def test_ledgers_and_plans_that_were_altered(source, unfinished, tmp_path):
    act, work = unfinished(source)
    kept = shutil.copytree(work, tmp_path / "kept")
    places = {
        ("shards",): {},
        ("shards", 0, "tokens"): {},
        ("shards", 0, "sha256"): {},
        ("position",): {"null"},
        ("skip",): {},
        ("documents",): {},
        ("complete",): {},
    }
    for at in places:
        for what in ("text", "negative", "list", "infinite", "nested", "object"):
            shutil.rmtree(work)
            shutil.copytree(kept, work)
            damage(work / "ledger.json", at, VALUES[what])
            assert work.name in refused(*act) or at == ("position",)
    for text in FILES.values():
        for name in ("ledger.json", "plan.json"):
            shutil.rmtree(work)
            shutil.copytree(kept, work)
            (work / name).write_bytes(text)
            if (name, text) != ("ledger.json", b"{}"):  # which begins again
                assert work.name in refused(*act)
    shutil.rmtree(work)
    shutil.copytree(kept, work)
    assert called(*act)[0] == 0


# ---- weights -------------------------------------------------------------------------


def change(name, tensor):
    def act(folder):
        kept = load_file(folder / huggingface.WEIGHTS)
        kept[name] = tensor(kept.get(name))
        save_file(kept, folder / huggingface.WEIGHTS)

    return act


def fill(value):
    def act(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return act


WTE = "transformer.wte.weight"
WEIGHTS = {
    "integers": (change(WTE, lambda t: t.int()), "got wte.weight of torch.int32"),
    "bool": (change(WTE, lambda t: t.bool()), "got wte.weight of torch.bool"),
    "complex": (change(WTE, lambda t: t.cfloat()), "got wte.weight of torch.complex"),
    "nan": (change("transformer.ln_f.weight", fill(float("nan"))), "got ln_f.weight"),
    "inf": (change("transformer.wpe.weight", fill(float("inf"))), "got wpe.weight"),
    "beyond float32": (
        change(WTE, lambda t: t.double() + 1e300),
        "got wte.weight of torch.float64",
    ),
    "a bias that is nan": (
        change("transformer.ln_f.bias", fill(float("nan"))),
        "got ln_f.bias",
    ),
    "two names": (
        change("wte.weight", lambda t: torch.zeros(257, 8)),
        "got wte.weight twice",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_a_model_cannot_have(name, place):
    act, message = WEIGHTS[name]
    act(place / "hf")
    assert message in refused(*imports(place))
    assert not (place / "imported").exists()


def shard(folder, extra=()):
    """Put the weights into two files with an index; ``extra`` stands in both."""
    kept = load_file(folder / huggingface.WEIGHTS)
    (folder / huggingface.WEIGHTS).unlink()
    files = {name: f"{i % 2}.safetensors" for i, name in enumerate(sorted(kept))}
    for file in set(files.values()):
        mine = {n: t for n, t in kept.items() if files[n] == file or n in extra}
        save_file(mine, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / huggingface.INDEX).write_text(json.dumps(index))
    return files


def test_a_tensor_in_two_files(place):
    shard(place / "hf", extra=[WTE])
    assert "got wte.weight twice" in refused(*imports(place))


def test_an_index_names_files_beside_it(place):
    files = shard(place / "hf")
    assert called(*imports(place))[0] == 0
    shutil.copy(place / "hf/0.safetensors", place)
    first = next(name for name, file in files.items() if file == "0.safetensors")
    outside = (place / "0.safetensors").resolve()
    for text in ("../0.safetensors", str(outside), "", "x", 3, None, ["0.safetensors"]):
        broken = {"weight_map": files | {first: text}}
        (place / "hf" / huggingface.INDEX).write_text(json.dumps(broken))
        assert "weight_map" in refused(*imports(place)), text
    for text in ("{}", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'):
        (place / "hf" / huggingface.INDEX).write_text(text)
        assert huggingface.INDEX in refused(*imports(place))


@pytest.mark.parametrize("key", ["n_layer", "n_embd", "vocab_size", "n_positions"])
def test_sizes_that_nobody_could_build(key, place):
    for size in (10**12, 10**6, 1000):
        damage(place / "hf/config.json", (key,), str(size))
        refused(*imports(place))


# ---- command lines -------------------------------------------------------------------

NUMBERS = ["-1", LONG, "-" + LONG, "9" * 5000, "nan", "inf", "1e400", "x", ""]
OPTIONS = {
    "sample": (sample.main, ["--tokens", "--top-k", "--temperature", "--seed"]),
    "evaluate": (
        evaluate.main,
        ["--limit", "--num-fewshot", "--window", "--batch-size", "--step"],
    ),
    "export": (export.main, ["--step"]),
    "prepare": (prepare.main, ["--val-fraction", "--shard-tokens", "--processes"]),
    "plan": (
        plan.main,
        ["--ranks", "--replicas", "--link-gbps", "--tflops", "--memory-gbs"],
    ),
}


def base(name, made, tmp_path):
    """A command line that would do something."""
    run = ("--run", made / "run")
    return {
        "sample": run,
        "evaluate": (*run, "--loss", "--data", made / "data"),
        "export": (*run, "--out", tmp_path / "out"),
        "prepare": (*("--source", "text", "--out", tmp_path / "out", made / "a.txt"),),
        "plan": ("--config", "tiny_mars_m"),
    }[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_numbers_out_of_range(name, made, tmp_path):
    main, options = OPTIONS[name]
    usual = base(name, made, tmp_path)
    for option in options:
        for number in NUMBERS:
            said = refused(main, *usual, f"{option}={number}")
            assert option in said
    for given in ("=--", "=\udcff", "=\ud800"):
        refused(main, *usual, f"{options[0]}{given}")


@pytest.mark.parametrize("option", ["--layers", "--width", "--vocab", "--steps"])
def test_the_profiler_answers_at_once(option):
    for number in ("-1", "0", LONG, "9" * 4000, "10000000000"):
        began = time.monotonic()
        with pytest.raises((ValueError, SystemExit), match=f"got {option}|2"):
            profile.arguments([f"{option}={number}"])
        assert time.monotonic() - began < SECONDS
    with pytest.raises(ValueError, match="at most 100000: change it"):
        profile.arguments(["--layers", LONG])


def test_plans_have_a_limit():
    said = refused(plan.main, "--config", "tiny_mars_m", "--ranks", 10_000_000)
    assert "got --ranks 10000000, expected at most 8192" in said
    assert called(plan.main, "--config", "tiny_mars_m", "--ranks", 8192)[0] == 0
    for name in ("plot", "plot.abc", "", ".png/"):
        args = ("--config", "tiny_mars_m", "--sweep", "--picture", name)
        assert "--picture" in refused(plan.main, *args)


@pytest.mark.parametrize("batch", [1_000_000_001, 10**18 + 9, 2 * 3 * 10**17])
def test_large_batches_are_explained_at_once(batch):
    began = time.monotonic()
    said = [_what_divides(batch, world) for world in (1, 7, 8, 64)]
    assert time.monotonic() - began < 1
    assert all(re.search("start 1|one of 1", text) or "start" in text for text in said)


PROMPTS = {
    "empty": "",
    "a lone surrogate": "\ud800",
    "half a character": "\udcff",
}


@pytest.mark.parametrize("what", PROMPTS)
def test_prompts_that_nobody_can_continue(what, place):
    refused(*samples(place, f"--prompt={PROMPTS[what]}"))


def test_a_tokenizer_of_more_tokens_than_the_model(place):
    path = str(place / "hf/tokenizer.json")
    coder = tokenizers.Tokenizer.from_file(path)
    coder.add_tokens(["class"])
    coder.save(path)
    said = refused(*samples(place, "--prompt", "class "))
    assert "got a prompt of the token id 257, expected ids below" in said
    assert called(*samples(place, "--prompt", "a"))[0] == 0


def test_tokenizers_that_cannot_encode(place):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
    raw = {**dict.fromkeys([*names, "decoder"]), "added_tokens": [], "model": model}
    path = place / "hf/tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", **raw}))
    assert "cannot encode" in refused(*samples(place, "--prompt", "b"))
    model |= {"type": "BPE", "merges": [], "unk_token": None}
    path.write_text(json.dumps({"version": "1.0", **raw}))
    assert "got a prompt of no token" in refused(*samples(place, "--prompt", "b"))
    for text in FILES.values():
        path.write_bytes(text)
        assert "tokenizer.json" in refused(*samples(place))


def with_tokenizer(place, **parts):
    """Change a tokenizer's own parts."""
    path = place / "hf/tokenizer.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | parts))
    return samples(place, "--prompt", "aaaa")


def replaced(by, times=1):
    """A normalizer that replaces each a by a text, several times over."""
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": by}
    return {"type": "Sequence", "normalizers": [one] * times}


def test_a_tokenizer_that_makes_texts_long_is_refused(place, in_time):
    for normalizer in (replaced("a" * 64, times=12), replaced("a" * 1_000_000)):
        said = refused(*with_tokenizer(place, normalizer=normalizer))
        assert "tokenizer.json that does not read (" in said
    longer = {"type": "Prepend", "prepend": "a" * 4000}
    many = {"type": "Sequence", "normalizers": [longer, *[longer] * 3]}
    assert "times as long" in refused(*with_tokenizer(place, normalizer=many))
    assert called(*with_tokenizer(place, normalizer=replaced("a" * 3)))[0] == 0


@pytest.mark.parametrize("length", [4, 10**8, 2**31])
def test_a_tokenizer_pads_and_cuts_no_text(place, in_time, length):
    padding = dict(strategy={"Fixed": length}, direction="Left", pad_id=0)
    padding |= dict(pad_to_multiple_of=None, pad_type_id=0, pad_token="a")
    cut = dict(max_length=1, strategy="LongestFirst", direction="Right", stride=0)
    code, out, _ = called(*with_tokenizer(place, padding=padding, truncation=cut))
    assert code == 0 and out.startswith("aaaa")


def test_a_tokenizer_that_panics_is_one_line(place, capfd):
    """The library prints where in its own code it was."""
    refused(*with_tokenizer(place, pre_tokenizer=dict(type="FixedLength", length=0)))
    assert capfd.readouterr().err == ""


def test_a_million_names_of_tensors_are_not_read(place):
    head = {f"h.{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            for i in range(200_000)}  # fmt: skip
    raw = json.dumps(head).encode()
    path = place / "hf/model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert "bytes of names, expected" in refused(*imports(place))


@pytest.mark.parametrize(
    "path",
    ["", "\udcff", "x" * 5000, "a/" * 2000, "~nobody/x", "/dev/null", "a.txt"],
    ids=lambda path: ascii(path)[:12],
)
def test_paths_that_are_no_folders(path, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(made / "a.txt", tmp_path)
    model = ("--model", made / "hf")
    for main, args in (
        (sample.main, [f"--run={path}"]),
        (sample.main, [f"--model={path}"]),
        (export.main, [f"--run={path}", "--out", tmp_path / "out"]),
        (import_hf.main, [f"--model={path}", "--out", tmp_path / "out"]),
        (evaluate.main, [*model, "--loss", f"--data={path}"]),
    ):
        refused(main, *args)
    if path not in ("~nobody/x",):
        refused(import_hf.main, *model, f"--out={path}")
        refused(prepare.main, "--source=text", f"--out={path}", made / "a.txt")
    for source in ("openwebtext", "fineweb-edu"):
        options = (f"--source={source}", f"--dataset={path}", "--tokenizer=bytes")
        refused(prepare.main, *options, "--processes=1", "--out=out")


def test_folders_that_are_links(made, tmp_path):
    """One to an empty folder is that folder; one to nothing is none."""
    inner, link, dead = (tmp_path / name for name in ("inner", "link", "dead"))
    inner.mkdir()
    link.symlink_to(inner)
    dead.symlink_to(tmp_path / "none")
    imports = (import_hf.main, "--model", made / "hf", "--out")
    prepares = (prepare.main, "--source", "text", made / "a.txt", "--out")
    for act in (imports, prepares):
        for out in (dead, dead / "below"):
            said = refused(*act, out)
            assert f"got --out {out}, where {dead} is a link to nothing, ex" in said
        assert called(*act, link)[0] == 0
        assert link.is_symlink() and any(inner.iterdir())
        shutil.rmtree(inner)
        inner.mkdir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dead", "inner", "link"]
    with pytest.raises(UserError, match="got --dump-folder .*, where .* is a link to "):
        check_folder("--dump-folder", dead)


ROWS = {
    "a lone surrogate": '{"text": "\\ud800"}',
    "an infinite number": '{"text": 1e400}',
    "a huge number": '{"text": ' + "9" * 5000 + "}",
    "nested lists": '{"text": ' + "[" * 2000 + "]" * 2000 + "}",
    "no text": '{"text": null}',
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_without_a_text(what, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text(f"{ROWS[what]}\n" * 3)
    options = ("--source=openwebtext", f"--dataset={tmp_path / 'corpus'}")
    options += ("--tokenizer=bytes", "--processes=1", f"--out={tmp_path / 'out'}")
    assert "corpus" in refused(prepare.main, *options)


# ---- the reader ----------------------------------------------------------------------


def test_json_is_read_as_its_type(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(asdict(SHAPE)))
    assert read_json(path, Shape, "a shape") == SHAPE
    path.write_text(json.dumps(asdict(replace(SHAPE)) | {"more": 1}))
    with pytest.raises(UserError, match="got more=1 in .*, expected a shape"):
        read_json(path, Shape, "a shape")
    assert read_json(path, Shape, "a shape", extra="ignore") == SHAPE
    with pytest.raises(UserError, match="got no .*, expected the folder of a run"):
        settings.describe(tmp_path)
