"""What fairseq-eval-lm writes and reports, and what it refuses before it scores anything."""

from __future__ import annotations

import naive
import numpy as np
import pytest
import runs
from evaluations import evaluate, make_data
from mistakes import user_error

from fairseq import checkpoint
from fairseq.evaluation import report
from fairseq.evaluation.scorer import Scores
from fairseq.text.dictionary import Dictionary

SHORTFORMER = runs.GOLDEN / "shortformer_stage2.pt"
BASELINE = runs.GOLDEN / "baseline.pt"


def test_models_of_an_ensemble_begin_rows_alike(tmp_path):
    state = checkpoint.load(BASELINE)
    state["args"]["add_bos_token"] = True
    checkpoint.save(tmp_path / "other.pt", state)
    with user_error(f"{tmp_path}/other.pt: has --add-bos-token True, unlike .*baseline.pt"):
        evaluate(["--path", f"{BASELINE}:{tmp_path}/other.pt"])


def test_outputs_are_different_files_and_stdin_is_read_once(tmp_path):
    flags = ["--path", str(BASELINE), "--text", str(runs.GOLDEN / "text" / "test.txt")]
    same = tmp_path / "out"
    with user_error("--score-documents .*/out: is the same file as --sample"):
        evaluate(flags, ["--score-documents", str(same), "--sample", str(same)])
    assert not same.exists()
    with user_error("--text -: cannot be read for --baseline, too"):
        evaluate(["--path", str(BASELINE), "--text", "-", "--by-frequency", "--baseline", str(SHORTFORMER)])


def test_parts_of_an_evaluation_share_a_folder(tmp_path):
    parts = [
        evaluate(["--path", str(BASELINE), "--results-path", str(tmp_path)], f"--num-shards 2 --shard-id {n}")
        for n in (0, 1)
    ]
    whole = evaluate(["--path", str(BASELINE)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.0-of-2.json", "results.1-of-2.json"]
    mean = sum(part["tokens"] * part["loss_base2"] for part in parts) / whole["tokens"]
    assert mean == pytest.approx(whole["loss_base2"], rel=1e-5)
    with user_error("--num-shards 5000: there are only .* blocks, so that part 4999 has none"):
        evaluate(["--path", str(BASELINE)], "--num-shards 5000 --shard-id 4999")


def test_tokens_that_are_left_out_are_counted(tmp_path, capsys):
    data = make_data(tmp_path / "data", ["a"], ["a " * 40, "a a"])
    settings = {"tokens_per_sample": 16, "max_target_positions": 16}
    naive.checkpoint(tmp_path / "checkpoint.pt", len(Dictionary.load(data / "dict.txt")), **settings)
    figures = evaluate(["--path", str(tmp_path / "checkpoint.pt")], "--sample-break-mode eos", data=data)
    assert figures["left_out_tokens"] == 41 and figures["tokens"] == 3
    assert "Left out: 41 tokens" in capsys.readouterr().out


def test_a_text_of_unknown_words_says_so():
    dictionary = Dictionary()
    unknown = np.full(2, dictionary.unk(), np.int32)
    words = report.join_words(Scores(unknown, np.zeros(2, np.float32), np.array([0, 2])), dictionary)
    figures = report.metrics(words, seconds=1.0)
    assert figures["unknown_share"] == 1 and "perplexity_without_unknown" not in figures
    assert "Unknown: 100 % of the tokens" in report.summary({**figures, "peak_rss_mb": 1.0})


def test_the_seed_decides_on_the_text_of_sample(tmp_path):
    texts = []
    for number, flags in enumerate(["", "--seed 1", "--seed 2"]):
        evaluate(["--path", str(SHORTFORMER), "--sample", str(tmp_path / f"{number}.txt")], flags)
        texts.append((tmp_path / f"{number}.txt").read_text())
    assert texts[0] == texts[1] != texts[2]
