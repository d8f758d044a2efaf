"""``fairseq.models.roberta.RobertaModel`` does what fairseq's documentation shows; numbers are
fairseq 0.12.2's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from sentences import write_folders

from fairseq import checkpoint
from fairseq.data.data_utils import collate_tokens
from fairseq.errors import UserError
from fairseq.models.roberta import RobertaModel
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.hf import HuggingFace

FORMER = runs.GOLDEN.parent / "roberta"
GOLDEN = FORMER.parent / "fairseq_0_12"
DATA = FORMER.parent / "fairseq_variants" / "data-bin"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())


def loaded(name: str, **settings: Any) -> Any:
    return RobertaModel.from_pretrained(str(GOLDEN), name, str(DATA), **settings)


@torch.no_grad()
def test_features_of_all_layers_and_logits_are_fairseqs() -> None:
    roberta = loaded("roberta.pt", bpe=None)
    for case in EXPECTED["roberta"]["rows"]:
        tokens = torch.tensor(case["tokens"])
        layers = roberta.extract_features(tokens, return_all_hiddens=True)
        assert len(layers) == roberta.args.encoder_layers + 1
        for layer, expected in zip(layers, case["features"], strict=True):
            torch.testing.assert_close(layer[0], torch.tensor(expected), atol=1e-5, rtol=0)
        assert torch.equal(roberta.extract_features(tokens), layers[-1])
        logits = roberta.model(tokens[None])[0][0, :, :50]
        torch.testing.assert_close(logits, torch.tensor(case["logits"]), atol=1e-5, rtol=0)


@torch.no_grad()
def test_features_and_logits_of_an_earlier_version_are_fairseqs() -> None:
    with np.load(FORMER / "expected.npz") as file:
        tokens, features, logits = (torch.from_numpy(file[name]) for name in ("tokens", "features", "logits"))
    roberta = RobertaModel.from_pretrained(str(FORMER), "checkpoint.pt", str(runs.DATA))
    torch.testing.assert_close(roberta.extract_features(tokens), features, atol=1e-5, rtol=0)
    torch.testing.assert_close(roberta.model(tokens)[0], logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_predictions_of_a_classifier_are_fairseqs() -> None:
    roberta = loaded("classifier.pt", load_checkpoint_heads=True)
    rows = [torch.tensor(case["tokens"]) for case in EXPECTED["roberta"]["rows"]]
    expected = torch.tensor(EXPECTED["sentence_prediction"]["predictions"])[:, 0]
    alone = torch.cat([roberta.predict("sentence_classification_head", row) for row in rows])
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)
    batch = collate_tokens(rows, pad_idx=1)
    torch.testing.assert_close(roberta.predict("sentence_classification_head", batch), expected, atol=1e-5, rtol=0)
    assert [roberta.task.label_dictionary.string([n + 4]) for n in range(2)] == ["0", "1"]
    with pytest.raises(UserError, match="SentenceModel: pseudo-log-likelihoods of it cannot be computed"):
        roberta.fill_mask("<mask>")


@pytest.mark.parametrize("flat", [False, True], ids=["fp32", "fp16"])
def test_a_classifier_goes_on_with_its_optimizer(flat: bool, tmp_path: Path) -> None:
    """Numbers of the optimizer's state count the copies and the output layer, which this package's
    model lacks."""
    theirs = torch.load(GOLDEN / "classifier.pt", weights_only=False)
    optimizer, names = theirs["last_optimizer_state"], list(theirs["model"])
    names = [name for name in names if not name.endswith(("version", "lm_head.weight"))]
    moments = {name: optimizer["state"].get(number) for number, name in enumerate(names)}
    if flat:
        whole = [(moments[name], theirs["model"][name]) for name in names]
        entry = {"step": optimizer["state"][2]["step"]} | {
            key: torch.cat([(own[key] if own else 0 * p).flatten() for own, p in whole])
            for key in ("exp_avg", "exp_avg_sq")
        }
        theirs["last_optimizer_state"] = {"state": {0: entry}, "param_groups": [optimizer["param_groups"][0]]}
        theirs["last_optimizer_state"]["param_groups"][0]["params"] = [0]
        torch.save(theirs, tmp_path / "model.pt")
    path = tmp_path / "model.pt" if flat else GOLDEN / "classifier.pt"
    rows = [" ".join(str(word) for word in Dictionary.load(DATA / "dict.txt").symbols[4:9])] * 4
    for split in ("train", "valid"):
        write_folders(tmp_path / "data", split, {"input0": rows, "label": ["even", "odd"] * 2}, DATA)
    flags = """--cpu --task sentence_prediction --criterion sentence_prediction --arch roberta_base --encoder-layers 2
        --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --dropout 0 --attention-dropout 0
        --optimizer adam --lr 1e-9 --max-positions 128 --batch-size 4 --num-classes 2 --max-update 11
        --no-epoch-checkpoints --disable-validation --reset-dataloader"""
    runs.train(tmp_path / "run", flags, ["--restore-file", path], data=tmp_path / "data")
    ours = checkpoint.load(tmp_path / "run" / "checkpoint_last.pt")["last_optimizer_state"]["state"]
    assert len(ours) == 40
    for name, entry in ours.items():
        before = moments[name.replace("emb_layer_norm", "layernorm_embedding")]
        assert before is not None and entry["step"] == 11
        # One update with the gradient g makes 0.999 v + 0.001 g² of the second moment v.
        assert (entry["exp_avg_sq"] >= 0.99899 * before["exp_avg_sq"].view_as(entry["exp_avg_sq"])).all(), name


def test_sentences_are_encoded_with_separators_and_decoded() -> None:
    roberta = loaded("roberta.pt")
    a, b = (roberta.task.source_dictionary[index] for index in (7, 8))
    assert roberta.encode(f"{a} {b}").tolist() == [0, 7, 8, 2]
    pair = roberta.encode(f"{a} {b}", a)
    assert pair.tolist() == [0, 7, 8, 2, 2, 7, 2] and pair.dtype == torch.int64
    assert roberta.encode(a, b, no_separator=True).tolist() == [0, 7, 2, 8, 2]
    assert roberta.decode(roberta.encode(f"{a} {b}")) == f"{a} {b}"
    assert roberta.decode(pair) == [f"{a} {b}", a]


@torch.no_grad()
def test_masks_are_filled_with_the_most_probable_words() -> None:
    roberta = loaded("roberta.pt")
    a, b = (roberta.task.source_dictionary[index] for index in (7, 8))
    found = roberta.fill_mask(f"{a} <mask> {b}", topk=3)
    logits = roberta.model(torch.tensor([[0, 7, 1200, 8, 2]]))[0][0, 2]
    best = logits.softmax(-1).topk(3)
    words = [roberta.task.source_dictionary[index] for index in best.indices.tolist()]
    assert [(text, word) for text, _, word in found] == [(f"{a} {word} {b}", word) for word in words]
    assert [probability for _, probability, _ in found] == pytest.approx(best.values.tolist())
    for text in (a, "<mask> <mask>"):
        with pytest.raises(ValueError, match="expected one <mask>, found"):
            roberta.fill_mask(text)


def test_a_new_head_is_trained_with_the_encoder() -> None:
    roberta = loaded("roberta.pt")
    roberta.register_classification_head("new_task", num_classes=3)
    lprobs = roberta.predict("new_task", roberta.encode("po"))
    assert lprobs.shape == (1, 3) and lprobs.exp().sum().item() == pytest.approx(1)
    logits = roberta.predict("new_task", roberta.encode("po"), return_logits=True)
    torch.testing.assert_close(logits.log_softmax(-1), lprobs)
    lprobs[0, 0].backward()
    names = {name for name, parameter in roberta.model.named_parameters() if parameter.grad is not None}
    assert {"classification_heads.new_task.dense.weight", "encoder.sentence_encoder.layers.0.fc1.weight"} <= names
    with pytest.raises(UserError, match="predict: no head mnli; there are new_task"):
        roberta.predict("mnli", torch.tensor([0, 2]))


def test_every_head_of_a_checkpoint_is_there(tmp_path: Path) -> None:
    state = checkpoint.load(GOLDEN / "classifier.pt")
    own = "classification_heads.sentence_classification_head."
    other = {
        name.replace(own, "classification_heads.mnli."): p + 1 for name, p in state["model"].items() if own in name
    }
    checkpoint.save(tmp_path / "model.pt", {**state, "model": {**state["model"], **other}})
    both = RobertaModel.from_pretrained(str(tmp_path), data_name_or_path=str(DATA))
    assert list(both.model.classification_heads) == ["sentence_classification_head", "mnli"]
    torch.testing.assert_close(
        both.model.classification_heads["mnli"].out_proj.bias, other["classification_heads.mnli.out_proj.bias"]
    )
    parameters = {name: p for name, p in {**state["model"], **other}.items() if own not in name}
    checkpoint.save(tmp_path / "model.pt", {**state, "model": parameters})
    alone = RobertaModel.from_pretrained(str(tmp_path), data_name_or_path=str(DATA))
    tokens = torch.tensor([0, 7, 2])
    torch.testing.assert_close(alone.predict("mnli", tokens), both.predict("mnli", tokens))


def test_gpt2s_subwords_are_numbers_of_its_files(tmp_path: Path) -> None:
    """RoBERTa's dictionaries hold the numbers that ``encoder.json`` gives to the subwords of
    ``vocab.bpe``."""
    library = json.loads(HuggingFace.learn_lines([["the tower of the town"] * 9], 270))["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in library["merges"]]
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "encoder.json").write_text(json.dumps(library["vocab"]))
    dictionary = Dictionary.load(DATA / "dict.txt")
    numbers = [str(number) for number in range(len(dictionary) - dictionary.nspecial)]
    (tmp_path / "dict.txt").write_text("".join(f"{number} 1\n" for number in reversed(numbers)))
    (tmp_path / "model.pt").write_bytes((GOLDEN / "roberta.pt").read_bytes())
    roberta = RobertaModel.from_pretrained(str(tmp_path))
    text = "the tower, the\ttown: ż"
    tokens = roberta.encode(text)
    assert 3 not in tokens and roberta.decode(tokens) == text
    subwords = {str(number): symbol for symbol, number in library["vocab"].items()}
    assert [subwords[roberta.task.source_dictionary[index]] for index in tokens[1:3]] == ["the", "Ġtower"]
    (filled, _, word), *_ = roberta.fill_mask("the <mask>, the", topk=1)
    assert filled.endswith(", the") and word in filled
    with pytest.raises(UserError, match=r"no/encoder\.json: file not found; give GPT-2's encoder\.json and vocab\.bpe"):
        RobertaModel.from_pretrained(str(tmp_path), gpt2_encoder_json="no/encoder.json")
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(UserError, match=r"encoder\.json: lacks numbers of subwords in .*vocab\.bpe"):
        RobertaModel.from_pretrained(str(tmp_path))


def test_the_network_and_the_settings_are_called_as_fairseqs_are() -> None:
    roberta: Any = loaded("roberta.pt", cpu=True)
    rows = torch.arange(4, 12)[None]
    logits, extra = roberta.model(rows, return_all_hiddens=True)
    states = roberta.extract_features(rows, return_all_hiddens=True)
    assert len(extra["inner_states"]) == len(states) == roberta.cfg.model.encoder_layers + 1
    torch.testing.assert_close(torch.stack(extra["inner_states"]), torch.stack(states).transpose(1, 2))
    lprobs = roberta.model.get_normalized_probs((logits, extra), log_probs=True)
    assert lprobs.shape == (1, 8, len(roberta.task.source_dictionary))
    torch.testing.assert_close(lprobs, logits.log_softmax(-1))
    assert roberta.task.mask_idx == roberta.task.source_dictionary.index("<mask>")


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="models are not downloaded, give the folder"):
        RobertaModel.from_pretrained("roberta.large")
    with pytest.raises(UserError, match="model.pt: file not found"):
        RobertaModel.from_pretrained(str(tmp_path))
    with pytest.raises(UserError, match="checkpoint_file roberta.pt:classifier.pt: several checkpoints; give one"):
        loaded("roberta.pt:classifier.pt")
    with pytest.raises(UserError, match=r"lm\.pt: TransformerLanguageModel is a decoder; give an encoder"):
        loaded("lm.pt")
    with pytest.raises(UserError, match="no such setting"):
        loaded("roberta.pt", nothing=1)
    with pytest.raises(UserError, match="bpe anything: unknown; choose from fastbpe, gpt2, "):
        loaded("roberta.pt", bpe="anything")
    with pytest.raises(UserError, match=r"bpe sentencepiece: needs its file; give it with bpe_codes"):
        loaded("roberta.pt", bpe="sentencepiece")
    with pytest.raises(UserError, match="tokenizer anything: unknown; choose from moses, nltk, space"):
        loaded("roberta.pt", tokenizer="anything")
    with pytest.raises(UserError, match="aligned_to_words: not implemented"):
        loaded("roberta.pt").extract_features_aligned_to_words("a")
