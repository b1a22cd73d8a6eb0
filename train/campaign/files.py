"""Malformed files: JSON, token files, weights, tokenizers, texts, data sets."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from train.campaign.children import Command
from train.campaign.ground import Ground, linked, rewrite, strings
from train.campaign.json_files import Malformed, import_of, json_files

# ---- safetensors ---------------------------------------------------------------------


def _read_weights(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _weights(head: Any, body: bytes) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + body


def _of_weights(ground: Ground) -> Iterator[Malformed]:
    """Yield model.safetensors that no exporter writes."""
    path = ground.exported / "model.safetensors"
    head, body = _read_weights(path)
    size = path.stat().st_size

    def case(name: str, change: Callable[[dict, bytes], bytes]) -> Malformed:
        def make(folder: Path) -> Command:
            given = linked(ground.exported, folder / "given")
            # read again: a thousand of these do not fit into memory
            content = change(*_read_weights(path))
            rewrite(given / "model.safetensors", content)
            return import_of(given)

        return Malformed(f"model.safetensors: {name}", make, True)

    for at in (0, 4, 8, 100, size // 2, size - 1):
        yield case(f"truncated to {at} bytes", lambda h, b, n=at: _weights(h, b)[:n])
    yield case("longer", lambda h, b: _weights(h, b) + b"\0" * 8)
    for length in (0, 1, 2**31, 2**62, 2**64 - 1):
        start = struct.pack("<Q", length)
        yield case(
            f"a header of {length}", lambda h, b, s=start: s + _weights(h, b)[8:]
        )
    for what, text in (("nested", b"[" * 10_000), ("not UTF-8", b'{"\xff": 1}')):
        yield case(f"a header that is {what}", lambda h, b, t=text: _weights(t, b))
    yield case("an empty header", lambda h, b: _weights({}, b""))
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        changes: dict[str, dict] = {
            f"{name} as {dtype}": {name: entry | {"dtype": dtype}}
            for dtype in ("I32", "U32", "BOOL", "F16", "F99", 3, None)
        }
        for shape in ([], [1], entry["shape"][::-1] + [1], [-1], "x", [10**20]):
            changes[f"{name} of {shape}"] = {name: entry | {"shape": shape}}
        if len(set(entry["shape"])) > 1:
            turned = {name: entry | {"shape": entry["shape"][::-1]}}
            changes[f"{name} turned"] = turned
        changes[f"{name} twice"] = {f"{name}2": entry}
        for what, change in changes.items():
            yield case(what, lambda h, b, c=change: _weights(h | c, b))
        yield case(
            f"without {name}",
            lambda h, b, n=name: _weights({k: v for k, v in h.items() if k != n}, b),
        )
        at = entry["data_offsets"][0] + (8 if entry["data_offsets"][1] > 8 else 0)
        for value in (np.nan, np.inf, -np.inf):
            number = np.float32(value).tobytes()
            yield case(
                f"{value} in {name}",
                lambda h, b, n=number, a=at: _weights(h, b[:a] + n + b[a + 4 :]),
            )


# ---- token files ---------------------------------------------------------------------


def _of_tokens(ground: Ground) -> Iterator[Malformed]:
    """Yield token files that are not what meta.json says, or hold unknown ids."""

    def case(name: str, split: str, change: Callable[[bytes], bytes], known: bool):
        def make(folder: Path) -> Command:
            given = linked(ground.data, folder / "given")
            content = change((given / f"{split}.bin").read_bytes())
            rewrite(given / f"{split}.bin", content)
            if known:  # meta.json agrees with it
                meta = json.loads((given / "meta.json").read_text())
                meta[split]["tokens"] = len(content) // 2
                meta[split]["sha256"] = sha256(content).hexdigest()
                rewrite(given / "meta.json", json.dumps(meta).encode())
            return commands[split](given)

        return Malformed(f"{split}.bin: {name}{', known' * known}", make, True)

    commands: dict[str, Callable[[Path], Command]] = {
        "train": lambda given: ground.train(
            "run", "--dataloader.dataset-path", given, steps=1
        ),
        "val": lambda given: Command(
            "train.evaluate",
            strings("--run", ground.run, "--loss", "--data", given, "--out", "e.json"),
        ),
    }
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda raw: b"",
        "odd": lambda raw: raw[:-1],
        "one token": lambda raw: raw[:2],
    }
    for split in commands:
        for name, change in changes.items():
            yield case(name, split, change, known=False)
            yield case(name, split, change, known=True)
        for cut in (2, 1000, 20_000):
            yield case(f"{cut} bytes short", split, lambda r, n=cut: r[:-n], False)
            yield case(f"{cut} bytes longer", split, lambda r, n=cut: r + r[:n], False)
        for at in (0, 100, 5000):
            flipped = lambda r, n=at: r[:n] + bytes([r[n] ^ 1]) + r[n + 1 :]  # noqa: E731
            yield case(f"a bit at {at}", split, flipped, False)
        beyond = {257: b"\x01\x01", 300: b"\x2c\x01", 65535: b"\xff\xff"}
        for token, pair in beyond.items():
            every = lambda r, p=pair: p * (len(r) // 2)  # noqa: E731
            yield case(f"ids of {token}", split, every, True)
    yield from _of_places(ground, commands)
    yield from _of_shards(ground)


def _of_places(ground: Ground, commands: dict) -> Iterator[Malformed]:
    """Yield token files that are missing, or are no files."""

    def case(split: str, name: str, change: Callable[[Path], None]) -> Malformed:
        def make(folder: Path) -> Command:
            given = linked(ground.data, folder / "given")
            (given / name).unlink()
            change(given / name)
            return commands[split](given)

        return Malformed(f"{name} is {change.__name__}, {split}", make, True)

    def missing(path: Path) -> None: ...

    def a_folder(path: Path) -> None:
        path.mkdir()

    def a_dead_link(path: Path) -> None:
        path.symlink_to("/none/none")

    def a_circle(path: Path) -> None:
        path.symlink_to(path.name)

    def the_null_device(path: Path) -> None:
        path.symlink_to("/dev/null")

    for split in commands:
        for name in ("meta.json", f"{split}.bin"):
            for change in (missing, a_folder, a_dead_link, a_circle, the_null_device):
                if (name, change) != ("meta.json", missing):
                    yield case(split, name, change)


def _of_shards(ground: Ground) -> Iterator[Malformed]:
    """Yield shards of llm.c; evaluating stops at the model's vocabulary at last."""

    def case(name: str, split: str, content: bytes) -> Malformed:
        def make(folder: Path) -> Command:
            given = linked(ground.found, folder / "given")
            rewrite(given / f"tokens_{split}_000000.bin", content)
            words = strings("--run", ground.run, "--loss", "--data", given)
            return Command("train.evaluate", words)

        return Malformed(f"shard of {split}: {name}", make, True)

    for split in ("train", "val"):
        raw = (ground.found / f"tokens_{split}_000000.bin").read_bytes()
        for at in (0, 3, 1023, 1024, 1025, len(raw) - 1, len(raw) - 2):
            yield case(f"truncated to {at}", split, raw[:at])
        for place in (0, 4, 8):
            for value in (-1, 0, 2**31 - 1, -(2**31)):
                number = struct.pack("<i", value)
                content = raw[:place] + number + raw[place + 4 :]
                yield case(f"{value} at {place}", split, content)
        yield case(
            "ids beyond GPT-2's", split, raw[:1024] + b"\xff" * (len(raw) - 1024)
        )


# ---- texts, data sets, tokenizers ----------------------------------------------------


def _of_texts(ground: Ground) -> Iterator[Malformed]:
    texts = {
        "not UTF-8": b"abc\xff\xfe",
        "UTF-16": "abc".encode("utf-16"),
        "empty": b"",
        "a truncated letter": "ü".encode()[:1],
        "a surrogate": b"\xed\xa0\x80",
        "one letter": b"x",
    }

    def case(name: str, content: bytes) -> Malformed:
        def make(folder: Path) -> Command:
            (folder / "text").write_bytes(content)
            options = ("--source", "text", "--out", "data", folder / "text")
            return Command("train.prepare", strings(*options))

        return Malformed(f"text: {name}", make, True)

    for name, content in texts.items():
        yield case(name, content)

    def corpus(name: str, file: str, content: bytes) -> Malformed:
        def make(folder: Path) -> Command:
            (folder / "texts").mkdir()
            (folder / "texts" / file).write_bytes(content)
            return ground.prepare_texts(folder / "texts", folder / "tokens")

        return Malformed(f"data set: {name}", make, True)

    lines = {
        "empty": b"",
        "another column": b'{"words": "a"}\n',
        "numbers": b'{"text": 1}\n' * 50,
        "nulls": b'{"text": "a"}\n{"text": null}\n',
        "lists": b'{"text": ["a"]}\n',
        "no JSON": b"abc\n",
        "not UTF-8": b'{"text": "\xff"}\n',
        "truncated": b'{"text": "abc"}\n{"te',
        "nested": b'{"text":' * 10_000 + b"\n",
        "a lone surrogate": b'{"text": "\\ud800"}\n' * 50,
        "mixed": b'{"text": "a"}\n{"text": 3}\n',
        "one document": b'{"text": "a"}\n',
    }
    for name, content in lines.items():
        yield corpus(f"JSON lines, {name}", "train.jsonl", content)
    for name, content in {
        "empty": b"",
        "garbage": b"PAR1" + b"\xff" * 100 + b"PAR1",
        "text": b"abc",
    }.items():
        yield corpus(f"parquet, {name}", "train.parquet", content)
        yield corpus(f"arrow, {name}", "train.arrow", content)
    yield corpus("of another kind", "train.xyz", b"abc")

    coders = {
        "empty": b"",
        "an object": b"{}",
        "nested": b"[" * 100_000,
        "not UTF-8": b"\xff",
        "a model that is unknown": b'{"version": "1.0", "model": {"type": "X"}}',
        "no vocabulary": b'{"version": "1.0", "model": {"type": "BPE"}}',
        "empty vocabulary": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, '
        b'"merges": []}, "added_tokens": []}',
        "ids beyond the model's": b'{"version": "1.0", "model": {"type": "WordLevel", '
        b'"vocab": {"[UNK]": 99999}, "unk_token": "[UNK]"}, "added_tokens": []}',
    }

    def coder(name: str, content: bytes) -> Malformed:
        def make(folder: Path) -> Command:
            given = linked(ground.exported, folder / "given")
            rewrite(given / "tokenizer.json", content)
            words = strings("--model", given, "--tokens", 3)
            return Command("train.sample", words)

        return Malformed(f"tokenizer.json: {name}", make, True)

    for name, content in coders.items():
        yield coder(name, content)


def malformed(ground: Ground, draw: random.Random) -> list[Malformed]:
    """Return malformed files in an order of the seed: the kinds by turns, so that any
    number of them has some of each.
    """
    kinds: dict[str, list[Malformed]] = {}
    for family in (json_files, _of_weights, _of_tokens, _of_texts):
        for found in family(ground):
            kinds.setdefault(found.name.partition(":")[0], []).append(found)
    listed = []
    for found in kinds.values():
        draw.shuffle(found)
    while kinds:
        for name in list(kinds):
            listed.append(kinds[name].pop())
            if not kinds[name]:
                del kinds[name]
    return listed
