"""Decoders exported as classes of transformers itself: no code, the same numbers, and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import exports
import pytest
import runs
import torch
from foreign_decoders import CASES, folder_of

from fairseq.hub import LanguageModel
from fairseq.interop.hugging_face import native

SMALL = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64 --lr 0.1
    --criterion cross_entropy"""
MODELS = {
    "GPT2LMHeadModel": "--arch gpt2_tiny",
    "GPT2LMHeadModel with scaled embeddings": "--arch transformer_lm_gpt3_small --decoder-layers 2 "
    "--decoder-embed-dim 32 --decoder-attention-heads 2 --activation-fn relu_squared",
    "LlamaForCausalLM": "--arch llama_tiny",
    "LlamaForCausalLM with scaled positions": "--arch llama_tiny --rotary-scaling 4 --rotary-trained-positions 32 "
    "--decoder-norm-eps 1e-4 --rotary-base 300",
    "LlamaForCausalLM with divided positions": "--arch llama_tiny --rotary-scaling 4 --decoder-kv-heads 4",
    "MistralForCausalLM": "--arch llama_tiny --attention-window 5",
    "Qwen2ForCausalLM": "--arch llama_tiny --decoder-biases qkv",
    "GPTNeoXForCausalLM": "--arch pythia_tiny",
    "GPTNeoXForCausalLM one after the other": "--arch pythia_tiny --rotary-fraction 0.5 --activation-fn gelu_accurate "
    "--share-decoder-input-output-embed",
}


def checkpoint_of(folder: Path, *flags: str) -> tuple[Any, Path]:
    """A model with random weights, larger than initial ones, and its checkpoint."""
    model, generator = runs.model_of(*flags).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model, exports.saved(model, folder, *flags)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_export_is_a_class_of_transformers_with_the_same_numbers_and_comes_back(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, path = checkpoint_of(tmp_path / "own", MODELS[name], SMALL)
    folder = exports.exported(path, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [name.split()[0]] and "auto_map" not in config
    assert [file.name for file in folder.glob("*.py")] == ["tokenization_fairseq.py"]
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == name.split()[0]
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert f" {theirs.num_parameters():,} parameters: " in (folder / "README.md").read_text()
    text = exports.tokens(2, 16)
    want = model.output_layer.log_probs(model(text)[0])
    torch.testing.assert_close(theirs.eval()(text).logits.log_softmax(-1), want, atol=1e-5, rtol=1e-5)
    again = LanguageModel.from_pretrained(exports.imported(folder, tmp_path / "in").parent)
    torch.testing.assert_close(again.model.output_layer.log_probs(again.model(text)[0]), want, atol=1e-5, rtol=1e-5)
    assert again.dictionary.symbols[:4] == ["<s>", "<pad>", "</s>", "<unk>"]


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama, tied", "pythia", "mistral with a window"])
def test_an_imported_model_is_exported_as_what_it_was_with_a_fast_tokenizer(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source, model = folder_of(tmp_path, *CASES[case])
    folder = exports.exported(exports.imported(source, tmp_path / "in"), tmp_path / "out")
    assert not [*folder.glob("*.py")]
    theirs, tokenizer = (
        getattr(transformers, auto).from_pretrained(folder) for auto in ("AutoModelForCausalLM", "AutoTokenizer")
    )
    assert type(theirs) is type(model) and tokenizer.is_fast
    original = pytest.importorskip("tokenizers").Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = tokenizer("the cat  sat on 12 lowest mats")["input_ids"]
    assert ids == original.encode("the cat  sat on 12 lowest mats").ids
    assert tokenizer.decode(ids) == "the cat  sat on 12 lowest mats"
    batch = torch.tensor([ids])
    torch.testing.assert_close(theirs.eval()(batch).logits, model(batch).logits, atol=1e-5, rtol=1e-5)
    longer = theirs.generate(batch, max_new_tokens=5, do_sample=False)
    assert torch.equal(longer, model.generate(batch, max_new_tokens=5, do_sample=False))


def test_a_classification_head_is_put_on_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("gpt2", "llama", "pythia"):
        _, path = checkpoint_of(tmp_path / name, f"--arch {name}_tiny", SMALL)
        folder = exports.exported(path, tmp_path / f"{name}-out")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        padded = exports.tokens(2, 9)
        padded[0, 5:] = 1
        logits = model.eval()(padded, attention_mask=padded != 1).logits
        torch.testing.assert_close(logits[:1], model(padded[:1, :5]).logits, atol=1e-5, rtol=1e-5)
        assert logits.shape == (2, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arch gpt2_tiny --token-shift 2", "GPT2LMHeadModel, which needs no code, .* `token_shift` 2 (unset)"),
        (
            "--arch llama_tiny --tokens-from-prev 16",
            "LlamaForCausalLM, which needs no code, .* `tokens_from_prev` 16 (unset)",
        ),
        ("--arch llama_tiny --qk-norm --rotary-fraction 0.5", "`qk_norm` True (unset); `rotary_fraction` 0.5 (1.0)"),
        ("--arch pythia_tiny --decoder-kv-heads 2", "GPTNeoXForCausalLM, .* `decoder_kv_heads` 2 (4)"),
        (
            "--arch transformer_lm_tiny --criterion adaptive_loss",
            "`adaptive_softmax_cutoff` 200,600 (unset); .*`decoder_learned_pos` False (set)",
        ),
    ],
)
def test_export_says_why_it_needs_code(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = runs.model_of(SMALL, flags)
    assert not native.is_native(model)
    path = exports.saved(model, tmp_path / "own", SMALL, flags)
    folder = exports.exported(path, tmp_path / "out")
    assert (folder / "modeling_transformer_lm.py").exists()
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    assert re.search(pattern, capsys.readouterr().out)
