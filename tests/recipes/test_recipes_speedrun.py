"""The recipe in examples/speedrun: flags that commands take, and a run end to end when small."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq_cli.common import get_training_parser

SCRIPT = Path(__file__).parents[2] / "examples" / "speedrun" / "speedrun.sh"


def run(**variables: Any) -> subprocess.CompletedProcess[str]:
    environment = runs.environment(**{name: str(value) for name, value in variables.items()})
    return subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)


@pytest.mark.parametrize("updates", [40, 1000])
def test_warm_up_and_decay_are_shares_of_the_updates(updates: int) -> None:
    result = run(DRY_RUN=1, UPDATES=updates)
    line = next(line for line in result.stdout.splitlines() if "train.py" in line)
    args = options.parse_args_and_arch(get_training_parser(), shlex.split(line)[2:])
    settings = training_settings(args)
    assert settings.optimization.max_update == updates and args.adam_betas == [0.9, 0.99]
    assert args.distributed_world_size == 1, "so many tokens an update"
    assert (args.warmup_updates, args.decay_updates) == (updates // 20, updates * 7 // 10)
    assert (args.tokens_per_sample, args.token_shift, args.zero_init_residual, args.qk_norm) == (64, 2, True, False)


def test_a_small_run_ends_with_the_perplexity_of_the_test_split(tmp_path: Path) -> None:
    result = run(SMALL=1, DATA=runs.DATA, OUT=tmp_path / "model", UPDATES=4, EXTRA="--cpu --log-format none")
    assert result.returncode == 0, result.stderr
    assert "Perplexity: " in result.stdout
    assert (tmp_path / "model" / "checkpoint_best.pt").is_file()


def test_a_wrong_number_of_updates_is_one_line() -> None:
    result = run(DRY_RUN=1, UPDATES="many")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "UPDATES=many: must be a whole number above 0\n"
