"""Progress bars: what is shown, when, and at what cost."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
import runs
import torch

from fairseq.errors import UserError
from fairseq.logging.progress import progress_bar

STATS = {"loss": 7.123456789012345, "ppl": 139.43, "wps": 3812.7, "num_updates": 4, "lr": 1e-07, "gnorm": 1.5}


def json_bar(items=range(10), **settings):
    stream = io.StringIO()
    return progress_bar(items, log_format="json", stream=stream, **settings), stream


def lines(stream):
    return runs.records(stream.getvalue())


def test_json_has_fairseqs_fields_in_order_with_every_digit():
    bar, stream = json_bar(log_interval=2, epoch=3)
    for step, _ in enumerate(bar, start=1):
        bar.log({**STATS, "num_updates": step}, step=step)
    found = lines(stream)
    assert [entry["num_updates"] for entry in found] == [2, 4, 6, 8, 10]
    assert list(found[0]) == ["epoch", "update", *STATS]
    assert found[1] == {"epoch": 3, "update": 2.4, **STATS, "num_updates": 4}


def test_json_summaries_carry_the_tag_in_every_name_but_the_epochs():
    bar, stream = json_bar(epoch=3)
    bar.print(STATS, tag="valid")
    bar.print(STATS)
    assert lines(stream) == [{"epoch": 3, **{f"valid_{k}": v for k, v in STATS.items()}}, {"epoch": 3, **STATS}]


def test_json_goes_to_stdout(capsys):
    progress_bar([], log_format="json").print({"loss": 1.5}, tag="train")
    assert runs.records(capsys.readouterr().out) == [{"train_loss": 1.5}]


def test_json_takes_tensors_and_numpy_numbers_and_is_json_for_what_is_no_number():
    bar, stream = json_bar()
    bar.print({"a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.int64(3), "d": float("nan"), "e": torch.inf})
    assert lines(stream) == [{"a": 0.5, "b": 0.25, "c": 3, "d": None, "e": None}]


@pytest.mark.parametrize("log_format", ["tqdm", "simple", "json", "none"])
def test_figures_are_computed_only_when_they_are_shown(log_format):
    asked = []

    def stats(step):
        asked.append(step)
        return {"loss": 1.0}

    bar = progress_bar(range(100), log_format=log_format, log_interval=25, stream=io.StringIO())
    for step, _ in enumerate(bar, start=201):
        bar.log(lambda step=step: stats(step), step=step)
    assert asked == [225, 250, 275, 300]


def test_a_resumed_epoch_is_counted_from_where_it_stands():
    class Resumed(list):
        iterations_in_epoch = 4

    bar, stream = json_bar(Resumed("abcdef"), log_interval=1, epoch=2, total=10)
    for _ in bar:
        bar.log({"loss": 1.0})
    assert [entry["update"] for entry in lines(stream)] == [1.5, 1.6, 1.7, 1.8, 1.9, 2.0]
    assert len(bar) == 10


def test_a_bar_gives_all_the_items():
    for log_format in ("tqdm", "simple", "json", "none"):
        bar = progress_bar(iter("abc"), log_format=log_format, stream=io.StringIO())
        assert list(bar) == ["a", "b", "c"]


def test_simple_lines_are_short():
    stream = io.StringIO()
    bar = progress_bar(range(10), log_format="simple", log_interval=5, epoch=1, stream=stream)
    for step, _ in enumerate(bar, start=1):
        bar.log(STATS, step=step)
    bar.print(STATS, tag="train")
    first, _, last = stream.getvalue().splitlines()
    assert last[19:].startswith(" | INFO | train | epoch")
    last = last.partition("train | ")[2]
    assert first == "epoch 001:      5 / 10 loss=7.123, ppl=139.4, wps=3813, num_updates=4, lr=1e-07, gnorm=1.5"
    assert last == "epoch 001 | loss 7.123 | ppl 139.4 | wps 3813 | num_updates 4 | lr 1e-07 | gnorm 1.5"


def test_tqdm_shows_the_figures_beside_the_bar_and_prints_summaries():
    stream = io.StringIO()
    with progress_bar(range(3), log_format="tqdm", log_interval=1, epoch=1, prefix="valid", stream=stream) as bar:
        for step, _ in enumerate(bar, start=1):
            bar.log({"loss": 7.123456}, step=step)
        bar.bar.refresh()
        bar.print({"loss": 7.123456}, tag="valid")
    assert "valid | loss 7.123\n" in stream.getvalue()


def test_nothing_is_shown_when_nothing_is_asked_for(capsys):
    bar = progress_bar(range(3), log_format="none", log_interval=1)
    for step, _ in enumerate(bar, start=1):
        bar.log(STATS, step=step)
    bar.print(STATS, tag="train")
    assert capsys.readouterr() == ("", "")


def test_the_default_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert type(progress_bar([])).__name__ == "TqdmBar"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert type(progress_bar([])).__name__ == "SimpleBar"
    assert type(progress_bar([], default="none")).__name__ == "ProgressBar"


def test_an_unknown_format_is_a_user_error():
    with pytest.raises(UserError, match="log_format xml: choose from"):
        progress_bar([], log_format="xml")


def test_steps_say_the_epoch_once_and_when_the_run_ends():
    stream = io.StringIO()
    bar = progress_bar(range(2), log_format="simple", log_interval=2, epoch=1, stream=stream)
    for _ in bar:
        shown = bar.log({"epoch": 1, "loss": 7.0}, eta=lambda values: 1000 * values["loss"] + 200.4)
    bar.print({"epoch": 1, "loss": 7.0}, tag="train")
    step, end = stream.getvalue().splitlines()
    assert step == "epoch 001:      2 / 2 loss=7, eta=2:00:00" and end.endswith(" | INFO | train | epoch 001 | loss 7")
    assert shown == {"epoch": 1, "loss": 7.0}


def test_step_that_is_not_due_returns_nothing():
    bar = progress_bar(range(2), log_format="none", log_interval=2)
    assert [bar.log({"loss": 7.0}) for _ in bar] == [None, {"loss": 7.0}]


def test_importing_the_logging_package_imports_no_bar_and_no_board():
    code = "import sys, fairseq.logging; print([m for m in ('tqdm', 'tensorboard', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
