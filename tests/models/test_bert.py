"""BERT and RoBERTa: golden values, and the properties that a bidirectional encoder has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
import torch.nn.functional as F
from runs import DATA, model_of
from torch import Tensor

from fairseq import checkpoint
from fairseq.config.settings import training_settings
from fairseq.errors import UserError
from fairseq.hub import load_model
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState

GOLDEN = Path(__file__).parents[1] / "golden" / "roberta"
KINDS = ("weight", "bias")
ROBERTA = """--cpu --arch roberta_base --task masked_lm --criterion masked_lm --encoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --encoder-attention-heads 4 --max-positions 64 --tokens-per-sample 64 --batch-size 8
    --dropout 0 --attention-dropout 0 --sample-break-mode none --seed 3 --optimizer adam --adam-betas 0.9,0.98
    --adam-eps 1e-6 --weight-decay 0.01 --lr-scheduler polynomial_decay --lr 0.002 --warmup-updates 10
    --total-num-update 100"""
TINY = """--cpu --task masked_lm --criterion masked_lm --encoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --encoder-attention-heads 2 --tokens-per-sample 16 --max-tokens 256"""


def tokens(rows: int = 3, length: int = 12, pad: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randint(4, 1000, (rows, length), generator=generator)
    drawn[1, 9:] = pad
    drawn[2, 2:] = pad
    return drawn


def naive(model: torch.nn.Module, src_tokens: Tensor, token_types: Tensor | None = None) -> Tensor:
    """Logits of each row by itself, without its padding, from the parameters by name."""
    p = {name: value.detach() for name, value in model.state_dict().items()}
    eps, heads = model.cfg.layer_norm_eps, model.cfg.encoder_attention_heads
    prefix = "encoder.sentence_encoder."

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))

    rows = []
    for row, types in zip(src_tokens, src_tokens * 0 if token_types is None else token_types, strict=True):
        length = int(row.ne(1).sum())
        x = p[f"{prefix}embed_tokens.weight"][row[:length]] + p[f"{prefix}embed_positions.weight"][2 : 2 + length]
        if f"{prefix}segment_embeddings.weight" in p:
            x = x + p[f"{prefix}segment_embeddings.weight"][types[:length]]
        x = norm(x, f"{prefix}emb_layer_norm")
        for layer in range(model.cfg.encoder_layers):
            at = f"{prefix}layers.{layer}."
            q, k, v = (
                linear(x, f"{at}self_attn.{name}_proj").view(length, heads, -1).transpose(0, 1) for name in "qkv"
            )
            weights = (q @ k.transpose(1, 2) / q.size(-1) ** 0.5).softmax(-1)
            attended = linear((weights @ v).transpose(0, 1).flatten(1), f"{at}self_attn.out_proj")
            x = norm(x + attended, f"{at}self_attn_layer_norm")
            x = norm(x + linear(gelu(linear(x, f"{at}fc1")), f"{at}fc2"), f"{at}final_layer_norm")
        head = norm(gelu(linear(x, "encoder.lm_head.dense")), "encoder.lm_head.layer_norm")
        logits = head @ p[f"{prefix}embed_tokens.weight"].T + p["encoder.lm_head.bias"]
        rows.append(F.pad(logits, (0, 0, 0, src_tokens.size(1) - length)))
    return torch.stack(rows)


def scrambled(arch: str, *flags: str) -> torch.nn.Module:
    """A small model, all of whose parameters are random."""
    model = model_of(f"--arch {arch}", TINY, *flags).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    with np.load(GOLDEN / "expected.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file}


@torch.no_grad()
def test_fairseq_roberta_checkpoint_gives_fairseqs_logits_and_features(golden: dict[str, Tensor]) -> None:
    model, task = load_model(GOLDEN / "checkpoint.pt", DATA)
    assert task.source_dictionary[1200] == "<mask>" and len(task.source_dictionary) == 1201
    torch.testing.assert_close(model(golden["tokens"])[0], golden["logits"], atol=1e-4, rtol=0)
    features, _ = model(golden["tokens"], features_only=True)
    torch.testing.assert_close(features, golden["features"], atol=1e-5, rtol=0)


def as_of_0_12_2(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """*parameters* in the order and under the names of fairseq 0.12.2, with the copies that each
    layer begins with."""
    stem = "encoder.sentence_encoder."
    renamed: dict[str, Tensor] = {f"{stem}version": torch.tensor([3.0])}
    first = {name: p for name, p in parameters.items() if name.startswith((f"{stem}embed", f"{stem}emb_"))}
    for name, p in {**first, **parameters}.items():
        layer, _, part = name.partition(".self_attn.k_proj.weight")
        if not part and layer != name:
            attention = [[parameters[f"{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv"] for kind in KINDS]
            renamed |= {f"{layer}.in_proj_{kind}": torch.cat(x) for kind, x in zip(KINDS, attention, strict=True)}
            for copy, source in (("out_proj", "self_attn.out_proj"), ("fc1", "fc1"), ("fc2", "fc2")):
                renamed |= {f"{layer}.{copy}_{kind}": parameters[f"{layer}.{source}.{kind}"] for kind in KINDS}
        renamed[name.replace("emb_layer_norm", "layernorm_embedding")] = p
    return renamed


def optimizer_of_0_12_2(
    state: dict[str, Any], before: dict[str, Tensor], after: dict[str, Tensor], flat: bool
) -> dict[str, Any]:
    """Adam's *state* of the parameters *before*, numbered, as of those *after*, whose copies never
    had a gradient."""
    tied = "encoder.lm_head.weight"
    numbers = {name: number for number, name in enumerate(name for name in before if name != tied)}
    order = [name.replace("layernorm_embedding", "emb_layer_norm") for name in after if "version" not in name]
    entries = [state["state"].get(numbers.get(name)) for name in order if name != tied]
    group = {**state["param_groups"][0], "params": [0] if flat else list(range(len(entries)))}
    if not flat:
        return {"state": {n: entry for n, entry in enumerate(entries) if entry}, "param_groups": [group]}
    kept = [
        p for name, p in zip(order, (p for n, p in after.items() if "version" not in n), strict=True) if name != tied
    ]
    moments = {
        key: torch.cat([(entry[key] if entry else 0 * p).flatten() for entry, p in zip(entries, kept, strict=True)])
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {
        "state": {0: {"step": next(entry["step"] for entry in entries if entry), **moments}},
        "param_groups": [group],
    }


@pytest.mark.parametrize("flat", [False, True], ids=["fp32", "fp16"])
def test_a_run_of_0_12_2_goes_on_with_its_optimizer(flat: bool, tmp_path: Path) -> None:
    theirs = checkpoint.load(GOLDEN / "checkpoint.pt")
    parameters = as_of_0_12_2(theirs["model"])
    optimizer = optimizer_of_0_12_2(theirs["last_optimizer_state"], theirs["model"], parameters, flat)
    checkpoint.save(tmp_path / "new.pt", {**theirs, "model": parameters, "last_optimizer_state": optimizer})
    restored = []
    for path in (GOLDEN / "checkpoint.pt", tmp_path / "new.pt"):
        args = runs.arguments(ROBERTA)
        task = setup_task(args)
        trainer = TrainingState(training_settings(args), task, task.build_model(args), task.build_criterion(args))
        trainer.load_state_dict(checkpoint.load(path), str(path))
        restored.append(trainer.state_dict())
    assert len(restored[0]["last_optimizer_state"]["state"]) == 41
    for key in ("model", "last_optimizer_state"):
        assert runs.difference(restored[1][key], restored[0][key]) is None


@torch.no_grad()
@pytest.mark.parametrize("version", ["decoder", "layernorm_embedding", "in_proj", "0.12.2"])
def test_names_of_other_versions_of_roberta_load(golden: dict[str, Tensor], version: str, tmp_path: Path) -> None:
    state = checkpoint.load(GOLDEN / "checkpoint.pt")
    parameters = state["model"]
    if version == "decoder":  # before 0.9
        parameters = {name.replace("encoder.", "decoder.", 1): value for name, value in parameters.items()}
        parameters["decoder.sentence_encoder.version"] = torch.tensor([1.0])
    elif version == "layernorm_embedding":  # since 0.10.2, which also marks a version
        parameters = {name.replace("emb_layer_norm", "layernorm_embedding"): p for name, p in parameters.items()}
        parameters["encoder.sentence_encoder.version"] = torch.tensor([3.0])
    elif version == "0.12.2":
        parameters = as_of_0_12_2(parameters)
    else:  # before 0.8
        for layer in range(2):
            at = f"encoder.sentence_encoder.layers.{layer}.self_attn."
            for kind in KINDS:
                parts = [parameters.pop(f"{at}{name}_proj.{kind}") for name in "qkv"]
                parameters[f"{at}in_proj_{kind}"] = torch.cat(parts)
    checkpoint.save(tmp_path / "other.pt", {**state, "model": parameters})
    model, _ = load_model(tmp_path / "other.pt", DATA)
    torch.testing.assert_close(model(golden["tokens"])[0], golden["logits"], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["bert_tiny", "roberta_base"])
def test_logits_are_those_of_a_naive_encoder_row_by_row(arch: str) -> None:
    model = scrambled(arch)
    types = torch.randint(2, (3, 12), generator=torch.Generator().manual_seed(2)) if arch == "bert_tiny" else None
    real = tokens().ne(1)
    expected = naive(model, tokens(), types)
    torch.testing.assert_close(model(tokens(), types)[0][real], expected[real], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@torch.no_grad()
def test_layer_drop_leaves_layers_out_in_training_only() -> None:
    model = scrambled("bert_tiny", "--encoder-layers 2 --dropout 0 --attention-dropout 0 --encoder-layerdrop 0.5")
    assert model.skips_parameters
    source = torch.tensor([[0, 5, 6, 2]])
    layers = [float(state[0, 0, 0]) for state in model.encoder.sentence_encoder.states(source)]
    assert len(set(layers)) == 3 and float(model(source, features_only=True)[0][0, 0, 0]) == layers[-1]
    model.train()
    outputs = {float(model(source, features_only=True)[0][0, 0, 0]) for _ in range(40)}
    assert len(outputs) == 4 and {layers[0], layers[1], layers[2]} < outputs, "none, either or both of two layers"


@torch.no_grad()
def test_padding_changes_no_hidden_state() -> None:
    model = scrambled("bert_tiny")
    alone, _ = model(tokens()[2:, :2], features_only=True)
    padded, _ = model(tokens(), features_only=True)
    torch.testing.assert_close(padded[2:, :2], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ["bert_tiny", "electra_tiny"])
def test_only_a_batch_with_padding_has_a_mask_which_is_made_once(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without data, which stands for a GPU: the host says whether there is padding."""
    masks: list[Tensor | None] = []
    kernel = F.scaled_dot_product_attention

    def note(*args: Any, attn_mask: Tensor | None, **options: Any) -> Tensor:
        masks.append(attn_mask)
        return kernel(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    model, criterion = scrambled(arch), "masked_lm" if arch == "bert_tiny" else "electra"
    args = runs.arguments(f"--arch {arch}", TINY, f"--criterion {criterion}")
    prepare = setup_task(args).build_criterion(args).prepare
    for source, padded in ((tokens()[:1], False), (tokens(), True)):
        sample = {"net_input": {"src_tokens": source}, "target": torch.ones_like(source), "nsentences": len(source)}
        told = prepare(model, sample)["net_input"]["padded"]
        assert told is padded
        model.to("meta")(source.to("meta"), features_only=True, padded=told)
        assert len(masks) == 2 and masks[0] is masks[1] and (masks[0] is not None) is padded
        masks.clear()


@torch.no_grad()
def test_every_token_sees_those_after_it() -> None:
    model = scrambled("bert_tiny")
    before, changed = tokens(), tokens()
    changed[0, -1] += 1
    moved = (model(changed)[0] - model(before)[0]).abs().amax(-1)
    assert (moved[0] > 1e-4).all() and not moved[1:].any()


@torch.no_grad()
def test_infuse_replaces_the_summed_embeddings() -> None:
    model = scrambled("bert_tiny")
    encoder = model.encoder.sentence_encoder
    same, _ = model(tokens(), infuse=lambda x: x)
    torch.testing.assert_close(same, model(tokens())[0], atol=0, rtol=0)
    doubled, _ = model(tokens(), infuse=lambda x: 2 * x)
    encoder.embed_tokens.weight *= 2
    encoder.embed_positions.weight *= 2
    encoder.segment_embeddings.weight *= 2
    model.encoder.lm_head.weight = torch.nn.Parameter(encoder.embed_tokens.weight / 2)
    torch.testing.assert_close(doubled, model(tokens())[0], atol=1e-5, rtol=1e-5)


def test_rows_longer_than_the_positions_are_refused() -> None:
    model = model_of("--arch bert_tiny --max-positions 16", TINY)
    with pytest.raises(ValueError, match=r"expected at most 16 tokens a row"):
        model(torch.full((1, 17), 5))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(UserError, match="--encoder-attention-heads 3: must divide --encoder-embed-dim 32"):
        model_of("--arch bert_tiny", TINY, "--encoder-attention-heads 3")


@pytest.mark.parametrize(("arch", "criterion"), [("bert_tiny", "masked_lm"), ("electra_tiny", "electra")])
@pytest.mark.parametrize("flags", ["", "--init-std 0.1", "--untie-weights-roberta --init-std 0.1"])
def test_initial_weights_have_the_deviation_asked_for(arch: str, criterion: str, flags: str) -> None:
    model = model_of(f"{TINY.replace('--criterion masked_lm', f'--criterion {criterion}')} --arch {arch} {flags}")
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and p.numel() > 400}
    assert any("lm_head.dense" in name for name in matrices) and any("embed_positions" in name for name in matrices)
    for name, weights in matrices.items():
        assert float(weights.detach().std()) == pytest.approx(0.1 if flags else 0.02, rel=0.1), name
