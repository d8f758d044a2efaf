"""A signal ends a run after its update: saved, with a documented exit code, and with the command
that goes on."""

from __future__ import annotations

import os
import signal

import pytest
import runs
import warm

from fairseq.training import loop

FLAGS = [
    runs.BASELINE,
    "--dropout 0.2 --attention-dropout 0.1 --optimizer adam --lr 0.002 --max-update 9 --save-interval-updates 3",
    "--no-epoch-checkpoints",
]
TWO = "--max-tokens 32 --distributed-world-size 2 --distributed-timeout 60 --batch-size-valid 1 --max-valid-steps 9"

# The criterion sends the signals: at a definite update, whatever the machine's speed.
PLUGIN = """
import atexit, os, signal, sys, time
import torch.distributed as dist
from fairseq.criterions import register_criterion
from fairseq.criterions import cross_entropy

# What is left of the group then has threads that may abort the process.
atexit.register(lambda: dist.is_initialized() and print("ends within the group", file=sys.stderr))

@register_criterion("signalling", dataclass=cross_entropy.AdaptiveCriterionConfig)
class AdaptiveLoss(cross_entropy.AdaptiveLoss):  # its checkpoints fit the original
    calls = 0

    def compute_loss(self, model, net_output, sample):
        AdaptiveLoss.calls += model.training is {training}
        if AdaptiveLoss.calls == 5 and (not dist.is_initialized() or dist.get_rank() == 1):
            for number in {numbers}:
                os.kill({target}, number)
            if len({numbers}) == 2:  # the second one has to end the update: its end does not come
                time.sleep(60)
        return super().compute_loss(model, net_output, sample)
"""


def signalled(folder, save_dir, *flags, numbers, target="os.getpid()", training=True):
    """A run in a process of its own whose criterion sends signals to *target* during update 5, or a
    validation."""
    plugin = folder / "signalling_plugin"
    plugin.mkdir(exist_ok=True)
    (plugin / "__init__.py").write_text(
        PLUGIN.format(numbers=[int(n) for n in numbers], target=target, training=training)
    )
    user_dir = ["--user-dir", plugin, "--criterion signalling"]
    return warm.command("train.py", runs.DATA, "--save-dir", save_dir, FLAGS, flags, user_dir)


def test_signalled_run_saves_exits_with_its_code_and_goes_on_exactly(tmp_path, monkeypatch, caplog):
    number = signal.SIGUSR1  # the others: below
    runs.train(tmp_path / "whole", FLAGS)
    before = signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end, caplog.at_level("INFO"):
        step = loop.update

        def signalled_step(state, samples, ask):
            if state.num_updates == 4:
                os.kill(os.getpid(), number)
            return step(state, samples, ask)

        patch.setattr(loop, "update", signalled_step)
        runs.train(tmp_path / "run", FLAGS)
    last = tmp_path / "run" / "checkpoint_last.pt"
    assert end.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert runs.content(last)["optimizer_history"][-1]["num_updates"] == 5
    assert f"stopped by {number.name} after update 5; saved {last}; the same command goes on from there" in caplog.text
    runs.train(tmp_path / "run", FLAGS)
    assert runs.difference(runs.content(tmp_path / "whole" / "checkpoint_last.pt"), runs.content(last)) is None


def test_signal_to_one_of_two_processes_in_an_update_or_validation_stops_both_at_its_end(tmp_path):
    whole = warm.command("train.py", runs.DATA, "--save-dir", tmp_path / "whole", FLAGS, TWO)
    assert whole.returncode == 0, whole.stderr
    for name, update in (("training", 5), ("validation", 3)):
        stopped = signalled(tmp_path, tmp_path / name, TWO, numbers=[signal.SIGTERM], training=name == "training")
        assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
        assert f"stopped by SIGTERM after update {update}; " in stopped.stderr and "Traceback" not in stopped.stderr
        assert "ends within the group" not in stopped.stderr
        resumed = warm.command("train.py", runs.DATA, "--save-dir", tmp_path / name, FLAGS, TWO)
        assert resumed.returncode == 0, resumed.stderr
        lines = [runs.summaries(runs.records(process.stdout), "test") for process in (whole, stopped, resumed)]
        assert lines[0] == lines[1] + lines[2] and [line["num_updates"] for line in lines[0]] == [3, 6, 9]
        contents = (runs.content(tmp_path / folder / "checkpoint_last.pt") for folder in ("whole", name))
        assert runs.difference(*contents) is None


@pytest.mark.parametrize(
    "flags, target, numbers, code, updates",
    [
        (TWO, "os.getppid()", [signal.SIGINT], 130, 5),
        ("", "os.getpid()", [signal.SIGINT, signal.SIGTERM], 143, None),
        (TWO, "os.getppid()", [signal.SIGINT, signal.SIGTERM], 143, None),
    ],
    ids=["launcher", "second", "launcher-second"],
)
def test_launcher_passes_a_signal_on_and_a_second_one_ends_at_once(tmp_path, flags, target, numbers, code, updates):
    stopped = signalled(tmp_path, tmp_path / "run", flags, numbers=numbers, target=target)
    assert stopped.returncode == code, stopped.stderr
    last = tmp_path / "run" / "checkpoint_last.pt"
    assert "Traceback" not in stopped.stderr
    assert ("stopped by" in stopped.stderr, last.exists()) == (updates is not None, True)
    assert runs.content(last)["optimizer_history"][-1]["num_updates"] == (updates or 3)


def test_time_limit_ends_two_processes_after_the_same_update(tmp_path):
    done = warm.command("train.py", runs.DATA, "--save-dir", tmp_path, FLAGS, TWO, "--stop-time-hours 1e-9")
    assert done.returncode == 0, done.stderr
    assert runs.updates(runs.records(done.stdout)) == [], "the limit was reached before the first update"
