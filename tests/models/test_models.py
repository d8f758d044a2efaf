"""Whole models: what they compute, how large they are, and what their parameters are called."""

from __future__ import annotations

import argparse
import gc
import math
import re

import pytest
import runs
import torch
import torch.nn.functional as F

from fairseq import checkpoint
from fairseq.checkpoint import describe_mismatch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.models.loading import load_parameters

PAD = 1
WORDS = 1200


def build(*flags):
    """A model in evaluation, its parameters large enough to matter."""
    model = runs.model_of(*flags).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(rows, length, seed=0):
    return torch.randint(4, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


# --- what they compute


def naive_positions(count, dim):
    """Positions 0 … count − 1, numbered from 2."""
    half = dim // 2
    frequencies = [math.exp(-i * math.log(10000) / (half - 1)) for i in range(half)]
    rows = [
        [*(math.sin(p * f) for f in frequencies), *(math.cos(p * f) for f in frequencies)] for p in range(2, count + 2)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def naive_hidden(model, source, remembered, numbers=None):
    """The hidden states of one row, in float64, and what the attention of each layer read.

    Args:
        source: word ids [T].
        remembered: for each layer, what its attention read before [M, C]; None: nothing, positions
            at the bottom.
        numbers: the layers to apply; None: all.
    """
    state = {name.removeprefix("decoder."): value.double() for name, value in model.state_dict().items()}
    dim, heads = model.cfg.decoder_embed_dim, model.cfg.decoder_attention_heads
    bands = [0, 200, 600, WORDS]
    x = []
    for word in source.tolist():
        band = max(i for i in range(3) if word >= bands[i])
        table, projection = (state[f"embed_tokens.embeddings.{band}.{part}.weight"] for part in (0, 1))
        x.append(math.sqrt(dim) * projection @ table[word - bands[band]])
    x = torch.stack(x)
    infused = remembered is not None
    if not infused:
        x = x + naive_positions(len(x), dim)
    if "ngram_notes.table.weight" in state:
        words = source.tolist()
        for t in range(len(x)):
            spread = (words[t - 1] * WORDS + words[t]) * 0x9E3779B97F4A7C15 % 2**64
            x[t] += math.sqrt(dim) * state["ngram_notes.table.weight"][1 + (spread >> 32) % 40 if t else 0]
    if "token_shift.weight" in state:
        for t in range(len(x) - 1, -1, -1):
            for i, weight in enumerate(state["token_shift.weight"][:t], 1):
                x[t] += weight[0] * x[t - i]
    read = []
    for number in numbers or range(model.cfg.decoder_layers):
        layer = {k.removeprefix(f"layers.{number}."): v for k, v in state.items() if k.startswith(f"layers.{number}.")}

        def linear(name, inputs, layer=layer):
            return inputs @ layer[f"{name}.weight"].t() + layer[f"{name}.bias"]

        def norm(name, inputs, layer=layer):
            centred = inputs - inputs.mean(-1, keepdim=True)
            scale = (centred**2).mean(-1, keepdim=True).add(1e-5).sqrt()
            return centred / scale * layer[f"{name}.weight"] + layer[f"{name}.bias"]

        own = norm("self_attn_layer_norm", x)
        read.append(own)
        before = remembered[number] if infused else own[:0]
        everything = torch.cat([before, own])
        placed = everything + naive_positions(len(everything), dim) if infused else everything
        key, value = linear("self_attn.k_proj", placed), linear("self_attn.v_proj", everything)
        query = linear("self_attn.q_proj", placed)
        attended = torch.zeros_like(own)
        for t in range(len(own)):
            here = len(before) + t
            for h in range(heads):
                part = slice(h * dim // heads, (h + 1) * dim // heads)
                q, k = query[here, part], key[: here + 1, part]
                if "self_attn.q_norm.weight" in layer:
                    q = layer["self_attn.q_norm.weight"] * q / (q.pow(2).mean() + 1e-6).sqrt()
                    k = layer["self_attn.k_norm.weight"] * k / (k.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
                scores = k @ q
                weights = (scores / math.sqrt(dim // heads)).softmax(0)
                attended[t, part] = weights @ value[: here + 1, part]
        x = x + linear("self_attn.out_proj", attended)
        inner = linear("fc1", norm("final_layer_norm", x)).clamp(min=0)
        x = x + linear("fc2", inner**2 if model.cfg.activation_fn == "relu_squared" else inner)
    return x, read


FAST = "--qk-norm --activation-fn relu_squared --token-shift 2 --ngram-notes 40"


@pytest.mark.parametrize("flags", ["", FAST])
def test_baseline_agrees_with_a_naive_computation(flags):
    model, source = build(runs.BASELINE, flags), tokens(2, 7)
    hidden, extra = model(source)
    assert extra["memory"] is None
    expected = torch.stack([naive_hidden(model, row, None)[0] for row in source])
    torch.testing.assert_close(hidden.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "cache, lengths, flags",
    [(16, [16, 16, 7], ""), (6, [4, 4, 4, 1], ""), (3, [5, 5], ""), (9, [2, 3, 5, 8], ""), (5, [4, 4, 3], FAST)],
)
def test_shortformer_agrees_with_a_naive_computation_segment_after_segment(cache, lengths, flags):
    model = build(runs.SHORTFORMER, f"--tokens-from-prev {cache}", flags)
    source, memory = tokens(2, sum(lengths)), None
    remembered = [[torch.zeros(0, 32, dtype=torch.float64)] * 2 for _ in range(2)]
    for segment in source.split(lengths, dim=1):
        hidden, extra = model(segment, memory)
        memory = extra["memory"]
        for row in range(2):
            expected, read = naive_hidden(model, segment[row], remembered[row])
            remembered[row] = [torch.cat([a, b])[-cache:] for a, b in zip(remembered[row], read, strict=True)]
            torch.testing.assert_close(hidden[row].double(), expected, atol=1e-4, rtol=1e-4)
            for kept, wanted in zip(memory, remembered[row], strict=True):
                torch.testing.assert_close(kept[row].double(), wanted, atol=1e-4, rtol=1e-4)
                assert not kept.requires_grad


def test_position_infused_attention_alone_has_no_memory():
    model = build(runs.BASELINE, "--position-infused-attention")
    source = tokens(1, 9)
    hidden, extra = model(source)
    expected, _ = naive_hidden(model, source[0], [torch.zeros(0, 32, dtype=torch.float64)] * 2)
    assert extra["memory"] is None and model.memory_length == 0
    torch.testing.assert_close(hidden[0].double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        [runs.SHORTFORMER],
        [runs.SHORTFORMER, "--tokens-from-prev 5"],
        [runs.BASELINE, "--position-infused-attention"],
        [runs.SHORTFORMER, "--tokens-from-prev 5", FAST],
    ],
)
@pytest.mark.parametrize("step", [1, 4, 16])
def test_token_by_token_inference_is_segment_by_segment_inference(flags, step):
    model, source = build(*flags), tokens(3, 16 * 3 + 5)
    memory, whole = None, []
    with torch.no_grad():
        for segment in source.split(16, dim=1):
            hidden, extra = model(segment, memory)
            memory = extra["memory"]
            whole.append(hidden)
        cache, single = model.new_cache(3), []
        for segment in source.split(16, dim=1):
            for piece in segment.split(step, dim=1):
                single.append(model(piece, cache=cache)[0])
            cache.next_segment()
    torch.testing.assert_close(torch.cat(single, 1), torch.cat(whole, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("flags", ["", "--decoder-learned-pos", "--no-decoder-normalize-before", FAST])
def test_token_by_token_inference_of_the_baseline_is_its_full_forward(flags):
    model, source = build(runs.BASELINE, flags), tokens(2, 16)
    with torch.no_grad():
        whole, cache = model(source)[0], model.new_cache(2)
        single = [model(source[:, t : t + 1], cache=cache)[0] for t in range(16)]
    torch.testing.assert_close(torch.cat(single, 1), whole, atol=1e-4, rtol=1e-4)
    assert cache.room == 0


def test_no_model_sees_the_future():
    for flags in (runs.BASELINE, runs.SHORTFORMER):
        model, source = build(flags), tokens(1, 12)
        changed = source.clone()
        changed[0, 8:] = 5
        with torch.no_grad():
            assert torch.equal(model(source)[0][:, :8], model(changed)[0][:, :8])


def test_probabilities_of_all_words_sum_to_one():
    for flags in ([runs.BASELINE], [runs.BASELINE, PLAIN]):
        model = build(*flags)
        output = model(tokens(2, 5))
        lprobs = model.get_normalized_probs(output, log_probs=True)
        assert lprobs.shape == (2, 5, WORDS)
        torch.testing.assert_close(model.get_normalized_probs(output, log_probs=False).sum(-1), torch.ones(2, 5))


# --- layers to keep


@pytest.mark.parametrize("keep", ["0,2,3", "3,1", "2"])
def test_kept_layers_are_those_of_the_whole_model_in_their_order(keep):
    whole, source = build(runs.BASELINE, "--decoder-layers 4"), tokens(1, 6)
    pruned = runs.model_of(runs.BASELINE, "--decoder-layers 4 --decoder-layers-to-keep", keep).eval()
    load_parameters(pruned, whole.state_dict(), "whole.pt")
    expected, _ = naive_hidden(whole, source[0], None, sorted(map(int, keep.split(","))))
    torch.testing.assert_close(pruned(source)[0][0].double(), expected, atol=1e-4, rtol=1e-4)
    again = runs.model_of(runs.BASELINE, "--decoder-layers 4 --decoder-layers-to-keep", keep)
    load_parameters(again, pruned.state_dict(), "pruned.pt")  # as when its training goes on
    assert all(torch.equal(a, b) for a, b in zip(pruned.parameters(), again.parameters(), strict=True))


def test_layers_to_keep_are_an_override_of_a_checkpoints_settings():
    path = runs.GOLDEN / "baseline.pt"
    state = checkpoint.load(path)["model"]
    for keep in ("1", [1]):
        (model,), *_ = load_models([path], runs.DATA, {"decoder_layers_to_keep": keep})
        assert len(model.decoder.layers) == 1
        for name, value in model.decoder.layers[0].state_dict().items():
            assert torch.equal(value, state[f"decoder.layers.1.{name}"])


@pytest.mark.parametrize("keep, message", [("0,9", "layers 0 to 3, no 9"), ("1,1", "different"), ("-1", "from 0")])
def test_layers_that_cannot_be_kept_are_refused(keep, message):
    whole = runs.model_of(runs.BASELINE, "--decoder-layers 4")
    with pytest.raises(UserError) as refusal:
        pruned = runs.model_of(runs.BASELINE, "--decoder-layers 4", f"--decoder-layers-to-keep={keep}")
        load_parameters(pruned, whole.state_dict(), "whole.pt")
    assert re.match(f"--decoder-layers-to-keep {keep}.*{message}", refusal.value.with_flags)


# --- variants

PLAIN = "--arch transformer_lm --criterion cross_entropy --decoder-normalize-before"
PLAIN += " --decoder-input-dim 32 --decoder-output-dim 32"
VARIANTS = {
    "tied": "",
    "plain": PLAIN,
    "fairseq 0.12's": "--arch transformer_lm --criterion cross_entropy",
    "shared": f"{PLAIN} --share-decoder-input-output-embed",
    "narrow": f"{PLAIN} --decoder-input-dim 16 --decoder-output-dim 24",
    "softmax alone": f"{PLAIN} --adaptive-softmax-cutoff 200,600 --criterion adaptive_loss",
    "input alone": f"{PLAIN} --adaptive-input --adaptive-input-cutoff 200,600 --decoder-input-dim 16",
    "four bands": "--adaptive-softmax-cutoff 9,99,999 --adaptive-input-cutoff 9,99,999 --adaptive-input-factor 2"
    " --adaptive-softmax-factor 2",
    "learned positions": f"{PLAIN} --decoder-learned-pos",
    "no positions": f"{PLAIN} --no-token-positional-embeddings",
    "post-norm": f"{PLAIN} --no-decoder-normalize-before --layernorm-embedding --no-scale-embedding",
    "gelu": f"{PLAIN} --activation-fn gelu --no-decoder-final-norm --decoder-layerdrop 0.5",
    "gelu_accurate": f"{PLAIN} --activation-fn gelu_accurate",
    "shortformer": "--arch shortformer_tiny",
    "normalised queries and keys": f"--arch shortformer_tiny {FAST} --zero-init-residual",
    "shortformer with a plain softmax": f"{PLAIN} --tokens-from-prev 4",
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_variant_trains_all_its_parameters_and_loads_strictly(flags):
    model = build(runs.BASELINE, flags)
    model.train()
    source = tokens(4, 16)
    layer = model.output_layer
    loss = 0.0
    for _ in range(4):  # layers may be left out
        hidden, _ = model(source)
        target = torch.arange(64).mul(19) % WORDS
        loss = loss + layer.loss(hidden.flatten(0, 1), layer.partition(target, PAD))
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.to_dense().isfinite().all()]
    assert not without
    assert 4 * 64 * 2 < float(loss.detach()) < 4 * 64 * 100
    other = runs.model_of(runs.BASELINE, flags, "--seed 9")
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_layer_drop_leaves_layers_out_in_training_only():
    model = build(runs.BASELINE, "--decoder-layerdrop 0.5 --dropout 0 --activation-dropout 0 --attention-dropout 0")
    source = tokens(1, 6)
    with torch.no_grad():
        assert torch.equal(model(source)[0], model(source)[0])
        model.train()
        outputs = {tuple(model(source)[0][0, 0, :3].tolist()) for _ in range(40)}
    assert len(outputs) == 4, "none, either or both of two layers"


def test_default_activation_is_relu_and_others_differ():
    source = tokens(1, 6)
    hidden = {}
    for name in ("relu", "gelu", "gelu_accurate", "tanh", "linear", "relu_squared"):
        model = build(runs.BASELINE, f"--activation-fn {name}")
        hidden[name] = model(source)[0].detach()
        layer = model.decoder.layers[0]
        inside = torch.tensor([-1.0, 0.5])
        expected = {
            "relu": inside.clamp(min=0),
            "gelu": inside * 0.5 * (1 + torch.erf(inside / math.sqrt(2))),
            "gelu_accurate": inside * 0.5 * (1 + (math.sqrt(2 / math.pi) * (inside + 0.044715 * inside**3)).tanh()),
            "tanh": inside.tanh(),
            "linear": inside,
            "relu_squared": inside.clamp(min=0) ** 2,
        }[name]
        torch.testing.assert_close(layer._activate(inside.clone()), expected)
    assert torch.equal(hidden["relu"], build(runs.BASELINE)(source)[0].detach())


def test_layers_of_a_model_with_zero_residuals_begin_as_the_identity_and_the_rest_as_ever():
    zero, plain = runs.model_of(runs.BASELINE, "--zero-init-residual").eval(), runs.model_of(runs.BASELINE)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(layer(x)[0], x) for layer in zero.decoder.layers)
    others = dict(plain.named_parameters())
    for name, parameter in zero.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            assert not parameter.any() and others[name].any()
        else:
            assert torch.equal(parameter, others[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_queries_and_keys_are_computed_in_full_precision(dtype):
    attention = build(runs.BASELINE, "--qk-norm").decoder.layers[0].self_attn
    query, key = (300 * torch.randn(2, 2, 2, 3, 16, generator=torch.Generator().manual_seed(0))).to(dtype)
    wide = attention._normalize(query.float(), key.float())
    for narrow, expected in zip(attention._normalize(query, key), wide, strict=True):
        assert narrow.dtype == dtype and torch.equal(narrow, expected.to(dtype))  # 300² · 16 exceeds float16


def test_attention_maps_are_of_normalised_queries_and_keys():
    attention = build(runs.BASELINE, "--qk-norm").decoder.layers[0].self_attn
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        value = attention._heads(attention.v_proj(x))
        attended = (attention.weights(x) @ value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(attention.out_proj(attended), attention(x))


# --- names

GOLDEN = "--cpu --max-tokens 64 --decoder-layers 2 --decoder-embed-dim 64 --decoder-attention-heads 4"
CUTOFFS = "--decoder-ffn-embed-dim 128 --adaptive-softmax-cutoff 200,600 --adaptive-input-cutoff 200,600"


@pytest.mark.parametrize("file", ["shortformer_stage1.pt", "baseline.pt"])
def test_parameters_have_fairseqs_names_in_fairseqs_order(file):
    state = checkpoint.load(runs.GOLDEN / file)
    flags = "--tokens-from-prev 32" if "short" in file else ""
    model = runs.model_of("--arch transformer_lm_wiki103", GOLDEN, CUTOFFS, flags)
    load_parameters(model, state["model"], file)
    assert describe_mismatch(model.upgrade_state_dict(state["model"]), model.state_dict(), file) is None
    ours = [name for name, _ in model.named_parameters()]
    assert ours == [name for name in state["model"] if name in ours], "the optimizer's state is in this order"


def test_checkpoint_of_shared_embeddings_from_before_there_was_an_output_projection_loads():
    model = build(runs.BASELINE, PLAIN, "--share-decoder-input-output-embed")
    state = {k: v for k, v in model.state_dict().items() if k != "decoder.output_projection.weight"}
    other = runs.model_of(runs.BASELINE, PLAIN, "--share-decoder-input-output-embed --seed 9").eval()
    load_parameters(other, state, "old.pt")
    outputs = [m.get_normalized_probs(m(tokens(1, 5)), log_probs=True) for m in (model, other)]
    assert torch.equal(*outputs)


# --- loss


def test_cross_entropy_through_any_output_layer_is_that_of_its_probabilities():
    class Task:
        target_dictionary = argparse.Namespace(pad=lambda: PAD)

    criterion = CrossEntropyCriterion(Task(), sentence_avg=False)
    source, target = tokens(2, 6), tokens(2, 6, seed=7)
    target[1, 4:] = PAD
    sample = {"net_input": {"src_tokens": source}, "target": target, "ntokens": 10, "nsentences": 2}
    for flags in ("", PLAIN):
        model = build(runs.BASELINE, flags)
        loss, size, log = criterion(model, criterion.prepare(model, dict(sample)))
        lprobs = model.get_normalized_probs(model(source), log_probs=True)
        expected = F.nll_loss(lprobs.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
        assert size == log["ntokens"] == 10 and log["nsentences"] == 2


@pytest.mark.parametrize("flags", ["--arch shortformer_tiny", "--arch transformer_xl_tiny --same-length"])
def test_masks_and_tables_of_positions_are_freed_with_the_model(flags):
    def tensors():
        gc.collect()
        return {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}

    def used():
        model = runs.model_of(flags, "--tokens-per-sample 24")
        tokens = torch.randint(4, 500, (2, 24))
        _, extra = model(tokens)
        model(tokens, memory=extra["memory"])
        with torch.inference_mode():
            model(tokens[:, :1], cache=model.new_cache(2))

    before = tensors()
    used()
    assert tensors() <= before


@pytest.mark.parametrize(
    "flags",
    [
        *("--arch llama_tiny", "--arch gpt2_tiny", "--arch pythia_tiny", "--arch transformer_lm_tiny"),
        *("--arch shortformer_tiny", "--arch transformer_xl_tiny"),
        *("--arch transformer_xl_tiny --pre-lnorm", "--arch bert_tiny", "--arch transformer_lm --decoder-layers 2"),
    ],
)
def test_under_autocast_the_sum_of_all_layers_has_the_lower_precision_and_gradients_have_the_weights(flags):
    model, dtypes = runs.model_of(flags, "--tokens-per-sample 16"), []
    body = model.decoder if hasattr(model, "decoder") else model.encoder.sentence_encoder
    for layer in body.layers:
        layer.register_forward_hook(lambda module, inputs, output: dtypes.extend([inputs[0].dtype, output[0].dtype]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(tokens(2, 16).clamp(max=500))[0]
    assert len(dtypes) >= 4 and set(dtypes) == {torch.bfloat16}
    hidden.float().sum().backward()
    gradients = [parameter.grad for parameter in body.parameters() if parameter.grad is not None]
    assert len(gradients) > 8 and {gradient.dtype for gradient in gradients} == {torch.float32}
