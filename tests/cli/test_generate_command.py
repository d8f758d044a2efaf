"""``fairseq-generate``: passages of a corpus beside their continuations."""

from __future__ import annotations

import itertools
import json
import re
import shutil

import numpy as np
import pytest
import runs
from mistakes import user_error

from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter, token_dtype
from fairseq.errors import UserError
from fairseq.inference import Search, generator_of, stream
from fairseq.inference.generation import draw_starts
from fairseq.inference.loading import load_models
from fairseq.inference.writer import Writer
from fairseq_cli import generate
from fairseq_cli.generate import get_generation_parser

SHORTFORMER = runs.GOLDEN / "shortformer_stage2.pt"


BASELINE = runs.GOLDEN / "baseline.pt"


def run(*flags, data=runs.DATA):
    """``fairseq-generate`` in this process; returns its passages."""
    return generate.main(options.parse_args_and_arch(get_generation_parser(), [str(data), *runs.words(*flags)]))


SEED_FLAGS = "--task language_modeling --cpu --gen-subset test --max-new-tokens 40 --sampling --sampling-topk 40"


def test_passages_are_the_corpus_and_the_models_text(capsys, tmp_path):
    flags = [SEED_FLAGS, "--path", SHORTFORMER, "--context-tokens 100 --num-samples 3 --results-path", tmp_path / "out"]
    found = run(flags)
    corpus = IndexedCorpus(str(runs.DATA / "test")).tokens
    [model], task, _ = load_models([SHORTFORMER], runs.DATA)
    assert len({passage.start for passage in found}) == 3
    for number, passage in enumerate(found):
        context = corpus[passage.start : passage.start + 100].tolist()
        assert passage.context.tokens == context
        assert passage.reference.tokens == corpus[passage.start + 100 : passage.start + 140].tolist()
        how = Search(40, top_k=40)
        never = [0, 1, 3]
        text = list(stream([model], context, how, generator=generator_of(1, number), forbidden=never))
        assert passage.continuation.tokens == text
        assert passage.continuation.symbols == " ".join(task.source_dictionary[token] for token in text)
    printed = capsys.readouterr().out
    assert all(passage.continuation.text.strip() in printed for passage in found)

    report = json.loads((tmp_path / "out" / "generate.json").read_text(encoding="utf-8"))
    assert report["checkpoints"] == [str(SHORTFORMER)] and report["split"] == "test"
    assert report["settings"]["sampling_topk"] == 40 and report["settings"]["seed"] == 1
    assert set(report["samples"][0]) == {"number", "start", "sample", "context", "continuation", "reference"}
    for passage, stored in zip(found, report["samples"], strict=True):
        for part in ("context", "continuation", "reference"):
            kept = getattr(passage, part)
            assert stored[part] == {"tokens": kept.tokens, "symbols": kept.symbols, "text": kept.text}
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_contexts_are_by_default_as_long_as_the_model_reads(tmp_path):
    [passage] = run("--cpu --max-new-tokens 1 --results-path", tmp_path / "out", "--path", SHORTFORMER)
    assert len(passage.context.tokens) == 128  # segment and cache
    assert json.loads((tmp_path / "out" / "generate.json").read_text())["settings"]["context_tokens"] == 128


def test_same_seed_gives_the_same_texts_and_another_seed_others():
    def texts(*flags):
        return [
            (p.start, p.continuation.text) for p in run(SEED_FLAGS, "--path", BASELINE, "--context-tokens 9", *flags)
        ]

    first = texts("--num-samples 4 --batch-size 3 --seed 8")
    assert first == texts("--num-samples 4 --batch-size 1 --seed 8")
    assert first[:2] == texts("--num-samples 2 --seed 8")
    assert not set(first) & set(texts("--num-samples 4 --seed 9"))


def test_contexts_are_shared_by_samples(capsys):
    found = run(SEED_FLAGS, "--path", BASELINE, "--context-tokens 5 --num-samples 6 --num-contexts 2")
    assert [passage.sample for passage in found] == [1, 2, 3, 1, 2, 3]
    assert len({passage.start for passage in found}) == 2
    assert len({passage.continuation.text for passage in found}) == 6


def test_progress_goes_to_stderr_in_the_format_asked_for(capsys):
    flags = "--cpu --sampling --context-tokens 5 --num-samples 3 --max-new-tokens 20 --log-interval 25"
    run(flags, "--path", BASELINE, "--log-format simple")
    shown = capsys.readouterr()
    lines = re.findall(r"^tokens: +(\d+) / 60 per_second=\S+, eta=\d\d:\d\d$", shown.err, re.MULTILINE)
    assert lines == ["25", "50"] and "per_second" not in shown.out
    run(flags, "--path", BASELINE, "--log-format json")
    found = [(line["work"], line["done"], line["total"]) for line in runs.records(capsys.readouterr().err)]
    assert found == [("tokens", 25, 60), ("tokens", 50, 60)]
    run(flags, "--path", BASELINE, "--no-progress-bar")
    assert "tokens:     25 / 60" in capsys.readouterr().err
    run(flags, "--path", BASELINE, "--log-format none")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("complete", [0, 3])
def test_what_is_complete_is_printed_and_kept_when_the_run_is_stopped(complete, monkeypatch, capsys, tmp_path):
    write = Writer.continue_all

    def stopped(*args):
        yield from itertools.islice(write(*args), complete)
        assert f"==== {complete} of 6: tokens " in capsys.readouterr().out or not complete
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "continue_all", stopped)
    flags = "--cpu --sampling --context-tokens 5 --num-samples 6 --max-new-tokens 4 --batch-size 2"
    with pytest.raises(KeyboardInterrupt):
        run(flags, "--path", BASELINE, "--results-path", tmp_path / "out")
    assert (tmp_path / "out").exists() == bool(complete)
    if complete:
        report = json.loads((tmp_path / "out" / "generate.json").read_text(encoding="utf-8"))
        assert [sample["number"] for sample in report["samples"]] == [1, 2, 3]


@pytest.mark.parametrize("flags", ["--beam 3 --fp16", "--bf16", "--beam 1", "--tokens-per-sample 8"])
def test_other_ways_write_too(flags, capsys):
    [found] = run("--cpu --max-new-tokens 20 --context-tokens 30", "--path", BASELINE, flags)
    assert len(found.continuation.tokens) == 20


def test_text_after_a_context_goes_on_where_that_ends():
    assert draw_starts(100, 60, 30, 3, seed=1) == draw_starts(100, 60, 30, 5, seed=1)[:3]
    assert all(0 <= start <= 10 for start in draw_starts(100, 60, 30, 200, seed=2))
    assert set(draw_starts(100, 60, 30, 300, seed=3)) == set(range(11))
    assert draw_starts(100, 99, 500, 2, seed=1) == [0, 0]


MISTAKES = {
    "": r"--path: name a checkpoint",
    "--path {baseline} --context-tokens 99999": r"--context-tokens 99999: the split has 2292 tokens; give 2291 or less",
    "--path {baseline} --beam 3 --sampling": r"--beam 3 --sampling: .*give one",
    "--path {baseline} --beam 0": r"--beam 0: must be at least 1",
    "--path {baseline} --sampling --sampling-topk -1": r"--sampling-topk -1: must be at least 0",
    "--path {baseline} --sampling --sampling-topp 0": r"--sampling-topp 0.0: must be greater than 0",
    "--path {baseline} --sampling --temperature 0": r"--temperature 0.0: must be greater than 0",
    "--path {baseline} --beam 1 --sampling-topk 4": r"--sampling-topk: has no effect without --sampling",
    "--path {baseline} --beam 1 --sampling-topp 0.4": r"--sampling-topp: has no effect without --sampling",
    "--path {baseline} --beam 1 --temperature 0.4": r"--temperature: has no effect without --sampling",
    "--path {baseline} --beam 1 --num-samples 4 --num-contexts 2": r"--num-samples: 2 continuations .* without",
    "--path {baseline} --num-samples 4 --num-contexts 3": r"--num-samples 4: must be a multiple of --num-contexts 3",
    "--path {baseline} --num-samples 2 --num-contexts 3": r"--num-samples 2: must be a multiple of --num-contexts 3",
    "--path {baseline} --min-len 201": r"--min-len 201: texts have at most 200 tokens; raise --max-len-b",
    "--path {baseline} --min-len 9 --max-len-b 8": r"--min-len 9: texts have at most 8 tokens; raise --max-len-b",
    "--path {baseline} --compile": r"--compile: .*leave it out",
    "--path {baseline} --max-new-tokens 0": r"--max-new-tokens 0: must be at least 1",
    "--path {baseline} --gen-subset nothing": r"nothing.idx: file not found",
    "--path {baseline} --results-path {file}": r"--results-path .*: cannot be written",
    "--path {baseline} --text x --gen-subset valid": r"--gen-subset valid: has no effect with --text; give one",
    "--path {file}": r"file: .*checkpoint",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_told_in_one_line(flags, tmp_path):
    (tmp_path / "file").write_text("no folder, no checkpoint")
    with user_error(MISTAKES[flags]) as error:
        run("--cpu", flags.format(baseline=BASELINE, file=tmp_path / "file"))
    assert "\n" not in error.value.with_flags


def test_token_beyond_the_dictionary_is_refused(tmp_path):
    shutil.copy(runs.DATA / "dict.txt", tmp_path / "dict.txt")
    with IndexedWriter(tmp_path / "test", token_dtype(9000)) as writer:
        writer.add(np.array([4, 8000, 2]), np.array([3]))
    with pytest.raises(UserError, match=r"token 1 is number 8000"):
        run("--cpu --context-tokens 1 --path", BASELINE, data=tmp_path)


def test_corpus_of_another_dictionary_is_refused(tmp_path):
    (tmp_path / "dict.txt").write_text("a 3\nb 2\n")
    with IndexedWriter(tmp_path / "test", token_dtype(6)) as writer:
        writer.add(np.array([4, 5, 2]), np.array([3]))
    with pytest.raises(UserError, match=r"dictionary of 1200 symbols"):
        run("--cpu --context-tokens 1 --path", BASELINE, data=tmp_path)


def test_results_that_cannot_be_written_leave_nothing_behind(tmp_path):
    (tmp_path / "generate.json").mkdir()
    with pytest.raises(UserError, match=r"generate.json: cannot be written"):
        run("--cpu --max-new-tokens 2 --context-tokens 3 --path", BASELINE, "--results-path", tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["generate.json"]


def test_parts_write_files_of_their_own_and_one_without_contexts_none(tmp_path):
    short = [SEED_FLAGS, "--max-new-tokens 2 --context-tokens 3 --path", BASELINE]
    whole = run(short, "--num-samples 3")
    for part in (0, 1):
        run(short, f"--num-samples 3 --num-shards 2 --shard-id {part} --results-path", tmp_path)
    stored = [json.loads((tmp_path / f"generate.{part}-of-2.json").read_text())["samples"] for part in (0, 1)]
    texts = {sample["number"]: sample["continuation"]["text"] for samples in stored for sample in samples}
    assert texts == {passage.number: passage.continuation.text for passage in whole}
    for kind, flags in (("contexts", ["--num-samples 1"]), ("lines", ["--results-format fairseq"])):
        with user_error(rf"--shard-id 4000: no {kind} are left .*--num-shards 5000; there are \d+, so give fewer"):
            run(short[1:], flags, "--cpu --num-shards 5000 --shard-id 4000 --results-path", tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_commands_use_the_library_and_not_one_another():
    for file in (runs.ROOT / "fairseq_cli").glob("*.py"):
        modules = re.findall(r"(?:from|import) fairseq_cli(?:\.| import )?(\w*)", file.read_text())
        known = {"common", "command"}  # parsers, and what makes an entry point, of the package itself
        known |= {"train"} if file.stem == "hydra_train" else set()  # another command line of it
        assert set(modules) <= known, file.name


def test_door_and_help(tmp_path):
    shown = runs.command("generate.py", "--help")
    assert shown.returncode == 0 and re.search(r"--num-contexts N\s+different contexts", shown.stdout)
