"""The steps of a job, with a stand-in for the run of each stage: what each run is given, and what
follows it."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from mistakes import user_error
from ranks import in_threads

from fairseq import checkpoint
from fairseq.checkpoint import CheckpointManager
from fairseq.config.settings import training_settings
from fairseq.distributed import Interruption, World
from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary
from fairseq.training import loop, resume
from fairseq.training.callbacks.settings import RunSettings
from fairseq.training.limit import Limit

DICTIONARY = Dictionary.load(runs.DATA / "dict.txt")
STAGES = "--arch shortformer_tiny --max-tokens 64 --stages 8:2,16:4,32:6"


class Model(str):
    """A model of which no checkpoint is a part."""

    def is_begun_by(self, parameters: object) -> bool:
        return False


@dataclass
class Script:
    """What the runs of a job do: they reach *ends*, one number of updates a run, and *log* tells of
    them in order."""

    ends: list[int]
    dictionary: Any = field(default_factory=lambda: DICTIONARY)
    inferred: dict[str, Any] = field(default_factory=dict)
    restored: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    nothing_to_do: bool = False
    made: list[Any] = field(default_factory=list)
    given: Any = None
    log: list[Any] = field(default_factory=list)

    def callbacks(self, settings: Any, world: World, stage: Any, manager: Any, interruption: Any, *more: Any) -> Any:
        """Nothing but the record of settings; a run is made after its callbacks."""
        self.given = (world, manager, stage, interruption)
        whole = more[-1]
        return [RunSettings(whole, manager)] if whole is not None and manager is not None else []

    def build(self, settings: Any, world: World, stage: Any) -> Any:
        """A state without a model, which is made and used as
        :func:`fairseq.training.build.build_state` does."""
        number = len(self.made) + 1
        log = self.log.append
        moments = torch.tensor([float(number)])

        def load_state_dict(state: Any, source: str, *, adopt: bool = False) -> None:
            log(("restore", state, source, adopt))
            made.restored = self.restored

        def train() -> None:
            log(("train", number))
            made.num_updates = self.ends[number - 1]
            done = stage is not None and made.num_updates >= stage.max_update
            made.end = Limit("a limit", ends_stage=done)

        made = SimpleNamespace(
            given=self.given,
            settings=settings,
            inferred=self.inferred,
            restored={},
            model=Model(f"model {number}"),
            num_updates=0,
            metric=None,
            end=Limit("a limit") if self.nothing_to_do else None,
            task=SimpleNamespace(source_dictionary=self.dictionary),
            batches=SimpleNamespace(open=lambda: log(("open", number)), close=lambda: log(("close", number)), epoch=1),
            interrupted=self.interrupted,
            load_state_dict=load_state_dict,
            plan=lambda: None,
            stored_settings=dict,
            train=train,
            state_dict=lambda: {
                "last_optimizer_state": {"moments": moments},
                "optimizer_history": [{"num_updates": made.num_updates}],
            },
            moments=moments,
        )
        self.made.append(made)
        return made

    def train(self, state: Any, callbacks: Any) -> None:
        """Stand in for :func:`fairseq.training.loop.train_stage`."""
        for callback in callbacks:
            with callback.running(state):
                pass
        state.train()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let jobs be made of this script."""
        monkeypatch.setattr(loop, "callbacks_of", self.callbacks)
        monkeypatch.setattr(loop, "build_state", self.build)
        monkeypatch.setattr(loop, "train_stage", self.train)
        told = lambda state, seconds: loop.logger.info(f"the end, {0 <= seconds < 60}")  # noqa: E731
        monkeypatch.setattr(loop, "log_end", told)
        monkeypatch.setattr(resume, "check_settings", lambda *args: None)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of what compares settings, and of what loads weights."""
    found: list[Any] = []
    monkeypatch.setattr(resume, "log_differences", lambda *args: found.append(("differences", *args)))
    monkeypatch.setattr(resume, "load_fitting", lambda *args: found.append(("load", *args)))
    return found


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """A job collects garbage between stages: not among all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: list[Any]) -> Callable[..., int]:
    """Run a job by a script; its checkpoints go to ``tmp_path``."""

    def train(script: Script, *flags: Any, world: World | None = None, interruption: Any = None) -> int:
        script.install(monkeypatch)
        settings = training_settings(runs.arguments(runs.BASELINE, "--save-dir", tmp_path, *flags))
        return loop.train(settings, world or World(), interruption)

    return train


def steps(script: Script, *names: str) -> list[Any]:
    return [entry for entry in script.log if entry[0] in names]


def lengths(script: Script) -> list[int]:
    return [made.settings.flat["tokens_per_sample"] for made in script.made]


# --- stages


def test_each_stage_goes_on_from_the_one_before_without_a_copy(
    follow: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    script, interruption = Script([2, 4, 6]), Interruption()
    assert follow(script, STAGES, "--reset-meters", interruption=interruption) == 0
    assert lengths(script) == [8, 16, 32]
    for number, made in enumerate(script.made, start=1):
        world, manager, stage, signals = made.given
        assert (world, stage.number, signals) == (World(), number, interruption)
        assert manager.folder == tmp_path
        assert made.settings.checkpoint.reset_meters is (number == 1), "what is reset is so at the beginning alone"
        assert made.settings.optimization.max_update == 6
    restored = steps(script, "restore")
    assert [(source, adopt) for _, _, source, adopt in restored] == [("stage 1", True), ("stage 2", True)]
    for (_, state, _, _), before in zip(restored, script.made, strict=False):
        assert state["last_optimizer_state"]["moments"].data_ptr() == before.moments.data_ptr()
    order = [("open", 1), ("train", 1), ("close", 1), ("open", 2), ("train", 2), ("close", 2), ("open", 3)]
    assert steps(script, "open", "train", "close") == [*order, ("train", 3)]
    assert [message for message in caplog.messages if "is done" in message] == [
        "stage 1 is done after 2 updates",
        "stage 2 is done after 4 updates",
    ]
    assert caplog.messages[-1] == "the end, True"


def test_a_stage_that_another_limit_ends_is_the_last(follow: Any) -> None:
    script = Script([2, 3])
    assert follow(script, STAGES) == 0
    assert lengths(script) == [8, 16]


def test_a_run_without_stages_is_one_run_with_its_settings(follow: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    script = Script([5])
    assert follow(script) == 0
    assert [made.given[2] for made in script.made] == [None] and lengths(script) == [16]
    assert caplog.messages[-1] == "the end, True"
    caplog.clear()
    assert follow(Script([0])) == 0
    assert not any("the end" in message for message in caplog.messages), "nothing was done"


@pytest.mark.parametrize(("updates", "first"), [(0, 8), (1, 8), (2, 16), (3, 16), (5, 32), (6, 32), (9, 32)])
def test_a_job_resumes_in_the_stage_of_its_updates(follow: Any, tmp_path: Path, updates: int, first: int) -> None:
    save(tmp_path / "checkpoint_last.pt", updates)
    script = Script([2, 4, 6][[8, 16, 32].index(first) :])
    assert follow(script, STAGES) == 0
    assert lengths(script) == [8, 16, 32][[8, 16, 32].index(first) :]
    script = Script([2, 4, 6])
    assert follow(script, STAGES, "--reset-optimizer") == 0
    assert lengths(script) == [8, 16, 32], "no updates are behind a reset optimizer"


def test_settings_of_the_data_and_of_a_checkpoint_hold_for_all_stages_and_are_written(
    follow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(
        "fairseq.training.effective.write_settings", lambda settings, path: written.append((settings, path))
    )
    save(tmp_path / "checkpoint_last.pt", 1)
    script = Script([2, 4, 6], inferred={"seed": 7}, restored={"clip_norm": 0.75})
    assert follow(script, STAGES) == 0
    assert [made.settings.common.seed for made in script.made] == [3, 7, 7]
    assert [made.settings.optimization.clip_norm for made in script.made] == [0.1, 0.75, 0.75]
    ((settings, path),) = written
    assert (settings.common.seed, settings.optimization.clip_norm) == (7, 0.75)
    assert path == tmp_path / "settings.yaml" and settings.optimization.stages == "8:2,16:4,32:6"


def test_a_run_with_nothing_to_do_and_one_that_saves_nothing_write_no_settings(
    follow: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    follow(Script([1], nothing_to_do=True))
    assert not (tmp_path / "settings.yaml").exists()
    follow(Script([1]), "--no-save")
    assert not (tmp_path / "settings.yaml").exists()
    follow(Script([1]))
    assert (tmp_path / "settings.yaml").exists()
    assert sum(message.startswith("settings: data=") for message in caplog.messages) == 3


# --- what a job starts from


def save(path: Path, updates: int, **content: Any) -> None:
    """A checkpoint after so many updates."""
    state = {"model": {"weight": torch.ones(1)}, "args": {}, "optimizer_history": [{"num_updates": updates}]}
    checkpoint.save(path, {**state, "last_optimizer_state": {"moments": torch.ones(1)}, **content})


def test_a_checkpoint_is_restored_and_its_settings_compared(follow: Any, tmp_path: Path, told: list[Any]) -> None:
    path = tmp_path / "checkpoint_last.pt"
    save(path, 1, args={"seed": 4})
    script = Script([2, 4, 6])
    assert follow(script, STAGES, "--finetune-from-model", tmp_path / "missing.pt") == 0
    (_, state, source, adopt), *_ = steps(script, "restore")
    assert (source, adopt, state["args"]) == (str(path), False, {"seed": 4})
    first = script.made[0]
    assert told == [("differences", first, first.settings, {"seed": 4}, str(path))]


def test_weights_of_another_run_are_loaded_into_the_first_stages_model(
    follow: Any, tmp_path: Path, told: list[Any]
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    save(folder / "checkpoint_last.pt", 5, dictionary=DICTIONARY.digest())
    script = Script([2, 4, 6])
    assert follow(script, STAGES, "--finetune-from-model", folder) == 0
    assert lengths(script) == [8, 16, 32], "its updates do not count"
    ((_, model, weights, source),) = told
    assert (model, source) == ("model 1", str(folder / "checkpoint_last.pt"))
    assert torch.equal(weights["weight"], torch.ones(1))
    assert [entry[2] for entry in steps(script, "restore")] == ["stage 1", "stage 2"]
    save(folder / "checkpoint_last.pt", 5, dictionary="0" * 64)
    with pytest.raises(UserError, match=f"^{folder}/checkpoint_last.pt: was trained with another dictionary"):
        follow(Script([2]), "--finetune-from-model", folder)


def test_a_failure_to_restore_names_the_file_and_one_of_a_later_stage_is_a_fault(
    follow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Script):
        def build(self, *args: Any) -> Any:
            made = super().build(*args)
            made.load_state_dict = lambda state, source, *, adopt=False: state["nothing"]
            return made

    with pytest.raises(KeyError):
        follow(Broken([2, 4, 6]), STAGES)
    save(tmp_path / "checkpoint_last.pt", 1)
    with pytest.raises(UserError, match=f"^{tmp_path}/checkpoint_last.pt: its training state cannot be restored"):
        follow(Broken([2, 4, 6]), STAGES)


# --- the dictionary next to the checkpoints


@pytest.mark.parametrize("dictionary", [None, Dictionary()])
def test_a_task_without_a_dictionary_file_leaves_none(follow: Any, tmp_path: Path, dictionary: Any) -> None:
    assert follow(Script([1], dictionary=dictionary)) == 0
    assert not (tmp_path / "dict.txt").exists()


def test_the_dictionary_is_kept_by_the_first_process(follow: Any, tmp_path: Path) -> None:
    assert follow(Script([1]), world=World(1, 1)) == 0
    assert not list(tmp_path.iterdir())
    assert follow(Script([1])) == 0
    assert (tmp_path / "dict.txt").read_bytes() == (runs.DATA / "dict.txt").read_bytes()


def test_checkpoints_of_another_dictionary_keep_their_folder(
    follow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "check_dictionary", lambda *args: None)  # which would fail before
    save(tmp_path / "checkpoint_last.pt", 1)
    (tmp_path / "dict.txt").write_text("other 1\n")
    with user_error(f"^--save-dir {tmp_path}: has checkpoints of another dictionary"):
        follow(Script([2]))
    assert (tmp_path / "dict.txt").read_text() == "other 1\n"


def test_the_first_process_checks_what_it_would_write_over(follow: Any, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    with user_error("^--metrics-file "):
        follow(Script([2]), "--metrics-file", metrics)
    assert follow(Script([2]), "--metrics-file", metrics, world=World(1, 1)) == 0


# --- several processes


@dataclass
class Job:
    """A job on several threads, each with the script of its rank."""

    scripts: list[Script]
    settings: Any
    signals: list[int]

    def __call__(self, world: World) -> int:
        interruption = Interruption()
        interruption.signal = self.signals[world.rank]
        return loop.train(self.settings, world, interruption)

    def of(self, name: str) -> Callable[..., Any]:
        """The method *name* of the script of a rank, whose world is the second argument."""
        return lambda *args: getattr(self.scripts[args[1].rank], name)(*args)


def on_two(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: Any, **script: Any) -> tuple[list[Any], list[Script]]:
    """The results and scripts of two ranks; a signal has reached the second one."""
    settings = training_settings(runs.arguments(runs.BASELINE, "--save-dir", folder, *flags))
    two = Job([Script([2], **script), Script([2], **script)], settings, [0, signal.SIGUSR1])
    two.scripts[0].install(monkeypatch)
    monkeypatch.setattr(loop, "callbacks_of", two.of("callbacks"))
    monkeypatch.setattr(loop, "build_state", two.of("build"))
    return in_threads(two, 2), two.scripts


def test_all_processes_restore_the_checkpoint_of_the_first_and_end_by_one_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, told: list[Any]
) -> None:
    caplog.set_level(logging.INFO)
    save(tmp_path / "checkpoint_last.pt", 1)
    ends, scripts = on_two(monkeypatch, tmp_path, interrupted=True)
    assert ends == [signal.SIGUSR1] * 2
    assert any(message.startswith("stopped by SIGUSR1 after update 2; ") for message in caplog.messages)
    for rank, script in enumerate(scripts):
        (restored,) = steps(script, "restore")
        assert restored[2] == str(tmp_path / "checkpoint_last.pt")
        manager = script.made[0].given[1]
        assert isinstance(manager, CheckpointManager) if rank == 0 else manager is None


@pytest.mark.parametrize(
    ("flags", "rows"),
    [("", [None, None]), ("--ddp-backend fully_sharded --shard-group-size 2", [(0, 2), (1, 2)])],
)
def test_each_process_reads_its_shard_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: list[Any], flags: str, rows: list[Any]
) -> None:
    read: list[Any] = []
    content = {"model": {}, "optimizer_history": []}
    monkeypatch.setattr(
        resume.checkpoint, "load", lambda path, rows=None, **_: read.append((path, rows)) or dict(content)
    )
    for name, flag in (("restored", "--restore-file"), ("initial", "--finetune-from-model")):
        path = tmp_path / f"{name}.pt"
        save(path, 1)
        ends, _ = on_two(monkeypatch, tmp_path / f"run {name}", flags, [flag, path])
        assert ends == [0, 0], ends
        assert {(str(path), own) for own in rows} <= set(read)
        read.clear()
