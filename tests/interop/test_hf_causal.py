"""Language models as Hugging Face folders: the same numbers in transformers, exact copies back,
one-line errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from exports import BANDS, LM, MODELS, XL, exported, imported, made, perturbed, saved, theirs, tokens
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mistakes import user_error
from runs import DATA, model_of

from fairseq import checkpoint
from fairseq.errors import UserError
from fairseq.inference import Search, stream
from fairseq.inference.reader import Reader, Rows
from fairseq.interop.hugging_face import decoders
from fairseq.interop.hugging_face.export import FIGURES, _card
from fairseq.models.loading import stored_parameters
from fairseq.modules import ACTIVATIONS
from fairseq.text.dictionary import Dictionary

# Models that differ in the parameters that they have.
STORED = ["baseline", "projections not tied", "plain", "gpt", "post-norm", "shortformer with norms", "rotary"]
STORED += ["parallel", "transformer-xl bands", "transformer-xl window", "transformer-xl shaw"]
STORED += ["transformer-xl with notes"]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_exported_code_gives_our_log_probabilities_and_greedy_text(name: str) -> None:
    model = made(name)
    other = theirs(model)
    assert len(other.state_dict()) == len([*other.parameters(), *other.buffers()]), (
        "transformers saves no parameter with two names"
    )
    text = tokens(3, 8)
    text[2, 3] = 1  # padding that no mask tells of
    want = model.output_layer.log_probs(model(text)[0])
    torch.testing.assert_close(other(text).logits.log_softmax(-1), want, atol=1e-5, rtol=1e-6)
    prompt = text[:1, :5]
    found = other.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=1)  # more than two segments
    assert found[0, 5:].tolist() == list(stream([Reader(model)], prompt[0].tolist(), Search(20, temperature=0)))


@torch.no_grad()
@pytest.mark.parametrize("name", ["baseline", "shortformer", "transformer-xl bands"])
def test_exported_code_runs_in_half_precision(name: str) -> None:
    other, text = theirs(made(name)), tokens(2, 20)
    want = other(text, use_cache=True).logits
    found = other.bfloat16()(text, use_cache=True).logits
    assert found.dtype == torch.float32 and float((found - want).abs().mean()) < 0.1 * float(want.std())


def test_labels_give_the_mean_loss_of_the_next_token() -> None:
    model = made("baseline")
    text = tokens(2, 8)
    lprobs = model.output_layer.log_probs(model(text[:, :-1])[0])
    want = -lprobs.gather(-1, text[:, 1:, None]).mean()
    torch.testing.assert_close(theirs(model)(text, labels=text).loss, want, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("name", STORED)
def test_what_is_exported_comes_back_exactly(name: str, tmp_path: Path) -> None:
    model = made(name)
    source = saved(model, tmp_path / "in", MODELS[name])
    folder = exported(source, tmp_path / "hf")
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "the weights are as readable as the rest"
    back = checkpoint.load(imported(folder, tmp_path / "back"))
    want, kept = stored_parameters(model), dict(back["model"])
    parameters = {key for key in want if not key.endswith(("version", "_float_tensor"))}
    assert kept.keys() == parameters and all(torch.equal(kept[key], want[key]) for key in parameters)
    assert (tmp_path / "back" / "dict.txt").read_bytes() == (DATA / "dict.txt").read_bytes()
    again = exported(tmp_path / "back" / "checkpoint.pt", tmp_path / "again")
    for file in ("config.json", "model.safetensors", "tokenizer_config.json"):
        assert (again / file).read_bytes() == (folder / file).read_bytes()


def test_the_card_has_the_measured_figures(tmp_path: Path) -> None:
    results = {
        "perplexity": 87.654,
        "bits_per_byte": 1.23456,
        "tokens": 12345,
        "command": "/a/bin/fairseq-eval-lm x/y\n|",
    }
    results["tasks"] = {"lambada": {"acc": 0.25}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    source = saved(made("baseline"), tmp_path / "in", MODELS["baseline"])
    card = (exported(source, tmp_path / "hf", "--results", tmp_path / "results.json") / "README.md").read_text()
    rows = ["Updates | 1,234", "`loss` | 9.5000", "Perplexity of a token | 87.65", "raw text | 1.2346"]
    rows += ["`lambada, acc` | 0.25", "Command | `fairseq-eval-lm x/y \\|`"]
    assert all(f"{row} |\n" in card for row in rows)
    assert "Tokens | 12,345 |" in card and "transformer_lm_tiny" in card


def test_markup_in_settings_and_results_stays_text_on_the_card(tmp_path: Path) -> None:
    markup = "</td>`|<script>x</script>\n\n# [a](http://b) **c** https://d\x1b[31m ---\n- e: !f"
    source = saved(made("baseline"), tmp_path / "in", MODELS["baseline"])
    state = checkpoint.load(source)
    state["args"]["best_checkpoint_metric"] = markup
    results: dict[str, Any] = dict.fromkeys((*FIGURES, "command", "machine", "versions", "commit"), markup)
    results["tasks"] = {markup: {markup: 0.25}, "a": markup}
    config = decoders.configuration(made("baseline"), Dictionary.load(DATA / "dict.txt"), str(source))
    config["settings"]["arch"] = state["args"]["arch"] = markup
    card = "\n".join(_card(config, state, results, 1))
    _, head, body = re.split(r"^---$", card, maxsplit=2, flags=re.MULTILINE)
    assert yaml.safe_load(head)["tags"] == ["fairseq-short", markup]
    outside = re.sub(r"`[^`\n]*`", "", body.split("```")[0] + body.split("```")[2])
    assert body.count("script") == 2 * 5
    assert not re.search(r"[<>\[\]*\x1b]|http|^- ", outside, flags=re.MULTILINE)
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3} and len(rows) == 6


def test_dictionaries_are_read_alike(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from fairseq.interop.hugging_face.exported.tokenization_fairseq import FairseqTokenizer

    for number, text in enumerate(("a 3\nb c 2\n<pad> 2 #fairseq:overwrite\n", "#specials eos=z unk=a\na 1\nz 1\n")):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        want, found = Dictionary.load(path), FairseqTokenizer(str(path))
        assert found.symbols == want.symbols and found.ids == want.indices and found.eos_token_id == want.eos()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{XL} --position-encoding learned --mem-len 0", "--position-encoding learned"),
        (
            "--arch lstm_lm --decoder-embed-dim 8 --decoder-hidden-size 8 --decoder-out-embed-dim 8",
            "LSTM.* cannot be exported; known: transformer_lm",
        ),
    ],
)
def test_models_that_cannot_be_expressed_are_refused_in_one_line(flags: str, message: str, tmp_path: Path) -> None:
    flags = f"{flags} --tokens-per-sample 8 --max-tokens 64"
    source = saved(model_of(flags, "--cpu"), tmp_path / "in", flags)
    with user_error(message) as error:
        exported(source, tmp_path / "hf")
    assert "\n" not in error.value.with_flags and not (tmp_path / "hf").exists()


def test_a_folder_with_files_and_flags_of_other_models_are_refused(tmp_path: Path) -> None:
    source = saved(made("baseline"), tmp_path / "in", MODELS["baseline"])
    with user_error("--half generator"):
        exported(source, tmp_path / "hf", "--half", "generator")
    with pytest.raises(UserError, match="missing.json"):
        exported(source, tmp_path / "hf", "--results", tmp_path / "missing.json")
    (tmp_path / "results.json").write_text('{"tokens": 10.5}')
    with user_error(f"--results {tmp_path}/results.json: tokens 10.5: must be a whole number"):
        exported(source, tmp_path / "hf", "--results", tmp_path / "results.json")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    with user_error("--out .*: is a file or not empty; give a new folder"):
        exported(source, tmp_path / "hf")
    assert [file.name for file in (tmp_path / "hf").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": None}, "settings are missing"),
        ({"settings": {"arch": "bert"}}, "hf/config.json: settings name the model 'bert'"),
        ({"no_apex": "x"}, "hf/config.json: settings: .*expected true or false"),
        ({"notes": True, "note_half_window": 10**18}, "hf/config.json: settings: note_half_window, notes: "),
        ({"decoder_layers": 3}, "layers.2.* is missing"),
        ({"decoder_layers": 10**9}, "larger model|at most|out of range"),
        ({"decoder_embed_dim": "wide"}, "hf/config.json: settings: .*decoder.embed.dim"),
        ({"decoder_ffn_embed_dim": 64}, "the configuration says"),
    ],
)
def test_changed_folders_are_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = exported(saved(made("baseline"), tmp_path / "in", MODELS["baseline"]), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    if "settings" not in change:
        change = {"settings": {**config["settings"], **change}}
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message) as error:
        imported(folder, tmp_path / "back")
    assert "\n" not in str(error.value) and not (tmp_path / "back").exists()


CACHES = ["--tokens-from-prev 3", "--tokens-from-prev 13 --attention-window 9"]
ROTATIONS = ["--rotary-fraction 1", "--rotary-fraction 0.5 --rotary-scaling 4 --rotary-trained-positions 16"]
ROTATIONS += ["--rotary-fraction 1 --rotary-scaling 4 --tokens-from-prev 13"]
CHOICES_LM = [  # flags of a small `transformer_lm`, one or none of each line; some contradict each other
    ["--adaptive-input --adaptive-input-cutoff 200,600", "--share-decoder-input-output-embed"],
    [BANDS, f"{BANDS} --adaptive-softmax-factor 2"],
    ["--decoder-learned-pos", "--no-token-positional-embeddings", "--position-infused-attention", *CACHES, *ROTATIONS],
    ["--decoder-normalize-before", "--decoder-normalize-before --decoder-parallel-residual"],
    ["--decoder-input-dim 16", "--decoder-output-dim 16"],
    ["--decoder-biases qkv", "--decoder-biases none"],
    ["--decoder-kv-heads 2", "--attention-window 3"],
    [f"--activation-fn {name}" for name in ACTIVATIONS],
    *(["--tie-adaptive-weights"], ["--tie-adaptive-proj"], ["--no-decoder-final-norm"], ["--decoder-gated-ffn"]),
    *(["--qk-norm"], ["--no-scale-embedding"], ["--layernorm-embedding"], ["--decoder-norm rms"], ["--token-shift 3"]),
]
CHOICES_XL = [
    ["--mem-len 0", "--mem-len 3", "--mem-len 13"],
    ["--cutoffs 200", "--cutoffs 200,600"],
    ["--position-encoding shaw", "--position-encoding shaw --max-relative-length 6", "--clamp-len 5"],
    ["--tie-projs tails", "--tie-projs all", "--tie-projs 0"],
    *(["--div-val 2"], ["--d-embed 16"], ["--d-head 12"], ["--no-tie-weight"]),
    *(["--same-length"], ["--untie-r"], ["--pre-lnorm"], ["--memory-start zeros"]),
]


@torch.no_grad()
@settings(deadline=None, max_examples=15, database=None, derandomize=True)
@given(data=st.data(), family=st.sampled_from([(LM, CHOICES_LM), (XL, CHOICES_XL)]))
def test_models_of_all_settings_read_rows_of_all_lengths_as_here(data: Any, family: Any) -> None:
    try:
        model = perturbed(family[0], *(data.draw(st.sampled_from(["", *flags])) for flags in family[1]))
    except UserError:
        assume(False)
    other, text = theirs(model), tokens(3, 27)
    want = model.output_layer.log_probs(model(text[:, :8])[0])
    torch.testing.assert_close(other(text[:, :8]).logits, want, atol=1e-5, rtol=1e-5)
    mask = torch.ones_like(text)
    mask[0, :5], mask[1, -9:], mask[2, 3:11] = 0, 0, 0
    cache, parts = None, []
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 17), (17, 18), (18, 27)):
        out = other(text[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    for row, real, found in zip(text, mask.bool(), torch.cat(parts, dim=1), strict=True):
        want = model.output_layer.log_probs(Rows(Reader(model), 1).read(row[real][None]))[0]
        torch.testing.assert_close(found[real], want, atol=1e-5, rtol=1e-5)
