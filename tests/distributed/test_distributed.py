"""Several processes train as one with the same global batch would."""

from __future__ import annotations

import shutil

import pytest
import runs
import warm

TWO = "--distributed-world-size 2"
FLAGS = [runs.NO_DROPOUT, "--optimizer nag --momentum 0.9 --max-update 24 --no-epoch-checkpoints --validate-interval 9"]
HALF = "--max-tokens 32 --max-tokens-valid 320"  # on each of two processes
BASELINE = [runs.BASELINE, *FLAGS]
# Without the kink of ReLU, where rounding chooses between two gradients.
SHORTFORMER = [runs.SHORTFORMER, "--activation-fn gelu", *FLAGS]
UNEVEN = (
    "--tokens-per-sample 600 --max-tokens 1200 --max-update 4"  # five blocks: the second process has none at the end
)


def two(folder, *flags):
    """A run of two processes: its log, and the checkpoint's content."""
    result = warm.command("train.py", runs.DATA, "--save-dir", folder, *flags, TWO)
    assert result.returncode == 0, result.stderr
    return runs.records(result.stdout), runs.content(folder / "checkpoint_last.pt")


def assert_follows(log, other):
    """Loss by loss, and gradient by gradient, which clipping would hide."""
    assert runs.losses(log) == pytest.approx(runs.losses(other), abs=1e-5)
    norms = ([line["gnorm"] for line in runs.updates(lines)] for lines in (log, other))
    assert next(norms) == pytest.approx(next(norms), rel=1e-4)


@pytest.fixture(scope="module")
def shortformer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shortformer")
    return folder, *two(folder, SHORTFORMER, HALF, "--ddp-backend no_c10d --save-interval-updates 10")


def test_two_processes_follow_one_with_the_same_global_batch(tmp_path, shortformer):
    _, log, _ = shortformer
    alone = runs.train(tmp_path, SHORTFORMER, "--max-tokens 64 --no-save --disable-validation")
    assert_follows(log, alone)
    assert len(runs.losses(log)) == 24


def test_two_processes_follow_one_with_batches_added_up(tmp_path):
    log, _ = two(tmp_path / "two", BASELINE, HALF, "--ddp-backend c10d")
    batches = runs.train(tmp_path, BASELINE, HALF, "--update-freq 2 --no-save")
    doubled = runs.train(tmp_path, BASELINE, "--max-tokens 64 --no-save")
    assert_follows(log, batches)
    assert_follows(log, doubled)


def test_validation_is_summed_over_processes(tmp_path, shortformer):
    _, log, _ = shortformer
    alone = runs.train(tmp_path, SHORTFORMER, "--max-tokens 64 --no-save --save-interval-updates 10")
    ours, theirs = ([line["loss"] for line in runs.summaries(lines, "test")] for lines in (log, alone))
    assert len(ours) == 3 and ours == pytest.approx(theirs, abs=1e-5)


def test_resumed_job_of_two_processes_is_bit_identical_and_one_process_writes(tmp_path, shortformer):
    folder, log, whole = shortformer
    assert sorted(path.name for path in folder.glob("*.pt")) == [
        *("checkpoint_1_10.pt", "checkpoint_1_20.pt", "checkpoint_best.pt", "checkpoint_last.pt")
    ]
    assert [line["num_updates"] for line in runs.updates(log)] == list(range(1, 25)), "each line is there once"
    assert len(whole["extra_state"]["random"]) == 2
    assert whole["extra_state"]["carried"]["memory"][0].size(0) == 4, "the rows of both processes"
    shutil.copy(folder / "checkpoint_1_10.pt", tmp_path / "checkpoint_last.pt")
    flags = [HALF, "--ddp-backend no_c10d --save-interval-updates 10"]
    resumed_log, resumed = two(tmp_path, SHORTFORMER, *flags)
    assert runs.difference(whole, resumed) is None
    assert runs.updates(resumed_log) == runs.updates(log)[10:]


def test_one_process_goes_on_where_two_stopped_with_their_rows_and_memory(tmp_path, shortformer, caplog):
    folder, log, _ = shortformer
    shutil.copy(folder / "checkpoint_1_10.pt", tmp_path / "checkpoint_last.pt")
    with caplog.at_level("INFO"):
        alone = runs.train(tmp_path, SHORTFORMER, "--max-tokens 64 --no-save --disable-validation")
    assert runs.losses(alone) == pytest.approx(runs.losses(log)[10:], abs=1e-5)
    assert "10 of 42 blocks of each row read by 2 processes, 1 at once; continues with 1 process," in caplog.text
    assert "random states of" in caplog.text and "dropped: processes then 2, now 1" in caplog.text


def test_two_processes_go_on_where_one_stopped_and_refuse_rows_that_do_not_exist(tmp_path):
    runs.train(tmp_path / "one", SHORTFORMER, "--max-tokens 64 --disable-validation --max-update 10")
    whole = runs.train(tmp_path, SHORTFORMER, "--max-tokens 64 --no-save --disable-validation")
    flags = ["--restore-file", tmp_path / "one" / "checkpoint_last.pt", "--disable-validation"]
    resumed, _ = two(tmp_path / "two", SHORTFORMER, HALF, *flags)
    assert runs.losses(resumed) == pytest.approx(runs.losses(whole)[10:], abs=1e-5)
    refused = warm.command("train.py", runs.DATA, "--save-dir", tmp_path / "no", SHORTFORMER, *flags, TWO)
    assert refused.returncode == 2 and "by 4 rows on all processes together, and 8 rows read" in refused.stderr


def test_torchrun_starts_the_processes_and_one_without_a_batch_takes_part(tmp_path):
    flags = runs.words(SHORTFORMER, UNEVEN, "--update-freq 1,2 --ddp-backend pytorch_ddp --no-save")
    with warm.torchrun(tmp_path, runs.ROOT / "train.py", runs.DATA, flags) as job:
        stdout, stderr = job.communicate(timeout=runs.TIMEOUT)
    assert job.returncode == 0, stderr
    log = runs.records(stdout)
    alone = runs.train(tmp_path, flags, "--max-tokens 2400")
    assert [line["wpb"] for line in runs.updates(log)] == [1470, 1200, 2670, 2670]
    assert_follows(log, alone)
