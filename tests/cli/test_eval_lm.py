"""fairseq-eval-lm: the original's numbers, its wording, its outputs, and mistakes in one line."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys

import naive
import numpy as np
import pytest
import runs
import torch
import warm
from evaluations import evaluate, make_data
from mistakes import user_error

from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter
from fairseq.system import provenance
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm, generate, interactive, validate
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser
from fairseq_cli.validate import get_validation_parser

SHORTFORMER = runs.GOLDEN / "shortformer_stage2.pt"
BASELINE = runs.GOLDEN / "baseline.pt"
UNK = 3
FLAGS = "--sample-break-mode none --max-sentences 1 --cpu"
SLIDING = "--sliding-inf 1 --context-window 63 --max-tokens 64"
MODES = {
    "shortformer.nonoverlap": (SHORTFORMER, ""),
    "shortformer.sliding": (SHORTFORMER, SLIDING),
    "baseline.nonoverlap": (BASELINE, ""),
    "baseline.window": (BASELINE, "--context-window 48"),
}


def scores(tmp_path, *flags, data=runs.DATA):
    """The tokens and log-probabilities that the command saves."""
    file = tmp_path / "scores.npz"
    evaluate(*flags, "--save-token-scores", file, data=data)
    with np.load(file) as saved:
        return saved["tokens"], saved["lprobs"]


def close(lprobs, expected):
    """Equal but for the rounding of float32: these random models are less well-behaved than trained
    ones."""
    np.testing.assert_allclose(lprobs, expected, rtol=2e-6, atol=1e-5)


# --- the original's numbers


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("mode", MODES)
def test_agrees_with_the_original_on_every_token(mode, split, tmp_path):
    path, flags = MODES[mode]
    with np.load(runs.GOLDEN / "expected" / f"{mode.replace('.', f'.{split}.')}.npz") as expected:
        tokens, lprobs = scores(tmp_path, FLAGS, flags, "--gen-subset", split, ["--path", str(path)])
        assert np.array_equal(tokens, expected["tokens"])
        assert np.abs(lprobs - expected["lprobs"]).max() < 1e-5


def test_command_in_a_process_of_its_own(tmp_path):
    mode = "baseline.window"
    path, flags = MODES[mode]
    saved = ["--results-path", str(tmp_path / "results"), "--save-token-scores", str(tmp_path / "s.npz")]
    words = [str(runs.DATA), "--path", str(path), "--gen-subset", "valid", *saved]
    result = warm.command("eval_lm.py", words, FLAGS, flags)
    assert result.returncode == 0, result.stderr
    name = mode.replace(".", ".valid.")
    expected = json.loads((runs.GOLDEN / "expected" / "perplexity.json").read_text())[name]
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"Evaluated 2670 tokens in \d+\.\d s \(\d+\.\d\d tokens/s\)", lines[0])
    assert lines[1] == f"Loss (base 2): {expected['loss_base2']:.4f}, Perplexity: {expected['perplexity']:.2f}"
    assert re.fullmatch(r"Peak memory: \d+ MB", lines[-1])
    with np.load(runs.GOLDEN / "expected" / f"{name}.npz") as golden, np.load(tmp_path / "s.npz") as found:
        known = golden["tokens"] != UNK
        others = math.exp(-golden["lprobs"][known].astype(np.float64).mean())
        share = f"{100 - 100 * known.mean():.3g} %"
        assert lines[2] == f"Unknown: {share} of the tokens, Perplexity of the others: {others:.2f}"
        assert np.abs(found["lprobs"] - golden["lprobs"]).max() < 1e-5
    report = json.loads((tmp_path / "results" / "results.json").read_text())
    assert report["loss_base2"] == pytest.approx(expected["loss_base2"], abs=1e-5)
    assert report["perplexity"] == pytest.approx(expected["perplexity"], abs=1e-3)
    assert report["tokens"] == 2670 and report["split"] == "valid" and report["checkpoints"] == [str(path)]
    assert report["versions"]["torch"] == torch.__version__ and "--gen-subset valid" in report["command"]
    assert report["commit"] == provenance.commit() and report["machine"]["processor"] == provenance.processor()
    assert report["settings"]["tokens_per_sample"] == 64 and report["peak_rss_mb"] > 50


# --- other checkpoints in fairseq's layout

KINDS = {
    "learned positions, plain softmax": {"decoder_learned_pos": True, "old_names": True},
    "shared softmax, gelu": {"share_decoder_input_output_embed": True, "activation_fn": "gelu"},
    "shared softmax in old names": {"share_decoder_input_output_embed": True, "old_names": True},
    "untied adaptive softmax, other widths": {
        "adaptive_softmax_cutoff": "300,700",
        "decoder_input_dim": 8,
        "decoder_output_dim": 24,
        "no_decoder_final_norm": True,
    },
    "adaptive input, plain softmax": {"adaptive_input": True, "adaptive_input_cutoff": "100,300,900"}
    | {"adaptive_input_factor": 2},
    "tied words, own projections, post-norm": {
        "adaptive_input": True,
        "adaptive_input_cutoff": "300,700",
        "adaptive_softmax_cutoff": "300,700",
        "tie_adaptive_weights": True,
        "decoder_normalize_before": False,
    },
    "no positions": {"no_token_positional_embeddings": True, "no_scale_embedding": True, "layernorm_embedding": True},
    "shortformer with a longer cache": {
        "adaptive_input": True,
        "adaptive_input_cutoff": "300",
        "adaptive_softmax_cutoff": "300",
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "no_decoder_final_norm": True,
        "tokens_from_prev": 24,
        "sliding_inf": -1,
    },
    "shortformer with a shorter cache, post-norm": {"decoder_normalize_before": False, "tokens_from_prev": 7},
}


@pytest.fixture(scope="module")
def short_data(tmp_path_factory):
    """The golden dictionary with the beginning of the golden test split."""
    folder = tmp_path_factory.mktemp("short") / "data-bin"
    folder.mkdir()
    shutil.copy(runs.DATA / "dict.txt", folder)
    corpus = IndexedCorpus(str(runs.DATA / "test"))
    lines = int(np.searchsorted(corpus.offsets, 330))
    with IndexedWriter(folder / "test", corpus.tokens.dtype) as writer:
        writer.add(corpus.tokens[: corpus.offsets[lines]], corpus.sizes[:lines])
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_random_checkpoints_of_fairseq_agree_with_a_naive_forward_pass(kind, short_data, tmp_path):
    args, state = naive.checkpoint(
        tmp_path / "checkpoint.pt", len(Dictionary.load(short_data / "dict.txt")), **KINDS[kind]
    )
    model, tokens = naive.NaiveLM(args, state), np.array(IndexedCorpus(str(short_data / "test")).tokens)
    path = f"--cpu --path {tmp_path / 'checkpoint.pt'}"
    found, lprobs = scores(tmp_path, path, data=short_data)
    assert np.array_equal(found, tokens)
    close(lprobs, model.score(tokens, 16))
    if args.get("tokens_from_prev"):
        expected = model.score(tokens, 16, rows=3)
        for more in ("", "--sliding-inf 1"):
            lprobs = scores(tmp_path, path, "--batch-size 3", more, data=short_data)[1]
            close(lprobs, expected)
    else:
        lprobs = scores(tmp_path, path, "--batch-size 3 --context-window 5", data=short_data)[1]
        close(lprobs, model.score(tokens, 16, window=5))


@pytest.mark.parametrize("length", [9, 40])
def test_segments_are_chosen_freely_at_evaluation(length, short_data, tmp_path):
    for kind in ("no positions", "shared softmax, gelu", "shortformer with a longer cache"):
        args, state = naive.checkpoint(tmp_path / "c.pt", len(Dictionary.load(short_data / "dict.txt")), **KINDS[kind])
        tokens = np.array(IndexedCorpus(str(short_data / "test")).tokens)
        lprobs = scores(tmp_path, f"--cpu --path {tmp_path / 'c.pt'} --tokens-per-sample {length}", data=short_data)[1]
        close(lprobs, naive.NaiveLM(args, state).score(tokens, length))


def test_ensemble_averages_probabilities(tmp_path):
    paths = [SHORTFORMER, BASELINE, runs.GOLDEN / "shortformer_stage1.pt"]
    flags = f"{FLAGS} --tokens-per-sample 64 --gen-subset test"
    single = [scores(tmp_path, flags, ["--path", str(path)])[1].astype(np.float64) for path in paths]
    together = scores(tmp_path, flags, ["--path", ":".join(map(str, paths))])[1]
    assert np.abs(together - np.log(np.mean(np.exp(single), axis=0))).max() < 5e-6


def test_model_overrides_change_the_model(tmp_path):
    flags = ["--path", str(SHORTFORMER), "--model-overrides"]
    kept = scores(tmp_path, FLAGS, [*flags, "{'dropout': 0.5}"])[1]
    cut = scores(tmp_path, FLAGS, [*flags, "{'tokens_from_prev': 5}"])[1]
    with np.load(runs.GOLDEN / "expected" / "shortformer.test.nonoverlap.npz") as expected:
        assert np.abs(kept - expected["lprobs"]).max() < 1e-5
        assert np.abs(cut - expected["lprobs"])[:64].max() < 1e-5  # the first segment has no cache
        assert np.abs(cut - expected["lprobs"])[64:].max() > 0.01


@pytest.mark.parametrize("precision", ["--bf16", "--fp16", "--memory-efficient-fp16"])
@pytest.mark.parametrize("more", ["", "--sliding-inf 1"])
def test_lower_precision_stays_close(precision, more, tmp_path):
    lprobs = scores(tmp_path, FLAGS, precision, more, ["--path", str(SHORTFORMER)])[1]
    with np.load(runs.GOLDEN / "expected" / "shortformer.test.nonoverlap.npz") as expected:
        difference = np.abs(lprobs - expected["lprobs"])
    assert 0 < difference.mean() < 0.03 and difference.max() < 0.3
    assert lprobs.dtype == np.float32


@pytest.mark.parametrize("more", ["", "--sliding-inf 1", "--sliding-inf 1 --bf16"])
def test_int8_stays_close_and_its_cost_in_perplexity_is_printed(more, tmp_path, capsys):
    figures = evaluate(FLAGS, "--int8", more, ["--path", str(SHORTFORMER)])
    exact = evaluate(FLAGS, more, ["--path", str(SHORTFORMER)])["perplexity"]
    assert figures["perplexity_without_int8"] == pytest.approx(exact, rel=1e-6)
    assert 0 < abs(figures["perplexity"] / exact - 1) < 0.02
    cost = 100 * (figures["perplexity"] / exact - 1)
    assert f"Perplexity of a token without int8: {exact:.2f}; cost of int8: {cost:+.2f} %\n" in capsys.readouterr().out


def test_softmax_batch_changes_nothing(tmp_path):
    few = scores(tmp_path, FLAGS, "--softmax-batch 3", ["--path", str(BASELINE)])[1]
    many = scores(tmp_path, FLAGS, ["--path", str(BASELINE)])[1]
    assert np.abs(few - many).max() < 1e-5


# --- what is printed


def test_word_probabilities_are_printed_line_by_line(capsys, tmp_path):
    data = make_data(tmp_path / "data", ["a", "bb", "c"], ["a bb", "", "c zz"])
    naive.checkpoint(tmp_path / "c.pt", 7)
    _, lprobs = scores(tmp_path, f"--cpu --path {tmp_path / 'c.pt'}", data=data)
    capsys.readouterr()
    evaluate(f"--cpu --path {tmp_path / 'c.pt'} --output-word-probs", data=data)
    lines = capsys.readouterr().out.splitlines()[:3]
    words = [["a", "bb", "</s>"], ["</s>"], ["c", "<unk>", "</s>"]]
    assert [[pair.split(" [")[0] for pair in line.split("\t")] for line in lines] == words
    printed = [float(number) for line in lines for number in re.findall(r"\[(.*?)\]", line)]
    assert printed == pytest.approx(lprobs.tolist(), abs=1e-6)


def test_word_statistics_are_a_table_by_falling_count(capsys, tmp_path):
    data = make_data(tmp_path / "data", ["a", "bb", "c"], ["a bb a", "bb a"])
    naive.checkpoint(tmp_path / "c.pt", 7)
    _, lprobs = scores(tmp_path, f"--cpu --path {tmp_path / 'c.pt'}", data=data)
    capsys.readouterr()
    evaluate(f"--cpu --path {tmp_path / 'c.pt'} --output-word-stats", data=data)
    table = [line.split("\t") for line in capsys.readouterr().out.splitlines()[:4]]
    assert table[0] == ["word", "count", "mean log-probability", "sum"]
    assert [row[:2] for row in table[1:]] == [["a", "3"], ["</s>", "2"], ["bb", "2"]]
    assert float(table[1][2]) == pytest.approx(lprobs[[0, 2, 5]].mean(), abs=1e-6)
    assert float(table[1][3]) == pytest.approx(lprobs[[0, 2, 5]].sum(), abs=1e-5)


@pytest.mark.parametrize("mark", [[], ["@@"]])
def test_remove_bpe_joins_subwords(mark, capsys, tmp_path):
    data = make_data(tmp_path / "data", ["un@@", "read@@", "able", "word", "x"], ["un@@ read@@ able word", "x un@@"])
    naive.checkpoint(tmp_path / "c.pt", 9)
    _, lprobs = scores(tmp_path, f"--cpu --path {tmp_path / 'c.pt'}", data=data)
    capsys.readouterr()
    figures = evaluate(f"--cpu --path {tmp_path / 'c.pt'} --output-word-probs --remove-bpe", mark, data=data)
    out = capsys.readouterr().out.splitlines()
    found = [re.findall(r"(\S+) \[(.*?)\]", line) for line in out[:2]]
    assert [[word for word, _ in line] for line in found] == [["unreadable", "word", "</s>"], ["x", "un</s>"]]
    assert float(found[0][0][1]) == pytest.approx(lprobs[:3].sum(), abs=1e-5)
    total = -float(lprobs.astype(np.float64).sum()) / math.log(2)
    assert figures["words"] == 5 and figures["word_loss_base2"] == pytest.approx(total / 5)
    assert figures["loss_base2"] == pytest.approx(total / 8)
    assert out[2].startswith("Evaluated 8 tokens in ")
    assert out[3].startswith(f"Loss (base 2): {total / 5:.4f}, Perplexity: {2 ** (total / 5):.2f}")


def test_remove_bpe_joins_pieces_of_sentencepiece(capsys, tmp_path):
    pieces = ["▁un", "read", "able", "▁word", "▁x", "▁"]
    data = make_data(tmp_path / "data", pieces, ["▁un read able ▁word", "▁x ▁ read"])
    naive.checkpoint(tmp_path / "c.pt", 10)
    _, lprobs = scores(tmp_path, f"--cpu --path {tmp_path / 'c.pt'}", data=data)
    capsys.readouterr()
    figures = evaluate(f"--cpu --path {tmp_path / 'c.pt'} --output-word-probs --remove-bpe sentencepiece", data=data)
    out = capsys.readouterr().out.splitlines()
    found = [re.findall(r"(\S+) \[(.*?)\]", line) for line in out[:2]]
    assert [[word for word, _ in line] for line in found] == [["unreadable", "word", "</s>"], ["x", "read", "</s>"]]
    assert float(found[0][0][1]) == pytest.approx(lprobs[:3].sum(), abs=1e-5)
    assert figures["words"] == 6


@pytest.mark.parametrize("command", ["eval_lm", "generate", "interactive"])
@pytest.mark.parametrize("choice", ["nonsense", "wordpiece", "letter", "sentencepiece", " "])
def test_subwords_that_the_dictionary_lacks_cannot_be_joined_in_any_command(command, choice, tmp_path):
    (tmp_path / "prompts").write_text("a b\n")
    module, parser, more = {
        "eval_lm": (eval_lm, get_eval_lm_parser, ""),
        "generate": (generate, get_generation_parser, "--context-tokens 4 --max-new-tokens 2"),
        "interactive": (interactive, get_interactive_generation_parser, f"--input {tmp_path / 'prompts'}"),
    }[command]
    words = [str(runs.DATA), "--cpu", "--path", str(BASELINE), *more.split(), "--remove-bpe", choice]
    with user_error(rf"--remove-bpe '{choice}': no symbol of the dictionary"):
        module.main(options.parse_args_and_arch(parser(), words))


@pytest.mark.parametrize("length", [2, 3, 16])
def test_a_word_that_the_end_of_a_block_cuts_counts_once(length, tmp_path):
    data = make_data(tmp_path / "data", ["un@@", "read@@", "able", "word"], ["un@@ read@@ able word", "un@@ able"])
    naive.checkpoint(tmp_path / "c.pt", 8)
    flags = f"--cpu --path {tmp_path / 'c.pt'} --remove-bpe --tokens-per-sample {length}"
    figures = evaluate(flags, data=data)
    total = -float(scores(tmp_path, flags, data=data)[1].astype(np.float64).sum()) / math.log(2)
    assert figures["words"] == 5 and figures["word_loss_base2"] == pytest.approx(total / 5)


def test_bits_per_character_of_a_corpus_of_characters(capsys, tmp_path):
    data = make_data(tmp_path / "data", [*"abcdefgh_", "madeupword0000"], ["a b _ c", "h"])
    naive.checkpoint(tmp_path / "c.pt", 14)
    figures = evaluate(f"--cpu --path {tmp_path / 'c.pt'}", data=data)
    assert figures["bits_per_character"] == figures["loss_base2"]
    assert f"Bits per character: {figures['loss_base2']:.4f}" in capsys.readouterr().out
    assert "bits_per_character" not in evaluate(FLAGS, ["--path", str(BASELINE)])


# --- mistakes


@pytest.fixture
def mistake(monkeypatch, capsys):
    """Run the command on a mistake; returns the line on stderr that tells of it."""

    def run(*flags, data=runs.DATA):
        monkeypatch.setattr(sys, "argv", ["eval_lm.py", str(data), *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            eval_lm.cli_main()
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        assert end.value.code == 2 and len(lines) == 1 and captured.out == "", captured
        return lines[0].removeprefix("eval_lm.py: error: ")

    return run


@pytest.mark.parametrize(
    "path, flags, line",
    [
        (BASELINE, "--context-window 64", "--context-window 64: must be less than --tokens-per-sample 64"),
        (BASELINE, "--sliding-inf 1", "--sliding-inf 1: the model has no memory"),
        (SHORTFORMER, "--context-window 48", "--context-window 48: the model uses its memory"),
        (SHORTFORMER, "--sliding-inf 1 --context-window 31", "--context-window 31: with --sliding-inf 1 must be 63"),
        (SHORTFORMER, "--sample-break-mode eos", "--sample-break-mode eos: a model with memory"),
        (BASELINE, "--fp16 --bf16", "--fp16 --bf16: choose one"),
        (BASELINE, "--max-tokens 63", "--max-tokens 63: a block has 64 tokens"),
        (BASELINE, "--gen-subset nothing", "data-bin/nothing.idx: file not found"),
        (BASELINE, "--model-overrides print(1)", "--model-overrides print(1): expected a dict"),
        (
            BASELINE,
            "--remove-bpe wordpiece",
            "--remove-bpe 'wordpiece': no symbol of the dictionary ends with wordpiece",
        ),
        (BASELINE, "--softmax-batch 0", "--softmax-batch 0: must be at least 1"),
        (BASELINE, "--results-path /dev/null/x", "--results-path /dev/null/x: cannot be written"),
        (BASELINE, "--save-token-scores /dev/null/x/y.npz", "--save-token-scores /dev/null/x: cannot be written"),
        ("missing.pt", "", "missing.pt: file not found"),
        (f"{BASELINE}:missing.pt", "", "missing.pt: file not found"),
        ("", "", "--path: an empty value; give one or leave the flag out"),
    ],
)
def test_mistakes_are_one_line(mistake, path, flags, line):
    assert line in mistake("--cpu", "--path", path, *flags.split())


def test_unknown_architecture_is_one_line(mistake, tmp_path):
    naive.checkpoint(tmp_path / "c.pt", 1200, arch="transformer_lm_wiki104")
    line = mistake("--path", tmp_path / "c.pt")
    assert "unknown architecture transformer_lm_wiki104; did you mean transformer_lm_wiki103" in line


def test_dictionary_of_another_size_is_one_line(mistake, tmp_path):
    data = make_data(tmp_path / "data", ["a"], ["a"])
    line = mistake("--path", BASELINE, data=data)
    assert "was trained with a dictionary of 1200 symbols, but " in line and "'s has 5; " in line


def test_longer_segments_than_learned_positions_are_one_line(mistake, tmp_path):
    naive.checkpoint(tmp_path / "c.pt", 1200, decoder_learned_pos=True)
    line = mistake("--path", tmp_path / "c.pt", "--tokens-per-sample", "17")
    assert line.startswith("--tokens-per-sample 17: ") and "has 16 positions" in line


def test_results_come_after_the_scores_that_they_are_of(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with user_error("--save-token-scores .*scores.npz: cannot be written .No space left"):
        evaluate("--path", BASELINE, FLAGS, f"--save-token-scores {tmp_path}/scores.npz --results-path {tmp_path}/out")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_text_in_the_place_of_the_data_folder_is_told_from_a_dictionary(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("it was the best of times\n")
    advice = f", or the model as DATA and --text {text}"
    for command, parser, more in (
        (eval_lm, get_eval_lm_parser, advice),
        (generate, get_generation_parser, advice),
        (validate, get_validation_parser, ""),
    ):
        for path in ([], ["--path", str(BASELINE)]):
            with user_error(f"^DATA: {text}: is a file; give the folder that fairseq-preprocess wrote{more}$"):
                command.main(options.parse_args_and_arch(parser(), [str(text), "--cpu", *path]))
