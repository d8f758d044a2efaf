"""Tests, losses, training, generation and several processes on a GPU, in one report.

    python -m benchmarks.gpu                 # or: make gpu
    python -m benchmarks.gpu --device cpu    # the same program with small models, as a rehearsal

Each step is a process with a time limit of its own, and all of them end after ten minutes, or
fifteen with several GPUs. A step that fails stands in the report with the last line of its error,
and the others go on. The exit code is 0 if every step passed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import language_model, machine
from fairseq.config import options
from fairseq.inference import Search, generate, generator_of
from fairseq.inference.reader import Reader
from fairseq.modules import devices
from fairseq.tasks import setup_task
from fairseq.training.hooks import Hook, register_hook
from fairseq.training.state import TrainingState
from fairseq_cli import train as train_command
from fairseq_cli.common import get_training_parser

ROOT = Path(__file__).parents[1]
ENCODER = "--task masked_lm --criterion masked_lm --sample-break-mode none --optimizer adam"
# Optimizer, rate and schedule are given: nothing is the recipe's, which has stages and accumulates.
MODELS = {
    "shortformer_wiki103": "--criterion adaptive_loss --optimizer nag --tokens-per-sample 512 --batch-size 18",
    "transformer_xl_wiki103_large": "--criterion cross_entropy --optimizer adam --batch-size 8",
    "bert_base": f"{ENCODER} --tokens-per-sample 512 --max-positions 512 --batch-size 32",
    "llama_135m": "--criterion cross_entropy --optimizer adam --tokens-per-sample 1024 --batch-size 16",
}
SMALL = {
    "shortformer_tiny": "--criterion adaptive_loss --optimizer nag --tokens-per-sample 32 --batch-size 4",
    "transformer_xl_tiny": "--criterion cross_entropy --optimizer adam --batch-size 4 --cutoffs 200,600",
    "bert_tiny": f"{ENCODER} --tokens-per-sample 32 --max-positions 32 --batch-size 4",
    "llama_tiny": "--criterion cross_entropy --optimizer adam --tokens-per-sample 32 --batch-size 4",
}
COMMON = """--lr 1e-3 --lr-scheduler fixed --clip-norm 0.1 --required-batch-size-multiple 1 --seed 1 --no-save
    --disable-validation --log-format json --log-interval 1"""
WORDS = {**dict.fromkeys(SMALL, 2_000), "bert_base": 30_522, "llama_135m": 49_152}
WORDS |= dict.fromkeys(("shortformer_wiki103", "transformer_xl_wiki103_large"), 267_744)
UPDATES = 20  # of losses that are compared
TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2}  # relative, of the loss of any of these updates
WARM_UP = 4  # updates that are not timed: compilation, a count of operations, a profile
KERNELS = re.compile(r"flash|fmha|attention|cudnn_.*sdp|flex", re.IGNORECASE)
TESTS = [
    *("tests/training/test_strict_device.py", "tests/training/test_precision.py", "tests/training/test_profiling.py"),
    *("tests/optim/test_optim.py", "tests/evaluation/test_scorer.py", "tests/data/test_iterator.py"),
]


@dataclass(frozen=True)
class Step:
    """One line of the report.

    Attributes:
        kind: the function of :data:`KINDS` that measures it.
        limit: most seconds it may take.
        flags: of training, beside those of the model.
    """

    name: str
    kind: str
    limit: float
    arch: str = ""
    precision: str = "fp32"
    flags: str = ""
    processes: int = 1


@dataclass(frozen=True)
class Setup:
    """What all steps share."""

    device: str  # cuda, cpu or strict
    small: bool
    seconds: float
    folder: str

    def command(self, arch: str, *flags: str, device: str = "") -> list[str]:
        """The words of a training command."""
        fixed = f"{self.folder}/{WORDS[arch]} --arch {arch} {MODELS.get(arch) or SMALL[arch]} {COMMON}"
        cpu = ["--cpu"] if (device or self.device) == "cpu" else []
        return [*fixed.split(), *" ".join(flags).split(), *cpu]


def steps(device: str, small: bool, gpus: int) -> list[Step]:
    """What is run, what matters most first: the time may not suffice for all."""
    models = list(SMALL if small else MODELS)
    causal = models[-1]
    measured = {
        precision: [Step(f"{arch}, {precision}", "train", 90, arch, precision) for arch in models]
        for precision in ("bf16", "fp16")
    }
    compiled = {
        precision: [Step(f"{s.name}, compiled", "train", 150, s.arch, precision, "--compile") for s in cases]
        for precision, cases in measured.items()
    }
    losses = [Step(f"loss of {arch}", "loss", 90, arch) for arch in SMALL]
    first = [Step("matrix products", "products", 60), *losses, Step("tests", "tests", 240)]
    writes = [Step(f"generation, {models[0]}", "write", 60, models[0])]
    if device == "strict":  # neither compiled code nor other processes have this device
        return [*first, *measured["bf16"], *writes, *measured["fp16"]]
    several = [Step("two processes on one device, gloo", "processes", 90, "llama_tiny", flags="gloo", processes=2)]
    count = gpus if gpus > 1 else 2 if device == "cpu" else 0
    if count:
        several += [
            Step(
                "two processes, FSDP2", "processes", 90, "llama_tiny", flags="--ddp-backend fully_sharded", processes=2
            )
        ]
        several += [
            Step(f"{causal}, bf16, {count} × {name}", "several", 120, causal, "bf16", flags, count)
            for name, flags in (
                ("DDP", ""),
                ("FSDP2", "--ddp-backend fully_sharded"),
                ("FSDP2, compiled", "--ddp-backend fully_sharded --compile"),
            )
        ]
    return [*first, *measured["bf16"], *several, *writes, *compiled["bf16"], *measured["fp16"], *compiled["fp16"]]


# Steps, each in a process of its own


def products(step: Step, setup: Setup) -> dict[str, Any]:
    """The machine, and the best speed of a large matrix product in TFLOP/s, by precision."""
    device, size = torch.device(setup.device), 8192 if setup.device == "cuda" else 256
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    found, speeds = machine.describe(device), {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpus": torch.cuda.device_count(), "memory_mib": properties.total_memory >> 20}
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
        found |= {"capability": f"{properties.major}.{properties.minor}", "driver": _driver()}
        types["tf32"] = torch.float32
    for name, dtype in types.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
        seconds = machine.best_seconds(functools.partial(torch.matmul, a, b), device, 10)
        speeds[name] = 2 * size**3 / seconds / 1e12
    return {"machine": found, "tflops": speeds}


def _driver() -> str | None:
    """The version of NVIDIA's driver; None without its tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    return None


def loss(step: Step, setup: Setup) -> dict[str, Any]:
    """Losses on the device beside the CPU's in fp32, without dropout."""
    expected = losses(setup.command(step.arch, f"--max-update {UPDATES}", device="cpu"))
    differences = {}
    for precision, tolerance in TOLERANCES.items():
        flag = "" if precision == "fp32" else f"--{precision}"
        found = losses(setup.command(step.arch, f"--max-update {UPDATES}", flag))
        differences[precision] = difference(found, expected, tolerance, f"{precision}, the CPU's in fp32")
    return {"first": expected[0], "last": expected[-1], "differences": differences, "tolerances": TOLERANCES}


def losses(command: Sequence[str]) -> list[float]:
    """The loss of each update of a run in this process, without dropout."""
    args = options.parse_args_and_arch(get_training_parser(), list(command))
    for name, value in vars(args).items():
        if "drop" in name and isinstance(value, float):
            setattr(args, name, 0.0)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        train_command.main(args)
    return [line["loss"] for line in records(log.getvalue())]


def difference(found: Sequence[float], expected: Sequence[float], tolerance: float, other: str) -> float:
    """The largest relative difference of two series, if it is at most *tolerance*."""
    if len(found) != len(expected):
        raise RuntimeError(f"{len(found)} updates, and {len(expected)} of {other}")
    differences = [abs(a - b) / b for a, b in zip(found, expected, strict=True)]
    largest = max(differences, key=lambda value: math.inf if math.isnan(value) else value)
    if not largest <= tolerance:
        raise RuntimeError(f"losses differ by {largest:.1e} from {other}; at most {tolerance:.0e} is expected")
    return largest


def records(text: str) -> list[dict[str, Any]]:
    """The lines of a JSON log that tell of updates."""
    lines = [json.loads(line[line.index("{") :]) for line in text.splitlines() if line.endswith("}") and "{" in line]
    return [line for line in lines if "num_updates" in line]


def tests(step: Step, setup: Setup) -> dict[str, Any]:
    """The tests that compute on the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--device", setup.device, "-p", "no:cacheprovider"]
    command += ["-n", "4"] if importlib.util.find_spec("xdist") and not setup.small else []
    command += [TESTS[0], "-k", "llama and resumes"] if setup.small else TESTS
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in process.stdout.splitlines() if line.strip()]
    if process.returncode:
        print(process.stdout, file=sys.stderr)
        failed = [line.split(" - ")[0].split("::")[-1] for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError(f"{lines[-1].strip('= ')}{': ' if failed else ''}{', '.join(failed)}")
    return {"result": lines[-1].strip("= ")}


class Stopwatch(Hook):
    """Times updates for some *seconds*, and looks into one of the first ones: operations, and
    kernels of attention."""

    def __init__(self, device: torch.device, seconds: float, counts: bool) -> None:
        self.device, self.seconds, self.counts = device, seconds, counts
        self.times: list[float] = []
        self.tokens, self.warm_up, self.flops = 0.0, 0.0, 0
        self.kernels: list[str] = []

    def on_start(self, state: TrainingState) -> None:
        self.tokens = float(state.batches.dataset.sizes.sum()) / len(state.batches)
        self.started = time.perf_counter()
        self.counter, self.inside = machine.flop_counter(), contextlib.ExitStack()

    def on_update(self, state: TrainingState) -> None:
        if state.num_updates <= WARM_UP:
            machine.synchronize(self.device)
            self.inside.close()
            activity = devices.profiler_activity(self.device)
            if state.num_updates == 1 and self.counts:
                self.inside.enter_context(self.counter)
            elif state.num_updates == 2 and self.counts:
                self.flops = self.counter.get_total_flops()
            elif state.num_updates == WARM_UP - 1 and activity is not None:
                self.profile = self.inside.enter_context(torch.profiler.profile(activities=[activity]))
            elif state.num_updates == WARM_UP:
                if activity is not None:
                    names = {event.key for event in self.profile.key_averages() if KERNELS.search(event.key)}
                    self.kernels = sorted(name[:90] for name in names)
                self.warm_up = time.perf_counter() - self.started
                self.times.append(time.perf_counter())
            return
        self.times.append(time.perf_counter())
        if len(self.times) > 6 and self.times[-1] - self.times[0] > self.seconds:
            state.end = "the time of this measurement"


def train(step: Step, setup: Setup) -> dict[str, Any]:
    """Speed and memory of training by ``fairseq-train``'s own loop."""
    device = torch.device(setup.device)
    watch = Stopwatch(device, setup.seconds, counts="--compile" not in step.flags)
    register_hook(lambda settings: watch)
    command = setup.command(step.arch, f"--{step.precision}", step.flags, "--max-update 1000000 --log-format none")
    command += ["--distributed-world-size", "1"]
    train_command.main(options.parse_args_and_arch(get_training_parser(), command))
    seconds = [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)]
    memory = devices.peak_memory(device)
    return {
        "tokens_per_second": watch.tokens / statistics.median(seconds),
        "updates": len(seconds),
        "seconds_of_first_updates": watch.warm_up,
        "flops_per_token": watch.flops / watch.tokens,
        "mib": machine.peak_rss() if memory is None else memory / 2**20,
        "kernels": watch.kernels,
    }


def write(step: Step, setup: Setup) -> dict[str, Any]:
    """Token by token: a text of a small model in fp32, which is the CPU's, and speeds in bf16."""
    device = torch.device(setup.device)
    texts = [_texts(_model(setup, "shortformer_tiny").to(d), None, 1, Search(32, beam=2)) for d in ("cpu", device)]
    if texts[0] != texts[1]:
        raise RuntimeError("a text of beam search in fp32 is not the CPU's")
    model, speeds = _model(setup, step.arch).to(device), {}
    search = Search(64 if setup.small else 192, top_k=40)
    for rows in (1, 4) if setup.small else (1, 64):
        seconds = []
        for _ in range(3):  # the first is a warm-up
            machine.synchronize(device)
            start = time.perf_counter()
            made = _texts(model, torch.bfloat16, rows, search)
            seconds.append(time.perf_counter() - start)
        speeds[str(rows)] = sum(map(len, made)) / min(seconds[1:])
    return {"tokens_per_second_by_streams": speeds}


def _model(setup: Setup, arch: str) -> Any:
    """A model with its initial weights."""
    args = options.parse_args_and_arch(get_training_parser(), setup.command(arch))
    torch.manual_seed(1)
    return setup_task(args).build_model(args).eval()


def _texts(model: Any, dtype: torch.dtype | None, rows: int, search: Search) -> list[list[int]]:
    """The best text of each of *rows* prompts."""
    prompts = [[10 + row] for row in range(rows)]
    found = generate([Reader(model, dtype)], prompts, search, generators=lambda n: generator_of(1, n), batch_size=rows)
    return [best.tokens for _, (best, *_) in sorted(found, key=lambda text: text[0])]


def processes(step: Step, setup: Setup) -> dict[str, Any]:
    """Losses of several processes beside those of one that reads as many rows."""
    shares = step.flags == "gloo"
    flags = f"--max-update {UPDATES} --dropout 0 --attention-dropout 0 --activation-dropout 0"
    chosen = "--distributed-backend gloo" if shares else step.flags
    log = ranks(setup.command(step.arch, flags, chosen), step.processes, shares)
    rows = int(SMALL[step.arch].split()[-1]) * step.processes
    expected = losses(setup.command(step.arch, flags, f"--batch-size {rows} --distributed-world-size 1"))
    found = difference([line["loss"] for line in log], expected, TOLERANCES["fp32"], "one process")
    return {"differences": {"fp32": found}, "tolerances": {"fp32": TOLERANCES["fp32"]}}


def several(step: Step, setup: Setup) -> dict[str, Any]:
    """Speed of several processes, each with a device of its own, from the log."""
    count = 20 if setup.small else 60
    command = setup.command(step.arch, f"--{step.precision}", step.flags, f"--max-update {count} --log-interval 10")
    last = ranks(command, step.processes, shares=False)[-1]
    return {"tokens_per_second": last["wps"], "processes": step.processes}


def ranks(command: Sequence[str], count: int, shares: bool) -> list[dict[str, Any]]:
    """The log of *count* processes, connected by torchrun's variables, that share device 0 or have
    one each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{rank}" for rank in range(count)]
        started = []
        for rank, file in enumerate(files):
            env = {**common, "RANK": str(rank), "LOCAL_RANK": "0" if shares else str(rank)}
            with file.with_suffix(".out").open("w") as out, file.with_suffix(".err").open("w") as err:
                started.append(
                    subprocess.Popen([sys.executable, "train.py", *command], cwd=ROOT, env=env, stdout=out, stderr=err)
                )
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                time.sleep(2)  # the others may have an error to tell, too
                for process in started:
                    process.kill()
            time.sleep(0.1)
        for rank, process in enumerate(started):
            if process.returncode > 0:
                text = files[rank].with_suffix(".err").read_text()
                print(text, file=sys.stderr)
                raise RuntimeError(f"rank {rank}: {last_line(text)}")
        return records(files[0].with_suffix(".out").read_text())


KINDS = {f.__name__: f for f in (products, loss, tests, train, write, processes, several)}


# The report


def last_line(text: str) -> str:
    """The last line of *text* that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def run(step: Step, setup: Setup, seconds_left: float) -> dict[str, Any]:
    """What the report has about *step*."""
    about = {"step": asdict(step), "passed": False, "seconds": 0.0}
    limit = min(step.limit, seconds_left)
    if limit < 5 <= step.limit:
        return {**about, "error": "not run: the time of the report is over"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--step", json.dumps([asdict(step), asdict(setup)])]
    started = time.perf_counter()
    # A session of its own, so that what it started ends with it.
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {**about, "seconds": limit, "error": f"took longer than {limit:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    about["seconds"] = time.perf_counter() - started
    if process.returncode:
        ended = f"ended with code {process.returncode}"
        return {**about, "error": last_line(err) or ended, "traceback": err[-4000:]}
    return {**about, "passed": True, **json.loads(out.splitlines()[-1])}


def cells(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[str]:
    """The columns of a *result* after its name: speed, share of the peak, memory, what else."""
    step = Step(**result["step"])
    if not result["passed"]:
        return ["", "", "", f"FAILED: {result['error'][:160]}"]
    speed, memory = result.get("tokens_per_second"), result.get("mib")
    flops = [r["flops_per_token"] for r in results if r["step"]["arch"] == step.arch and r.get("flops_per_token")]
    peaks: dict[str, float] = next((r["tflops"] for r in results if "tflops" in r), {})
    peak = peaks.get(step.precision, 0) * step.processes
    share = f"{speed * flops[0] / peak / 1e12:.0%}" if speed and flops and peak else ""
    text = result.get("result", "")
    if "tflops" in result:
        text = ", ".join(f"{name} {value:,.1f}" for name, value in result["tflops"].items()) + " TFLOP/s"
    if "differences" in result:
        text = ", ".join(
            f"{name} {value:.1e} (at most {result['tolerances'][name]:.0e})"
            for name, value in result["differences"].items()
        )
    if "tokens_per_second_by_streams" in result:
        speeds = result["tokens_per_second_by_streams"]
        text = "tokens/s: " + ", ".join(f"{rows} × {value / int(rows):,.0f}" for rows, value in speeds.items())
    if result.get("kernels"):
        text = "; ".join(name[:40] for name in result["kernels"][:2])
    return ["" if speed is None else f"{speed:,.0f}", share, "" if memory is None else f"{memory:,.0f}", text]


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["| step | s | tokens/s | of peak | MiB | |", "|---|--:|--:|--:|--:|---|"]
    for result in results:
        row = [result["step"]["name"], f"{result['seconds']:.0f}", *cells(result, results)]
        lines.append("| " + " | ".join(row).replace("\n", " ") + " |")
    return "\n".join(lines)


def report(chosen: Sequence[Step], setup: Setup, minutes: float, file: Path) -> bool:
    """Run the *chosen* steps, write *file* after each, and print the table; return whether all
    passed."""
    started = time.perf_counter()
    for words in {WORDS[arch] for arch in (*SMALL, *(step.arch for step in chosen if step.arch in WORDS))}:
        folder = Path(setup.folder) / str(words)
        folder.mkdir()
        language_model.make_corpus(folder, words)
    results: list[dict[str, Any]] = []
    about: dict[str, Any] = {"machine": machine.describe(torch.device("cpu")), "device": setup.device}
    for step in chosen:
        results.append(run(step, setup, 60 * minutes - (time.perf_counter() - started)))
        about["machine"] |= results[-1].pop("machine", {})
        passed = len(results) == len(chosen) and all(result["passed"] for result in results)
        content = {**about, "small": setup.small, "passed": passed, "steps": results}
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(
            f"{step.name}: {'passed' if results[-1]['passed'] else results[-1]['error']}", file=sys.stderr, flush=True
        )
    known = about["machine"]
    print(f"\n{known['device']}, torch {known['torch']}, commit {known['commit']}, {known['date']}\n\n{table(results)}")
    failed = sum(not result["passed"] for result in results)
    minutes = (time.perf_counter() - started) / 60
    print(f"\n{len(results) - failed} of {len(results)} steps passed in {minutes:.1f} minutes; figures in {file}")
    return passed


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu", "strict"), default="cuda", help="default: cuda")
    parser.add_argument("--small", action="store_true", help="small models, also on a GPU")
    parser.add_argument("--only", default="", metavar="REGEX", help="only steps whose name has this in it")
    parser.add_argument("--minutes", type=float, help="most time (default: 10; 15 with several GPUs)")
    parser.add_argument("--seconds", type=float, default=4, help="time of a speed in seconds (default: 4)")
    parser.add_argument("--json", type=Path, default=Path("gpu-report.json"), metavar="FILE", help="the report")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.step:
        step, setup = json.loads(args.step)
        if setup["device"] == "strict":
            sys.path.insert(0, str(ROOT / "tests"))
            importlib.import_module("strict").activate()
        print("\n" + json.dumps(KINDS[step["kind"]](Step(**step), Setup(**setup))))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda or torch.version.hip else "is built without CUDA"
        print(f"make gpu: torch {torch.__version__} {built}; make gpu DEVICE=cpu rehearses", file=sys.stderr)
        return 2
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    small = args.small or args.device != "cuda"
    # As Ctrl-C does, so that the step of the moment ends with its processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [step for step in steps(args.device, small, gpus) if re.search(args.only, step.name)]
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(args.device, small, args.seconds, folder)
        passed = report(chosen, setup, args.minutes or (15 if gpus > 1 else 10), args.json)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
