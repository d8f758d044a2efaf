"""A fine-tuned encoder classifies new text in Python, on the command line and in transformers, with
one result."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerators
import pytest
import runs
import torch
from mistakes import user_error
from sentences import GOOD, NO_DROPOUT, SMALL, WORDS, separable, write_dictionary, write_pretrained, write_tsv

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq.evaluation.classifier import SentenceClassifier
from fairseq.models.loading import stored_settings
from fairseq.tasks import setup_task
from fairseq.text import raw_text
from fairseq.text.dictionary import Dictionary
from fairseq_cli import export_model, finetune
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.finetune import get_finetune_parser

TEXTS = ["w1 w11", "w2 nonsense w7 w8 w19", "w0", " ".join(WORDS) + " w3" * 30]
NARROW = "--arch electra_tiny --encoder-input-dim"
PAIRS = [("w1 w11", "w2"), ("w2", "w7 w8 w19 w4 w4"), (" ".join(WORDS), "w3 " * 20)]


def table(folder: Path, labels: tuple[str, ...], pairs: bool = False) -> Path:
    """A folder with train.tsv and dev.tsv; classes are drawn from *labels*."""
    for seed, name in enumerate(("train", "dev")):
        rows = [[*([text, text] if pairs else [text]), labels[(n + label) % len(labels)]]
                for n, (text, label) in enumerate(separable(seed, 12))]  # fmt: skip
        columns = ["sentence1", "sentence2"] if pairs else ["sentence"]
        write_tsv(folder / f"{name}.tsv", [*columns, "label"], rows)
    return folder


def classifier(
    folder: Path, *flags: Any, labels: tuple[str, ...] = ("bad", "good", "so-so"), pairs: bool = False
) -> Path:
    """A checkpoint of a classifier with random weights, beside its dictionary."""
    data_bin = write_dictionary(folder / "bin")
    data = table(folder / "table", labels, pairs)
    kind = ["--sentence-pairs"] if pairs else []
    args = runs.arguments(SMALL, NO_DROPOUT, "--data-bin", data_bin, *kind, *flags, data=data)
    task = setup_task(args)
    torch.manual_seed(3)
    model = task.build_model(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    write_dictionary(folder / "run")
    state = {
        "args": {**stored_settings(task.settings.flat, model), "data_bin": "/nowhere"},
        "model": model.state_dict(),
    }
    checkpoint.save(folder / "run" / "checkpoint_best.pt", {**state, "optimizer_history": [], "extra_state": {}})
    return folder / "run" / "checkpoint_best.pt"


def printed(capsys: pytest.CaptureFixture[str], *words: Any) -> list[str]:
    capsys.readouterr()
    finetune.predict(options.parse_args_and_arch(finetune.get_predict_parser(), [*map(str, words), "--cpu"]))
    return capsys.readouterr().out.splitlines()


def test_labels_are_those_of_the_training_table(tmp_path: Path) -> None:
    assert SentenceClassifier.from_pretrained(classifier(tmp_path)).labels == ("bad", "good", "so-so")
    numbers = classifier(tmp_path / "numbers", labels=("10", "9", "-1"))
    assert SentenceClassifier.from_pretrained(numbers.parent).labels == ("-1", "9", "10")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sentence\tlabel\na\tx,y\nb\tz\n", "line 2: label 'x,y' has a comma"),
        ("sentence\tlabel\na\tx\nb\n", "line 3: no label"),
        ("sentence\tlabel\na\tx\nb\tx\n", "all examples have the label 'x'"),
        ("sentence\tlabel\n", "no examples"),
        ("sentence\tmark\na\tx\n", "no column 'label'"),
        ("sentence\tlabel\n" + "".join(f"a\t{n / 7}\n" for n in range(1200)), "more than 1000 .* --regression-target"),
    ],
)  # fmt: skip
def test_a_table_without_usable_labels_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(content)
    with user_error(f"{tmp_path}/train.tsv: {message}"):
        setup_task(runs.arguments(SMALL, "--data-bin", write_dictionary(tmp_path / "bin"), data=tmp_path))


def test_fine_tuning_finds_dictionary_and_labels_and_its_model_classifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = write_dictionary(tmp_path / "pretrained")
    write_pretrained(home / "checkpoint.pt", home, "--token-types 0")
    rows = [[text, "good" if label else "bad"] for text, label in separable(5, 60)]
    for name in ("train", "dev"):
        write_tsv(
            tmp_path / "table" / f"{name}.tsv", ["id", "sentence", "label"], [[i, *r] for i, r in enumerate(rows)]
        )
    words = ["--cpu --log-format none --seeds 1 --lrs 0.02 --max-epoch 5 --batch-size 8 --path", home / "checkpoint.pt"]
    words = runs.words(tmp_path / "table", *words, "--save-dir", tmp_path / "out")
    report = finetune.main(options.parse_args_and_arch(get_finetune_parser(), words))
    assert report["score"] > 90
    best = tmp_path / "out" / "lr0.02-seed1"
    want = (best / "predictions.valid.tsv").read_text().splitlines()[1:]
    lines = [json.loads(line) for line in printed(capsys, best / "checkpoint_best.pt", tmp_path / "table" / "dev.tsv")]
    assert [f"{n}\t{line['label']}" for n, line in enumerate(lines)] == want
    assert [line["text"] for line in lines] == [row[0] for row in rows]
    [one] = SentenceClassifier.from_pretrained(best).classify([f"{GOOD[0]} w11 w12"])
    assert one.label == "good" and one.score == one.probabilities["good"] > 0.5
    assert sum(one.probabilities.values()) == pytest.approx(1)


def test_a_training_run_finds_dictionary_and_labels_and_its_checkpoint_has_them(tmp_path: Path) -> None:
    home = write_dictionary(tmp_path / "pretrained")
    write_pretrained(home / "checkpoint.pt", home)
    data = table(tmp_path / "table", ("x", "y", "z"))
    runs.train(tmp_path / "run", SMALL, "--max-update 1 --finetune-from-model", home / "checkpoint.pt", data=data)
    model = SentenceClassifier.from_pretrained(tmp_path / "run" / "checkpoint_last.pt")
    assert model.labels == ("x", "y", "z")
    assert [prediction.label in model.labels for prediction in model.classify(TEXTS)] == [True] * len(TEXTS)


def test_texts_do_not_depend_on_their_batch_and_equal_a_direct_computation(tmp_path: Path) -> None:
    model = SentenceClassifier.from_pretrained(classifier(tmp_path))
    together, alone = model.logits(TEXTS, batch_size=3), torch.cat([model.logits([text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    dictionary = Dictionary.load(tmp_path / "bin" / "dict.txt")
    rows = [[0, *(dictionary.index(word) for word in text.split())][:23] + [2] for text in TEXTS]
    with torch.no_grad():
        direct = torch.cat([model.model(torch.tensor([row]))[0] for row in rows])
    torch.testing.assert_close(together, direct, atol=1e-5, rtol=0)
    for prediction, row in zip(model.classify(TEXTS), direct.softmax(1), strict=True):
        assert prediction.label == model.labels[int(row.argmax())]
        assert list(prediction.probabilities.values()) == pytest.approx(row.tolist(), abs=1e-5)
    assert model.classify([]) == []
    with pytest.raises(ValueError, match="the model reads single sentences"):
        model.classify([("a", "b")])


def test_the_device_can_be_left_to_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, devices = classifier(tmp_path), []
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: devices.append(device) or module)
    for kind in (None, "cuda"):
        accelerators.found(monkeypatch, kind)
        SentenceClassifier.from_pretrained(path, device="auto")
    assert devices == [torch.device("cpu"), torch.device("cuda")]


def test_a_file_stdin_and_a_table_give_the_same_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = classifier(tmp_path)
    texts = TEXTS[:3]
    (tmp_path / "lines").write_text("".join(f"{text}\r\n" for text in texts))
    (tmp_path / "rows.tsv").write_text("\ufeffid\tsentence\n" + "".join(f"7\t{text}\n" for text in texts))
    lines = printed(capsys, path, tmp_path / "lines")
    assert [json.loads(line)["text"] for line in lines] == texts
    assert list(json.loads(lines[0])) == ["text", "label", "probability", "probabilities"]
    assert printed(capsys, path, tmp_path / "rows.tsv") == lines
    for flags in ((), ("--batch-size", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "lines").read_bytes())))
        found = [json.loads(line) for line in printed(capsys, path, *flags)]
        for one, line in zip(found, map(json.loads, lines), strict=True):
            assert (one["text"], one["label"]) == (line["text"], line["label"])
            assert one["probabilities"] == pytest.approx(line["probabilities"], abs=1e-5)
    rows = [line.split("\t") for line in printed(capsys, path, tmp_path / "lines", "--format", "tsv")]
    assert rows[0] == ["text", "label", "bad", "good", "so-so"] and [row[0] for row in rows[1:]] == texts
    for row, line in zip(rows[1:], map(json.loads, lines), strict=True):
        assert row[1] == line["label"]
        assert [float(cell) for cell in row[2:]] == pytest.approx(list(line["probabilities"].values()), abs=2e-6)


def test_the_text_may_follow_flags_or_be_a_pipe_and_the_model_be_the_folder_of_a_run_without_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = classifier(tmp_path)
    path = path.rename(path.with_name("checkpoint_last.pt"))
    (tmp_path / "lines").write_text("w1 w2\n")
    lines = printed(capsys, path, tmp_path / "lines")
    assert len(lines) == 1 and printed(capsys, path.parent, "--batch-size", 2, tmp_path / "lines") == lines
    reading, writing = os.pipe()
    with open(writing, "wb") as file:
        file.write(b"w1 w2\n")
    assert printed(capsys, path, f"/dev/fd/{reading}") == lines
    os.close(reading)


def test_pairs_are_two_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = classifier(tmp_path, pairs=True)
    (tmp_path / "pairs").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))
    lines = [json.loads(line) for line in printed(capsys, path, tmp_path / "pairs")]
    want = SentenceClassifier.from_pretrained(path).classify(PAIRS)
    assert [line["label"] for line in lines] == [prediction.label for prediction in want]
    assert [line["text_pair"] for line in lines] == [b.strip() for _, b in PAIRS]
    (tmp_path / "rows.tsv").write_text("sentence2\tsentence1\n" + "".join(f"{b}\t{a}\n" for a, b in PAIRS))
    assert [json.loads(line) for line in printed(capsys, path, tmp_path / "rows.tsv")] == lines
    (tmp_path / "one").write_text("w1\tw2\nw1\n")
    with pytest.raises(UserError, match="one: line 2: 1 columns; expected sentence1 and sentence2"):
        printed(capsys, path, tmp_path / "one")


def test_regression_gives_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = classifier(tmp_path, "--regression-target", labels=("1.5", "2"))
    (tmp_path / "lines").write_text("w1\nw2 w3\n")
    lines = [json.loads(line) for line in printed(capsys, path, tmp_path / "lines")]
    want = SentenceClassifier.from_pretrained(path).logits(["w1", "w2 w3"]).squeeze(1).tolist()
    assert [line["score"] for line in lines] == pytest.approx(want, abs=1e-5) and "label" not in lines[0]
    assert printed(capsys, path, tmp_path / "lines", "--format", "tsv")[0] == "text\tscore"


def test_what_cannot_be_classified_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = classifier(tmp_path)
    (tmp_path / "latin").write_bytes(b"w1\n\xff\n")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfw\xff\n")
    (tmp_path / "empty").touch()
    for words, message in {
        (path, tmp_path / "latin"): "latin: line 2, byte 1: not UTF-8",
        (path, tmp_path / "marked"): "marked: line 1, byte 5: not UTF-8",
        (path, tmp_path / "none"): "none: file not found",
        (path, tmp_path / "empty"): "empty: the text is empty; give a file with at least one word",
        (path, tmp_path): "cannot be read",
        (path, tmp_path / "latin", "--data", tmp_path): f"{tmp_path}/dict.txt: file not found",
        (tmp_path / "none.pt", tmp_path / "latin"): "none.pt: file not found",
    }.items():
        with user_error(message):
            printed(capsys, *words)
    monkeypatch.setattr(raw_text, "LONGEST_ROW", 1 << 20)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(runs.Endless(2 << 20))))
    with pytest.raises(UserError, match="stdin: line 1: longer than 1 MiB; split it"):
        printed(capsys, path)
    pretrained = write_pretrained(tmp_path / "bin" / "pre.pt", tmp_path / "bin")
    with pytest.raises(UserError, match="not a fine-tuned classifier"):
        printed(capsys, pretrained, tmp_path / "latin")


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "flags", "pairs"),
    [
        ("BertForSequenceClassification", "", True),
        ("BertForSequenceClassification", "--token-types 0 --activation-fn relu --pooler-dropout 0.2", False),
        ("BertForSequenceClassification", f"{NARROW} 16", True),
        ("ElectraForSequenceClassification", f"{NARROW} 8 --pooler-activation-fn gelu", True),
        ("ElectraForSequenceClassification", f"{NARROW} 16 --pooler-activation-fn gelu", False),
        ("RobertaForSequenceClassification", "--arch roberta", False),
        ("BertForSequenceClassification", "--regression-target", False),
    ],
)  # fmt: skip
def test_transformers_gives_the_same_logits(kind: str, flags: str, pairs: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    labels = ("1", "2") if "regression" in flags else ("bad", "good", "so-so")
    path = classifier(tmp_path, flags, labels=labels, pairs=pairs)
    export_model.main(
        options.parse_args_and_arch(get_export_parser(), [str(path), "--to", "hf", "--out", str(tmp_path / "out")])
    )
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    theirs, report = load(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and type(theirs).__name__ == kind
    regression = "regression" in flags
    assert theirs.config.id2label == ({0: "score"} if regression else dict(enumerate(labels)))
    assert theirs.config.problem_type == ("regression" if regression else "single_label_classification")
    ours = SentenceClassifier.from_pretrained(path)
    texts: Any = PAIRS if pairs else TEXTS
    sentences = [(text,) if isinstance(text, str) else text for text in texts]
    batch = ours.task.rows(sentences, [None] * len(texts), "").batch(torch.arange(len(texts)).numpy())["net_input"]
    tokens = batch["src_tokens"]
    types = {"token_type_ids": batch["token_types"]} if "token_types" in batch else {}
    found = theirs.eval()(tokens, attention_mask=tokens.ne(ours.task.dictionary.pad()).long(), **types).logits
    torch.testing.assert_close(found, ours.logits(texts), atol=1e-5, rtol=0)
    assert (tmp_path / "out" / "vocab.txt").read_text().splitlines() == ours.task.dictionary.symbols


def test_transformers_makes_the_rows_of_pairs_that_have_a_separator(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from fairseq.interop.hugging_face.exported.tokenization_fairseq import FairseqEncoderTokenizer

    path = classifier(tmp_path, "--separator-token 2", pairs=True)
    words = [str(path), "--to", "hf", "--out", str(tmp_path / "out")]
    export_model.main(options.parse_args_and_arch(get_export_parser(), words))
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    settings = {name: value for name, value in config.items() if name not in ("tokenizer_class", "auto_map")}
    tokenizer: Any = FairseqEncoderTokenizer(str(tmp_path / "out" / "vocab.txt"), **settings)
    row = SentenceClassifier.from_pretrained(path).task.rows([PAIRS[0]], [None], "").batch(torch.arange(1).numpy())
    encoded = tokenizer(*PAIRS[0])
    assert encoded["input_ids"] == row["net_input"]["src_tokens"][0].tolist() and encoded["input_ids"].count(2) == 3
    assert encoded["token_type_ids"] == row["net_input"]["token_types"][0].tolist()
    other = classifier(tmp_path / "other", "--init-token 5")
    with user_error("its rows begin with id 5, not with <s> as in transformers"):
        export_model.main(
            options.parse_args_and_arch(get_export_parser(), [str(other), *words[1:-1], str(tmp_path / "new")])
        )


def test_an_export_reads_its_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, load = classifier(tmp_path), [], checkpoint.load

    def counted(path: Any, *args: Any, **settings: Any) -> Any:
        read.append(Path(path))
        return load(path, *args, **settings)

    monkeypatch.setattr(checkpoint, "load", counted)
    words = [str(path), "--to", "hf", "--out", str(tmp_path / "out")]
    export_model.main(options.parse_args_and_arch(get_export_parser(), words))
    assert read == [path]
    SentenceClassifier.from_pretrained(path)
    assert read == [path, path]


def test_a_head_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    path = classifier(tmp_path, "--arch electra_tiny --encoder-input-dim 8")
    args = SimpleNamespace(source=str(path), data=None, out=str(tmp_path / "out"), target_format="hf")
    args.__dict__.update(half="discriminator", results=None, revisions=False, push=None)
    with user_error("--pooler-activation-fn tanh and embeddings of width 8 .*-fn gelu"):
        export_model.main(args)  # type: ignore[arg-type]
    args.half = "generator"
    with user_error("--half generator: .* is a classifier"):
        export_model.main(args)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
