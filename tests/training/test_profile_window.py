"""The window of --profile: which updates, and what is asked of torch's profiler, on a CPU and on a
GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from mistakes import user_error

from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.training.callbacks import profiler

SMALL = f"{runs.BASELINE} --no-epoch-checkpoints --no-last-checkpoints --disable-validation"


class Recorded:
    """A profiler of torch that notes what is asked of it."""

    made: list[Recorded] = []

    def __init__(self, activities: list[Any]) -> None:
        self.activities = activities
        self.calls: list[Any] = []
        self.made.append(self)

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")

    def key_averages(self) -> Any:
        return SimpleNamespace(table=lambda **settings: self.calls.append(settings) or "TABLE")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    monkeypatch.setattr(profiler, "profile", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    return Recorded.made


def observed(folder: Path, text: str | None, updates: list[int], world: World | None = None) -> None:
    """Profile a run whose updates begin after so many others."""
    callback = profiler.Profiler(profiler.parse_window(text, 0), str(folder))
    state: Any = SimpleNamespace(world=world or World(), num_updates=0, cfg=SimpleNamespace(max_update=0))
    with callback.running(state):
        for state.num_updates in updates:
            callback.before_update(state)
            callback.after_update(state)


@pytest.mark.parametrize(
    ("updates", "count", "first"),
    [
        ([0, 1, 2, 3, 4, 5], 3, 3),
        ([0, 1, 2, 3], 2, 3),  # the run ends
        ([3, 4, 5], 2, 4),  # it resumes
        ([0, 1, 2, 2, 3, 4, 5], 4, 3),  # an update is repeated
        ([2, 3, 4, 4, 4], 3, 3),  # the last one is repeated: the window is over
    ],
)
def test_each_window_is_one_profile_of_its_updates(
    tmp_path: Path, recorded: list[Recorded], updates: list[int], count: int, first: int, caplog: Any
) -> None:
    caplog.set_level("INFO")
    observed(tmp_path, "2:5", updates)
    (made,) = recorded
    table = {"sort_by": "self_cpu_time_total", "row_limit": 40, "max_name_column_width": 70}
    assert made.calls == ["start", "stop", table]
    assert made.activities == [torch.profiler.ProfilerActivity.CPU]
    text = (tmp_path / "profile" / "operators.txt").read_text()
    assert text == f"{count} updates from {first} on; cpu, torch {torch.__version__}\nTABLE\n"
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["operators.txt", "trace.json"]
    assert caplog.messages == [f"profile of {count} updates from {first} on: {tmp_path}/profile"]


@pytest.mark.parametrize("updates", [[], [0, 1], [5, 6]])
def test_a_run_outside_of_its_window_leaves_an_empty_folder(
    tmp_path: Path, recorded: list[Recorded], updates: list[int]
) -> None:
    observed(tmp_path, "2:5", updates)
    assert recorded == [] and list((tmp_path / "profile").iterdir()) == []


def test_the_first_process_alone_profiles_and_only_when_asked(tmp_path: Path, recorded: list[Recorded]) -> None:
    observed(tmp_path, "0:5", [0], World(1, 1))
    observed(tmp_path, None, [0])
    assert recorded == [] and not (tmp_path / "profile").exists()


def test_an_update_that_fails_stops_the_profile_without_a_result(tmp_path: Path, recorded: list[Recorded]) -> None:
    callback = profiler.Profiler(profiler.Window(0, 5), str(tmp_path))
    state: Any = SimpleNamespace(world=World(), num_updates=0, cfg=SimpleNamespace(max_update=0))
    with pytest.raises(KeyError), callback.running(state):
        callback.before_update(state)
        raise KeyError
    assert recorded[0].calls == ["start", "stop"] and list((tmp_path / "profile").iterdir()) == []


def test_a_gpu_is_profiled_with_its_kernels_and_its_memory(
    tmp_path: Path, recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **settings: memory.append(settings))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("memory"))
    observed(tmp_path, "0:1", [0], World(device=torch.device("cuda")))
    (made,) = recorded
    assert made.activities == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    (table,) = [call for call in made.calls if isinstance(call, dict)]
    assert table["sort_by"] == "self_device_time_total"
    assert memory == [{"max_entries": 200_000, "stacks": "python"}, {"enabled": None}]
    assert (tmp_path / "profile" / "memory.pickle").read_text() == "memory"


@pytest.mark.parametrize(
    ("text", "limit", "window"),
    [
        ("10:13", 0, (10, 13)),
        (" 0 : 1 ", 1, (0, 1)),
        ("5:8", 8, (5, 8)),
        ("1234567890:9999999999", 0, (1234567890, 9999999999)),
    ],
)
def test_windows_lie_before_the_last_update(text: str, limit: int, window: tuple[int, int]) -> None:
    assert profiler.parse_window(text, limit) == profiler.Window(*window)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("5:8", 7),
        ("5:5", 0),
        ("6:5", 0),
        ("0:2", 1),
        ("0:1x", 0),
        ("x0:1", 0),
        ("12345678901:99999999999", 0),
        ("٣:٤", 0),
    ],
)
def test_other_windows_are_refused(text: str, limit: int) -> None:
    with pytest.raises(UserError, match="^profile "):
        profiler.parse_window(text, limit)


def test_a_folder_that_cannot_be_written_is_named_with_its_flag(tmp_path: Path, recorded: list[Recorded]) -> None:
    (tmp_path / "profile").write_text("a file")
    with user_error(f"^--profile {tmp_path}/profile: "):
        observed(tmp_path, "0:1", [])
    (tmp_path / "profile").unlink()
    (tmp_path / "profile" / "trace.json").mkdir(parents=True)
    with user_error(f"^--profile {tmp_path}/profile"):
        observed(tmp_path, "0:1", [0])


def test_files_of_an_earlier_profile_do_not_stay_beside_a_new_one(tmp_path: Path, recorded: list[Recorded]) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "memory.pickle").write_text("of a GPU")
    observed(tmp_path, "0:1", [0])
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["operators.txt", "trace.json"]
