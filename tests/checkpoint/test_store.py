"""One file: copies of tensors, what is read however it was saved, and one-line reasons why a file
is not."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq.checkpoint import describe_mismatch, load, read, save
from fairseq.checkpoint.store import copied
from fairseq.distributed.tensor_part import TensorPart
from fairseq.errors import UserError
from fairseq.modules import devices

MODEL = {"w": torch.arange(4.0)}
WHOLE = {"args": {"arch": "a"}, "model": MODEL}


def rejection(path: Path) -> str:
    with pytest.raises(UserError) as error:
        load(path)
    return str(error.value)


def stored(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


# Copies


def test_a_copy_shares_no_memory_and_tied_tensors_are_copied_once() -> None:
    once = torch.ones(2, requires_grad=True)
    part = TensorPart(torch.ones(2), 1, torch.Size([4]))
    tree = {"a": once, "b": [once, {"c": part}, part], "n": 3, "t": (once,), "none": None}
    found = copied(tree)
    assert found.keys() == tree.keys() and found["n"] == 3 and found["none"] is None
    assert found["a"] is found["b"][0] and found["b"][1]["c"] is found["b"][2]
    assert torch.equal(found["a"], once) and not found["a"].requires_grad
    assert found["a"].data_ptr() != once.data_ptr()
    copy = found["b"][2]
    assert isinstance(copy, TensorPart) and (copy.first, copy.shape) == (1, (4,))
    assert torch.equal(copy.local, part.local) and copy.local.data_ptr() != part.local.data_ptr()


def test_tensors_of_the_host_are_the_same_where_no_copy_is_asked_for() -> None:
    part = TensorPart(torch.ones(2, requires_grad=True), 0, torch.Size([2]))
    tree = {"a": torch.ones(2), "b": [part]}
    found = copied(tree, again=False)
    assert found["a"].data_ptr() == tree["a"].data_ptr() and found is not tree
    assert found["b"][0].local.data_ptr() == part.local.data_ptr() and not found["b"][0].local.requires_grad


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a device; a copy to the host is a plain one."""

    device = torch.device("cuda:0")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def to(self, *target: Any, **settings: Any) -> torch.Tensor:
        return self.cpu() if "cpu" in target else super().to(*target, **settings)


def test_tensors_of_a_device_are_saved_as_host_tensors_and_tied_ones_once(tmp_path: Path) -> None:
    matrix = torch.arange(10_000.0).view(100, 100)
    one = matrix.clone().as_subclass(OnDevice)
    model = {"w": one, "tied": one, "turned": one.t(), "rows": one[3:5], "host": matrix}
    save(tmp_path / "c.pt", {**WHOLE, "model": model, "extra_state": {"memory": [one, {"x": one[0]}]}})
    state = load(tmp_path / "c.pt")
    assert state["model"]["w"].data_ptr() == state["model"]["tied"].data_ptr()
    expected = {"w": matrix, "tied": matrix, "turned": matrix.t(), "rows": matrix[3:5], "host": matrix}
    for name, value in expected.items():
        assert type(state["model"][name]) is torch.Tensor and torch.equal(state["model"][name], value)
    memory = state["extra_state"]["memory"]
    assert torch.equal(memory[0], matrix) and torch.equal(memory[1]["x"], matrix[0])


def test_the_optimizers_state_is_not_copied_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(torch, "save", lambda state, file: written.append(state))
    optimizer = {"state": {0: {"exp_avg": torch.ones(2).as_subclass(OnDevice)}}}
    save(tmp_path / "c.pt", {"model": {"w": torch.ones(2).as_subclass(OnDevice)}, "last_optimizer_state": optimizer})
    assert type(written[0]["model"]["w"]) is torch.Tensor
    assert written[0]["last_optimizer_state"] is optimizer


@pytest.mark.parametrize("again", [True, False])
def test_copies_of_tensors_of_a_device_are_on_the_host(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for a save in the background are in pinned memory, and waited for once."""
    pinned, waits = [], []

    def host(tensor: Any, *, device: str, pin_memory: bool) -> torch.Tensor:
        pinned.append((device, pin_memory))
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(torch, "empty_like", host)
    monkeypatch.setattr(devices, "synchronize", waits.append)
    value, other = (torch.ones(2).as_subclass(OnDevice) for _ in range(2))
    found = copied({"w": value, "part": TensorPart(other, 0, torch.Size([4]))}, again=again)
    assert torch.equal(found["w"], torch.ones(2)) and torch.equal(found["part"].local, torch.ones(2))
    assert again or type(found["w"]) is type(found["part"].local) is torch.Tensor
    assert pinned == [("cpu", True)] * 2 * again and waits == [OnDevice.device] * again


# Reading


def test_tied_and_overlapping_tensors_are_saved_once(tmp_path: Path) -> None:
    matrix = torch.ones(1000, 10)
    save(tmp_path / "c.pt", {**WHOLE, "model": {"w": matrix, "tied": matrix}, "extra_state": {"memory": [matrix[5:9]]}})
    assert (tmp_path / "c.pt").stat().st_size < 50_000
    model = load(tmp_path / "c.pt")["model"]
    assert model["w"].data_ptr() == model["tied"].data_ptr()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_files_of_the_zip_format_are_mapped_into_memory(tmp_path: Path) -> None:
    for zipped in (True, False):
        path = tmp_path / f"{zipped}.pt"
        torch.save(WHOLE, path, _use_new_zipfile_serialization=zipped)
        state = load(path)
        assert (str(path) in Path("/proc/self/maps").read_text()) == zipped
        assert torch.equal(state["model"]["w"], MODEL["w"])


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_a_gpu_are_read_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    torch.save(WHOLE, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    monkeypatch.undo()
    for found in (load(tmp_path / "c.pt"), read(tmp_path / "c.pt")):
        assert found["model"]["w"].device.type == "cpu" and torch.equal(found["model"]["w"], MODEL["w"])


def test_pickles_of_another_protocol_are_read_without_a_warning(tmp_path: Path) -> None:
    torch.save(WHOLE, tmp_path / "c.pt", pickle_protocol=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(read(tmp_path / "c.pt")["model"]["w"], MODEL["w"])


def test_no_environment_lets_a_checkpoint_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "canary",)

    path = stored(tmp_path / "c.pt", {**WHOLE, "x": Call()})
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert "rejected: the pickle contains" in rejection(path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("settings", [{"args": {}}, {"args": Namespace(a=1)}, {"cfg": {}}, {"args": None, "cfg": {}}])
def test_a_checkpoint_has_settings_under_either_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert load(stored(tmp_path / "c.pt", {"model": MODEL, **settings}))["model"].keys() == {"w"}


NO_MODEL = "not a checkpoint (it holds no 'model'); give a file that training saved"
NO_ARGS = "not a checkpoint (it holds no 'args'); give a file that training saved"


@pytest.mark.parametrize(
    "state, message",
    [
        *((state, NO_MODEL) for state in ([1], {"args": {}}, {"args": {}, "model": [1]}, torch.ones(1))),
        ({"args": {}, "model": {"w": torch.ones(1), "v": 3}}, NO_MODEL),
        ({"args": {}, "model": {"w": torch.ones(1), 5: torch.ones(1)}}, NO_MODEL),
        *(
            ({"model": MODEL, **more}, NO_ARGS)
            for more in ({}, {"args": 3}, {"args": None}, {"cfg": "text"}, {"xx": {}})
        ),
    ],
)
def test_what_is_no_checkpoint_is_rejected_with_what_it_lacks(tmp_path: Path, state: Any, message: str) -> None:
    path = stored(tmp_path / "c.pt", state)
    assert rejection(path) == f"{path}: {message}"


# Reasons


def test_a_foreign_global_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
    assert rejection(path) == (
        f"{path}: rejected: the pickle contains os.system, which checkpoints do not need and which could run code; "
        "nothing was executed; use a checkpoint from a source you trust"
    )


# Mismatches


def sizes(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_a_mismatch_lists_up_to_three_names_of_each_kind() -> None:
    wanted = sizes(a=(1,), b=(2, 3), c=(1,))
    ending = "; use the `arch` and sizes it was trained with"
    start = "c.pt: does not fit this model: parameters "
    assert describe_mismatch(sizes(b=(2, 3)), wanted, "c.pt") == f"{start}2 missing (a, c){ending}"
    assert describe_mismatch({}, wanted, "c.pt") == f"{start}3 missing (a, b, c){ending}"
    assert describe_mismatch({}, {**wanted, **sizes(d=(1,))}, "c.pt") == f"{start}4 missing (a, b, c, …){ending}"
    found = {**sizes(a=(1,), b=(3, 2), x=(1,)), "c": torch.ones(1).long()}
    assert describe_mismatch(found, wanted, "c.pt") == (
        f"{start}1 unexpected (x), 1 of another shape (b [3, 2] for [2, 3]), 1 of another type (c torch.int64){ending}"
    )


def test_parts_of_a_tensor_fit_as_the_whole_does() -> None:
    wanted = sizes(w=(4, 2))
    part = TensorPart(torch.zeros(1, 2), 3, torch.Size([4, 2]))
    assert describe_mismatch({"w": part}, wanted, "c.pt") is None
    whole = TensorPart(torch.zeros(4, 2).long(), 0, torch.Size([4, 2]))
    assert "1 of another type (w torch.int64)" in str(describe_mismatch({"w": whole}, wanted, "c.pt"))


def test_numbers_of_a_buffer_do_not_fit_whole_numbers() -> None:
    wanted = {"n": torch.zeros(2).long()}
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert "1 of another type" in str(describe_mismatch({"n": torch.zeros(2).to(kind)}, wanted, "c.pt"))
    assert describe_mismatch({"n": torch.zeros(2).int()}, wanted, "c.pt") is None
