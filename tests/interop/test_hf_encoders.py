"""Encoders to and from Hugging Face's folders: the same numbers, strict names, one-line errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from evaluations import evaluate
from mistakes import user_error
from runs import arguments, model_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel, MaskedLanguageModel, load_model, load_scorer
from fairseq.interop.hugging_face import encoders
from fairseq.modules.transformer_layer import FUNCTIONS
from fairseq_cli import export_model, import_model
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.import_model import get_import_parser

GOLDEN = Path(__file__).parents[1] / "golden" / "hf_encoders"
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "##s", ",", "again", "a", "##g"]
NAMES = ("bert", "roberta", "electra_generator", "electra_discriminator")


def imported(source: Path, out: Path) -> Path:
    argv = [str(source), "--from", "hf", "--out", str(out)]
    import_model.main(options.parse_args_and_arch(get_import_parser(), argv))
    return out


def exported(source: Path, out: Path, *flags: str) -> Path:
    argv = [str(source), "--to", "hf", "--out", str(out), *flags]
    export_model.main(options.parse_args_and_arch(get_export_parser(), argv))
    return out


def expected(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / name / "expected.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def copied(name: str, tmp_path: Path, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """A golden folder with other settings and tensors; None removes one."""
    folder = tmp_path / "source"
    shutil.copytree(GOLDEN / name, folder)
    content = json.loads((folder / "config.json").read_text())
    content |= config or {}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))
    if tensors:
        state = {**load_file(folder / "model.safetensors"), **tensors}
        save_file({k: v for k, v in state.items() if v is not None}, folder / "model.safetensors")
    return folder


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Of the words [N, V]; of a discriminator's [N], of being replaced."""
    return logits.log_softmax(-1) if logits.dim() == 2 else torch.nn.functional.logsigmoid(logits)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_imported_encoders_give_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    want = expected(name)
    model, task = load_model(imported(GOLDEN / name, tmp_path / "out"))
    real = want["attention_mask"].bool()
    logits, _ = model(want["input_ids"], token_types=want["token_type_ids"])
    features, _ = model(want["input_ids"], token_types=want["token_type_ids"], features_only=True)
    assert logits.shape == want["logits"].shape
    torch.testing.assert_close(features[real], want["last_hidden"][real], atol=1e-5, rtol=0)
    torch.testing.assert_close(log_probs(logits[real]), log_probs(want["logits"][real]), atol=1e-5, rtol=0)
    assert len(task.source_dictionary) == 131


def test_vocabulary_keeps_ids_and_special_symbols(tmp_path: Path) -> None:
    _, task = load_model(imported(GOLDEN / "bert", tmp_path / "bert"))
    words = task.source_dictionary
    assert words.symbols == (GOLDEN / "bert" / "vocab.txt").read_text().split()
    assert (words.pad(), words.unk(), words.bos(), words.eos(), words.mask()) == (0, 1, 2, 3, 4)
    _, task = load_model(imported(GOLDEN / "roberta", tmp_path / "roberta"))
    words = task.source_dictionary
    assert (words.bos(), words.pad(), words.eos(), words.mask()) == (0, 1, 2, -1) and words[5] == "token5"


def test_a_tokenizer_file_gives_the_vocabulary_and_its_added_words(tmp_path: Path) -> None:
    folder = copied("roberta", tmp_path)
    vocabulary = {f"w{index}": index for index in range(129)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _, task = load_model(imported(folder, tmp_path / "out"))
    assert task.source_dictionary.mask() == 129 and task.source_dictionary[130] == "madeupword0130"
    assert task.source_dictionary.pad() == 1 and task.source_dictionary[1] == "w1"


def test_imported_bert_reads_text_with_the_tokenizer_of_its_folder(tmp_path: Path) -> None:
    words = WORD_PIECES + [f"w{index}" for index in range(len(WORD_PIECES), 131)]
    tokenizer = tokenizers.BertWordPieceTokenizer({word: index for index, word in enumerate(words)})
    folder = copied("bert", tmp_path)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").unlink()
    out = imported(folder, tmp_path / "out")
    scorer = load_scorer(out)
    assert isinstance(scorer, MaskedLanguageModel)
    for text in ("The rivers, again", "a  RIVER\tthé", "kilt 語"):
        want = tokenizer.encode(text, add_special_tokens=False).ids
        assert [scorer.reader.dictionary.index(word) for word in scorer.score(text)[0]] == want
    # A file is lines, each of which is a row.
    lines = ["the rivers, again", "a river", "again"] * 20
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    report = evaluate(f"--cpu --text {tmp_path / 'text'}", data=out)
    total = sum(float(lprobs.double().sum()) for _, lprobs in scorer.score(lines))
    assert report["loss_base2"] * report["tokens"] == pytest.approx(-total / math.log(2), rel=1e-5)
    shutil.copy(out / "tokenization.json", tmp_path)
    again = imported(exported(out / "checkpoint.pt", tmp_path / "again"), tmp_path / "back")
    assert (again / "tokenization.json").read_bytes() == (tmp_path / "tokenization.json").read_bytes()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_exported_encoders_are_the_imported_ones(name: str, tmp_path: Path) -> None:
    out = exported(imported(GOLDEN / name, tmp_path / "in") / "checkpoint.pt", tmp_path / "out")
    want = load_file(GOLDEN / name / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert want.keys() == found.keys() and all(torch.equal(want[key], found[key]) for key in want)
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN / name, out))
    ignored = {"classifier_dropout", "transformers_version", "use_cache", "initializer_range"}
    keys = [key for key in first if not key.startswith(("summary", "add_", "is_")) and key not in ignored]
    differing = {key: (first[key], second.get(key)) for key in keys if first[key] != second.get(key)}
    assert set(differing) <= {"bos_token_id", "eos_token_id"}


@torch.no_grad()
@pytest.mark.parametrize(
    ("arch", "flags", "kind"),
    [
        ("bert_tiny", "", "BertForMaskedLM"),
        ("bert_tiny", "--untie-weights-roberta --activation-fn gelu_accurate", "BertForMaskedLM"),
        ("bert_tiny", "--token-types 1 --activation-fn relu", "BertForMaskedLM"),
        ("bert_tiny", "--token-types 0", "BertForMaskedLM"),
        ("roberta", "--encoder-layers 2", "RobertaForMaskedLM"),
        ("bert_tiny", "--encoder-input-dim 16", "ElectraForMaskedLM"),
        ("electra_tiny", "--encoder-input-dim 16", "ElectraForPreTraining"),
        ("electra_tiny", "--half generator", "ElectraForMaskedLM"),
    ],
)
def test_transformers_loads_exported_encoders_with_the_same_hidden_states(
    arch: str, flags: str, kind: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    flags, _, half = flags.partition("--half ")
    sizes = "--encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 2 --max-positions 20"
    argv = f"--task masked_lm --criterion masked_lm --arch {arch} {sizes} {flags}"
    model = model_of(argv).eval()
    for number, parameter in enumerate(model.parameters()):
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    args = {**vars(arguments(argv)), "optimizer_overrides": "{}"}
    state = {"args": args, "model": model.state_dict(), "optimizer_history": [], "extra_state": {}}
    checkpoint.save(tmp_path / "checkpoint.pt", state)
    out = exported(
        tmp_path / "checkpoint.pt", tmp_path / "out", "--data", args["data"], *(["--half", half] * bool(half))
    )
    theirs, report = getattr(transformers, kind).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(4, 1000, (3, 12), generator=torch.Generator().manual_seed(1))
    tokens[1, 7:] = 1
    real = tokens.ne(1)
    found = theirs.eval()(tokens, attention_mask=real.long(), output_hidden_states=True)
    ours = model
    if half:
        hidden = model.generator.sentence_encoder(tokens)
        logits = model.generator.lm_head(hidden)
    else:
        logits, hidden = ours(tokens)[0], ours(tokens, features_only=True)[0]
    torch.testing.assert_close(found.hidden_states[-1][real], hidden[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(log_probs(found.logits[real]), log_probs(logits[real]), atol=1e-5, rtol=0)


def test_names_of_2018_and_unused_heads_are_understood(tmp_path: Path) -> None:
    state = load_file(GOLDEN / "bert" / "model.safetensors")
    former = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    former["bert.pooler.dense.weight"] = torch.zeros(32, 32)
    former["cls.seq_relationship.weight"] = torch.zeros(2, 32)
    former["bert.embeddings.position_ids"] = torch.arange(40)[None]
    former["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
    folder = copied("bert", tmp_path)
    save_file(former, folder / "model.safetensors")
    one = checkpoint.load(imported(folder, tmp_path / "a") / "checkpoint.pt")["model"]
    other = checkpoint.load(imported(GOLDEN / "bert", tmp_path / "b") / "checkpoint.pt")["model"]
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("bert", {"model_type": "t5"}, "model_type is 't5'; known: bert, roberta"),
        ("bert", {"hidden_act": "silu"}, "hidden_act is 'silu'; known: gelu"),
        ("bert", {"hidden_act": ["gelu"]}, "hidden_act is "),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder is True; only False"),
        ("bert", {"hidden_size": 64}, r"is \[131, 32\], but the configuration says \[131, 64\]"),
        ("bert", {"num_hidden_layers": 3}, "the tensor bert.encoder.layer.2.attention.self.query.weight is missing"),
        ("bert", {"num_hidden_layers": 1}, "16 tensors are not part of this configuration"),
        ("bert", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected a whole number"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads 5 does not divide hidden_size 32"),
        ("bert", {"num_attention_heads": 0}, "num_attention_heads is 0; expected"),
        ("bert", {"pad_token_id": 131}, "pad_token_id is 131, but there are 131 words"),
        ("bert", {"layer_norm_eps": "small"}, "layer_norm_eps is 'small'; expected a number"),
        ("bert", {"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0; expected a number"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings is 2; expected a whole number from 3"),
        ("roberta", {"eos_token_id": 500}, "eos_token_id is 500, but there are 131 words"),
        ("electra_discriminator", {"embedding_size": 32}, r"is \[131, 16\], but the configuration says \[131, 32\]"),
    ],
)
def test_impossible_folders_are_refused_and_nothing_is_written(
    name: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        imported(copied(name, tmp_path, config), tmp_path / "out")
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    folder = copied("bert", tmp_path, **{"cls.predictions.decoder.weight": torch.zeros(131, 32)})
    with pytest.raises(UserError, match="cls.predictions.decoder.weight is tied in the configuration"):
        imported(folder, tmp_path / "out")


def test_untied_weights_are_kept(tmp_path: Path) -> None:
    weight = torch.randn(131, 32)
    folder = copied("bert", tmp_path, {"tie_word_embeddings": False}, **{"cls.predictions.decoder.weight": weight})
    model, _ = load_model(imported(folder, tmp_path / "out"))
    assert torch.equal(model.encoder.lm_head.weight, weight)


def test_an_untied_output_layer_has_the_bias_that_transformers_reads(tmp_path: Path) -> None:
    biases = {"cls.predictions.decoder.bias": torch.randn(131), "cls.predictions.bias": torch.zeros(131)}
    weight = {"cls.predictions.decoder.weight": torch.randn(131, 32)}
    folder = copied("bert", tmp_path, {"tie_word_embeddings": False}, **weight, **biases)
    model, _ = load_model(imported(folder, tmp_path / "out"))
    assert torch.equal(model.encoder.lm_head.bias, biases["cls.predictions.decoder.bias"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bare", [False, True])
def test_encoders_without_an_output_layer_are_refused(name: str, bare: bool, tmp_path: Path) -> None:
    heads = ("cls.", "lm_head.", "generator_", "discriminator_")
    state = load_file(GOLDEN / name / "model.safetensors")
    kept = {key.partition(".")[2] if bare else key: value for key, value in state.items() if not key.startswith(heads)}
    folder = copied(name, tmp_path)
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"no output layer for tokens; save it as \w+ForMaskedLM"):
        imported(folder, tmp_path / "out")


def test_encoders_are_no_language_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="BertModel is an encoder, which does not predict the next token"):
        LanguageModel.from_pretrained(imported(GOLDEN / "bert", tmp_path / "out"))


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    folder = imported(GOLDEN / "electra_discriminator", tmp_path / "in")
    with user_error("--half generator: .* has no generator"):
        exported(folder / "checkpoint.pt", tmp_path / "out", "--half", "generator")
    bert = imported(GOLDEN / "bert", tmp_path / "bert")
    with user_error("--half generator: .* is not an ELECTRA model"):
        exported(bert / "checkpoint.pt", tmp_path / "out", "--half", "generator")
    with pytest.raises(UserError, match="none.pt: file not found"):
        exported(bert / "none.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with user_error("--out .*: is a file or not empty"):
        exported(folder / "checkpoint.pt", folder)


def test_activations_are_those_of_transformers() -> None:
    activations = pytest.importorskip("transformers.activations").ACT2FN
    x = torch.linspace(-6, 6, 1001)
    pairs = [
        *encoders.ACTIVATIONS.items(),
        *((there, ours) for ours, there in encoders.WRITTEN_ACTIVATIONS.items()),
    ]
    for theirs, ours in pairs:
        torch.testing.assert_close(
            FUNCTIONS[ours](x), activations[theirs](x), atol=1e-6, rtol=0, msg=f"{theirs}, {ours}"
        )
