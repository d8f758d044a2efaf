"""Models that scripts load as from fairseq's hub: their text, settings and networks."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preprocessing
import pytest
import runs
import torch
from exports import BASE
from fairseq.hub_utils import GeneratorHubInterface
from subword_encodings import TEXT, encodings

from fairseq import checkpoint_utils
from fairseq.errors import UserError
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


def test_settings_of_generation_hold_from_the_loading_on(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    lm = load(max_len_b=7, min_len=7, cpu=True)
    [best, *_] = lm.generate(lm.encode("the low"), beam=2)
    assert len(best["tokens"]) == 8
    torch.testing.assert_close(
        lm.generate(lm.encode("the low"), score_reference=True)[0]["positional_scores"],
        lm.score("the low", shorten_method="truncate")["positional_scores"],
    )
    capsys.readouterr()
    assert lm.translate(["the low"], verbose=True, max_len_b=9) == [lm.sample("the low", beam=5, max_len_b=9)]
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == ["S", *"HP" * 5]
    torch.manual_seed(1)
    drawn = [lm.sample("the", sampling=True) for _ in range(6)]
    torch.manual_seed(1)
    assert [lm.sample("the", sampling=True) for _ in range(6)] == drawn and len(set(drawn)) > 1
    for settings in ({"prefix_allowed_tokens_fn": print}, {"diverse_beam_groups": 2}):
        with pytest.raises(UserError, match=f"{next(iter(settings))}: is not implemented"):
            lm.sample("the", **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unkpen: is not implemented"):
        load(unkpen=1.0)
    with pytest.raises(UserError, match="nothing: no such setting"):
        load(nothing=1)


def test_an_ensemble_scores_with_the_mean_probability_and_without_padding(load: Load, tmp_path: Path) -> None:
    runs.saved(tmp_path / "model" / "two.pt", f"{MODEL} --seed 2", data=tmp_path / "data-bin")
    both, line = load(checkpoint_file="model.pt:two.pt"), load().encode("the low the")
    each = [load(checkpoint_file=name).score("the low the")["positional_scores"] for name in ("model.pt", "two.pt")]
    assert not torch.allclose(*each)
    expected = torch.stack(each).exp().mean(0).log()
    torch.testing.assert_close(both.score("the low the")["positional_scores"], expected)
    padded = torch.cat([line, torch.tensor([both.src_dict.pad()] * 2)])[None]
    [[scored]] = both.generate(padded, score_reference=True)
    torch.testing.assert_close(scored["positional_scores"], expected)
    torch.testing.assert_close(both.generate(line, beam=1)[0]["positional_scores"][:3], expected)


def test_settings_of_searches_may_change_later_and_must_be_possible(load: Load) -> None:
    lm = load(seed=3, batch_size=4)
    assert lm.cfg.common.seed == 3 and lm.cfg.dataset.batch_size == 4
    lm.cfg.generation.max_len_b = 3
    assert len(lm.generate(lm.encode("the"))[0]["tokens"]) <= 4
    for settings, message in (({"beam": 0}, "beam 0: must be at least 1"), ({"max_len_b": -1}, "max_len_b -1: must")):
        with pytest.raises(UserError, match=message):
            lm.sample("the", **settings)


def test_a_model_with_subwords_is_pickled_and_an_explicit_file_comes_first(load: Load, tmp_path: Path) -> None:
    lm = load(bpe="fastbpe")
    again = pickle.loads(pickle.dumps(lm))
    assert again.sample("the low", max_len_b=9) == lm.sample("the low", max_len_b=9)
    other = tmp_path / "other"
    for codes, message in (("t h\n", "not two symbols and a count"), ("", "not two symbols|has no merges")):
        other.write_text(codes)
        with pytest.raises(UserError, match=f"other: .*({message})"):
            load(bpe="fastbpe", bpe_codes=str(other))


def test_a_folder_of_plugins_is_imported_first(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    monkeypatch.setattr("fairseq.interop.fairseq.hub_utils.import_user_module", folders.append)
    load(user_dir=str(tmp_path))
    assert folders == [str(tmp_path)]


def test_flat_settings_are_put_into_groups(load: Load) -> None:
    lm = load()
    again = GeneratorHubInterface(Namespace(tokenizer="space", tokens_per_sample=32), lm.task, lm.models)
    assert again.tokenize(" a  b ") == "a b" and again.cfg.task.tokens_per_sample == 32
