"""The benchmark of the time to a perplexity: its figures, and its runs on a tiny corpus."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs

from benchmarks import clocked_training, time_to_quality
from benchmarks.levers import GRID, SIZES, Row, flags_of, rows, stage_ends
from benchmarks.time_to_quality import costs, retimed, table, time_to, welch
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.training import loop
from fairseq.training.stages import plan
from fairseq_cli.common import get_training_parser


def curve(*perplexities: float, step: float = 10.0) -> list[dict[str, float]]:
    """A curve with a validation every *step* seconds of CPU time, and twice as many of the
    wall clock."""
    return [
        {"updates": n, "cpu": n * step, "seconds": 2 * n * step, "ppl": ppl} for n, ppl in enumerate(perplexities, 1)
    ]


def test_the_time_is_that_from_which_on_the_perplexity_stays_below() -> None:
    assert time_to(curve(400, 100, 50), 200) == pytest.approx(15), "half-way in the logarithm"
    assert time_to(curve(400, 100, 50), 200, "seconds") == pytest.approx(30)
    assert time_to(curve(400, 100, 300, 75), 150) == pytest.approx(35), "not the first time below"
    assert time_to(curve(400, 150, 100), 150) == pytest.approx(20), "equal is not below"
    assert time_to(curve(90, 80), 100) == 10, "no earlier than the first validation"
    assert time_to(curve(400, 100, 100), 100) is None
    assert time_to(curve(400, 90, 101), 100) is None


def test_welchs_test_has_the_p_values_of_students_distribution() -> None:
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([2.0, 2.0], [2.0, 2.0]) == 1 and welch([2.0, 2.0], [3.0, 3.0]) == 0
    # Equal variances and sizes: ν = 2 (n − 1). Tables have t = 2.776 for ν = 4, and 12.706 for ν =
    # 1, at p = 0.05.
    shift = 2.776 * math.sqrt(2 / 3)
    assert welch([-1.0, 0.0, 1.0], [shift - 1, shift, shift + 1]) == pytest.approx(0.05, abs=1e-4)
    # One variance is nothing beside the other, so that ν = 1; variance 2, n = 2, standard error 1.
    assert welch([-1.0, 1.0], [12.706, 12.706]) == pytest.approx(0.05, abs=1e-4)


def test_welchs_test_agrees_with_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for a, b in (([1.0, 2.0, 4.0], [2.5, 7.0]), ([3.0, 3.1, 2.9, 3.3], [1.0, 9.0, 2.0]), ([1.0, 2.0], [1.1, 1.9, 2.4])):
        expected = stats.ttest_ind(a, b, equal_var=False).pvalue
        assert welch(a, b) == pytest.approx(expected, abs=1e-5) == welch(b, a)


def test_the_plot_has_the_mean_and_the_range_of_the_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(time_to_quality, "draw_curves", lambda *arguments: drawn.extend(arguments))
    runs = {"baseline": [curve(400, 100), curve(300, 120, step=20.0)], "stack": [curve(90, 80)]}
    time_to_quality.plot(tmp_path / "curve.png", runs)
    baseline, stack = drawn[1]
    assert baseline.x.tolist() == [15, 30] and baseline.mean.tolist() == [350, 110], "means over the seeds"
    assert baseline.values.tolist() == [[400, 100], [300, 120]] and stack.values.tolist() == [[90, 80]]
    assert drawn[4] == 110, "the target"


def test_the_table_has_means_deviations_and_what_was_not_reached() -> None:
    curves = {
        "baseline": [curve(400, 100), curve(400, 104), curve(400, 96)],
        "fast": [curve(400, 50), curve(400, 49), curve(400, 51)],
        "slow": [curve(400, 300), curve(400, 51), curve(400, 51)],
    }
    lines = table(curves).splitlines()
    assert lines[0] == "Target: perplexity 100.00 on the test split, 3 seed(s) of the baseline."
    cells = {line.split(" | ")[0].strip("| "): [cell.strip("| ") for cell in line.split(" | ")] for line in lines[4:]}
    # 96: 100 is reached at 10 + 10 · ln 4 / ln (400 / 96) s; the other two runs count with all of
    # their 20 s.
    reached = 1 + math.log(4) / math.log(400 / 96)
    assert cells["baseline"][2] == f"{(4 + reached) / 3:.0f} ± 0" and cells["baseline"][3] == "10000.0"
    assert cells["baseline"][5:] == ["1.00", "", "100.0 ± 4.0", "2"]
    fast = [10 + 10 * math.log(4) / math.log(400 / last) for last in (50, 49, 51)]
    mean = sum(fast) / 3
    assert cells["fast"][4].startswith(f"{mean:.1f} ± ")
    times = [20, 20, 10 + 10 * math.log(4) / math.log(400 / 96)]
    assert float(cells["fast"][5]) == pytest.approx(sum(times) / 3 / mean, abs=0.005)
    assert 0 < float(cells["fast"][6]) < 0.01
    assert cells["slow"][2] == "not reached by 1" and cells["slow"][7] == "134.0 ± 143.8"


def test_the_time_of_updates_is_measured_and_set_by_stage() -> None:
    ends = stage_ends(["--max-update", "9", "--stages", "8:5,16:12:64:4e-3", "--seed", "1"])
    assert ends == [5, 12] and stage_ends(["--max-update", "9", "--max-update", "7"]) == [7]
    # Two seconds an update in the first stage, three in the second; the first and the fourth
    # interval do not count: one begins a run, the other has updates of both stages.
    times = {1: 50.0, 2: 52.0, 4: 56.0, 6: 61.0, 8: 67.0, 12: 79.0}
    points = [{"updates": n, "cpu": time, "seconds": 0.0, "ppl": 1.0} for n, time in times.items()]
    assert costs(points, ends) == [2.0, 3.0]
    assert [point["cpu"] for point in retimed(points, ends, [1.0, 10.0])] == [1, 2, 4, 15, 35, 75]


def test_every_row_is_a_valid_command_with_its_share_of_the_updates() -> None:
    for size in SIZES.values():
        for row in rows(size):
            flags = flags_of(row, size, "2e-3", 5, "test")
            settings = training_settings(options.parse_args_and_arch(get_training_parser(), ["data", *flags]))
            updates = round(size.updates * row.share)
            assert settings.optimization.max_update == updates and settings.optimization.lr == [0.002]
            stages = plan(settings)
            assert not stages or stages[-1].max_update == updates
            assert settings.common.seed == 5 and settings.data.valid_subset == "test"
    size = SIZES["medium"]
    names = [row.name for row in rows(size)]
    assert names[0] == "baseline" and len(set(names)) == len(names)
    last = next(row for row in rows(size) if row.name == "+bf16")
    levers = (
        "--bf16",
        "--tokens-per-sample {T/4}",
        "--token-shift 2",
        "--zero-init-residual",
        "--adam-betas 0.9,0.99",
        "relu_squared",
    )
    assert all(flag in last.flags for flag in levers) and last.share == size.stacked


def test_rows_stand_on_the_tuned_baseline_and_the_grid_reads_equally_many_tokens() -> None:
    """Half the batch has twice the updates; a lever on top of a tuned batch keeps that ratio."""
    for row in GRID:
        flags = flags_of(row, SIZES["tiny"], "1e-2", 1, "valid")
        last = dict(zip(flags, flags[1:], strict=False))
        assert int(last["--max-update"]) * int(last["--max-tokens"]) == 12 * 64
    short = GRID[2].under(Row("short", "--tokens-per-sample {T/4}", 0.5))
    flags = flags_of(short, SIZES["tiny"], "1e-2", 1, "test")
    last = dict(zip(flags, flags[1:], strict=False))
    assert [last[f] for f in ("--tokens-per-sample", "--max-tokens", "--max-update")] == ["4", "32", "12"]
    assert short.name == "short" and "--lr-scheduler" in flags


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Trains in this process; the list has the commands."""
    commands: list[list[str]] = []
    places = ((loop, "update"), (loop, "evaluate"))
    for place, name in places:
        monkeypatch.setattr(place, name, getattr(place, name))  # the recorder replaces them

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        monkeypatch.setattr(sys, "argv", command[2:])
        before = [getattr(place, name) for place, name in places]
        clocked_training.main()
        for (place, name), function in zip(places, before, strict=True):
            setattr(place, name, function)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(time_to_quality, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
    monkeypatch.setattr(time_to_quality, "RATES", ("1e-2", "1e-9"))
    monkeypatch.setattr(time_to_quality, "GRID", time_to_quality.GRID[:1])
    return commands


def test_the_benchmark_trains_what_is_not_there_and_prints_the_table(
    tmp_path: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tmp_path), "--data", str(runs.DATA), "--size", "tiny", "--rows", "baseline;muon"]
    time_to_quality.main([*command, "--seeds", "1"])
    output = capsys.readouterr().out
    assert "baseline: cosine, rate 1e-2" in output and "| muon | 1 | " in output
    assert len(in_process) == 4, "two rates, the baseline, muon"
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == ["grid: cosine", "grid: cosine", "baseline", "muon"]
    assert [point["updates"] for point in lines[2]["curve"]] == [2, 4, 6, 8, 10, 12]
    assert lines[3]["curve"][-1]["updates"] == 9
    assert {"commit", "date", "device"} <= lines[3].keys() and "--valid-subset valid" in lines[0]["flags"]
    for line in lines:
        for clock in ("cpu", "seconds"):
            times = [point[clock] for point in line["curve"]]
            assert times == sorted(times) and times[0] > 0

    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"row": "bf16", "cur')  # killed while it wrote
    time_to_quality.main([*command, "--seeds", "1,2"])
    assert len(in_process) == 6, "seed 2 of both rows"
    assert "| muon | 2 | " in capsys.readouterr().out
    time_to_quality.main([*command[:-2], "--seeds", "1,2", "--row", "mine@0.5: --activation-fn gelu"])
    assert len(in_process) == 8 and in_process[-1][-2:] == ["--activation-fn", "gelu"]
    assert "| mine | 2 | " in (tmp_path / "table.md").read_text()

    known = [str(tmp_path / "known"), *command[1:-1], "baseline", "--baseline", "cosine@1e-2", "--seeds", "1"]
    time_to_quality.main(known)
    assert len(in_process) == 9, "no grid"
    time_to_quality.main([*command[:-1], "baseline", "--clock", "0"])
    assert len(in_process) == 10 and "--max-update 48" in " ".join(in_process[-1])
    (line,) = [json.loads(line) for line in (tmp_path / "clock.jsonl").read_text().splitlines()]
    assert line["row"] == "baseline" and line["seconds"][0] > 0
    (tmp_path / "clock.jsonl").write_text('{"row": "baseline", "seconds": [1.0]}\n')
    time_to_quality.main([*command[:-1], "baseline", "--seeds", "1"])
    assert "| baseline | 1 | 12 | 1000.0 | 12.0 | 1.00 |" in (tmp_path / "table.md").read_text()


def test_rows_are_listed_and_unknown_ones_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    time_to_quality.main([str(tmp_path / "out"), "--list", "--rows", "muon"])
    assert capsys.readouterr().out == "muon: --optimizer muon --muon-iterations 3\n" and not (tmp_path / "out").exists()
    for flags, message in {
        "--rows muons": "no row 'muons'",
        "--row muons": "expected NAME: FLAGS",
        "--row a@1.1.1:": "'1.1.1': expected a number of at least 0",
        "--baseline cosin@1": "'cosin@1': expected SCHEDULE@RATE, a schedule of: cosine; wsd;",
        "--baseline cosine@0": "'cosine@0': expected SCHEDULE@RATE",
        "--clock -1": "'-1': expected a number of at least 0",
        "--clock nan": "'nan': expected a number of at least 0",
        "--updates 0": "'0': expected a whole number above 0",
        "--seeds 1,x": "'x': expected a whole number above 0",
        "--data nowhere": "--data nowhere: no dict.txt; give a folder of fairseq-preprocess",
    }.items():
        with pytest.raises(SystemExit) as exit:
            time_to_quality.main([str(tmp_path / "out"), *flags.split()])
        assert exit.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing was written"


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "runs.jsonl").write_text("no JSON\n")
    for out in (tmp_path / "file", tmp_path):
        with pytest.raises(SystemExit) as exit:
            time_to_quality.main([str(out), "--data", str(runs.DATA)])
        assert exit.value.code == 2
        assert f"{out}: " in (error := capsys.readouterr().err) and "give a new folder, or that of earlier" in error


def test_validations_are_not_part_of_the_time() -> None:
    now = [0.0]
    recorder = clocked_training.Recorder(lambda: (now[0], 10 * now[0]))
    recorder.begin = recorder.clock()
    for seconds, ppl in ((3, 50.0), (4, 40.0)):
        now[0] += seconds
        before = recorder.clock()
        now[0] += 100
        recorder.validated(int(now[0]), ppl, before)
    assert [point["cpu"] for point in recorder.curve] == [3, 7]
    assert [point["seconds"] for point in recorder.curve] == [30, 70]
    assert [point["ppl"] for point in recorder.curve] == [50.0, 40.0]
    assert Row("a", "x", 0.5).plus(Row("b", "y", 0.5)) == Row("+b", "x y", 0.25)
