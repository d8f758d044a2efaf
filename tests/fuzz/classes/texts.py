"""Files of text, corpora and codes: cut, of another encoding or version, too large, or another
file."""

from __future__ import annotations

import functools
import gzip
import lzma
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from fuzz.commands import Case
from fuzz.inputs import TINY, TNF


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    yield from _compressed(base)
    yield from _codes(base)
    yield from _data(base)


def _compressed(base: Path) -> Iterator[Case]:
    import zstandard

    makers = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}
    for suffix, compress in makers.items():
        good = compress(b"ax by\n" * 50)
        contents = {
            "cut": good[:-4],
            "junk behind": good + b"junk junk junk",
            "other": b"ax by\n",
            "head": good[:6],
            "damaged": good[:20] + b"\xff\xff" + good[22:],
        }
        contents["bomb"] = b""
        if suffix == "gz":
            contents["bomb of one row"] = b""
        if suffix == "zst":
            contents["window"] = zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
            ).compress(b"ax by\n" * 50)
        for kind, content in contents.items():
            name = f"text.jsonl.{suffix}" if kind == "bomb of one row" else f"text.txt.{suffix}"
            for command in (
                ("tokenize", name, "--tokenizer", "space"),
                ("eval_lm", f"{base}/data", "--path", f"{base}/lm/checkpoint_last.pt", "--cpu", "--text", name),
            ):
                yield Case(
                    f"texts {suffix} {kind} {command[0]}",
                    command,
                    (name,),
                    functools.partial(_write_compressed, name=name, content=content),
                    stdout="/dev/null",
                    is_valid=kind in ("bomb", "window") or (suffix, kind) == ("zst", "damaged"),
                )


def _write_compressed(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content or _bomb(name))


def _bomb(name: str) -> bytes:
    """Hundreds of megabytes in one stream: zeros, or one row of JSON lines."""
    import zstandard

    if name.endswith(".xz"):
        stream, size = lzma.LZMACompressor(preset=0), 100
    elif name.endswith(".zst"):
        stream, size = zstandard.ZstdCompressor(level=1).compressobj(), 400
    else:
        stream, size = zlib.compressobj(1, zlib.DEFLATED, 31), 600 if "jsonl" in name else 100
    parts = [b'{"text": "', *[b"a" * (1 << 20)] * size, b'"}'] if "jsonl" in name else [b"\0" * (1 << 20)] * size
    return b"".join(map(stream.compress, parts)) + stream.flush()


def _codes(base: Path) -> Iterator[Case]:
    contents = {
        "empty": b"",
        "binary": bytes(range(256)),
        "not UTF-8": b"#version: 0.2\na \xff\n",
        "version": b"#version: 9.9\na b\n",
        "three": b"#version: 0.2\na b c\n",
        "NUL": b"\0" * 1000,
        "line": b"a" * 1_000_000,
    }
    for kind, file in (
        ("subword_nmt", "codes"),
        ("sentencepiece", "pieces.model"),
        ("gpt2", "codes"),
        ("hf", "BPE.json"),
    ):
        good = (base / file).read_bytes()
        for name, content in {
            **contents,
            "cut": good[: len(good) // 2],
            "BOM": b"\xef\xbb\xbf" + good,
            "UTF-16": good.decode("latin-1").encode("utf-16"),
            "more": good + b"\xff" * 40,
        }.items():
            yield Case(
                f"texts codes {kind} {name}", ("tokenize", f"{base}/train.txt", "--bpe", kind, "--bpe-codes", "codes"),
                ("codes",), lambda folder, content=content: (folder / "codes").write_bytes(content), is_valid=True,
            )  # fmt: skip
    moses = ("tokenize", f"{base}/train.txt", "--tokenizer", "moses", "--moses-source-lang")
    for language in ("xx", "", "../../etc/passwd", "e\0n", "/dev/zero", "EN", "en "):
        yield Case(
            f"texts language {language!r}", (*moses, language),
            ("--moses-source-lang",),
        )  # fmt: skip


UNCHECKED = {("checksums.txt", "empty"), ("checksums.txt", "twice")}  # a file that is not listed is not checked
FILES = ("dict.txt", "notes.txt", "checksums.txt", "train.bin", "train.idx", "train.notes.bin", "train.notes.idx")


def _data(base: Path) -> Iterator[Case]:
    for file in FILES:
        good = (base / "data" / file).read_bytes()
        other = (base / "data" / ("notes.txt" if file == "dict.txt" else "dict.txt")).read_bytes()
        contents = {
            "empty": b"", "cut": good[:-3], "twice": good + good, "NUL": b"\0" * len(good), "swapped": other,
            "ones": b"\xff" * len(good), "BOM": b"\xef\xbb\xbf" + good,
            "UTF-16": good.decode("latin-1").encode("utf-16"),
            "head": b"\xff" * 24 + good[24:], "numbers": good.replace(b"1", b"-1").replace(b"2", b"9" * 5000),
        }  # fmt: skip
        commands = {
            "train": ("train", "data", *TNF, *TINY, "--no-save", "--disable-validation", "--max-update", "1"),
            "notes": ("notes", f"{base}/tnf/checkpoint_last.pt", "data"),
            "eval_lm": ("eval_lm", "data", "--path", f"{base}/lm/checkpoint_last.pt", "--cpu", "--gen-subset", "train"),
        }
        for kind, content in contents.items():
            for name, command in commands.items() if content != good else ():
                yield Case(
                    f"texts data {file} {kind} {name}", command, (file, "data", "train"),
                    lambda folder, file=file, content=content: _copy(base, folder, file, content),
                    is_valid=name != "train" or kind == "BOM" or (file, kind) in UNCHECKED,
                )  # fmt: skip


def _copy(base: Path, folder: Path, file: str, content: bytes) -> None:
    shutil.copytree(base / "data", folder / "data")
    (folder / "data" / file).write_bytes(content)
