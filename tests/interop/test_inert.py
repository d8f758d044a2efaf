"""Pickled modules are read as data: right where they are whole, refused where they are hostile,
never run."""

from __future__ import annotations

import builtins
import os
import pickle
import shutil
import struct
import sys
import types
from collections import OrderedDict
from pathlib import Path

import naive_xl
import numpy as np
import pytest
import torch
from imports import AUTHORS, HF, SHAPES, SMALL, authors, refusal, saved
from torch import nn

from fairseq import checkpoint
from fairseq.interop.pickles import inert


def module_like(config: dict, state: dict) -> nn.Module:
    """A module with the attributes and parameters of the authors', its classes named as theirs
    are."""
    foreign = types.ModuleType("mem_transformer")
    shell = type("MemTransformerLM", (nn.Module,), {"__module__": "mem_transformer"})
    foreign.MemTransformerLM = shell  # type: ignore[attr-defined]
    sys.modules["mem_transformer"] = foreign
    root = shell()
    parameters: dict[int, nn.Parameter] = {}
    for name, value in state.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, shell())
            module = module._modules[part]
        module.register_parameter(last, parameters.setdefault(id(value), nn.Parameter(value)))
    for key in (
        "n_layer",
        "n_head",
        "d_model",
        "d_head",
        "tgt_len",
        "mem_len",
        "attn_type",
        "same_length",
        "clamp_len",
    ):
        setattr(root, key, config[key])
    root.n_token, root.d_embed = config["vocab_size"], config.get("d_embed", config["d_model"])
    root.word_emb.div_val, root.word_emb.cutoffs = config["div_val"], [*config["cutoffs"], config["vocab_size"]]
    for layer in root.layers.children():
        layer.pos_ff.d_inner, layer.dec_attn.pre_lnorm = config["d_inner"], config["pre_lnorm"]
        layer.dec_attn.drop, layer.dec_attn.dropatt = nn.Dropout(0.1), nn.Dropout(0.2)
    return root


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("shape", ["narrow, one projection, mixed ties", "narrow, bands of their own"])
def test_modules_in_either_format_are_read_without_their_classes(zipped, shape, tmp_path, monkeypatch):
    config = {**SMALL, **SHAPES[shape]}
    state = naive_xl.random_state(config)
    module = module_like(config, state)
    torch.save(module, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    monkeypatch.delitem(sys.modules, "mem_transformer")
    found = checkpoint.load(authors(tmp_path / "model.pt", tmp_path / "a") / "checkpoint.pt")
    path, _ = saved(tmp_path, config, state)
    wanted = checkpoint.load(authors(path, tmp_path / "b", "--config", tmp_path / "config.json") / "checkpoint.pt")
    assert found["args"] == {**wanted["args"], "dropout": 0.1, "dropatt": 0.2}
    assert all(torch.equal(found["model"][name], wanted["model"][name]) for name in wanted["model"])
    assert "mem_transformer" not in sys.modules


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_every_kind_are_what_was_saved(zipped, tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {"whole": base, "transposed": base.t(), "rows": base[1:3], "columns": base[:, ::2], "empty": base[:0]}
    tensors |= {str(kind): base.to(kind) for kind in (torch.float16, torch.bfloat16, torch.float64, torch.int64)}
    tensors |= {"bool": base > 3, "scalar": torch.tensor(7), "parameter": nn.Parameter(base)}
    torch.save(tensors, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    loaded = inert.load(tmp_path / "x.pt")
    for name, tensor in tensors.items():
        found = loaded.tensor(loaded.root[name])
        assert found.dtype == tensor.dtype and torch.equal(found, tensor.detach())
    shared = {loaded.root[name].storage for name in ("whole", "transposed", "rows", "columns", "parameter")}
    assert len(shared) == 1


class Call:
    """Pickled, it is a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


def hostile_objects(canary: Path) -> dict[str, object]:
    command = f"touch {canary}"
    code = f"__import__('os').system({command!r})"
    return {
        "os.system": Call(os.system, command),
        "eval": Call(builtins.eval, code),
        "exec": Call(builtins.exec, code),
        "getattr": Call(getattr, Call(builtins.__import__, "os"), "system"),
        "import": Call(builtins.__import__, "os"),
        "nested": {"layers": [Call(OrderedDict, [("weight", Call(os.system, command))])]},
        "argument": Call(OrderedDict, Call(os.system, command)),
        "in a tensor": Call(torch._utils._rebuild_parameter, Call(os.system, command), True, OrderedDict()),
        "load": Call(pickle.loads, pickle.dumps(Call(os.system, command))),
    }


def hostile_instructions(canary: Path) -> dict[str, bytes]:
    command = f"touch {canary}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    return {
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + text + b"o.",
        "NEWOBJ of a call": b"\x80\x02cos\nsystem\n" + text + b"\x85\x81.",
        "BUILD on a class": b"\x80\x02cbuiltins\ndict\n}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsb" + text + b"b.",
        "EXT1": b"\x80\x02\x82\x01.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "PERSID": b"P" + command + b"\n.",
    }


def hostile_file(path: Path, kind: str, canary: Path) -> None:
    objects, instructions = hostile_objects(canary), hostile_instructions(canary)
    if kind in instructions:
        path.write_bytes(instructions[kind])
    elif kind in objects:
        torch.save(objects[kind], path)


HOSTILE = [*hostile_objects(Path("x")), *hostile_instructions(Path("x"))]


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_of_the_authors_are_refused_and_nothing_is_run(kind, tmp_path):
    path, canary, out = tmp_path / "model.pt", tmp_path / "canary", tmp_path / "out"
    hostile_file(path, kind, canary)
    message = refusal(path, "--from", "transformer-xl", "--out", out)
    assert message.startswith(f"{path}: ") and not canary.exists() and not out.exists()


@pytest.mark.parametrize("kind", ["os.system", "eval", "getattr", "nested", "argument", "in a tensor", "STACK_GLOBAL"])
def test_refusal_names_what_a_hostile_file_asks_for(kind, tmp_path):
    hostile_file(tmp_path / "model.pt", kind, tmp_path / "canary")
    others = {"eval": "__builtin__.eval", "getattr": "__builtin__.__import__"}
    wanted = others.get(kind, f"{os.system.__module__}.system")
    wanted = "os.system" if kind == "STACK_GLOBAL" else wanted
    message = refusal(tmp_path / "model.pt", "--from", "transformer-xl", "--out", tmp_path / "out")
    assert f"rejected: the pickle contains {wanted}, " in message and "nothing was executed" in message


@pytest.mark.parametrize("place", ["hook", "attribute", "parameter"])
def test_hostile_object_inside_a_real_module_is_refused(place, tmp_path, monkeypatch):
    module = module_like(SMALL, naive_xl.random_state(SMALL))
    call = Call(os.system, f"touch {tmp_path / 'canary'}")
    {"hook": module._forward_hooks, "attribute": module.__dict__, "parameter": module._parameters}[place]["x"] = call
    torch.save(module, tmp_path / "model.pt")
    monkeypatch.delitem(sys.modules, "mem_transformer")
    assert "rejected" in refusal(tmp_path / "model.pt", "--from", "transformer-xl", "--out", tmp_path / "out")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", ["os.system", "INST"])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "vocab.pkl", "model.safetensors"])
def test_hostile_files_in_a_hugging_face_folder_are_refused_and_nothing_is_run(kind, file, tmp_path):
    shutil.copytree(HF, tmp_path / "in")
    hostile_file(tmp_path / "in" / file, kind, tmp_path / "canary")
    message = refusal(tmp_path / "in", "--from", "hf-transfo-xl", "--out", tmp_path / "out")
    assert file in message and not (tmp_path / "canary").exists() and not (tmp_path / "out").exists()


def test_damaged_files_are_refused_wherever_the_damage_is(tmp_path):
    module, legacy = (AUTHORS / "adaptive_div1.model.pt").read_bytes(), tmp_path / "legacy.pt"
    torch.save(naive_xl.random_state(SMALL), legacy, _use_new_zipfile_serialization=False)
    for whole in (module, legacy.read_bytes()):
        for length in np.linspace(0, len(whole) - 1, 40).astype(int):
            (tmp_path / "cut.pt").write_bytes(whole[:length])
            message = refusal(
                tmp_path / "cut.pt",
                "--from",
                "transformer-xl",
                "--out",
                tmp_path / "out",
                "--config",
                AUTHORS / "base.json",
            )
            assert message.startswith(f"{tmp_path / 'cut.pt'}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(("items", "reason"), [(4, "invalid tensor"), (0, "tensor without data")])
def test_tensor_that_claims_more_than_is_stored_is_refused(items, reason, tmp_path):
    class Greedy:
        def __reduce__(self) -> tuple:
            storage = torch.zeros(items).storage() if items else None
            return torch._utils._rebuild_tensor_v2, (storage, 3, (2,), (1,), False, OrderedDict())

    torch.save({"word_emb.emb_layers.0.weight": Greedy()}, tmp_path / "x.pt")
    config = ["--config", AUTHORS / "base.json"]
    message = refusal(tmp_path / "x.pt", "--from", "transformer-xl", "--out", tmp_path / "o", *config)
    assert reason in message
