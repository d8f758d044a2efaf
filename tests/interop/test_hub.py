"""Models that scripts load as from fairseq's hub: their text, settings and networks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preprocessing
import pytest
import runs
import torch
from exports import BASE
from subword_encodings import TEXT, encodings

from fairseq import checkpoint_utils
from fairseq.errors import UserError
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models.transformer_lm import TransformerLanguageModel

MODEL = f"--arch transformer_lm {BASE.replace('--tokens-per-sample 8', '--tokens-per-sample 32')} --max-tokens 512"
MODEL += " --criterion cross_entropy --cpu"
Load = Callable[..., GeneratorHubInterface]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The function that loads a random model of words; its folder has codes of fastBPE."""
    text = preprocessing.text_file(tmp_path, TEXT, "train.txt")
    codes = tmp_path / "codes.txt"
    codes.write_bytes(encodings()["subword_nmt"].content)
    preprocessing.run(tmp_path / "data-bin", trainpref=text, validpref=text, bpe="subword_nmt", bpe_codes=str(codes))
    (tmp_path / "model").mkdir()
    runs.saved(tmp_path / "model" / "model.pt", MODEL, data=tmp_path / "data-bin")
    version, *pairs = codes.read_text().splitlines()
    assert version == "#version: 0.2"
    (tmp_path / "model" / "bpecodes").write_text("".join(f"{pair} {9 - n}\n" for n, pair in enumerate(pairs)))

    def loaded(**settings: Any) -> GeneratorHubInterface:
        lm: GeneratorHubInterface = TransformerLanguageModel.from_pretrained(
            str(tmp_path / "model"), data_name_or_path=str(tmp_path / "data-bin"), **settings
        )
        return lm

    return loaded


def test_text_is_split_by_the_encoders_that_are_named(load: Load) -> None:
    lm, subwords = load(tokenizer="moses", bpe="fastbpe"), encodings()["subword_nmt"]
    line = "the lower river"
    assert lm.apply_bpe(line) == subwords.encode([line])[0] != line and lm.remove_bpe(lm.apply_bpe(line)) == line
    assert lm.string(lm.encode(line)) == lm.apply_bpe(line) and lm.decode(lm.encode(line)) == line
    assert lm.tokenize("isn't") == "isn &apos;t" and lm.detokenize("isn &apos;t") == "isn't"
    assert load(tokenizer="moses", moses_no_escape=True).tokenize("isn't") == "isn 't"
    assert load().encode(line).tolist() == load().src_dict.encode(line).tolist()
    with pytest.raises(UserError, match="bpe bert: is not implemented"):
        load(bpe="bert")
    with pytest.raises(UserError, match="bpe subword_nmt: needs its file|bpecodes"):
        load(bpe="sentencepiece")


def test_models_and_settings_are_those_of_an_ensemble(load: Load, tmp_path: Path) -> None:
    lm = load(tokenizer="moses", bpe="fastbpe")
    [model], cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(tmp_path / "model" / "model.pt")], {"data": str(tmp_path / "data-bin")}
    )
    rows = lm.encode("the low")[None]
    hub: Any = lm.models[0]
    torch.testing.assert_close(hub(rows)[0], model(rows)[0])
    assert hub.decoder.extract_features(rows)[0].shape[-1] == lm.cfg.model.decoder_output_dim
    assert lm.cfg.task.data == cfg.task.data and lm.cfg.tokenizer._name == "moses" and lm.args.tokens_per_sample == 32
    again = GeneratorHubInterface(cfg, task, [model])
    assert again.sample("the low", max_len_b=9) == load().sample("the low", max_len_b=9)
    assert lm.max_positions == 32 and lm.tgt_dict is lm.task.target_dictionary and lm.device.type == "cpu"


def test_a_model_with_subwords_is_pickled_and_an_explicit_file_comes_first(load: Load, tmp_path: Path) -> None:
    lm = load(bpe="fastbpe")
    again = pickle.loads(pickle.dumps(lm))
    assert again.sample("the low", max_len_b=9) == lm.sample("the low", max_len_b=9)
    other = tmp_path / "other"
    for codes, message in (("t h\n", "not two symbols and a count"), ("", "not two symbols|has no merges")):
        other.write_text(codes)
        with pytest.raises(UserError, match=f"other: .*({message})"):
            load(bpe="fastbpe", bpe_codes=str(other))
