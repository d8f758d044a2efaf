"""fairseq-eval-lm and the harness's requests for encoders: the numbers of a loop that masks one
token at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import imported
from mistakes import user_error
from noted import BERT, ELECTRA, corpus
from runs import saved, words

from fairseq import checkpoint
from fairseq.config import options
from fairseq.hub import MaskedLanguageModel, load_model, load_scorer
from fairseq.interop.harness.requests import EncoderRequests
from fairseq_cli import eval_lm
from fairseq_cli.eval_lm import get_eval_lm_parser

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_encoders" / "bert"


def evaluate(data: Path, *flags: Any) -> dict[str, Any]:
    return eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), [str(data), "--cpu", *words(*flags)]))


@torch.no_grad()
def literal(predict: Any, dictionary: Any, line: list[int]) -> list[float]:
    """The log-probability of each token of *line* where it alone is masked."""
    lprobs = []
    for place, token in enumerate(line):
        row = torch.tensor([[dictionary.bos(), *line, dictionary.eos()]])
        row[0, 1 + place] = dictionary.mask()
        lprobs.append(float(predict(row)[0, 1 + place].float().log_softmax(-1)[token]))
    return lprobs


@pytest.mark.parametrize("flags", [BERT, ELECTRA], ids=["bert", "electra"])
def test_split_has_the_pseudo_perplexity_of_a_literal_loop(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = corpus(tmp_path)
    path = saved(tmp_path / "model.pt", flags, data=data)
    figures = evaluate(data, "--gen-subset valid", ["--path", path, "--save-token-scores", tmp_path / "s.npz"])
    model, task = load_model(path, data)
    encoder, dictionary = model.masked_lm, task.source_dictionary
    ids = task.dataset("valid").blocks.corpus
    lines = [ids.tokens[a : b - 1].tolist() for a, b in zip(ids.offsets[:-1], ids.offsets[1:], strict=True)]
    want = [
        lprob
        for line in lines
        for lprob in literal(lambda rows: encoder.lm_head(encoder.sentence_encoder(rows)), dictionary, line)
    ]
    with np.load(tmp_path / "s.npz") as scores:
        np.testing.assert_allclose(scores["lprobs"], want, atol=1e-4)
        assert scores["tokens"].tolist() == [token for line in lines for token in line]
    assert figures["perplexity"] == pytest.approx(math.exp(-sum(want) / len(want)), rel=1e-4)
    assert "Pseudo-perplexity: " in capsys.readouterr().out


def test_imported_bert_scores_a_text_and_its_bands_as_a_literal_loop(tmp_path: Path) -> None:
    out = imported(GOLDEN, tmp_path / "out")
    model, task = load_model(out)
    dictionary = task.source_dictionary
    symbols = dictionary.symbols
    lines = [[20, 21, 22, 23], [30], [31, 20]]
    (tmp_path / "text.txt").write_text("".join(" ".join(symbols[i] for i in line) + "\n" for line in lines))
    (tmp_path / "counts").write_text(f"{symbols[20]} 5\n{symbols[30]} 50\n")
    flags = ["--text", tmp_path / "text.txt", "--by-frequency", "--word-counts", tmp_path / "counts"]
    figures = evaluate(out, flags, "--frequency-bands 1,10")
    lprobs = [literal(lambda rows: model(rows)[0], dictionary, line) for line in lines]
    assert figures["loss_base2"] == pytest.approx(-sum(map(sum, lprobs)) / 7 / math.log(2), abs=1e-4)
    unseen, rare, frequent, everything = figures["by_frequency"]["bands"]
    bits = [[-lprob / math.log(2) for lprob in line] for line in lprobs]
    assert (rare["words"], frequent["words"], everything["words"]) == (2, 1, 7)
    assert rare["bits_per_word"][0] == pytest.approx((bits[0][0] + bits[2][1]) / 2, abs=1e-4)
    assert frequent["bits_per_word"][0] == pytest.approx(bits[1][0], abs=1e-4)
    assert unseen["bits_per_word"][0] == pytest.approx((sum(bits[0][1:]) + bits[2][0]) / 4, abs=1e-4)


def test_baseline_reads_a_text_with_its_own_dictionary(tmp_path: Path) -> None:
    """Both are one model, of which one has the rows of its vocabulary in another order."""
    out, other = imported(GOLDEN, tmp_path / "out"), tmp_path / "other"
    model, task = load_model(out)
    symbols = task.source_dictionary.symbols
    state, swapped = checkpoint.load(out), list(range(len(symbols)))
    swapped[20], swapped[21] = 21, 20
    rows = {name for name, value in state["model"].items() if value.dim() and len(value) == len(symbols)}
    assert len(rows) >= 2
    state["model"] = {name: v[swapped] if name in rows else v for name, v in state["model"].items()}
    other.mkdir()
    lines = (out.parent / "dict.txt").read_text().split("\n")
    at = {line.rpartition(" ")[0]: number for number, line in enumerate(lines)}
    first, second = at[symbols[20]], at[symbols[21]]
    lines[first], lines[second] = lines[second], lines[first]
    (other / "dict.txt").write_text("\n".join(lines))
    state.pop("dictionary", None)
    checkpoint.save(other / "checkpoint.pt", state)
    (tmp_path / "text.txt").write_text(" ".join(symbols[20:24]) + "\n")
    (tmp_path / "counts").write_text(f"{symbols[20]} 5\n")
    flags = ["--text", tmp_path / "text.txt", "--by-frequency", "--word-counts", tmp_path / "counts"]
    report = evaluate(out, flags, ["--baseline", other])["by_frequency"]
    for band in report["bands"]:
        if band["words"]:
            assert band["difference"] == pytest.approx([0], abs=1e-5)
            assert band["bits_per_word"][0] == pytest.approx(band["bits_per_word"][1], abs=1e-5)


def test_documents_are_scored_by_their_lines(tmp_path: Path) -> None:
    out = imported(GOLDEN, tmp_path / "out")
    scorer = MaskedLanguageModel.from_pretrained(out)
    symbols = scorer.reader.dictionary.symbols
    texts = [f"{symbols[20]} {symbols[21]}\n{symbols[22]}", symbols[30]]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    evaluate(out, ["--text", tmp_path / "d.jsonl", "--score-documents", tmp_path / "s.jsonl"])
    found = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in found] == [3, 1]
    want = [float(lprobs.sum()) for _, lprobs in scorer.score(texts)]
    assert [row["log_probability"] for row in found] == pytest.approx(want, abs=1e-4)


def test_requests_of_the_harness_have_the_scores_of_a_literal_loop(tmp_path: Path) -> None:
    scorer = load_scorer(imported(GOLDEN, tmp_path / "out"))
    assert isinstance(scorer, MaskedLanguageModel)
    dictionary, model = scorer.reader.dictionary, scorer.model
    words = [dictionary.symbols[index] for index in (20, 21, 22, 23)]
    requests = EncoderRequests(scorer, batch_size=3)
    whole = literal(lambda rows: model(rows)[0], dictionary, [20, 21, 22, 23])
    pairs = [(f"{words[0]} {words[1]}", f" {words[2]} {words[3]}"), ("", " ".join(words)), (words[0], "")]
    found = requests.log_likelihoods(pairs)
    assert [lprob for lprob, _ in found] == pytest.approx([sum(whole[2:]), sum(whole), 0.0], abs=1e-4)
    assert found[2] == (0.0, True)
    lines = [sum(literal(lambda rows: model(rows)[0], dictionary, line)) for line in ([20, 21], [22, 23])]
    text = f"{words[0]} {words[1]}\n{words[2]} {words[3]}"
    assert requests.rolling([text, ""]) == pytest.approx([sum(lines), 0.0], abs=1e-4)
    with user_error("the model is an encoder, which generates no text"):
        requests.generations([("a", {})])


def test_flags_of_the_other_kind_of_model_are_one_line(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    path = saved(tmp_path / "model.pt", BERT, data=data)
    for flags in ("--context-window 4", "--int8", "--tokens-per-sample 12", "--sliding-inf 1"):
        with user_error(f"{flags.split()[0]}: .*model.pt is an encoder, which reads whole lines; leave it out"):
            evaluate(data, flags, "--gen-subset valid", ["--path", path])
    with user_error("is an encoder, which does not predict the next token"):
        evaluate(data, "--gen-subset valid", ["--path", f"{path}:{path}"])
