"""What scripts written for fairseq use beside runs: averages, pieces of texts, checks of splits, text as stdin."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
import torch
from fairseq.data.data_utils import raise_if_valid_subsets_unintentionally_ignored
from fairseq.file_chunker_utils import Chunker, find_offsets
from fairseq.file_io import PathManager
from fairseq.models.ema import EMA
from torch import nn

from fairseq.config import options
from fairseq_cli import interactive
from scripts.average_checkpoints import average_checkpoints


def ema_config(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(**{"ema_decay": 0.9, "ema_start_update": 0, "ema_fp32": False, **settings})


@pytest.mark.parametrize("fp32", [False, True])
def test_an_average_is_that_of_its_formula_and_whole_numbers_are_copied(fp32: bool) -> None:
    model = nn.BatchNorm1d(3)
    average = EMA(model, ema_config(ema_fp32=fp32))
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.num_batches_tracked.fill_(7)
    for _ in range(2):
        average.step(model)
    found = average.get_model().state_dict()
    torch.testing.assert_close(found["weight"], torch.full((3,), 0.81 * 1.0 + 0.19 * 2.0))
    assert found["num_batches_tracked"] == 7
    assert set(average.fp32_params) == ({"weight", "bias", "running_mean", "running_var"} if fp32 else set())
    torch.testing.assert_close(average.reverse(nn.BatchNorm1d(3)).weight, found["weight"])


def test_an_average_starts_at_its_update_and_skips_what_it_is_told() -> None:
    model = nn.Linear(2, 1)
    average = EMA(model, ema_config(ema_start_update=5), skip_keys=["bias"])
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1.0
        model.bias += 1.0
    average.step(model, updates=5)
    torch.testing.assert_close(average.get_model().weight, before + 0.1)
    torch.testing.assert_close(average.get_model().bias, model.bias.detach())
    average.step(model, updates=4)
    assert average.get_decay() == 0 and torch.equal(average.get_model().weight, model.weight.detach())


@pytest.mark.parametrize("pieces", [1, 3, 7, 40])
def test_pieces_of_a_text_have_each_line_once(tmp_path: Path, pieces: int) -> None:
    lines = [f"line {number} {'ü' * (number % 5)}\n" for number in range(20)]
    (tmp_path / "text").write_text("".join(lines), encoding="utf-8")
    offsets = find_offsets(tmp_path / "text", pieces)
    found = []
    for start, end in zip(offsets, offsets[1:], strict=False):
        with Chunker(tmp_path / "text", start, end) as chunk:
            found += list(chunk)
    assert len(offsets) == pieces + 1 and found == lines
    with Chunker(tmp_path / "text", 0, -1) as chunk:
        assert list(chunk) == lines


def test_files_are_those_of_this_machine(tmp_path: Path) -> None:
    with PathManager.opena(tmp_path / "a", "w") as file:
        file.write("text")
    assert PathManager.async_close() and PathManager.supports_rename(tmp_path / "a")
    PathManager.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "text"


def test_the_mean_of_checkpoints_is_rounded_down_for_whole_numbers(tmp_path: Path) -> None:
    for number in (1, 4):
        values = {
            "w": torch.tensor([1.0 * number]),
            "h": torch.tensor([0.5 * number]).half(),
            "n": torch.tensor(number),
        }
        torch.save({"model": values, "args": number}, tmp_path / f"{number}.pt")
    paths = [str(tmp_path / f"{number}.pt") for number in (1, 4)]
    found = average_checkpoints(paths)
    assert (float(found["model"]["w"]), float(found["model"]["h"]), int(found["model"]["n"])) == (2.5, 1.25, 2)
    assert found["args"] == 1
    torch.save({"model": {"other": torch.ones(1)}}, tmp_path / "4.pt")
    with pytest.raises(Exception, match=r"4\.pt: has other parameters than .*1\.pt"):
        average_checkpoints(paths)


@pytest.mark.parametrize(
    ("there", "settings", "unread"),
    [
        (["valid"], {}, False),
        (["valid", "valid1"], {}, True),
        (["valid", "valid1"], {"valid_subset": "valid,valid1"}, False),
        (["valid", "valid1"], {"combine_valid_subsets": True}, False),
        (["valid", "valid1"], {"ignore_unused_valid_subsets": True}, False),
        (["valid", "valid1"], {"disable_validation": True}, False),
    ],
)
def test_splits_that_would_not_be_read_are_an_error(
    tmp_path: Path, there: list[str], settings: dict[str, object], unread: bool
) -> None:
    for name in there:
        (tmp_path / f"{name}.bin").touch()
    switches = dict.fromkeys(("combine_valid_subsets", "ignore_unused_valid_subsets", "disable_validation"), False)
    dataset = SimpleNamespace(**{"valid_subset": "valid", **switches, **settings})
    config = SimpleNamespace(dataset=dataset, task=SimpleNamespace(data=str(tmp_path)))
    if unread:
        with pytest.raises(ValueError, match="valid1"):
            raise_if_valid_subsets_unintentionally_ignored(config)
    else:
        raise_if_valid_subsets_unintentionally_ignored(config)


def test_interactive_reads_a_text_that_a_script_puts_in_place_of_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs.DATA), "--path", str(runs.GOLDEN / "baseline.pt"), "--cpu", "--max-len-b", "4"]
    args = options.parse_args_and_arch(interactive.get_interactive_generation_parser(), words)
    args.batch_size = None
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    interactive.main(args)
    assert capsys.readouterr().out.strip()
