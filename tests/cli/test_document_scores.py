"""fairseq-eval-lm --score-documents: a score for each document, which does not depend on the
others."""

from __future__ import annotations

import json
import math

import pytest
import runs

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq_cli import eval_lm
from fairseq_cli.eval_lm import get_eval_lm_parser

SHORTFORMER = runs.GOLDEN / "shortformer_stage2.pt"
BASELINE = runs.GOLDEN / "baseline.pt"


def evaluate(*flags):
    """Run the command in this process; returns its figures."""
    words = [word for flag in flags for word in (flag if isinstance(flag, list) else str(flag).split())]
    return eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), [str(runs.DATA), *words]))


@pytest.mark.parametrize("path", [SHORTFORMER, BASELINE])
@pytest.mark.parametrize("name", ["text", "text.jsonl"])
def test_each_document_has_a_score_that_does_not_depend_on_the_others(path, name, tmp_path):
    words = (runs.GOLDEN / "text" / "test.txt").read_text(encoding="utf-8").split()
    rows = [" ".join(words[:5]), " ".join(words[5:150]), " ".join(words[150:220]), ""]
    texts = [rows[0], f"{rows[1]}\n{rows[0]}", *rows[2:]] if name == "text.jsonl" else rows
    lines = [json.dumps({"text": text}) for text in texts] if name == "text.jsonl" else texts
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = tmp_path / "scores.jsonl"
    flags = f"--cpu --batch-size 3 --text {tmp_path}/{name} --score-documents {out} --path"
    figures = evaluate(flags, [str(path)])
    model = LanguageModel.from_pretrained(path, runs.DATA)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["document"] for line in found] == [1, 2, 3, 4]
    for line, text in zip(found, texts, strict=True):
        lprobs = model.score(text)[1].double()
        assert line["tokens"] == len(lprobs)
        assert line["log_probability"] == pytest.approx(float(lprobs.sum()), rel=1e-5)
        assert line["perplexity"] == pytest.approx(math.exp(-lprobs.mean()), rel=1e-5)
    total = sum(line["log_probability"] for line in found)
    assert figures["perplexity"] == pytest.approx(math.exp(-total / figures["tokens"]), rel=1e-5)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--gen-subset test", "--score-documents: needs --text"),
        ("--text {text} --sliding-inf 1", "--score-documents: needs --text, and excludes --sliding-inf 1"),
        ("--text {text} --context-window 8", "--context-window 8: documents are read in blocks of their own"),
        ("--text {text} --sample-break-mode eos", "--sample-break-mode eos: documents are read in blocks of their own"),
    ],
)
def test_document_scores_name_the_flags_that_they_exclude(flags, message, tmp_path):
    text = runs.GOLDEN / "text" / "test.txt"
    with pytest.raises(UserError) as error:
        evaluate("--cpu --score-documents", tmp_path / "out", flags.format(text=text), "--path", BASELINE)
    assert error.value.with_flags.startswith(message) and not (tmp_path / "out").exists()
