"""The log of training: on a terminal, in a file and as JSON; its first lines, its last one, and
what it costs."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import math
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import warm
from mistakes import logged
from small_runs import a_run
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from fairseq.criterions import CRITERIONS
from fairseq.criterions.sentence_prediction import metric_figures
from fairseq.data.glue import GLUE
from fairseq.logging.figures import NamedSums
from fairseq.logging.progress import RunProgress, _fitted, progress_bar
from fairseq.system.terminal import MessageHandler, duration
from fairseq.training.log import RunLog

QUICK = f"{runs.BASELINE} {runs.NO_DROPOUT} --no-epoch-checkpoints --log-interval 4"
NO_SAVE = f"{QUICK} --no-save --disable-validation"
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
NUMBER = r"-?[\d.]+(?:e[-+]?\d+)?"
UPDATE = rf"\d+/6 \| loss {NUMBER} \| ppl {NUMBER} \| lr {NUMBER} \| [\d,]+ tok/s \| \d\d:\d\d left"
VALIDATION = rf"valid on 'test' subset \| update 6 \| loss {NUMBER} \| ppl {NUMBER} \| best_loss {NUMBER}"


def on_a_terminal(columns: int, *flags: Any) -> str:
    """What ``train.py`` writes to a terminal of so many columns."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    streams = {"stdin": end, "stdout": end, "stderr": end}
    with warm.start("train.py", runs.DATA, *flags, variables={"TERM": "xterm"}, **streams):
        os.close(end)
        output = b""
        while True:
            try:
                output += os.read(terminal, 65536)
            except OSError:  # the process has ended
                break
    os.close(terminal)
    return output.decode()


def screen(output: str) -> list[str]:
    """The lines that *output* leaves on a terminal and in its scrollback."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\r\n\x1b]+", output):
        if part == "\x1b[A":
            row -= 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


def test_a_terminal_keeps_lines_and_messages_above_a_bar_that_counts_the_whole_run(tmp_path: Path) -> None:
    flags = f"{QUICK} --log-format tqdm --max-update 6 --log-interval 100 --save-dir {tmp_path}"
    output = on_a_terminal(3000, flags)
    lines = screen(output)
    assert all(re.fullmatch(rf"{UPDATE}|{VALIDATION}|[^|]*", line) for line in lines), lines
    assert all(len(line.replace(str(tmp_path), "own").replace(str(runs.DATA), "data-bin")) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if "tok/s" in line] == ["1/6", "2/6", "5/6"]
    assert "done training in" in lines[-1]
    bars = re.findall(r"\repoch 001: +\d+%\|(.*?)\| (\d)/6 \[\S+ left(?:, loss ([\d.]+))?\]", output)
    assert {count for _, count, _ in bars} >= {"0", "1", "5"} and all(len(bar) > 20 for bar, _, _ in bars)
    assert all(loss for _, count, loss in bars if count not in "01"), "the loss stands beside the bar"


def test_the_bar_has_the_loss_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run("--log-interval 100")
    log, meter, shown = RunLog(run.settings, run.world), run.meters["train_inner"], []
    for loss in (9.0, 7.0, 3.0):
        meter.add(NamedSums.of({"loss": loss * math.log(2), "ntokens": 1, "nsentences": 1}, 1, run.world.device))
        shown.append(log._present_loss(run))
    assert shown == pytest.approx([9, 7, 3])
    meter.add(NamedSums.of({"loss": math.log(2), "ntokens": 1, "nsentences": 1}, 1, run.world.device))
    meter.add(NamedSums.of({"loss": math.log(2) * 5, "ntokens": 1, "nsentences": 1}, 1, run.world.device))
    assert log._present_loss(run) == pytest.approx(3), "the mean of two updates"


def test_a_line_on_a_terminal_has_at_most_80_columns() -> None:
    metrics = [f"metric{number} {number}" for number in range(9)]
    line = _fitted("100000/300000", metrics, ["100,000 tok/s", "1:02:31 left"])
    assert line == "100000/300000 | metric0 0 | metric1 1 | metric2 2 | 100,000 tok/s | 1:02:31 left"
    assert _fitted("valid", metrics[:2]) == "valid | metric0 0 | metric1 1"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "00:00"), (151, "02:31"), (3751, "1:02:31"), (90000, "25:00:00")])
def test_times_are_shown_as_tqdm_shows_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text == tqdm.format_interval(round(seconds))


def test_files_have_fairseqs_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [QUICK, "--max-epoch 1 --update-freq 7 --log-format simple --save-dir", tmp_path]
    runs.train_command.main(runs.arguments(*flags))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    names = ["loss", "nll_loss", "ppl", "wps", "ups", "wpb", "bsz", "num_updates", "lr", "gnorm", "clip"]
    names += ["train_wall", "wall"]
    for line, update in zip(lines, (1, 2, 4), strict=False):
        match = re.fullmatch(rf"{STAMP} \| INFO \| train_inner \| epoch 001:      {update} / 6 (.*)", line)
        assert match is not None, line
        values = dict(part.split("=") for part in match[1].split(", "))
        assert list(values) == [*names, "total_updates", "eta"]
        assert (values["num_updates"], values["total_updates"]) == (str(update), "6")
        assert re.fullmatch(r"\d\d:\d\d", values["eta"])
    for line, start, ending in (
        (lines[3], r"train \| epoch 001", names),
        (lines[4], r"test \| epoch 001 \| valid on 'test' subset", [*names[:4], "wpb", "bsz", "num_updates"]),
    ):
        match = re.fullmatch(rf"{STAMP} \| INFO \| {start} \| (.*)", line)
        assert match is not None, line
        found = [part.split()[0] for part in match[1].split(" | ")]
        assert found == (ending if ending is names else [*ending, "best_loss", "wall"])


def test_json_lines_have_fairseqs_tags_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.train_command.main(runs.arguments(QUICK, "--max-epoch 1 --update-freq 7 --save-dir", tmp_path))
    parts = [line.split(" | ", 3) for line in capsys.readouterr().out.splitlines()]
    assert [tag for _, _, tag, _ in parts] == ["train_inner"] * 3 + ["train", "test"]
    assert all(re.fullmatch(STAMP, date) and level == "INFO" for date, level, _, _ in parts)
    inner, train, test = (json.loads(parts[index][3]) for index in (0, 3, 4))
    assert list(inner)[:3] == ["epoch", "update", "loss"] and inner["update"] == 1 / 6
    assert {"epoch", "train_loss", "train_wall", "train_num_updates"} <= train.keys()
    assert {"epoch", "test_loss", "test_ppl", "test_num_updates", "test_best_loss"} <= test.keys()


def test_lines_come_often_at_first_and_the_same_after_a_resume() -> None:
    def shown(log_format: str, start: int) -> tuple[list[int | None], int]:
        stream = io.StringIO()
        run = RunProgress(start, start, 240)
        found = []
        with progress_bar(range(240), log_format=log_format, log_interval=100, run=run, stream=stream) as bar:
            for step, _ in enumerate(bar, start=start + 1):
                values = bar.log({"num_updates": step}, "train_inner", step)
                found += [values["num_updates"]] if values is not None else []
                if step == 240:
                    break
        return found, stream.getvalue().count("num_updates")

    early = [1, 2, 5, 10, 20, 50, 100, 200]
    for log_format in ("simple", "json"):
        assert shown(log_format, 0) == (early, len(early))
    assert shown("json", 130) == ([200], 1)
    assert shown("simple", 130) == ([200], 2), "a person sees the first update, records do not"


def test_a_line_at_the_interval_holds_all_updates_since_the_last_one(tmp_path: Path) -> None:
    each = runs.updates(runs.train(tmp_path, NO_SAVE, "--max-update 8 --log-interval 1"))
    lines = runs.updates(runs.train(tmp_path, NO_SAVE, "--max-update 8"))
    assert [line["num_updates"] for line in lines] == [1, 2, 4, 8]
    for line, (first, last) in zip(lines, ((0, 1), (0, 2), (0, 4), (4, 8)), strict=True):
        tokens = sum(update["wpb"] for update in each[first:last])
        loss = sum(update["loss"] * update["wpb"] for update in each[first:last]) / tokens
        assert line["loss"] == pytest.approx(loss, rel=1e-9) and line["wpb"] == tokens / (last - first)


class Reads(TorchDispatchMode):
    """Counts what the host reads from tensors; on a GPU each would wait for the device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_updates_without_a_line_read_no_more_than_they_do_without_a_log(tmp_path: Path) -> None:
    def reads(log_format: str, updates: int) -> int:
        with Reads() as mode:
            runs.train(tmp_path, NO_SAVE, f"--log-interval 100 --max-update {updates} --log-format {log_format}")
        return mode.count

    each = [reads(log_format, 4) - reads(log_format, 2) for log_format in ("none", "simple", "tqdm")]
    assert each == [each[0]] * 3 and each[0] > 0


def test_messages_do_not_end_up_in_the_line_of_a_bar() -> None:
    stream = io.StringIO()
    logger = logging.Logger("above a bar")
    logger.addHandler(MessageHandler(stream))
    logger.info("before")
    with progress_bar(range(3), log_format="tqdm", stream=stream, prefix="work") as bar:
        for _ in bar:
            logger.info("a message")
    assert screen(stream.getvalue()) == ["before", *["a message"] * 3]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--max-update 2", "--max-update 2 is reached after 2 updates; change it to train on"),
        (
            "--max-epoch 1 --max-update 0 --max-tokens 256",
            "--max-epoch 1 is reached after 11 updates; change it to train on",
        ),
        ("--stop-time-hours 1e-9", "--stop-time-hours 1e-09 is reached after 2 updates; change it to train on"),
        ("--stages 8:1,16:2", "the end of --stages 8:1,16:2 is reached after 2 updates; change it to train on"),
        ("--patience 1", "--patience 1 is reached after 2 updates; change it to train on"),
    ],
    ids=["updates", "epochs", "time", "stages", "patience"],
)
def test_nothing_to_do_names_the_limit_and_what_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: str, message: str
) -> None:
    caplog.set_level(logging.INFO)
    # A rate of 9 makes every validation after the first one worse.
    first = {"--max-epoch": "--max-epoch 1 --max-tokens 256", "--stages": flags, "--patience": f"{flags} --lr 9"}
    name = flags.split()[0]
    once = first.get(name, "--max-update 2")
    if name == "--patience":
        once += " --max-update 9 --validate-interval-updates 1 --clip-norm 0"
    runs.train(tmp_path, QUICK, once)
    caplog.clear()
    assert runs.train(tmp_path, QUICK, flags) == []
    assert f"nothing to do: {message}" in logged(caplog)
    assert not any("done training" in text for text in caplog.messages)


def test_the_last_lines_have_time_and_best_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "argv", ["/env/bin/fairseq-train"])
    log = runs.train(tmp_path, QUICK, "--max-update 3")
    *_, limit, end = logged(caplog)
    assert limit == "--max-update 3 is reached after 3 updates"
    match = re.fullmatch(r"done training in [\d.]+ seconds \(\d\d:\d\d\); best validation loss ([\d.]+)", end)
    assert match is not None, caplog.messages[-1]
    (validation,) = runs.summaries(log, "test")
    assert float(match[1]) == pytest.approx(validation["loss"], rel=1e-3)


def test_the_time_of_a_run_is_that_of_all_its_stages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = runs.train(tmp_path, QUICK, "--stages 8:20,16:21 --no-save")
    seconds = re.match(r"done training in ([\d.]+) seconds", caplog.messages[-1])
    assert seconds is not None and float(seconds[1]) >= log[-1]["test_wall"] - 0.05  # rounded


def test_the_total_of_a_run_in_epochs_is_what_it_comes_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--max-tokens 256 --update-freq 2,5 --max-epoch 3 --log-format simple --log-interval 1"
    runs.train_command.main(runs.arguments(NO_SAVE, flags, "--save-dir", tmp_path))
    lines = re.findall(r"num_updates=(\d+).* total_updates=(\d+)", capsys.readouterr().out)
    assert [int(update) for update, _ in lines] == list(range(1, 13))
    assert {total for _, total in lines} == {"12"}, "6 in the first epoch, 3 in each of the others"


def test_the_page_explains_every_metric_of_the_log() -> None:
    page = (runs.ROOT / "docs" / "reference.md").read_text().split("## Metrics")[1]
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", page, flags=re.MULTILINE))))
    figures = set(metric_figures(tuple(name for layout in GLUE.values() for name in layout.metrics)))
    for name in ("adaptive_loss", "cross_entropy", "label_smoothed_cross_entropy", "masked_lm", "electra"):
        criterion = CRITERIONS[name]
        figures |= set(criterion.figures(object.__new__(criterion)))
    line = "epoch update num_updates wps ups wpb bsz lr gnorm clip loss_scale train_wall wall stage tokens_per_sample"
    assert explained >= {*figures, *line.split(), "best_loss", "total_updates", "eta"}
