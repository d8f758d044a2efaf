"""Llama, Mistral, Qwen 2, GPT-NeoX and OPT from Hugging Face folders: transformers' numbers,
tokens, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from foreign_decoders import CASES, LLAMA, ROPE3, WORDS, folder_of, random_model
from safetensors.torch import load_file, save_file

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq_cli import import_model
from fairseq_cli.import_model import get_import_parser


def imported(source: Path, out: Path) -> Path:
    argv = [str(source), "--from", "hf", "--out", str(out)]
    import_model.main(options.parse_args_and_arch(get_import_parser(), argv))
    return out


def text_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(4, WORDS, (rows, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_decoder_gives_the_numbers_of_transformers(case: str, tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path, *CASES[case])
    ours = LanguageModel.from_pretrained(imported(folder, tmp_path / "in")).model
    text = text_of(3, 40)
    lprobs = ours.output_layer.log_probs(ours(text)[0])  # type: ignore[union-attr]
    torch.testing.assert_close(lprobs, model(text).logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_sharded_files_are_read_as_one(tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path, *CASES["llama"], max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists() and len([*folder.glob("model-*.safetensors")]) > 2
    ours = LanguageModel.from_pretrained(imported(folder, tmp_path / "in")).model
    lprobs = ours.output_layer.log_probs(ours(text_of(1, 9))[0])  # type: ignore[union-attr]
    torch.testing.assert_close(lprobs, model(text_of(1, 9)).logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": "../model.safetensors"}, "names '../model.safetensors', which is not in its folder"),
        ({"lm_head.weight": "other.safetensors"}, "names 'other.safetensors', which is not in its folder"),
        ({"more.weight": "model-00001"}, "names 'more.weight', which its file lacks"),
        ({"more.weight": 3}, "expected a weight_map"),
    ],
)
def test_damaged_indices_of_shards_are_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, *CASES["llama"], max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = sorted(path.name for path in folder.glob("model-*.safetensors"))[0]
    index["weight_map"] |= {name: first if file == "model-00001" else file for name, file in change.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        imported(folder, tmp_path / "in")


@torch.no_grad()
def test_decoder_reads_raw_text_with_its_tokenizer(tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path, *CASES["pythia"])
    ours = LanguageModel.from_pretrained(imported(folder, tmp_path / "in"))
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens, lprobs = ours.score("the cat  sat on 12 lowest mats")
    ids = [3, *library.encode("the cat  sat on 12 lowest mats").ids, 3]
    assert [ours.dictionary.index(token) for token in tokens] == ids[1:]
    want = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(lprobs, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_texts_of_a_model_with_a_symbol_of_their_beginning_begin_with_it(tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path, *CASES["mistral"])  # of which </s> is 2
    values = json.loads((folder / "tokenizer.json").read_text())
    template = {"single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
    pair = [*template["single"], {"Sequence": {"id": "B", "type_id": 0}}]
    template |= {"pair": pair, "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    processors = [byte_level, {"type": "TemplateProcessing", **template}]
    values["post_processor"] = {"type": "Sequence", "processors": processors}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    ours = LanguageModel.from_pretrained(imported(folder, tmp_path / "in"))
    tokens, lprobs = ours.score("the cat")
    ids = [1, *(ours.dictionary.index(token) for token in tokens)]
    want = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(lprobs, want, atol=1e-5, rtol=1e-5)


def test_an_imported_decoder_goes_on_training_with_a_memory(tmp_path: Path) -> None:
    settings = {**LLAMA, "vocab_size": 1200, "bos_token_id": 2, "eos_token_id": 2, "tie_word_embeddings": True}
    model, folder = random_model("Llama", settings), tmp_path / "theirs"
    model.save_pretrained(folder)
    words = (runs.DATA / "dict.txt").read_text().splitlines()
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *(line.split()[0] for line in words)]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(vocabulary)}))
    source = imported(folder, tmp_path / "in")
    flags = "--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64 --lr 0.001"
    shape = "--arch llama_tiny --decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-norm-eps 1e-6 --max-update 9"
    more = f"{flags} {shape} --log-format json --log-interval 1 --optimizer adam"
    loading = ["--finetune-from-model", source / "checkpoint.pt"]
    losses = runs.losses(runs.train(tmp_path / "out", more, loading, "--tokens-from-prev 16"))
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("llama", {"model_type": "gemma"}, "model_type is 'gemma'; known: bert, .*llama, mistral"),
        ("llama", {"attention_bias": True}, "attention_bias is True; only False is supported"),
        ("llama", {"head_dim": 16}, "head_dim is 16; only hidden_size / num_attention_heads"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; known: default, linear, llama3"),
        ("llama", {"rope_parameters": {**ROPE3, "low_freq_factor": 2}}, "only 1 and 4 are"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "rotary_scaling"),
        ("llama", {"rope_parameters": 3}, "rope_parameters is 3; expected an object"),
        ("llama", {"num_key_value_heads": 3}, "must be a multiple of"),
        ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish'; known: gelu"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act is"),
        ("llama", {"num_hidden_layers": 3}, "model.layers.2.* is missing"),
        ("llama", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight is tied in the configuration, but its values differ"),
        ("qwen 2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("pythia", {"attention_bias": False}, "attention_bias is False; only True"),
        ("opt", {"enable_bias": False}, "enable_bias is False; only True"),
        ("opt", {"hidden_size": 10**6}, "the configuration says|takes"),
    ],
)
def test_other_folders_are_refused_in_one_line(case: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, *CASES[case])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message) as error:
        imported(folder, tmp_path / "in")
    assert "\n" not in str(error.value) and not (tmp_path / "in").exists()


def test_files_of_a_model_without_an_output_layer_lack_it_by_name(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, *CASES["llama"])
    state = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in state.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="the tensor lm_head.weight is missing"):
        imported(folder, tmp_path / "in")
