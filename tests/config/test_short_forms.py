"""One flag for what fairseq says in several: the same settings, and an error where both forms
contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from mistakes import user_error


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("--save-every 1000u,90min,2ep", "--save-interval-updates 1000 --save-interval-minutes 90 --save-interval 2"),
        ("--save-every 1Mw:10,10Mw", "--save-interval-words 1M:10,10M"),
        ("--save-every 500Kt", "--save-interval-tokens 500K"),
        ("--save-every 0ep,0min", "--no-epoch-checkpoints --save-interval-minutes 0"),
        ("--save-every never", "--no-save"),
        ("--validate-every 5Ku,3ep", "--validate-interval-updates 5000 --validate-interval 3"),
        ("--validate-every never", "--disable-validation"),
        ("--keep 3u,5ep,2best", "--keep-interval-updates 3 --keep-last-epochs 5 --keep-best-checkpoints 2"),
        ("--reset optimizer,meters", "--reset-optimizer --reset-meters"),
        ("--reset all", "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters"),
        ("--keep 3u --keep-interval-updates 3", "--keep-interval-updates 3"),
    ],
)
def test_a_short_form_is_what_it_stands_for(short: str, long: str) -> None:
    assert vars(runs.arguments(short)) == vars(runs.arguments(long))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--save-every 5u --save-interval-updates 6", "--save-every 5u: contradicts --save-interval-updates 6"),
        ("--save-every 5u --no-save", "--save-every 5u: contradicts --no-save on; give one of them"),
        ("--validate-every 2ep --disable-validation", "--validate-every 2ep: contradicts --disable-validation on"),
        ("--save-every 5", "--save-every 5: '5' is none of Nu, Nep, Nmin, Nw, Nt"),
        ("--save-every never,5u", "--save-every never,5u: 'never' is none of Nu, Nep, Nmin, Nw, Nt"),
        ("--save-every 0w", "--save-every 0w: '0w' must be greater than 0"),
        ("--validate-every 0ep", "--validate-every 0ep: '0ep' must be greater than 0"),
        ("--keep 3u,0ep", "--keep 3u,0ep: '0ep' must be greater than 0, or left out"),
        ("--save-every 5u,6u", "--save-every 5u,6u: two numbers of u; give one"),
        ("--keep never", "--keep never: 'never' is none of Nu, Nep, Nbest"),
        ("--reset optimiser", "--reset optimiser: 'optimiser' is none of optimizer, lr-scheduler"),
    ],
)
def test_what_no_short_form_means_is_one_line(flags: str, line: str) -> None:
    with user_error(line):
        runs.arguments(flags)


def test_a_command_line_wins_over_the_form_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("save_every: 500u,10min\nkeep_last_epochs: 2\n")
    for flags in ("--save-every 7u --keep 1ep", "--save-interval-updates 7 --keep-last-epochs 1"):
        args = runs.arguments("--config", tmp_path / "c.yaml", flags)
        assert (args.save_interval_updates, args.save_interval_minutes, args.keep_last_epochs) == (7, 10, 1)
        assert "save_every" not in args, "no checkpoint has the short form"
    (tmp_path / "c.yaml").write_text("save_every: 500\n")
    with user_error(f"--config {tmp_path}/c.yaml: --save-every 500: '500' is none of"):
        runs.arguments("--config", tmp_path / "c.yaml")
