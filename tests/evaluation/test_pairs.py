"""Minimal pairs: one command for encoders and decoders, a table by phenomenon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exports import imported, parsed

from fairseq.errors import UserError
from fairseq.evaluation.pairs import read_pairs
from fairseq.hub import load_scorer
from fairseq_cli import harness
from fairseq_cli.harness import get_harness_parser

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("source", ["hf_encoders/bert", "language_model/shortformer_stage2.pt"])
def test_accuracy_by_phenomenon_is_the_share_of_pairs_whose_good_sentence_scores_higher(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_encoder = source.startswith("hf")
    out = imported(GOLDEN / source, tmp_path / "model") if is_encoder else GOLDEN / source
    data = out.parent if is_encoder else GOLDEN / "language_model" / "data-bin"
    model: Any = load_scorer(out, data)
    words = (model.dictionary if hasattr(model, "dictionary") else model.reader.dictionary).symbols
    rows = [
        {"sentence_good": f"{words[20 + i]} {words[40 + i]}", "sentence_bad": words[60 - i], "UID": "ab"[i % 2]}
        | ({"linguistics_term": "agreement"} if i < 3 else {})
        for i in range(8)
    ]
    rows += [{"sentence_good": row["sentence_bad"], "sentence_bad": row["sentence_good"], "UID": "c"} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [out, "--data", data, "--pairs", tmp_path / "pairs.jsonl", "--cpu", "--results-path", tmp_path]
    found = harness.main(parsed(get_harness_parser(), *argv))
    want: dict[str, list[bool]] = {}
    for row in rows:
        # Ends of lines, which decoders score, are no part of a sentence.
        good, bad = (
            model.score(row[name])[1][: None if is_encoder else -1].sum() for name in ("sentence_good", "sentence_bad")
        )
        right = good > bad
        for name in (row.get("linguistics_term", row["UID"]), "all"):
            want.setdefault(name, []).append(bool(right))
    assert found == {name: {"pairs": len(group), "acc": sum(group) / len(group)} for name, group in want.items()}
    assert found["all"]["acc"] == 0.5
    assert json.loads((tmp_path / "results.json").read_text())["phenomena"] == found
    assert "| agreement | 3 |" in capsys.readouterr().out


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
