"""Files that are small for what they would make a careless reader do: recurse, multiply, run out of
memory."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import naive_xl
import pytest
import torch
from imports import HF, SMALL, refusal, saved

from fairseq.interop.pickles import inert

TABLE = "word_emb.emb_layers.0.weight"
ITEMS = 3_000
DEEP = b")" + b"\x85" * 160_000  # a tuple in a tuple in …: to hash it recurses, beyond the stack
NESTED = DEEP[:10_000]  # the same, quick to read
DOUBLED = b")" + b"2\x86" * 60  # 2 to the power of 60 leaves
SHELL = b"cm\nM\n)\x81"  # an object of an unknown class
ORDERED, SET, PATTERN = b"ccollections\nOrderedDict\n", b"c__builtin__\nset\n", b"cre\n_compile\n"
MANY = b"".join(b"M" + struct.pack("<H", number) + b"N" for number in range(ITEMS))


def text(content: str) -> bytes:
    return b"X" + struct.pack("<I", len(content)) + content.encode()


def whole(number: int) -> bytes:
    return pickle.dumps(number, 2)[2:-1]


def storage(count: int = 4, key: bytes = text("0")) -> bytes:
    """What a pickle says of numbers outside it."""
    return b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + whole(count) + b"tQ"


def tensor(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    shape = pickle.dumps(size, 2)[2:-1] + pickle.dumps(stride, 2)[2:-1]
    return b"ctorch._utils\n_rebuild_tensor\n(" + storage() + whole(offset) + shape + b"tR"


def legacy(content: bytes, keys: bytes = b"\x80\x02]U\x010a.", numbers: bytes = b"") -> bytes:
    """A file in the format before torch 1.6."""
    head = [pickle.dumps(part, 2) for part in (inert.LEGACY_MAGIC, 1001, {})]
    return b"".join([*head, b"\x80\x02", content, b".", keys, numbers])


def state_dict(content: bytes) -> bytes:
    """A file that holds one tensor of four numbers, the table."""
    return legacy(b"}" + text(TABLE) + content + b"s", numbers=struct.pack("<q4f", 4, 1, 2, 3, 4))


def module(state: bytes) -> bytes:
    return legacy(SHELL + b"}" + state + b"b", keys=b"\x80\x02].")


def inside(name: bytes, deeper: bytes) -> bytes:
    return text("_modules") + b"}" + name + SHELL + b"}" + deeper + b"bss"


FLAT, NAME, KIND = "invalid key of a mapping", "invalid name", "invalid tensor size"
AGAIN, SHAPE, LARGER = "too many repeated copies", "invalid tensor shape", "larger than its storage"
EXHAUSTING = {
    "deep key": (b"\x80\x02}" + DEEP + b"K\x01s.", FLAT),
    "deep key of a DICT": (b"\x80\x02(" + NESTED + b"K\x01d.", FLAT),
    "deep key of an OrderedDict": (b"\x80\x02" + ORDERED + b"]" + NESTED + b"K\x01\x86a\x85R.", FLAT),
    "deep key of an object": (b"\x80\x02" + SHELL + NESTED + b"K\x01s.", FLAT),
    "deep key of numbers": (legacy(b"}", b"\x80\x02]" + NESTED + b"a."), "data without a tensor"),
    "doubled name": (b"\x80\x04" + DOUBLED + b"2\x93.", NAME),
    "long name": (b"\x80\x04" + text("a" * 10_000) + b"2\x93.", NAME),
    "doubled key of numbers": (b"\x80\x02" + storage(key=DOUBLED) + b".", KIND),
    "name that is no text": (
        module(text("_modules") + b"}K\x01" + SHELL + b"ss"),
        "the _modules of a module are damaged",
    ),
    "nameless parameter": (
        module(text("_modules") + b"}s" + text("_parameters") + b"}NK\x00ss"),
        "the _parameters of a module are damaged",
    ),
    "long name of a parameter": (
        module(inside(text("a" * 200), inside(text("a" * 200), b""))),
        "_modules of a module are damaged",
    ),
    "names of tensors": (state_dict(b"").replace(text(TABLE), b"}K\x01" + tensor(0, (4,), (1,))), "not text"),
    "parameters of two": (
        module(
            text("_parameters")
            + b"}"
            + text("a")
            + b"Nsq\x01s"
            + text("_modules")
            + b"}"
            + text("b")
            + SHELL
            + b"}"
            + text("_parameters")
            + b"h\x01sbss"
        ),
        "the _parameters of a module are damaged",
    ),
    "number of many digits": (b"\x80\x02\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20) + b".", "too large"),
    "sets of one list": (b"\x80\x02](" + b"N" * ITEMS + b"eq\x01" + (SET + b"h\x01\x85R") * ITEMS + b".", AGAIN),
    "objects of one mapping": (b"\x80\x02}(" + MANY + b"uq\x01" + (SHELL + b"h\x01b") * ITEMS + b".", AGAIN),
    "objects of one tuple": (b"\x80\x02(" + b"N" * ITEMS + b"tq\x01" + (SHELL + b"h\x01b") * ITEMS + b".", AGAIN),
    "calls of one tuple": (b"\x80\x02(" + b"N" * ITEMS + b"tq\x01" + (PATTERN + b"h\x01R") * ITEMS + b".", AGAIN),
    "numbers that are nowhere": (b"\x80\x02}" + text(TABLE) + tensor(0, (4,), (1,)) + b"s.", "tensor data truncated"),
    "count beyond 64 bits": (b"\x80\x02" + storage(1 << 63) + b".", KIND),
    "count of far more numbers": (legacy(storage(1 << 50), numbers=struct.pack("<q", 1 << 50)), "cannot be read"),
    "stride beyond 64 bits": (state_dict(tensor(0, (1,), (1 << 70,))), SHAPE),
    "size beyond 64 bits": (state_dict(tensor(0, (0, 1 << 70), (1, 1))), SHAPE),
    "offset beyond 64 bits": (state_dict(tensor(1 << 70, (0,), (1,))), SHAPE),
    "offset beyond the numbers": (state_dict(tensor(5, (0,), (1,))), LARGER),
    "too many dimensions": (state_dict(tensor(0, (1,) * 65, (1,) * 65)), SHAPE),
    "empty, but of a size that overflows": (state_dict(tensor(0, (0, 1 << 62, 1 << 62), (1, 1, 1))), ""),
    "call with a line end": (
        b"\x80\x04" + text("os\nx") + text("system\x1b[2J") + b"\x93)R.",
        "contains os x.system [2J,",
    ),
}


@pytest.mark.parametrize("kind", EXHAUSTING)
def test_exhausting_files_are_refused_for_what_they_do(kind, tmp_path):
    content, reason = EXHAUSTING[kind]
    (tmp_path / "model.pt").write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    message = refusal(tmp_path / "model.pt", *argv)
    assert reason in message and len(message) < 500 and message.isprintable()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kind, file",
    [("deep key", "vocab.pkl"), ("doubled name", "pytorch_model.bin"), ("sets of one list", "pytorch_model.bin")],
)
def test_exhausting_files_in_a_hugging_face_folder_are_refused(kind, file, tmp_path):
    content, reason = EXHAUSTING[kind]
    shutil.copytree(HF, tmp_path / "in")
    (tmp_path / "in" / file).write_bytes(content)
    message = refusal(tmp_path / "in", "--from", "hf-transfo-xl", "--out", tmp_path / "out")
    assert f"{file}: cannot be read" in message and reason in message


def test_deep_content_that_is_no_key_is_only_no_model(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"\x80\x02" + DEEP + b".")
    assert "neither tensors by name nor a saved module" in refusal(
        tmp_path / "model.pt", "--from", "transformer-xl", "--out", tmp_path / "out"
    )


@pytest.mark.parametrize("value", [b"]" + b"2\x86" * 60, b"]" + DEEP[1:], SHELL + b"}K\x00h\x01sb", DEEP])
def test_settings_of_any_size_give_a_short_complaint(value, tmp_path):
    state = text("n_layer") + value.replace(b"h\x01", DOUBLED) + b"s"
    table = b"}" + text("weight") + tensor(0, (2, 2), (2, 1)) + b"s"
    for part in ("0", "emb_layers", "word_emb"):
        table = b"}" + text(part) + SHELL + b"}" + text("_parameters" if part == "0" else "_modules") + table + b"sbs"
    content = legacy(
        SHELL + b"}" + state + text("_modules") + table + b"sb", numbers=struct.pack("<q4f", 4, 1, 2, 3, 4)
    )
    (tmp_path / "model.pt").write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({key: SMALL[key] for key in SMALL if key != "n_layer"}))
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    message = refusal(tmp_path / "model.pt", *argv)
    assert "n_layer is " in message and "it must be a whole number" in message and len(message) < 500


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"n_layer": 10**9}, "n_layer is 1000000000 in the configuration, more layers than there are tensors"),
        ({"n_head": 10**30, "d_head": 10**30}, "it must be a whole number from 1 to 2147483647"),
        ({"n_head": 10**4200}, "not valid JSON (a number of 4201 digits)"),
        ({"clamp_len": 1 << 40}, "it must be a whole number up to 2147483647"),
        ({"mem_len": 1 << 70}, "it must be a whole number from 0 to 2147483647"),
        ({"vocab_size": 1 << 31}, "it must be a whole number from 1"),
        ({"vocab_size": 10**6, "div_val": 10**9, "cutoffs": [*range(1, 10**5)]}, "a list of fewer than 64 words"),
        ({"tie_projs": [[[0] * 30] * 30] * 30}, "tie_projs is [["),
        ({"tgt_len": "x" * 10**6}, "tgt_len is 'xxx"),
    ],
)
def test_settings_beyond_all_models_are_refused_at_once(change, reason, tmp_path):
    path, _ = saved(tmp_path, SMALL)
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **change}))
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    message = refusal(path, *argv)
    assert reason in message and len(message) < 500


@pytest.mark.parametrize("key", ["model_type", "layer_norm_epsilon", "cutoffs", "eos_token_id"])
def test_hugging_face_settings_of_any_kind_give_a_short_complaint(key, tmp_path):
    shutil.copytree(HF, tmp_path / "in")
    values = {"cutoffs": 5, "eos_token_id": 10**30}
    config = json.loads((HF / "config.json").read_text())
    config |= {key: values.get(key, [[[[0] * 30] * 30] * 30]), "proj_share_all_but_first": True}
    config.pop("tie_projs", None)
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path / "in", "--from", "hf-transfo-xl", "--out", tmp_path / "out")
    assert f"{key} is " in message and len(message) < 500


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("x" * 300, torch.zeros(1), "invalid tensor name"),
        ("a\nb", torch.zeros(1), "invalid tensor name"),
        (TABLE, torch.zeros(1).expand(1 << 40, 64), "views far larger than their storage"),
        (TABLE, torch.zeros(2, 2).to_sparse(), "not a dense tensor"),
        (TABLE, torch.zeros(2, 2, dtype=torch.complex64), "not a dense tensor"),
        (TABLE, torch.zeros(2, 2, device="meta"), "not a dense tensor"),
    ],
)
def test_tensors_that_cannot_be_a_models_are_refused(name, value, reason, tmp_path):
    from fairseq.errors import UserError
    from fairseq.interop.transformer_xl.conversion import convert

    with pytest.raises(UserError, match=reason) as error:
        convert({name: value}, SMALL, "it")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_many_views_of_one_storage_are_not_multiplied(tmp_path):
    numbers = torch.zeros(100_000)
    torch.save({f"layers.{n}.x": numbers[n:] for n in range(50)} | {TABLE: numbers.view(500, 200)}, tmp_path / "x.pt")
    loaded = inert.load(tmp_path / "x.pt")
    assert len({loaded.tensor(value).untyped_storage().data_ptr() for value in loaded.root.values()}) == 1
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    assert "views far larger than their storage" in refusal(tmp_path / "x.pt", *argv)


def test_square_views_that_differ_in_their_strides_stay_apart(tmp_path):
    from fairseq.interop.transformer_xl.conversion import convert

    config = {**SMALL, "d_head": 6, "n_head": 2}
    state = naive_xl.random_state(config)
    projection = state["layers.0.dec_attn.o_net.weight"]
    state["layers.1.dec_attn.o_net.weight"] = projection.t()
    model, _ = convert(state, config)
    assert torch.equal(model["decoder.layers.0.self_attn.out_proj.weight"], projection)
    assert torch.equal(model["decoder.layers.1.self_attn.out_proj.weight"], projection.t())


def test_archive_whose_parts_overlap_is_refused(tmp_path):
    path = Path(tmp_path / "x.pt")
    torch.save({TABLE: torch.zeros(4)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        entry = archive.getinfo(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        for number in range(40):
            copy = zipfile.ZipInfo(f"x/data/{number + 1}")
            copy.file_size, copy.compress_size, copy.CRC = entry.file_size, entry.compress_size, entry.CRC
            copy.header_offset = entry.header_offset
            archive.filelist.append(copy)
        archive._didModify = True
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    argv = ["--from", "transformer-xl", "--out", tmp_path / "out", "--config", tmp_path / "config.json"]
    assert "overlapping entries" in refusal(path, *argv)
