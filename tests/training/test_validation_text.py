"""Validation of a model of raw text: bits per byte, and a line that the model writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import preprocessing
import pytest
import runs
from evaluations import evaluate

from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.training.build import build_state
from fairseq.training.validation import text_writer
from fairseq_cli import validate

WORDS = (runs.GOLDEN / "text" / "valid.txt").read_text(encoding="utf-8").split()
SIZES = "--cpu --tokens-per-sample 16 --batch-size 16 --max-update 4 --validate-interval-updates 2 --seed 3"
BANDS = "--adaptive-input-cutoff 50,100 --adaptive-softmax-cutoff 50,100"
SIZES += " --log-format json --log-interval 1 --optimizer adam --lr 0.002"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("raw")
    for name, words in (("train", WORDS[:1200]), ("valid", WORDS[1200:1500])):
        lines = [" ".join(words[i : i + 12]) for i in range(0, len(words), 12)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = {f"{name}pref": str(folder / f"{name}.txt") for name in ("train", "valid")}
    preprocessing.run(folder / "data-bin", learn_bpe=300, **texts)
    yield folder / "data-bin"


def written(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("sample after update")]


def validate_again(path: Path, data: Path) -> list[dict[str, float]]:
    """What ``fairseq-validate`` measures of each split."""
    parser = validate.get_validation_parser()
    args = options.parse_args_and_arch(parser, [str(data), "--path", str(path), "--cpu"], task_defaults=False)
    return list(validate.main(args)[str(path)].values())


@pytest.mark.parametrize(
    "arch",
    [
        f"transformer_lm_tiny {BANDS}",
        f"transformer_lm_fast_tiny {BANDS} --ngram-notes 100 --ema-decay 0.5",
        f"shortformer_tiny {BANDS}",
        "transformer_xl_tiny",
        "llama_tiny --bf16",
        "gpt2_tiny --add-bos-token --max-target-positions 17",
    ],
)
def test_a_model_writes_a_line_after_each_validation_and_trains_as_without(
    arch: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log = runs.train(tmp_path / "with", f"--arch {arch} {SIZES}", data=data)
    lines = written(caplog)
    assert [line.split(":")[0] for line in lines] == ["sample after update 2", "sample after update 4"]
    assert all("\n" not in line and len(line) > 25 for line in lines)
    caplog.clear()
    without = runs.train(tmp_path / "without", f"--arch {arch} {SIZES} --no-sample", data=data)
    assert not written(caplog)
    assert runs.updates(log) == runs.updates(without) and runs.summaries(log, "valid") == runs.summaries(
        without, "valid"
    )
    states = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("with", "without")]
    assert runs.difference(*states) is None
    if "lm_tiny" in arch:  # the same model writes the same line
        caplog.clear()
        runs.train(tmp_path / "again", f"--arch {arch} {SIZES}", data=data)
        assert written(caplog) == lines


def test_bits_per_byte_of_a_validation_are_those_of_the_evaluated_text(data: Path, tmp_path: Path) -> None:
    flags = f"--arch transformer_lm_tiny {BANDS} {SIZES} --save-dir {tmp_path}"
    (*_, last) = runs.summaries(runs.train(tmp_path, flags, data=data), "valid")
    text = data.parent / "valid.txt"
    figures = evaluate(f"--cpu --tokens-per-sample 16 --text {text}", data=tmp_path / "checkpoint_last.pt")
    assert figures["raw_bytes"] == text.stat().st_size
    assert last["bpb"] == pytest.approx(figures["bits_per_byte"], rel=1e-5)
    assert last["bpb"] == pytest.approx(last["nll_loss"] * figures["tokens"] / text.stat().st_size)
    (validated,) = validate_again(tmp_path / "checkpoint_last.pt", data)
    assert validated["bpb"] == pytest.approx(last["bpb"], rel=1e-6)
    part = runs.summaries(runs.train(tmp_path / "part", flags, "--max-valid-steps 1", data=data), "valid")
    assert all("bpb" not in line for line in part), "bytes are those of the whole text"


@pytest.mark.parametrize("case", ["rank 1", "--ddp-backend fully_sharded", "--compile", "--no-sample", "no tokenizer"])
def test_only_one_process_with_whole_weights_writes_text(case: str, data: Path, tmp_path: Path) -> None:
    flags = case if case.startswith("--") else ""
    folder = runs.DATA if case == "no tokenizer" else data
    splits = "--train-subset valid --valid-subset test" if case == "no tokenizer" else ""
    arch = "llama_tiny"
    args = runs.arguments(f"--arch {arch} {SIZES} {splits} --save-dir {tmp_path}", data=folder)
    state = build_state(training_settings(args), World())
    assert (text_writer(state) is None) == (case == "no tokenizer")
    others = training_settings(runs.arguments(f"--arch {arch} {SIZES} {splits} {flags}", data=folder))
    state.settings = others
    state.world = World(1, 2) if case == "rank 1" else state.world
    assert text_writer(state) is None
