"""What scripts written for fairseq use beside runs: averages, pieces of texts, checks of splits,
text as stdin."""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from torch import nn

from fairseq.config import options
from fairseq.data import Dictionary, MonolingualDataset
from fairseq.data.data_utils import raise_if_valid_subsets_unintentionally_ignored
from fairseq.distributed import ModuleProxyWrapper
from fairseq.file_chunker_utils import Chunker, find_offsets
from fairseq.file_io import PathManager
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq_cli import interactive
from scripts.average_checkpoints import average_checkpoints


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
    cfg = {"model": Namespace(arch="a"), "task": None}
    torch.save({"model": values, "args": Namespace(b=2), "cfg": cfg}, tmp_path / "1.pt")
    found = average_checkpoints(paths)
    assert (found["args"], found["cfg"]) == (Namespace(b=2), cfg)
    torch.save(found, tmp_path / "average.pt")
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


def test_context_is_what_the_rows_before_held() -> None:
    words = Dictionary()
    for word in range(30):
        words.add_symbol(f"w{word}")
    rows = [torch.arange(4, 9), torch.arange(9, 14), torch.arange(14, 17)]
    task = LanguageModelingTask(LanguageModelingConfig(data="unused", tokens_per_sample=5), words)
    batches = list(task.eval_lm_dataloader(MonolingualDataset(rows, [5, 5, 3], words), batch_size=2, context_window=7))
    sources = [row[row != 1].tolist() for batch in batches for row in batch["net_input"]["src_tokens"]]
    targets = [row[row != 1].tolist() for batch in batches for row in batch["target"]]
    # At most 12 tokens a row, of which up to 7 are context.
    assert sources == [list(range(4, 9)), list(range(4, 14)), list(range(7, 17))]
    assert targets == [row.tolist() for row in rows]
    assert [start for batch in batches for start in batch["start_indices"]] == [0, 5, 7]


def test_a_wrapped_module_has_the_names_of_the_module() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    inner: Any = nn.Linear(2, 3)
    inner.note = "here"
    outer: Any = ModuleProxyWrapper(Wrapper(inner))
    assert outer.note == "here" and outer.state_dict().keys() == {"weight", "bias"}
    outer.load_state_dict({"weight": torch.ones(3, 2), "bias": torch.zeros(3)})
    assert outer(torch.ones(2)).tolist() == [2, 2, 2]
    with pytest.raises(AttributeError, match="absent"):
        outer.absent  # noqa: B018


def test_interactive_reads_a_text_that_a_script_puts_in_place_of_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(runs.DATA), "--path", str(runs.GOLDEN / "baseline.pt"), "--cpu", "--max-len-b", "4"]
    args = options.parse_args_and_arch(interactive.get_interactive_generation_parser(), words)
    args.batch_size = None
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    interactive.main(args)
    assert capsys.readouterr().out.strip()
