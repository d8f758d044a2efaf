"""Train settings within one budget each, side by side, and compare them.

python compare.py run settings.yaml --data data-bin --out search --seconds 300 --seeds 1,2,3
python compare.py report search
python compare.py ranks search whole
python compare.py curve search whole --picture curve.png
python compare.py reach search --against baseline

settings.yaml maps names to flags of fairseq-train; those of `base` come before all others. Every
run is one process with its share of the cores, and --processes of them are trained at the same
time. Run it again to resume.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from scipy import stats
from tables import updates as updates_in

ROOT = Path(__file__).resolve().parents[2]

KNOWN = "accuracy of known words"
UNITS = {"time": "core-hours", "tokens": "million tokens"}

Row = dict[str, Any]


def command(args: Sequence[str], log: Path, times: Path | None = None) -> None:
    """Run a Python command of this checkout on the cores of this thread; add its wall and
    CPU seconds to *times*, also if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {shlex.join(args)}\n")
        out.flush()
        process = subprocess.Popen(
            [sys.executable, *args], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    if times:
        sitting = {"wall": time.monotonic() - start, "processor": usage.ru_utime + usage.ru_stime}
        with times.open("a", encoding="utf-8") as out:
            out.write(f"{json.dumps(sitting)}\n")
    if status:
        raise Mistake(f"{log}: the command failed; correct what its last lines say and run again")


class Mistake(Exception):
    """What a user can correct, on one line."""


def lines(path: Path) -> list[Row]:
    """Lines of metrics, none if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def updates_within(folder: Path, train: Sequence[str], seconds: float) -> int:
    """Updates of *train* that fit into *seconds*, from the speed of 24; kept in *folder*."""
    plan = folder / "updates"
    if not plan.exists():
        metrics = folder / "speed.jsonl"
        metrics.unlink(missing_ok=True)
        speed = ["--max-update", "24", "--no-save", "--disable-validation", "--log-interval", "4"]
        command([*train, *speed, "--metrics-file", str(metrics)], folder / "speed.log")
        plan.write_text(f"{updates_in(metrics, seconds)}\n")
    return int(plan.read_text())


def one(name: str, flags: Sequence[str], seed: int, args: argparse.Namespace) -> None:
    """Train *flags* with *seed*, measure the model, and write one row; each step only once."""
    folder = args.out / name / str(seed)
    row = folder / "row.json"
    if row.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    train = ["train.py", str(args.data), *flags]
    updates = args.updates or updates_within(args.out / name, train, args.seconds)
    times = folder / "times.jsonl"
    saved = folder / "checkpoint_last.pt"
    done = folder / "trained"
    if not done.exists():
        command(
            [
                *(*train, "--seed", str(seed), "--max-update", str(updates), "--save-dir", str(folder)),
                *("--no-epoch-checkpoints", "--save-interval-minutes", "5", *shlex.split(args.train_flags)),
            ],
            folder / "train.log",
            times,
        )
        done.touch()
    scores = folder / "scores"
    if args.pairs and not (scores / "pairs" / "results.json").exists():
        pairs = ["--pairs", str(args.pairs), "--batch-size", "64", "--results-path", str(scores / "pairs")]
        pairs += ["--known-words", str(args.known_words)] if args.known_words else []
        command(["-m", "fairseq_cli.harness", str(saved), *pairs], folder / "pairs.log")
    if not (scores / "text" / "results.json").exists():
        text = ["eval_lm.py", str(args.data), "--path", str(saved), "--results-path", str(scores / "text")]
        command([*text, *shlex.split(args.eval_flags)], folder / "text.log")
    text_scores = json.loads((scores / "text" / "results.json").read_text())
    result: Row = {"setting": name, "seed": seed, "updates": updates, "flags": shlex.join(flags)}
    result["tokens"] = next(line["wpb"] for line in lines(folder / "metrics.jsonl") if line.get("wpb")) * updates
    result["sittings"] = lines(times)
    # Texts that came as words have no size in bytes.
    per_byte = text_scores.get("bits_per_byte")
    result |= {"bits_per_token": text_scores["loss_base2"]} if per_byte is None else {"bits_per_byte": per_byte}
    if args.pairs:
        results = json.loads((scores / "pairs" / "results.json").read_text())
        result["accuracy"] = {phenomenon: values["acc"] for phenomenon, values in results["phenomena"].items()}
        result["pairs"] = results["phenomena"]["all"]["pairs"]
        if "known_words" in results:  # as BabyLM: the mean of paradigms
            result[KNOWN] = results["known_words"]["averages"]["paradigms"]["acc"]
    row.write_text(json.dumps(result, indent=1) + "\n")
    for path in [] if args.keep else folder.glob("checkpoint_*.pt"):
        path.unlink()
    print(f"{name} seed {seed}: {describe(result)}", flush=True)


def describe(row: Row) -> str:
    """One run on a line."""
    seconds = sum(sitting["processor"] for sitting in row["sittings"])
    accuracy = f", pairs {100 * row['accuracy']['all']:.2f} %" if "accuracy" in row else ""
    bits, unit = bits_of(row)
    return f"{row['updates']} updates, {seconds:.0f} s of CPU time, {bits:.4f} {unit}{accuracy}"


def bits_of(row: Row) -> tuple[float, str]:
    """Bits of a run's model, and what they are counted in."""
    name = "bits_per_byte" if "bits_per_byte" in row else "bits_per_token"
    return row[name], name.replace("_", " ")


def run(args: argparse.Namespace) -> None:
    """All runs, --processes at a time, each with cores of its own, seed by seed."""
    try:
        settings = yaml.safe_load(args.settings.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        settings = None
    if not isinstance(settings, dict) or not all(isinstance(flags, str) for flags in settings.values()):
        raise Mistake(f"{args.settings}: must be YAML that maps names to flags of fairseq-train")
    base = shlex.split(settings.pop("base", ""))
    names = args.only.split(",") if args.only else list(settings)
    if unknown := [name for name in names if name not in settings]:
        raise Mistake(f"--only {unknown[0]}: not in {args.settings}; it has {', '.join(settings)}")
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= args.processes <= len(cores):
        raise Mistake(f"--processes {args.processes}: must be from 1 to {len(cores)}, the number of cores")
    share = len(cores) // args.processes
    groups = [cores[index * share : (index + 1) * share] for index in range(args.processes)]
    jobs = [(name, [*base, *shlex.split(settings[name])], seed, args) for seed in args.seeds for name in names]
    # The affinity of a thread is inherited by the processes that it starts.
    with ThreadPoolExecutor(args.processes, initializer=lambda: os.sched_setaffinity(0, groups.pop())) as pool:
        list(pool.map(one, *zip(*jobs, strict=True)))


def rows(folder: Path) -> dict[str, list[Row]]:
    """Rows of every setting under *folder*."""
    found: dict[str, list[Row]] = defaultdict(list)
    for path in sorted(folder.glob("*/*/row.json")):
        found[path.parts[-3]].append(json.loads(path.read_text(encoding="utf-8")))
    return found


def interval(values: Sequence[float], digits: int) -> str:
    """Mean of *values* with the half width of its 95 % interval (Student's t)."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{mean} ± {half:.{digits}f}"


def report(folder: Path, against: str | None = None) -> Iterator[str]:
    """A table in Markdown: settings, the best bits per byte first; with *against*, their
    differences from that setting, seed by seed."""
    found = rows(folder)
    if against is not None and against not in found:
        raise Mistake(f"--against {against}: no such setting in {folder}; it has {', '.join(found)}")
    base = {row["seed"]: bits_of(row)[0] for row in found[against]} if against is not None else {}
    unit = next((bits_of(row)[1] for each in found.values() for row in each), "bits per byte")
    head = ["setting", "seeds", "updates", "tokens (M)", "CPU time (s)", unit, "pairs (%)"]
    has_known = any(KNOWN in row for each in found.values() for row in each)
    head += ["known words (%)"] * has_known + [f"from {against}"] * bool(base)
    yield f"| {' | '.join(head)} |"
    yield f"|---{'|---:' * (len(head) - 1)}|"
    for name in sorted(found, key=lambda name: bits(found[name])):
        each = found[name]
        seconds = statistics.mean(sum(sitting["processor"] for sitting in row["sittings"]) for row in each)
        pairs = [100 * row["accuracy"]["all"] for row in each if "accuracy" in row]
        known = [100 * row[KNOWN] for row in each if KNOWN in row]
        cells = [name, len(each), each[0]["updates"], f"{each[0]['tokens'] / 1e6:.2f}", f"{seconds:.0f}"]
        cells += [interval([bits_of(row)[0] for row in each], 4), interval(pairs, 2) if pairs else "–"]
        cells += [interval(known, 2) if known else "–"] * has_known
        changes = [bits_of(row)[0] - base[row["seed"]] for row in each if base and row["seed"] in base]
        cells += [interval(changes, 4) if changes and name != against else "–"] if base else []
        yield f"| {' | '.join(map(str, cells))} |"


def bits(each: Sequence[Row]) -> float:
    """Mean bits of the runs of a setting."""
    return statistics.mean(bits_of(row)[0] for row in each)


def compare(small: Path, whole: Path) -> Iterator[str]:
    """How well the bits per byte of *small* order the settings of *whole*."""
    first, second = rows(small), rows(whole)
    names = sorted(first.keys() & second.keys(), key=lambda name: bits(second[name]))
    if len(names) < 3:
        raise Mistake(f"{small}, {whole}: fewer than three settings in common; train more")
    yield f"| setting | {small.name} | {whole.name} |"
    yield "|---|---:|---:|"
    yield from (f"| {name} | {bits(first[name]):.4f} | {bits(second[name]):.4f} |" for name in names)
    yield ""
    result = stats.spearmanr([bits(first[name]) for name in names], [bits(second[name]) for name in names])
    yield f"Spearman's rank correlation of {len(names)} settings: {result.statistic:.2f}"


def validations(folder: Path) -> dict[str, list[list[Row]]]:
    """For each setting under *folder*, the validations of each of its runs, by updates."""
    found: dict[str, list[list[Row]]] = defaultdict(list)
    for path in sorted(folder.glob("*/*/row.json")):
        measured = [line for line in lines(path.with_name("metrics.jsonl")) if line["tag"] != "train_inner"]
        if measured:
            found[path.parts[-3]].append(measured)
    return found


def updates_until(measured: Sequence[Row], target: float) -> float | None:
    """The update from which on the perplexities *measured* stay below *target*, between two
    validations on a straight line in the logarithm; None if the last one is not below it."""
    above = [index for index, line in enumerate(measured) if not line["ppl"] < target]
    if not above:
        return measured[0]["num_updates"]
    if above[-1] == len(measured) - 1:
        return None
    before, after = measured[above[-1]], measured[above[-1] + 1]
    share = math.log(before["ppl"] / target) / math.log(before["ppl"] / after["ppl"])
    return before["num_updates"] + share * (after["num_updates"] - before["num_updates"])


def reach(folder: Path, against: str) -> Iterator[str]:
    """A table in Markdown: updates until the perplexity, on the split that runs validate, stays
    below the mean of the final ones of *against*; nothing for a setting if a run fails to."""
    found = validations(folder)
    if against not in found:
        raise Mistake(f"--against {against}: no run with validations in {folder}; it has {', '.join(found)}")
    target = statistics.mean(measured[-1]["ppl"] for measured in found[against])
    yield f"Target: a perplexity of {target:.2f}, the mean of {len(found[against])} of {against}"
    yield ""
    yield "| setting | seeds | reach it | updates until then | times fewer | p | final perplexity | updates |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    # Half of the baseline's runs end above their mean: they count with all their updates.
    least = [updates_until(measured, target) or measured[-1]["num_updates"] for measured in found[against]]
    for name in sorted(found, key=lambda name: statistics.mean(measured[-1]["ppl"] for measured in found[name])):
        each = found[name]
        needed = least if name == against else [updates_until(measured, target) for measured in each]
        times = [updates for updates in needed if updates is not None]
        cells = [name, len(each), sum(measured[-1]["ppl"] < target for measured in each)]
        if len(times) < len(each):
            cells += ["–", "–", "–"]
        else:
            cells += [interval(times, 0), f"{statistics.mean(least) / statistics.mean(times):.2f}"]
            several = name != against and min(len(times), len(least)) > 1
            cells += [f"{stats.ttest_ind(times, least, equal_var=False).pvalue:.1g}" if several else "–"]
        cells += [interval([measured[-1]["ppl"] for measured in each], 2), each[0][-1]["num_updates"]]
        yield f"| {' | '.join(map(str, cells))} |"


def curve(folders: Sequence[Path], picture: Path | None, target: float, over: str) -> Iterator[str]:
    """The best bits per byte and pairs of each folder *over* CPU time or tokens, the line
    through the pairs over its logarithm, and where that line reaches *target* percent."""
    points: list[tuple[float, float, float]] = []
    yield "| runs | best setting | tokens (M) | CPU time (s) | bits per byte | pairs (%) |"
    yield "|---|---|---:|---:|---:|---:|"
    for folder in folders:
        scored = {name: each for name, each in rows(folder).items() if all("accuracy" in row for row in each)}
        if not scored:
            raise Mistake(f"{folder}: no runs with minimal pairs; give `run` the flag --pairs")
        name = min(scored, key=lambda name: bits(scored[name]))
        each = scored[name]
        seconds = statistics.mean(sum(sitting["processor"] for sitting in row["sittings"]) for row in each)
        pairs = 100 * statistics.mean(row["accuracy"]["all"] for row in each)
        tokens = statistics.mean(row["tokens"] for row in each) / 1e6
        points.append((seconds / 3600 if over == "time" else tokens, bits(each), pairs))
        cells = [folder.name, name, f"{tokens:.2f}", f"{seconds:.0f}", f"{bits(each):.4f}", f"{pairs:.2f}"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    if len(points) < 2:
        return
    line = stats.linregress([math.log10(point[0]) for point in points], [point[2] for point in points])
    slope, intercept = line.slope, line.intercept
    yield f"{slope:.2f} points for ten times the {over}"
    if slope > 0:
        needed = 10 ** ((target - intercept) / slope)
        yield f"{target} %: {needed:,.0f} {UNITS[over]}, if the trend continues"
    if picture:
        draw(points, picture, target, over)


def draw(points: Sequence[tuple[float, float, float]], picture: Path, target: float, over: str) -> None:
    """Pairs, with a line at *target*, and bits per byte."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5))
    amounts, bytes_, pairs = zip(*sorted(points), strict=True)
    for axis, values, label in ((axes[0], pairs, "minimal pairs (%)"), (axes[1], bytes_, "bits per byte")):
        axis.semilogx(amounts, values, "o-")
        axis.set(xlabel=UNITS[over], ylabel=label)
        axis.grid(alpha=0.3, which="both")
    axes[0].axhline(target, color="gray", linestyle="--", label=f"{target} %")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def seeds(text: str) -> list[int]:
    """The numbers of a list such as 1,2,3."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Run, report or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    parser_run = commands.add_parser("run", help="train and measure all settings")
    parser_run.add_argument("settings", type=Path, help="YAML file of names and flags")
    parser_run.add_argument("--data", type=Path, required=True, help="folder made by fairseq-preprocess")
    parser_run.add_argument("--out", type=Path, required=True, help="folder of runs")
    parser_run.add_argument("--pairs", type=Path, help="minimal pairs; without them only texts are scored")
    parser_run.add_argument(
        "--known-words", type=Path, help="also the accuracy of pairs whose words are all in this text"
    )
    budget = parser_run.add_mutually_exclusive_group(required=True)
    budget.add_argument("--seconds", type=float, help="training time of each run")
    budget.add_argument("--updates", type=int, help="updates of each run, instead of a time")
    parser_run.add_argument("--seeds", type=seeds, default=[1], metavar="N,…", help="random seeds (default: 1)")
    parser_run.add_argument("--only", help="names of settings (default: all)")
    parser_run.add_argument("--processes", type=int, default=2, help="runs at the same time (default: 2)")
    parser_run.add_argument("--train-flags", default="", help="further flags of fairseq-train")
    parser_run.add_argument("--eval-flags", default="--bf16", help="flags of fairseq-eval-lm (default: --bf16)")
    parser_run.add_argument("--keep", action="store_true", help="keep checkpoints")
    parser_report = commands.add_parser("report", help="print a table")
    parser_report.add_argument("folder", type=Path)
    parser_report.add_argument("--against", metavar="NAME", help="also print differences from this setting, by seed")
    parser_ranks = commands.add_parser("ranks", help="print the rank correlation of two folders")
    parser_ranks.add_argument("small", type=Path)
    parser_ranks.add_argument("whole", type=Path)
    parser_reach = commands.add_parser("reach", help="print how soon settings reach the perplexity of one of them")
    parser_reach.add_argument("folder", type=Path, help="runs that were validated (--validate-interval-updates)")
    parser_reach.add_argument(
        "--against", metavar="NAME", required=True, help="the setting whose final one is the target"
    )
    parser_curve = commands.add_parser("curve", help="print and draw the best of each folder over CPU time")
    parser_curve.add_argument("folders", type=Path, nargs="+")
    parser_curve.add_argument("--over", choices=tuple(UNITS), default="time", help="(default: time)")
    parser_curve.add_argument("--picture", type=Path, help="PNG file to draw")
    parser_curve.add_argument("--target", type=float, default=67.3, help="percent of pairs (default: 67.3)")
    args = parser.parse_args()
    try:
        if args.command == "run":
            for name in ("data", "out", "pairs", "known_words"):
                path = getattr(args, name)
                setattr(args, name, path and path.resolve())
            run(args)
        elif args.command == "reach":
            print(*reach(args.folder, args.against), sep="\n")
        elif args.command == "curve":
            print(*curve(args.folders, args.picture, args.target, args.over), sep="\n")
        else:
            table = report(args.folder, args.against) if args.command == "report" else compare(args.small, args.whole)
            print(*table, sep="\n")
    except OSError as error:
        parser.exit(2, f"compare.py: error: {error.filename}: {error.strerror}\n")
    except Mistake as error:
        parser.exit(2, f"compare.py: error: {error}\n")


if __name__ == "__main__":
    main()
