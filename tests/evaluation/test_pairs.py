"""Minimal pairs: one command for encoders and decoders, a table by phenomenon."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from exports import imported, parsed

from fairseq.errors import UserError
from fairseq.evaluation.pairs import Pair, accuracies, have_known_words, read_pairs
from fairseq.hub import LanguageModel, load_scorer
from fairseq_cli import harness
from fairseq_cli.harness import get_harness_parser

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("source", ["hf_encoders/bert", "language_model/shortformer_stage2.pt"])
@pytest.mark.parametrize("start", [True, False])
def test_accuracy_by_phenomenon_is_the_share_of_pairs_whose_good_sentence_scores_higher(
    source: str, start: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_encoder = source.startswith("hf")
    out = imported(GOLDEN / source, tmp_path / "model") if is_encoder else GOLDEN / source
    data = out.parent if is_encoder else GOLDEN / "language_model" / "data-bin"
    model: Any = load_scorer(out, data)
    words = (model.dictionary if hasattr(model, "dictionary") else model.reader.dictionary).symbols
    rows = [
        {
            "sentence_good": f"{words[20 + i]} {words[40 + i]}",
            "sentence_bad": f"{words[60 - i]} {words[9]}",
            "UID": "ab"[i % 2],
        }
        | ({"linguistics_term": "agreement"} if i < 3 else {})
        for i in range(8)
    ]
    rows += [{"sentence_good": row["sentence_bad"], "sentence_bad": row["sentence_good"], "UID": "c"} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [out, "--data", data, "--pairs", tmp_path / "pairs.jsonl", "--cpu", "--results-path", tmp_path]
    argv += [] if start else ["--no-start"]
    if is_encoder and not start:
        with pytest.raises(UserError, match="no_start: the model is an encoder"):
            harness.main(parsed(get_harness_parser(), *argv))
        return
    found = harness.main(parsed(get_harness_parser(), *argv))
    want: dict[str, list[bool]] = {}
    for row in rows:
        # Ends of lines, which decoders score, are no part of a sentence.
        sentences = [row[name] for name in ("sentence_good", "sentence_bad")]
        if start:
            good, bad = (model.score(text)[1][: None if is_encoder else -1].sum() for text in sentences)
        else:
            good, bad = (-model.score_tokens(model.encode(f"{text} .")[None, :-2], 4).sum() for text in sentences)
        right = good > bad
        for name in (row.get("linguistics_term", row["UID"]), "all"):
            want.setdefault(name, []).append(bool(right))
    assert found == {name: metrics(group) for name, group in want.items()}
    assert found["all"]["acc"] == 0.5
    assert json.loads((tmp_path / "results.json").read_text())["phenomena"] == found
    assert "| agreement | 3 |" in capsys.readouterr().out


def metrics(right: list[bool]) -> dict[str, float]:
    share = sum(right) / len(right)
    return {"pairs": len(right), "acc": share, "stderr": pytest.approx(statistics.pstdev(right) / len(right) ** 0.5)}


def test_averages_are_over_pairs_paradigms_and_phenomena() -> None:
    # (phenomenon, paradigm): right ones of ten and of forty pairs
    rows = [("x", "a", 4, 10), ("x", "b", 30, 40), ("y", "c", 9, 10)]
    pairs = [Pair("", "", x, uid) for x, uid, _, total in rows for _ in range(total)]
    good = [float(number < right) for _, _, right, total in rows for number in range(total)]
    found = accuracies(pairs, good, [0.5] * len(good)).averages
    want = {"pairs": 43 / 60, "paradigms": (0.4 + 0.75 + 0.9) / 3, "phenomena": (34 / 50 + 0.9) / 2}
    assert {name: average.share for name, average in found.items()} == pytest.approx(want)
    assert found["pairs"].error == pytest.approx(math.sqrt(43 / 60 * 17 / 60 / 60))
    of_paradigms = math.sqrt(0.4 * 0.6 / 10 + 0.75 * 0.25 / 40 + 0.9 * 0.1 / 10) / 3
    assert found["paradigms"].error == pytest.approx(of_paradigms)


def test_pairs_with_an_unknown_word_are_left_out_of_a_second_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("ann's\nIS\nn't\nthe ex-wife.\nwere don’t isle", encoding="utf-8")
    good = ["Ann isn't the ex-wife.", "Don't!", "The wife is.", "Isn't the isle?", "ann's don’t", 'Were the "isles"?']
    pairs = [Pair(text, f"The {text.lower()}", "x", "y") for text in good]
    assert have_known_words(pairs, words) == [True, True, False, True, True, False]
    checkpoint, data = GOLDEN / "language_model" / "shortformer_stage2.pt", GOLDEN / "language_model" / "data-bin"
    known = LanguageModel.from_pretrained(checkpoint, data).dictionary.symbols[20:]
    known = [word for word in known if word.isalpha()][:6]
    rows = [{"sentence_good": f"{known[0]} {word}", "sentence_bad": known[1], "UID": word} for word in known[2:]]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words.write_text(" ".join(known[:4]))
    argv = [checkpoint, "--data", data, "--pairs", tmp_path / "pairs.jsonl", "--known-words", words, "--out", tmp_path]
    found = harness.main(parsed(get_harness_parser(), *argv))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["phenomena"] == found and found["all"]["pairs"] == 4 and len(results["paradigms"]) == 4
    part = results["known_words"]
    assert part["phenomena"] == {name: found[name] for name in known[2:4]} | {"all": part["averages"]["pairs"]}
    assert part["phenomena"]["all"]["pairs"] == 2 and part["file"] == str(words)
    assert f"| {known[5]} | 1 | " in (out := capsys.readouterr().out) and "| 0 | – |" in out
    words.write_text("none")
    harness.main(parsed(get_harness_parser(), *argv))
    assert "words.txt: every pair has a word that it lacks, such as" in caplog.text
    assert "known words" not in capsys.readouterr().out


def test_pairs_without_names_are_of_the_paradigm_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "hypernym.jsonl").write_text('{"sentence_good": "a", "sentence_bad": "b"}\n')
    assert read_pairs(tmp_path) == [Pair("a", "b", "hypernym", "hypernym")]


def test_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        row = {"sentence_good": f"good {name}", "sentence_bad": "bad", "UID": name}
        mark = "\ufeff" * (name == "a.jsonl")
        (tmp_path / name).write_text(mark + 2 * (json.dumps(row) + "\n"), encoding="utf-8")
    (tmp_path / "none").mkdir()
    (tmp_path / "README").write_text("not a pair")
    assert [pair.good for pair in read_pairs(tmp_path, limit=1)] == ["good a.jsonl", "good b.jsonl"]
    assert len(read_pairs(tmp_path)) == 4
    with pytest.raises(UserError, match=r"none: no pairs; give a file, or a folder of files \*\.jsonl"):
        read_pairs(tmp_path / "none")


def test_line_without_a_sentence_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "a", "sentence_bad": "b"}\n{"sentence_good": "a"}\n')
    argv = [tmp_path, "--pairs", tmp_path / "pairs.jsonl", "--results-path", tmp_path / "out"]
    with pytest.raises(UserError, match="line 2: expected sentence_good and sentence_bad"):
        harness.main(parsed(get_harness_parser(), *argv))
    assert not (tmp_path / "out").exists()
