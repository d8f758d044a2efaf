"""fairseq-eval-lm and fairseq-validate --by-frequency: against words counted and summed in a
loop."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import noted
import numpy as np
import pytest
import runs
from mistakes import user_error

from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.evaluation import Scorer, validation
from fairseq.evaluation.by_frequency import training_counts
from fairseq.hub import load_model
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm, preprocess, validate
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.preprocess import get_preprocessing_parser
from fairseq_cli.validate import get_validation_parser

BASELINE, SHORTFORMER = runs.GOLDEN / "baseline.pt", runs.GOLDEN / "shortformer_stage2.pt"
BERT = "--task masked_lm --criterion masked_lm --arch bert_tiny --encoder-embed-dim 16 --encoder-ffn-embed-dim 32"
BERT += " --encoder-attention-heads 2 --encoder-layers 1 --max-positions 40 --tokens-per-sample 40 --max-tokens 400"
EDGES = [1, 10, 100, 1000, 10_000, 100_000]


def evaluate(*flags: Any, data: Path = runs.DATA) -> dict[str, Any]:
    args = options.parse_args_and_arch(get_eval_lm_parser(), [str(data), "--cpu", *runs.words(*flags)])
    return eval_lm.main(args)


def validated(*flags: Any, data: Path = runs.DATA) -> dict[str, Any]:
    words = [str(data), "--cpu", *runs.words(*flags)]
    args = options.parse_args_and_arch(get_validation_parser(), words, task_defaults=False)
    return validate.main(args)


def literal(words: list[tuple[str, float]], counts: Counter[str]) -> dict[str, tuple[int, float, float]]:
    """Number, mean loss and its standard error of the words of each band, from (word, loss in
    bits)."""
    bands: dict[str, list[float]] = {}
    for word, loss in words:
        low = max([0, *(edge for edge in EDGES if edge <= counts[word])])
        bands.setdefault("unknown" if word == "<unk>" else str(low), []).append(loss)
    bands["all"] = [loss for _, loss in words]
    found = {}
    for name, losses in bands.items():
        mean = sum(losses) / len(losses)
        variance = sum((loss - mean) ** 2 for loss in losses) / max(1, len(losses) - 1)
        found[name] = len(losses), mean, math.sqrt(variance / len(losses))
    return found


def check(report: dict[str, Any], want: dict[str, tuple[int, float, float]], model: int = 0) -> None:
    bands = {str(band.get("low", band["band"])): band for band in report["bands"] if band["words"]}
    assert bands.keys() == want.keys()
    for name, (count, mean, error) in want.items():
        assert bands[name]["words"] == count
        assert bands[name]["bits_per_word"][model] == pytest.approx(mean, abs=1e-5)
        if count > 1:
            assert bands[name]["standard_error"][model] == pytest.approx(error, abs=1e-5)


def split_words(data: Path, split: str) -> list[str]:
    """The words of a split, without ends of lines; its symbols are words."""
    dictionary = Dictionary.load(data / "dict.txt")
    return [dictionary[int(token)] for token in IndexedCorpus(str(data / split)).tokens[:] if token != dictionary.eos()]


def test_bands_of_a_decoder_equal_a_literal_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--path", BASELINE, "--by-frequency", "--save-token-scores", tmp_path / "s.npz"]
    report = evaluate(flags, "--results-path", tmp_path / "out")["by_frequency"]
    dictionary = Dictionary.load(runs.DATA / "dict.txt")
    with np.load(tmp_path / "s.npz") as scores:
        pairs = zip(scores["tokens"].tolist(), scores["lprobs"].tolist(), strict=True)
        words = [(dictionary[token], -lprob / math.log(2)) for token, lprob in pairs if token != dictionary.eos()]
    check(report, literal(words, Counter(split_words(runs.DATA, "train"))))
    assert json.loads((tmp_path / "out" / "results.json").read_text())["by_frequency"] == report
    assert (tmp_path / "out" / "by-frequency.png").read_bytes().startswith(b"\x89PNG")
    assert "| 100-999 |" in capsys.readouterr().out


def test_two_decoders_are_side_by_side_with_their_paired_difference(tmp_path: Path) -> None:
    both = evaluate("--by-frequency", ["--path", SHORTFORMER, "--baseline", BASELINE])["by_frequency"]
    other = evaluate("--by-frequency", ["--path", SHORTFORMER])["by_frequency"]
    assert both["models"] == ["baseline", "shortformer_stage2"]
    for band, alone in zip(both["bands"], other["bands"], strict=True):
        assert band["bits_per_word"][1] == alone["bits_per_word"][0] and alone["difference"] == []
        if band["words"]:
            first, second = band["bits_per_word"]
            assert band["difference"] == pytest.approx([second - first], abs=1e-9)
    models = validated(
        "--by-frequency --valid-subset test", ["--path", f"{BASELINE}:{SHORTFORMER}", "--results-path", tmp_path]
    )
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["figures"] == models
    for band, want in zip(found["by_frequency"]["test"]["bands"], both["bands"], strict=True):
        assert band["words"] == want["words"]
        for name in ("difference", "bits_per_word") if band["words"] else ():
            assert band[name] == pytest.approx(want[name], abs=2e-5)
    assert (tmp_path / "by-frequency-test.png").exists()


def test_validation_of_an_encoder_equals_a_literal_count_of_the_masked_tokens(tmp_path: Path) -> None:
    data = noted.corpus(tmp_path)
    path = runs.saved(tmp_path / "bert.pt", BERT, data=data)
    validated("--by-frequency --valid-subset valid", ["--path", path, "--results-path", tmp_path], data=data)
    report = json.loads((tmp_path / "results.json").read_text())["by_frequency"]["valid"]

    model, task = load_model(path, data)
    dataset, dictionary = task.dataset("valid"), task.source_dictionary
    tokens = dataset.blocks.corpus.tokens[:]
    pieces: list[tuple[int, float]] = []  # place, bits
    for row in range(len(dataset)):
        sample = dataset.batch(np.array([row]))
        lprobs = model(sample["net_input"]["src_tokens"])[0][0].float().log_softmax(-1)
        for column, target in enumerate(sample["target"][0].tolist()):
            if target != dictionary.pad():
                pieces.append(
                    (
                        int(dataset.blocks.starts[row]) + column - 1,
                        -float(lprobs[column, target].detach()) / math.log(2),
                    )
                )
    check(report, literal(whole_words(dictionary, tokens, dict(pieces)), Counter(joined(data, "train"))))


def joined(data: Path, split: str) -> list[str]:
    dictionary = Dictionary.load(data / "dict.txt")
    lines = dictionary.string(IndexedCorpus(str(data / split)).tokens[:].tolist()).split("</s>")
    return [word for line in lines for word in (line + " ").replace("@@ ", "").split()]


def whole_words(dictionary: Dictionary, tokens: Any, losses: dict[int, float]) -> list[tuple[str, float]]:
    """The words of *tokens* with any of *losses*, by place, and their sum."""
    words, word, total = [], "", None
    for place, token in enumerate(tokens.tolist()):
        symbol = dictionary[token]
        if symbol == "</s>":
            continue
        word += symbol.removesuffix("@@")
        if place in losses:
            total = (total or 0.0) + losses[place]
        if not symbol.endswith("@@"):
            words += [(word, total)] if total is not None else []
            word, total = "", None
    return words


KINDS = {"masked": (noted.TNF_BERT, "loss"), "electra": (noted.TNF_ELECTRA, "discriminator_loss")}
KINDS["causal"] = (f"--task language_modeling --notes {noted.CAUSAL}", "nll_loss")


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_tokens_are_at_their_places_and_add_up_to_the_loss_with_notes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, name = KINDS[kind]
    data, meters = noted.corpus(tmp_path), []
    monkeypatch.setattr(validation, "_word_losses", lambda meter, blocks, task: meters.append((meter, blocks)))
    monkeypatch.setattr(validation, "_report", lambda *args: None)
    path = runs.saved(tmp_path / "model.pt", flags, data=data)
    validated("--by-frequency --keep-notes --valid-subset valid", ["--path", path], data=data)
    assert len(meters) == 3  # with notes, with those of other words, without
    meter, blocks = meters[0]
    places, losses = meter.totals.rows["token losses"].numpy().T
    text = places >= 0  # ELECTRA's discriminator also reads the begin symbol of each row
    assert len(np.unique(places[text])) == text.sum() and places.max() < len(blocks.corpus.tokens)
    assert losses.sum() == pytest.approx(float(meter.totals[name]), rel=1e-5)
    if kind != "masked":
        assert text.sum() == len(blocks.corpus.tokens)


def test_models_with_and_without_notes_are_side_by_side(tmp_path: Path) -> None:
    data = noted.corpus(tmp_path)
    plain = runs.saved(tmp_path / "plain.pt", noted.BERT, data=data)
    notes = runs.saved(tmp_path / "notes.pt", noted.TNF_BERT, data=data)
    flags = ["--keep-notes", "--by-frequency", "--valid-subset", "valid", "--results-path", tmp_path / "out"]
    validated(flags, ["--path", f"{plain}:{notes}"], data=data)
    report = json.loads((tmp_path / "out" / "results.json").read_text())["by_frequency"]["valid"]
    assert report["models"] == ["plain", "notes", "notes, notes of other words", "notes, without notes"]
    everything = report["bands"][-1]
    assert everything["words"] and len(everything["difference"]) == 3
    for loss, difference in zip(everything["bits_per_word"][1:], everything["difference"], strict=True):
        assert difference == pytest.approx(loss - everything["bits_per_word"][0], abs=1e-9)


def test_figures_without_a_value_are_null_in_the_results(tmp_path: Path) -> None:
    data = noted.corpus(tmp_path)
    path = runs.saved(tmp_path / "bert.pt", BERT, data=data)
    flags = ["--rare-words", "--valid-subset", "valid", "--path", path, "--results-path", tmp_path / "out"]
    [figures] = validated(flags, data=data).values()
    assert any(math.isnan(value) for value in figures["valid"].values())
    found = json.loads((tmp_path / "out" / "results.json").read_text())["figures"][str(path)]["valid"]
    assert found.keys() == figures["valid"].keys() and None in found.values()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for flags, message in [
        (["--baseline", BASELINE], "--baseline: is compared in --by-frequency"),
        (["--by-frequency", "--baseline", BASELINE], "--baseline .*: is the checkpoint that is evaluated"),
        (["--word-counts", "x"], "--word-counts: needs --by-frequency"),
        (["--by-frequency", "--frequency-bands", "10,5"], "--frequency-bands 10,5: must rise"),
        (["--by-frequency", "--frequency-bands", "1,,2"], "--frequency-bands: expected a whole number, got ''"),
        (["--by-frequency", "--word-counts", tmp_path / "x"], "--word-counts .*x: file not found"),
        (["--by-frequency", "--baseline", tmp_path / "no.pt"], "no.pt: file not found"),
    ]:
        with user_error(message):
            evaluate(["--path", BASELINE], flags)
    bare = tmp_path / "bare"
    shutil.copytree(runs.DATA, bare)
    for file in bare.glob("train.*"):
        file.unlink()
    with user_error(f"--by-frequency: {bare} has no training split to count; give --word-counts"):
        evaluate(["--path", BASELINE, "--by-frequency"], data=bare)
    counted = evaluate(["--path", BASELINE, "--by-frequency", "--word-counts", runs.DATA], data=bare)["by_frequency"]
    assert counted == evaluate(["--path", BASELINE, "--by-frequency"])["by_frequency"]


def test_missing_files_and_other_dictionaries_are_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "validate", None)
    monkeypatch.setattr(Scorer, "score", None)
    paths = ["--by-frequency", "--path", f"{BASELINE}:{tmp_path}/no.pt"]
    other = runs.saved(tmp_path / "other.pt", noted.CAUSAL, data=noted.corpus(tmp_path))
    for command, flags, message in [
        (evaluate, ["--by-frequency", "--path", BASELINE, "--baseline", other], "other.pt: .* dictionary"),
        (validated, ["--by-frequency", "--path", f"{BASELINE}:{other}"], "other.pt: .* dictionary"),
        (evaluate, ["--by-frequency", "--path", BASELINE, "--baseline", tmp_path / "no.pt"], "no.pt: file not found"),
        (validated, paths, "no.pt: file not found"),
        (validated, ["--path", BASELINE, "--by-frequency", "--word-counts", tmp_path / "x"], "x: file not found"),
    ]:
        with user_error(message):
            command(flags, "--results-path", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_words_of_raw_text_are_those_between_spaces(tmp_path: Path) -> None:
    """From raw text through byte-level subwords to an encoder and the bands of another text."""
    lines = ["the cats don't sit on naïve 世界 mats.", "the cat sat 🙂 on the mat, the cats"] * 30
    (tmp_path / "train").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "text").write_text("the cats\nhat 世界 mats.\n", encoding="utf-8")
    flags = ["--trainpref", tmp_path / "train", "--bpe", "hf", "--learn-bpe", "290", "--destdir", tmp_path / "bin"]
    preprocess.main(get_preprocessing_parser().parse_args(runs.words(*flags)))
    path = runs.saved(tmp_path / "bert.pt", BERT, data=tmp_path / "bin")
    counts = Counter(" ".join(lines).split())
    dictionary = load_model(path, tmp_path / "bin")[1].source_dictionary
    assert training_counts(tmp_path / "bin", dictionary) == counts
    flags = ["--path", path, "--text", tmp_path / "text", "--by-frequency", "--frequency-bands", "1,31,61"]
    bands = evaluate(flags, data=tmp_path / "bin")["by_frequency"]["bands"]
    assert [counts[word] for word in ("hat", "世界", "mats.", "cats", "the")] == [0, 30, 30, 60, 120]
    assert [band["words"] for band in bands] == [1, 2, 1, 1, 5]
    assert bands[1]["tokens"][0] > 2  # of subwords
