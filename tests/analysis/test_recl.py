"""fairseq-analyze recl: the metric as the paper defines it, exact windows, its files, and mistakes
in one line."""

from __future__ import annotations

import json
import math
import sys

import naive
import numpy as np
import pytest
import runs
import torch
from mistakes import user_error

from fairseq import checkpoint
from fairseq.analysis import plots, recl
from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary
from fairseq_cli import analyze
from fairseq_cli.analyze import get_recl_parser

BASELINE, SHORTFORMER = runs.GOLDEN / "baseline.pt", runs.GOLDEN / "shortformer_stage2.pt"

FILES = {"losses.npz", "results.json"} | {f"recl-{name}.png" for name in ("gain", "perplexity")}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def undrawn(monkeypatch):
    """The names of pictures in place of their content: drawing takes most of the time."""
    for name in ("draw_gains", "draw_perplexities"):
        monkeypatch.setattr(plots, name, lambda path, *rest, name=name: path.write_bytes(name.encode()))


def run(*flags, data=runs.DATA):
    """Run the command in this process; returns its figures. A list holds words that are not to be
    split."""
    argv = [word for flag in flags for word in ([str(f) for f in flag] if isinstance(flag, list) else flag.split())]
    return analyze.recl(options.parse_args_and_arch(get_recl_parser(), [str(data), "--cpu", *argv]))


def by_loops(losses, contexts, top_r, threshold):
    """RECLs and relative gains [M][K − 1] of losses [M][K][N], a position at a time, as appendix C
    words it."""
    models, positions = range(len(losses)), range(len(losses[0][0]))
    gains = [[] for _ in models]
    for k in range(len(contexts) - 1):
        baseline = [min(losses[i][k][t] for i in models) for t in positions]
        count = max(1, math.ceil(round(top_r * len(baseline), 6)))
        hard = sorted(positions, key=lambda t: (-baseline[t], t))[:count]
        for i in models:
            short = sum(min(baseline[t], losses[i][k][t]) for t in hard) / count
            long = sum(min(baseline[t], losses[i][k + 1][t]) for t in hard) / count
            gains[i].append((math.exp(short) - math.exp(long)) / math.exp(short))
    lengths = []
    for i in models:
        k = 0
        while k < len(contexts) - 1 and gains[i][k] >= threshold:
            k += 1
        lengths.append(contexts[k])
    return lengths, gains


def test_a_group_whose_answer_is_known():
    # Perplexities 8 and 4 with the short context: the baseline is 4 everywhere. Then the first
    # model halves it at half of the positions, and the second, now at 3.9 everywhere, gains 2.5 %;
    # another step brings neither anything.
    first = np.log([[8, 8, 8, 8], [2, 4, 2, 4], [2, 4, 2, 4]])
    second = np.log([[4, 4, 4, 4], [3.9, 3.9, 3.9, 3.9], [3.9, 3.9, 3.9, 3.9]])
    gains = recl.relative_gains(np.stack([first, second]), 1.0)
    assert gains.baseline[0] == pytest.approx(4)
    assert gains.relative[:, 0] == pytest.approx([1 - math.sqrt(2) / 2, 0.025])
    assert gains.absolute[:, 0] == pytest.approx([4 - 2 * math.sqrt(2), 0.1])
    # Then the baseline is 2 and 3.9 in turn, which neither model undercuts.
    assert gains.relative[:, 1] == pytest.approx([0, 0], abs=1e-12)
    contexts = np.array([10, 20, 30])
    assert [recl.effective_length(g, contexts, 0.01).tokens for g in gains.relative] == [20, 20]
    assert recl.effective_length(gains.relative[1], contexts, 0.03) == recl.EffectiveLength(10, "at most")
    assert recl.effective_length(np.array([0.2, 0.1]), contexts, 0.1) == recl.EffectiveLength(30, "at least")


@pytest.mark.parametrize("top_r", [1.0, 0.5, 0.1, 0.001])
def test_gains_and_lengths_are_those_of_loops_over_positions(top_r):
    rng = np.random.default_rng(5)
    contexts = [5, 10, 15, 20, 25]
    losses = rng.exponential(2.0, (3, 1, 40)) + rng.normal(0, 0.2, (3, 5, 40)) - np.linspace(0, 0.4, 5)[None, :, None]
    lengths, expected = by_loops(losses.tolist(), contexts, top_r, 0.04)
    gains = recl.relative_gains(losses, top_r)
    np.testing.assert_allclose(gains.relative, expected, atol=1e-12)
    assert [recl.effective_length(g, np.array(contexts), 0.04).tokens for g in gains.relative] == lengths


def test_hard_positions_are_those_with_the_largest_baseline():
    assert recl.hardest(np.array([1.0, 5.0, 3.0, 5.0, 2.0]), 0.4).tolist() == [1, 3]
    assert recl.hardest(np.arange(10.0), 0.3).tolist() == [9, 8, 7]  # not four, for all that 0.3 · 10 > 3
    assert recl.hardest(np.arange(10.0), 0.01).tolist() == [9]


def test_positions_have_their_context_and_are_drawn_once():
    drawn = recl.draw_positions(1000, 100, 300, seed=1)
    assert len({*drawn.tolist()}) == 300 and drawn.min() >= 100 and drawn.max() < 1000
    assert (drawn == recl.draw_positions(1000, 100, 300, seed=1)).all()
    assert (drawn != recl.draw_positions(1000, 100, 300, seed=2)).any()
    assert recl.draw_positions(110, 100, 300, seed=1).tolist() == list(range(100, 110))


SETTINGS = {
    "baseline": {},
    "shortformer": {"tokens_from_prev": 7, "position_infused_attention": True, "tokens_per_sample": 5},
    "adaptive": {
        "adaptive_input": True,
        "adaptive_input_cutoff": "50,200",
        "adaptive_softmax_cutoff": "50,200",
        "tie_adaptive_weights": True,
    },
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_loss_is_that_of_naive_scoring_of_the_truncated_window(kind, tmp_path):
    vocabulary = len(Dictionary.load(str(runs.DATA / "dict.txt")))
    args, state = naive.checkpoint(tmp_path / "model.pt", vocabulary, **SETTINGS[kind])
    tokens = IndexedCorpus(str(runs.DATA / "test")).tokens
    contexts, positions = np.array([4, 13, 18]), np.array([18, 40, 333])
    reader, _ = recl.load_reader(str(tmp_path / "model.pt"), "m", str(runs.DATA), 18, {}, {})
    found = recl.measure([reader], tokens, positions, contexts, max_tokens=20).losses[0]
    model = naive.NaiveLM(args, state)
    for k, context in enumerate(contexts.tolist()):
        for n, place in enumerate(positions.tolist()):
            window = torch.from_numpy(tokens[place - context : place].astype(np.int64))
            segment = 5 if kind == "shortformer" else context
            cuts = [0, *range(context % segment or segment, context + 1, segment)]
            memory = None
            for start, end in zip(cuts, cuts[1:], strict=False):
                hidden, memory = model.hidden(window[start:end], memory)
            expected = -float(model.log_probs(hidden[-1:])[0, int(tokens[place])])
            assert found[k, n] == pytest.approx(expected, abs=2e-5)


def test_nothing_before_a_window_counts(tmp_path):
    flags = "--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test --batch-size 4 --mem-len 8"
    runs.train(
        tmp_path,
        flags,
        "--tokens-per-sample 8 --optimizer adam --lr 0.01 --lr-scheduler fixed --max-update 3 --no-epoch-checkpoints",
    )
    path = str(tmp_path / "checkpoint_last.pt")
    reader, _ = recl.load_reader(path, "xl", str(runs.DATA), 20, {}, {})
    assert reader.segment == 8
    tokens = np.array(IndexedCorpus(str(runs.DATA / "test")).tokens)
    other = tokens.copy()
    other[:80], other[80] = tokens[100:180], tokens[80] ^ 1
    positions, contexts = np.array([100]), np.array([7, 19, 20])
    found, changed = (recl.measure([reader], t, positions, contexts).losses[0, :, 0] for t in (tokens, other))
    assert (found[:2] == changed[:2]).all() and found[2] != changed[2]


def test_the_command_writes_what_it_measured(tmp_path, capsys):
    folder = tmp_path / "new" / "recl"
    flags = "--names base|line,short --step 8 --max-context 24 --positions 50 --top-r 1,0.2 --threshold 0.02"
    figures = run(["--path", f"{BASELINE}:{SHORTFORMER}", "--results-path", folder], flags)
    written = json.loads((folder / "results.json").read_text())
    assert written["contexts"] == [8, 16, 24] and written["positions"] == 50 and "command" in written
    with np.load(folder / "losses.npz") as saved:
        losses, contexts = saved["losses"], saved["contexts"].tolist()
        assert losses.shape == (2, 3, 50) and saved["names"].tolist() == ["base|line", "short"]
    for group, top_r in zip(written["groups"], (1.0, 0.2), strict=True):
        lengths, gains = by_loops(losses.tolist(), contexts, top_r, 0.02)
        assert [model["recl"] for model in group["models"]] == lengths
        np.testing.assert_allclose([model["relative_gain"] for model in group["models"]], gains, atol=1e-9)
    assert figures["groups"] == written["groups"]
    table = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in table[:4]] == [6] * 4 and "base/line" in table[2]
    for name in ("recl-gain.png", "recl-perplexity.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG") and (folder / name).stat().st_size > 10_000


def measured(*models):
    """Losses [M, K, N] of models with these perplexities at 10, 20, … tokens; at every other
    position 0.2 more."""
    losses = np.log(np.array(models, dtype=float))[:, :, None] + np.array([0, 0.2, 0, 0.2])
    return recl.ContextLosses([f"m{i}" for i in range(len(models))], np.arange(1, losses.shape[1] + 1) * 10, losses)


def test_a_perplexity_that_rises_is_marked_with_the_recls_beyond_its_lowest():
    found = measured([90, 80, 70, 75], [90, 95, 85, 91], [90, 80, 75, 75])
    assert found.risen_from() == [30, 30, None]
    gains = [recl.Gains(r, 4, np.ones(3), np.array([row] * 3), np.zeros((3, 3))) for r, row in
             ((1.0, [0.1, 0.1, 0.1]), (0.5, [0.1, 0.001, 0.1]))]  # fmt: skip
    rows = recl.table(found, gains, 0.01)
    assert [row[1:3] for row in rows[1:]] == [["≥ 40 ↑", "20"], ["≥ 40 ↑", "20"], ["≥ 40", "20"]]
    assert [row[-1].endswith("↑") for row in rows[1:]] == [True, True, False]
    remarks = recl.remarks(found)
    assert [remark[:4] for remark in remarks] == ["↑ m0", "↑ m1"]
    assert "at 30 tokens" in remarks[0] and "a RECL above 30 " in remarks[0]


def test_a_rise_within_the_error_of_the_positions_is_not_marked():
    losses = np.tile([3.0, 2.0, 2.0], (1, 1, 1)).swapaxes(1, 2) + np.zeros((1, 3, 100))
    losses[0, 2] += np.where(np.arange(100) % 2, 1.0, -0.9)  # 0.05 more, with a standard error of 0.095
    assert recl.ContextLosses(["m"], np.array([1, 2, 3]), losses).risen_from() == [None]
    losses[0, 2] = 2.05
    assert recl.ContextLosses(["m"], np.array([1, 2, 3]), losses).risen_from() == [2]


def test_one_model_is_a_group_and_is_told_so(caplog):
    with caplog.at_level("INFO"):
        figures = run(["--path", str(BASELINE)], "--step 8 --max-context 16 --positions 5")
    assert "compared with itself" in caplog.text and len(figures["models"]) == 1


def test_a_baseline_reads_farther_than_it_was_trained_to_unless_its_positions_were_learned(tmp_path):
    vocabulary = len(Dictionary.load(str(runs.DATA / "dict.txt")))
    flags = "--step 16 --max-context 32 --positions 5"
    naive.checkpoint(tmp_path / "sinusoids.pt", vocabulary)
    assert run(["--path", tmp_path / "sinusoids.pt"], flags)["contexts"] == [16, 32]
    naive.checkpoint(tmp_path / "learned.pt", vocabulary, decoder_learned_pos=True)
    with user_error(r"--max-context 32: .*learned.pt has positions for 16 tokens"):
        run(["--path", tmp_path / "learned.pt"], flags)


def test_names_tell_models_apart():
    assert recl.distinct_names(["a/best.pt", "b/best.pt"], None) == ["a", "b"]
    assert recl.distinct_names(["a/x.pt", "a/y.pt"], None) == ["x", "y"]
    assert recl.distinct_names(["a/x.pt", "a/y.pt", "b/x.pt"], None) == ["a/x.pt", "a/y.pt", "b/x.pt"]
    assert recl.distinct_names(["a.pt", "b.pt"], "one, two") == ["one", "two"]


@pytest.mark.parametrize(
    "flags, line",
    [
        ("", "--path: name a checkpoint"),
        ("--path missing.pt", "missing.pt: file not found"),
        (f"--path {BASELINE}:{BASELINE}", "--path: a checkpoint is named twice"),
        (f"--path {BASELINE} --step 0", "--step 0: must be at least 1"),
        (f"--path {BASELINE} --step 300", "--max-context 500: fewer than two steps of --step 300; give 600"),
        (
            f"--path {BASELINE} --step 10 --max-context 25",
            "--max-context 25: not a multiple of --step 10; give 20 or 30",
        ),
        (f"--path {BASELINE} --step 150", "--max-context 500: not a multiple of --step 150; give 450 or 600"),
        (f"--path {BASELINE} --max-context 2300", "--max-context 2300: the corpus has 2292 tokens; give 2291"),
        (f"--path {BASELINE} --threshold 1", "--threshold 1.0: must be less than 1"),
        (f"--path {BASELINE} --threshold 0", "--threshold 0.0: must be greater than 0"),
        (f"--path {BASELINE} --threshold nan", "--threshold: expected a number"),
        (f"--path {BASELINE} --top-r 1,0", "--top-r 0.0: must be greater than 0"),
        (f"--path {BASELINE} --top-r 1.5", "--top-r 1.5: must be at most 1"),
        (f"--path {BASELINE} --positions 0", "--positions 0: must be at least 1"),
        (f"--path {BASELINE}:{SHORTFORMER} --names a", "--names a: 1 names for the 2 checkpoints"),
        (f"--path {BASELINE}:{SHORTFORMER} --names a,a", "--names a,a: names must differ"),
        (f"--path {BASELINE} --results-path /dev/null/x", "--results-path /dev/null/x: cannot be written"),
        (f"--path {BASELINE} --gen-subset nothing", "nothing.idx: file not found"),
        (f"--path {BASELINE} --sample-break-mode eos", "--sample-break-mode eos: the split is read as one"),
    ],
)
def test_mistakes_are_one_line(flags, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fairseq-analyze", "recl", str(runs.DATA), "--cpu", *flags.split()])
    with pytest.raises(SystemExit) as end:
        analyze.cli_main()
    stderr = [text for text in capsys.readouterr().err.splitlines() if "error:" in text]
    assert end.value.code == 2 and len(stderr) == 1 and line in stderr[0]


def test_another_dictionary_is_refused(tmp_path):
    naive.checkpoint(tmp_path / "other.pt", 50)
    with pytest.raises(UserError, match=r"other.pt: was trained with a dictionary of 50 symbols"):
        run(["--path", f"{BASELINE}:{tmp_path / 'other.pt'}"], "--step 8 --max-context 16")


def test_a_model_that_diverged_is_refused(tmp_path):
    vocabulary = len(Dictionary.load(str(runs.DATA / "dict.txt")))
    args, state = naive.checkpoint(tmp_path / "whole.pt", vocabulary)
    content = checkpoint.load(tmp_path / "whole.pt")
    content["model"]["decoder.layers.1.fc2.bias"] = torch.full_like(
        content["model"]["decoder.layers.1.fc2.bias"], 3e38
    )  # finite, but its layer norm overflows
    torch.save(content, tmp_path / "nan.pt")
    with pytest.raises(UserError, match="its loss is NaN"):
        run(["--path", tmp_path / "nan.pt"], "--step 8 --max-context 16 --positions 5")


def test_batch_size_is_the_most_windows_read_at_once(monkeypatch):
    sizes, read = [], recl.WindowReader.losses

    def counted(reader, windows, targets):
        sizes.append(tuple(windows.shape))
        return read(reader, windows, targets)

    monkeypatch.setattr(recl.WindowReader, "losses", counted)
    flags = "--step 8 --max-context 16 --positions 7"
    found = [
        run(["--path", BASELINE], flags, more) for more in ("", "--batch-size 3", "--batch-size 3 --max-tokens 33")
    ]
    assert sizes[:2] == [(7, 16), (7, 8)]
    assert sizes[2:8] == [(3, 16), (3, 16), (1, 16), (3, 8), (3, 8), (1, 8)]
    assert sizes[8:] == [(2, 16), (2, 16), (2, 16), (1, 16), (3, 8), (3, 8), (1, 8)]
    for figures in found[1:]:
        assert figures["models"][0]["perplexity"] == pytest.approx(found[0]["models"][0]["perplexity"], rel=1e-5)


@pytest.mark.parametrize("flags", ["--max-context 20000", "--gen-subset nope", "--path missing.pt"])
def test_notes_come_after_what_is_checked(flags, caplog, tmp_path):
    with caplog.at_level("INFO"), pytest.raises(UserError):
        run(["--path", BASELINE, "--results-path", tmp_path / "new"], flags)
    assert not caplog.text and not (tmp_path / "new").exists()


def test_results_are_all_of_one_run(tmp_path, monkeypatch, undrawn):
    folder, flags = tmp_path / "results", "--step 8 --max-context 16 --positions 5"
    run(["--path", BASELINE, "--results-path", folder], flags)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert set(before) == FILES

    def interrupted(path, measured):
        raise KeyboardInterrupt

    monkeypatch.setattr(plots, "draw_perplexities", interrupted)
    for place in (folder, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            run(["--path", SHORTFORMER, "--results-path", place], flags)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_results_that_cannot_be_written_are_named_and_leave_the_rest_as_it_was(tmp_path, undrawn):
    (tmp_path / "losses.npz").mkdir()
    (tmp_path / "results.json").write_text("before")
    with user_error(r"--results-path .*losses.npz: cannot be written"):
        run(["--path", BASELINE, "--results-path", tmp_path], "--step 8 --max-context 16 --positions 5")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["losses.npz", "results.json"]
    assert (tmp_path / "results.json").read_text() == "before"


def test_without_matplotlib_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with user_error(r"--results-path: plots need matplotlib.*pip install matplotlib"):
        run(["--path", str(BASELINE), "--results-path", tmp_path / "x"])
    assert not (tmp_path / "x").exists()
