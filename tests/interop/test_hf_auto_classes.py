"""Exported language models in transformers: the automatic classes, padding on any side, batches,
fine-tuning."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import MODELS, exported, keep_code_in, made, saved, theirs, tokens

from fairseq.interop import hugging_face
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.models.transformer_xl_settings import TransformerXLConfig

transformers = pytest.importorskip("transformers")
KINDS = ("baseline", "gpt", "shortformer", "transformer-xl bands", "transformer-xl zeros", "transformer-xl shaw")
NOTED = ("token shift and notes", "shortformer with notes", "transformer-xl with notes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An exported Shortformer; transformers keeps its code in a folder of the test."""
    keep_code_in(tmp_path / "modules", monkeypatch)
    return exported(saved(made("shortformer"), tmp_path / "in", MODELS["shortformer"]), tmp_path / "hf")


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 8 tokens with padding at the left, at the right, inside, and without any."""
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[0, :3], mask[1, 5:], mask[2, 3:6] = 0, 0, 0
    return tokens(4, 8).where(mask.bool(), 1), mask


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS + NOTED)
def test_rows_do_not_depend_on_padding_on_any_side(name: str) -> None:
    other = theirs(made(name))
    rows, mask = ragged()
    found = other(rows, attention_mask=mask).logits
    cached = other(rows, attention_mask=mask, use_cache=True).logits
    for row, real in enumerate(mask.bool()):
        want = other(rows[row, real][None]).logits[0]
        torch.testing.assert_close(found[row, real], want, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(cached[row, real], want, atol=1e-5, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS + NOTED)
def test_prompts_of_several_lengths_go_on_as_each_alone(name: str) -> None:
    other = theirs(made(name))
    rows, mask = ragged()
    rows, mask = rows[[0, 3]], mask[[0, 3]]
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 1}
    both = other.generate(rows, attention_mask=mask, **settings)
    assert both[0, 8:].tolist() == other.generate(rows[:1, 3:], **settings)[0, 5:].tolist()
    assert both[1].tolist() == other.generate(rows[1:], **settings)[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS + NOTED)
def test_beams_go_on_from_the_rows_that_they_were_chosen_from(name: str) -> None:
    other = theirs(made(name))
    settings = {"num_beams": 4, "num_return_sequences": 4, "do_sample": False, "max_new_tokens": 5, "pad_token_id": 1}
    for scale in (1.0, 30.0):  # flat and steep distributions
        other.decoder.layers[-1].fc2.weight.mul_(scale)
        for rows in tokens(6, 3).split(3):
            cached = other.generate(rows, **settings)
            assert cached.tolist() == other.generate(rows, use_cache=False, **settings).tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", ["baseline", "shortformer", "token shift and notes"])
def test_a_cache_of_several_lengths_is_reordered_and_goes_on_with_padding(name: str) -> None:
    other, (rows, mask), chosen = theirs(made(name)), ragged(), [3, 0, 0, 1]
    cache = other(rows, attention_mask=mask, use_cache=True).past_key_values
    cache.reorder_cache(torch.tensor(chosen))
    more, real = tokens(4, 4), torch.ones(4, 4, dtype=torch.bool)
    real[1, 0] = False
    found = other(more, attention_mask=real.long(), past_key_values=cache).logits
    for row, origin in enumerate(chosen):
        text = torch.cat([rows[origin, mask[origin].bool()], more[row, real[row]]])
        want = other(text[None], use_cache=True).logits[0, -int(real[row].sum()) :]
        torch.testing.assert_close(found[row, real[row]], want, atol=1e-5, rtol=1e-6)


def test_labels_after_padding_are_left_out_of_the_loss() -> None:
    other, (rows, mask) = theirs(made("baseline")), ragged()
    labels = rows.where(mask.bool(), -100)
    with torch.no_grad():
        found = other(rows[:1], attention_mask=mask[:1], labels=labels[:1]).loss
        torch.testing.assert_close(found, other(rows[:1, 3:], labels=rows[:1, 3:]).loss)


@torch.no_grad()
@pytest.mark.parametrize("name", ["narrow ends", "transformer-xl"])
def test_hidden_states_are_what_the_layers_and_the_output_layer_read(name: str) -> None:
    model, text, read = made(name), tokens(2, 8), []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    read.append(model(text)[0])
    found = theirs(model)(text, output_hidden_states=True).hidden_states
    assert len(found) == len(read) == 3
    for ours, other in zip(read, found, strict=True):
        torch.testing.assert_close(other, ours, atol=1e-5, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_what_is_asked_for_does_not_depend_on_padding_or_the_way_of_asking(name: str) -> None:
    other = theirs(made(name))
    rows, mask = ragged()
    found = other(rows, attention_mask=mask, output_hidden_states=True, output_attentions=True)
    cached = other(rows, attention_mask=mask, output_hidden_states=True, use_cache=True)
    embedded = other.get_input_embeddings()(rows)
    given = other(inputs_embeds=embedded, attention_mask=mask)
    torch.testing.assert_close(given.logits, found.logits, atol=1e-5, rtol=1e-6)
    for row, real in enumerate(mask.bool()):
        want = other(rows[row, real][None], output_hidden_states=True, output_attentions=True)
        for ours, theirs_, from_cache in zip(
            want.hidden_states, found.hidden_states, cached.hidden_states, strict=True
        ):
            torch.testing.assert_close(theirs_[row, real], ours[0], atol=1e-5, rtol=1e-6)
            torch.testing.assert_close(from_cache[row, real], ours[0], atol=1e-5, rtol=1e-6)
        for ours, theirs_ in zip(want.attentions, found.attentions, strict=True):
            at = real.nonzero()[:, 0]
            memory = theirs_.size(-1) - 8  # of zeros
            columns = torch.cat([torch.arange(memory), memory + at])
            torch.testing.assert_close(theirs_[row][:, at][..., columns], ours[0], atol=1e-5, rtol=1e-6)
            torch.testing.assert_close(ours.sum(-1), torch.ones(ours.shape[:-1]), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["shortformer", "transformer-xl"])
def test_the_model_is_one_graph_with_and_without_a_mask(name: str) -> None:
    other, (rows, mask) = theirs(made(name)), ragged()
    for given in ({}, {"attention_mask": mask}):
        want = other(rows, **given).logits
        graph = torch.export.export(other, (rows,), given, strict=False).module()
        torch.testing.assert_close(graph(rows, **given).logits, want, atol=1e-5, rtol=1e-6)


def test_what_the_exported_code_lacks_is_an_error(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    for name, value in (("output_attentions", True), ("inputs_embeds", torch.zeros(2, 8, 32))):
        ids = None if name == "inputs_embeds" else tokens(2, 8)
        with pytest.raises(ValueError, match=f"{name}: not with a cache"):
            model(ids, use_cache=True, **{name: value})
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"attention_mask \[2, 1, 8, 8\]: give the padding alone"):
        model(tokens(2, 8), attention_mask=torch.ones(2, 1, 8, 8))
    with pytest.raises(ValueError, match="inputs_embeds: notes of pairs and words are found by tokens; give input_ids"):
        theirs(made("shortformer with notes"))(inputs_embeds=torch.zeros(2, 8, 32))
    with pytest.raises(NotImplementedError, match="vocabulary of their training"):
        model.resize_token_embeddings(9)


@torch.no_grad()
def test_the_configuration_asks_for_hidden_states_and_tuples_as_arguments_do() -> None:
    other = theirs(made("shortformer"))
    want = other(tokens(2, 8), output_hidden_states=True).hidden_states
    other.config.output_hidden_states = True
    found = other(tokens(2, 8)).hidden_states
    assert len(found) == len(want) > 2 and all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert isinstance(other(tokens(2, 8), return_dict=False), tuple)
    other.config.return_dict = False
    assert isinstance(other(tokens(2, 8)), tuple)


@torch.no_grad()
def test_the_automatic_classes_load_the_folder(folder: Path) -> None:
    text = tokens(2, 8)
    causal = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    base = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
    hidden = base(text).last_hidden_state
    found = causal.decoder.log_probs(hidden)
    torch.testing.assert_close(found, causal(text).logits)
    classifier, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, trust_remote_code=True, output_loading_info=True
    )
    assert loading["missing_keys"] == {"score.weight"} and not loading["unexpected_keys"]
    assert not classifier.accepts_loss_kwargs  # or a Trainer would not divide accumulated gradients
    rows, mask = ragged()
    scores = classifier(rows, attention_mask=mask).logits
    for row, last in enumerate((7, 4, 7, 7)):
        want = classifier.score(base(rows, attention_mask=mask).last_hidden_state[row, last])
        torch.testing.assert_close(scores[row], want)


def test_a_trainer_fine_tunes_a_classifier_and_a_language_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    text = tokens(8, 6)
    for auto, labels in (("SequenceClassification", text[:, 0] % 2), ("CausalLM", text)):
        torch.manual_seed(1)
        kind = getattr(transformers, f"AutoModelFor{auto}")
        model = kind.from_pretrained(folder, trust_remote_code=True)
        examples = [{"input_ids": row, "labels": label} for row, label in zip(text, labels, strict=True)]
        flags: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
        settings = transformers.TrainingArguments(
            str(tmp_path / "run"), max_steps=12, learning_rate=1e-2, logging_steps=1, **flags
        )
        trainer = transformers.Trainer(model, settings, train_dataset=examples)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < 0.8 * losses[0], auto
        trainer.save_model(str(tmp_path / auto))
        again = kind.from_pretrained(tmp_path / auto, trust_remote_code=True)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(again(text).logits, model(text).logits)


@pytest.mark.parametrize("name", ["shortformer", "transformer-xl"])
def test_an_export_has_files_that_a_person_can_read_as_they_are(name: str, tmp_path: Path) -> None:
    folder = exported(saved(made(name), tmp_path / "in", MODELS[name]), tmp_path / "hf")
    family = "modeling_transformer_xl.py" if name.startswith("transformer") else "modeling_transformer_lm.py"
    files = {file.name: file.read_text() for file in folder.glob("*.py")}
    assert files.keys() == {"modeling_fairseq.py", family, "tokenization_fairseq.py"}
    for file, text in files.items():
        assert text == (Path(hugging_face.__file__).parent / "exported" / file).read_text()
        assert "MIT License" in text.splitlines()[0]
        # Packages that transformers wants before it runs the file: no tokenizer's own library.
        needed = transformers.dynamic_module_utils.get_imports(folder / file)
        assert {*needed} <= {*sys.stdlib_module_names, "torch", "transformers", "tokenizers"}
        assert not re.search(r"^\s*from \.(?!modeling_fairseq )", text, re.M)


UNREAD = {  # they change no number in evaluation, stand in `config.json` under another name, or are refused
    "lm": """adaptive_softmax_dropout character_embeddings decoder_layerdrop decoder_layers decoder_layers_to_keep
        embed_init_std max_target_positions ngram_notes_dropout no_apex tokens_from_prev tokens_per_sample
        zero_init_residual""",
    "xl": "init_std ngram_notes_dropout no_apex",
}


@pytest.mark.parametrize(("family", "config"), [("lm", TransformerLMConfig), ("xl", TransformerXLConfig)])
def test_exported_code_reads_every_setting_of_a_model(family: str, config: type) -> None:
    code = (Path(hugging_face.__file__).parent / "exported" / f"modeling_transformer_{family}.py").read_text()
    names = {field.name for field in dataclasses.fields(config)}
    assert names - {*re.findall(r"\bcfg\.(\w+)", code)} == {*UNREAD[family].split()}
