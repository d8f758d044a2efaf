"""Settings trained within one budget each, with the same seeds, and a test of their differences.

A run is one process of ``fairseq-train`` in ``OUT/SETTING/SEED``, and its measurements are further
processes; ``row.json`` says that it is complete.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fairseq.config.command_settings import CompareConfig
from fairseq.errors import UserError
from fairseq.system.files import atomic_file, prepare_folder
from fairseq.system.json_files import read_json, write_json
from fairseq.system.opening import decoded, read_named
from fairseq.system.tables import table
from fairseq.text.tokenizers.base import import_package

BASE = "base"
SETTINGS = "settings.yaml"
ROW = "row.json"
KNOWN = "accuracy of known words"

Row = dict[str, Any]


def read_settings(path: str | Path) -> dict[str, list[str]]:
    """The flags of each setting in a YAML file, those of ``base`` before its own.

    Raises:
        UserError: the file cannot be read, or does not map names to flags.
    """
    text = decoded(read_named(path, "check the path"), path, "convert it")
    try:
        content = yaml.safe_load(text)
        flags = {str(name): shlex.split(value) for name, value in content.items()}
    except (yaml.YAMLError, AttributeError, TypeError, ValueError):
        raise UserError(f"{path}: must be YAML that maps names to flags of fairseq-train, in quotes") from None
    base = flags.pop(BASE, [])
    for name in flags:
        if not name or Path(name).name != name:
            raise UserError(f"{path}: {name!r}: not possible as the name of a folder; use another")
    if not flags:
        raise UserError(f"{path}: has no setting beside {BASE}; add one")
    return {name: [*base, *own] for name, own in flags.items()}


def compare(settings: str | Path, data: str, cfg: CompareConfig) -> None:
    """Train and measure every setting with every seed, ``cfg.processes`` runs at a time, each with
    its share of the cores; runs that are complete in ``cfg.out`` are not repeated."""
    flags = read_settings(settings)
    names, out = cfg.only.split(",") if cfg.only else [*flags], Path(cfg.out)
    for name in names:
        if name not in flags:
            raise UserError(f"`only` {name}: not in {settings}; it has {', '.join(flags)}")
    cores = available_cores()
    if cfg.processes > len(cores):
        raise UserError(f"`processes` {cfg.processes}: must be at most {len(cores)}, the number of cores")
    if len(cfg.seeds) > 1:
        _stats()
    prepare_folder("`out`", out)
    with atomic_file(out / SETTINGS) as file:  # the first of them is what others are compared with
        file.write(Path(settings).read_bytes())
    share = len(cores) // cfg.processes
    groups = [cores[index * share : (index + 1) * share] for index in range(cfg.processes)]

    def pin() -> None:
        # Processes inherit the affinity of the thread that starts them.
        group = groups.pop()
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, group)

    every = [Run(name, seed, flags[name], data, out / name / str(seed), share) for seed in cfg.seeds for name in names]
    runs = [run for run in every if not (run.folder / ROW).exists()]
    with ThreadPoolExecutor(cfg.processes, initializer=pin) as pool:
        if cfg.seconds is not None:  # all seeds of a setting make the same updates
            firsts = {run.setting: run for run in reversed(runs)}
            list(pool.map(lambda run: run.plan(cfg.seconds), firsts.values()))
        for line in pool.map(lambda run: run.complete(cfg), runs):
            print(line, flush=True)


def available_cores() -> list[int]:
    """The cores that this process may use; where the system does not tell, all."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Run:
    """A setting that is trained with one seed."""

    setting: str
    seed: int
    flags: Sequence[str]  # of fairseq-train
    data: str
    folder: Path
    threads: int

    @property
    def updates_file(self) -> Path:
        """The file with the number of updates that fit into the time of each run."""
        return self.folder.parent / "updates"

    def plan(self, seconds: float) -> None:
        """Write :attr:`updates_file` from the speed of 24 updates, unless it is there."""
        if self.updates_file.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = self.folder / "speed.jsonl"
        metrics.unlink(missing_ok=True)
        flags = ["--max-update", "24", "--no-save", "--disable-validation", "--log-interval", "4"]
        self._command("train", [self.data, *self.flags, *flags, "--metrics-file", str(metrics)])
        speeds = [float(line["ups"]) for line in read_lines(metrics) if line.get("ups")][1:]
        updates = max(1, int(seconds * statistics.median(speeds)))
        self.updates_file.write_text(f"{updates}\n", encoding="utf-8")

    def complete(self, cfg: CompareConfig) -> str:
        """Train, measure and describe the run; each step is done once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        updates = cfg.updates or int(self.updates_file.read_text(encoding="utf-8"))
        trained, model = self.folder / "trained", str(self.folder / "checkpoint_last.pt")
        if not trained.exists():
            flags = ["--seed", str(self.seed), "--max-update", str(updates), "--save-dir", str(self.folder)]
            flags += ["--no-epoch-checkpoints", "--save-interval-minutes", "5"]
            self._command("train", [self.data, *self.flags, *flags], self.folder / "times.jsonl")
            trained.touch()
        row = {"setting": self.setting, "seed": self.seed, "updates": updates, "flags": shlex.join(self.flags)}
        batches = (line["wpb"] for line in read_lines(self.folder / "metrics.jsonl") if line.get("wpb"))
        row |= {"tokens": next(batches, 0) * updates, "sittings": read_lines(self.folder / "times.jsonl")}
        text = self._measured("eval_lm", [self.data, "--path", model, *shlex.split(cfg.eval_flags)], "text")
        # Texts that came as words have no size in bytes.
        per_byte = text.get("bits_per_byte")
        row |= {"bits_per_token": text["loss_base2"]} if per_byte is None else {"bits_per_byte": per_byte}
        if cfg.pairs is not None:
            known = ["--known-words", cfg.known_words] if cfg.known_words else []
            pairs = self._measured("harness", [model, "--pairs", cfg.pairs, *known], "pairs")
            row["accuracy"] = {name: values["acc"] for name, values in pairs["phenomena"].items()}
            row["pairs"] = pairs["phenomena"]["all"]["pairs"]
            if "known_words" in pairs:  # as BabyLM: the mean of paradigms
                row[KNOWN] = pairs["known_words"]["averages"]["paradigms"]["acc"]
        write_json(self.folder / ROW, row, "`out`")
        for path in [] if cfg.keep else self.folder.glob("checkpoint_*.pt"):
            path.unlink()
        bits, unit = bits_of(row)
        return f"{self.setting} seed {self.seed}: {updates} updates, {seconds_of([row])} s, {bits:.4f} {unit}"

    def _measured(self, command: str, words: Sequence[str], name: str) -> Mapping[str, Any]:
        """The results of a measurement, which is made unless it is there."""
        results = self.folder / "scores" / name / "results.json"
        if not results.exists():
            self._command(command, [*words, "--results-path", str(results.parent)])
        found: Mapping[str, Any] = read_json(results, "remove it and run again")
        return found

    def _command(self, name: str, words: Sequence[str], times: Path | None = None) -> None:
        """Run a command of the package, which logs into the folder; add its seconds to *times*,
        also if it fails.

        Raises:
            UserError: it fails.
        """
        log, start, processor = self.folder / f"{name}.log", time.monotonic(), None
        with log.open("a", encoding="utf-8") as out:
            out.write(f"$ fairseq-{name} {shlex.join(words)}\n")
            out.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", f"fairseq_cli.{name}", *words],
                env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            if hasattr(os, "wait4"):
                _, status, usage = os.wait4(process.pid, 0)
                processor = usage.ru_utime + usage.ru_stime
            else:
                status = process.wait()
        if times is not None:
            sitting = {"wall": time.monotonic() - start}
            sitting |= {} if processor is None else {"processor": processor}
            with times.open("a", encoding="utf-8") as out:
                out.write(f"{json.dumps(sitting)}\n")
        if status:
            raise UserError(f"{log}: the command failed; correct what its last lines say and run again")


def read_lines(path: Path) -> list[Row]:
    """The JSON lines of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# ---- the table ---------------------------------------------------------------------------------


def report(folder: Path, against: str | None = None) -> list[str]:
    """A table of the runs in *folder*, the lowest bits first.

    With several seeds, ± is half of the 95 % interval of the mean (Student's t). Differences are
    from *against*, by default the first setting in the file, between runs of one seed, and p is of
    a paired t-test that there is none.

    Raises:
        UserError: there are no runs, or none of *against*.
    """
    found: dict[str, list[Row]] = defaultdict(list)
    for path in sorted(folder.glob(f"*/*/{ROW}")):
        found[path.parts[-3]].append(read_json(path, "remove it and run again"))
    if not found:
        raise UserError(f"{folder}: no complete runs; give the folder of fairseq-compare")
    if against is not None and against not in found:
        raise UserError(f"`against` {against}: no such setting in {folder}; it has {', '.join(found)}")
    if against is None and (folder / SETTINGS).exists():
        against = next(iter(read_settings(folder / SETTINGS)))
    base = {row["seed"]: bits_of(row)[0] for row in found.get(against or "", ())}
    every = [row for rows in found.values() for row in rows]
    has_pairs, has_known = (any(name in row for row in every) for name in ("accuracy", KNOWN))
    head = ["setting", "seeds", "updates", "tokens (M)", "time (s)", "CPU time (s)", bits_of(every[0])[1]]
    head += [f"from {against}", "p"] * bool(base)
    head += ["pairs (%)"] * has_pairs + ["known words (%)"] * has_known
    lines = [head]
    for name in sorted(found, key=lambda name: statistics.mean(bits_of(row)[0] for row in found[name])):
        rows = found[name]
        cells = [name, str(len(rows)), str(rows[0]["updates"])]
        cells.append(f"{statistics.mean(row['tokens'] for row in rows) / 1e6:.2f}")
        cells += [seconds_of(rows), seconds_of(rows, "processor")]
        cells.append(interval([bits_of(row)[0] for row in rows], 4))
        if base:
            paired = [row for row in rows if row["seed"] in base and name != against]
            changes = [bits_of(row)[0] - base[row["seed"]] for row in paired]
            cells += [interval(changes, 4, sign="+"), p_value(changes)]
        cells += [interval([100 * row["accuracy"]["all"] for row in rows if "accuracy" in row], 2)] * has_pairs
        cells += [interval([100 * row[KNOWN] for row in rows if KNOWN in row], 2)] * has_known
        lines.append(cells)
    return table(lines, left=1)


def bits_of(row: Row) -> tuple[float, str]:
    """Bits of a run's model, and what they are counted in."""
    name = "bits_per_byte" if "bits_per_byte" in row else "bits_per_token"
    return row[name], name.replace("_", " ")


def seconds_of(rows: Sequence[Row], of: str = "wall") -> str:
    """The mean over *rows* of the seconds in training, or of those of the ``processor``; a dash
    where the system does not tell them."""
    sittings = [sitting.get(of) for row in rows for sitting in row["sittings"]]
    return "–" if None in sittings else f"{sum(sittings) / len(rows):.0f}"


def interval(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean of *values*, a dash if there are none, with the half width of its 95 % interval."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):{sign}.{digits}f}"
    if len(values) == 1:
        return mean
    half = _stats().t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} ± {half:.{digits}f}"


def p_value(changes: Sequence[float]) -> str:
    """The probability of such differences, or larger ones, by chance; a dash for one pair."""
    if len(changes) < 2 or len(set(changes)) == 1:
        return "–"
    return f"{_stats().ttest_1samp(changes, 0).pvalue:.1g}"


def _stats() -> Any:
    return import_package("scipy.stats", "`seeds`: intervals of several seeds need scipy: pip install scipy")
