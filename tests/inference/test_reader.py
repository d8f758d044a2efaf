"""The reader of models for inference: its kernels compute what the modules do, and the exact best
words."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import weakref

import naive
import pytest
import runs
import torch
from machines import HAS_AVX512

from fairseq.inference.kernels import SOURCE, decoding_kernels, dequantized, quantize
from fairseq.inference.loading import load_language_models
from fairseq.inference.reader import Reader, inference_copy
from fairseq.kernels import build as native
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.models.transformer_xl import TransformerXL, TransformerXLDecoder
from fairseq.models.transformer_xl_settings import TransformerXLConfig
from fairseq.modules.norms import RMSNorm
from fairseq.text.dictionary import Dictionary

VOCABULARY, LENGTH = 40, 8
BANDS = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "10,20",
    "adaptive_softmax_cutoff": "10,20",
    "adaptive_input_factor": 2,
    "adaptive_softmax_factor": 2,
}
MODERN = {
    "rotary_fraction": 1.0,
    "no_token_positional_embeddings": True,
    "decoder_norm": "rms",
    "decoder_biases": "none",
    "decoder_gated_ffn": True,
    "activation_fn": "silu",
}
DECODERS = {
    "modern": MODERN,
    "modern, memory": {**MODERN, "tokens_from_prev": 5, "qk_norm": True, "rotary_fraction": 0.6},
    "modern, shared keys": {**MODERN, "decoder_embed_dim": 24, "decoder_attention_heads": 4, "decoder_kv_heads": 2},
    "modern, one key": {**MODERN, "decoder_attention_heads": 5, "decoder_kv_heads": 1, "attention_window": 3},
    "modern, heads of 64": {**MODERN, "decoder_embed_dim": 128, "decoder_kv_heads": 1, "qk_norm": True},
    "modern, shifted, notes": {**MODERN, "token_shift": 2, "ngram_notes": 9, "word_notes": 7},
    "parallel": {"rotary_fraction": 0.2, "no_token_positional_embeddings": True, "decoder_parallel_residual": True},
    "parallel, gated": {**MODERN, "decoder_parallel_residual": True, "activation_fn": "gelu", "decoder_biases": "all"},
    "shared keys, memory": {"decoder_kv_heads": 1, "tokens_from_prev": 5, "decoder_biases": "qkv"},
    "modern, post-norm": {**MODERN, "decoder_normalize_before": False, "no_decoder_final_norm": True},
    "no biases": {"decoder_biases": "none"},
}
LANGUAGE_MODELS = {
    "baseline": {},
    "shortformer": {"tokens_from_prev": 8},
    "short cache": {"tokens_from_prev": 5},
    "learned positions": {"decoder_learned_pos": True},
    "post-norm": {"decoder_normalize_before": False, "no_decoder_final_norm": True},
    "gelu": {"activation_fn": "gelu"},
    "tanh gelu": {"activation_fn": "gelu_fast"},
    "tanh": {"activation_fn": "tanh"},
    "squared relu": {"activation_fn": "relu_squared"},
    "bands": {**BANDS, "tokens_from_prev": 8},
    "tied bands": {**BANDS, "tie_adaptive_weights": True, "tie_adaptive_proj": True},
}
TRANSFORMER_XL = {
    "xl": {},
    "xl, pre-norm, notes": {"pre_lnorm": True, "ngram_notes": 9, "word_notes": 7},
    "xl, same length": {"same_length": True},
    "xl, shaw": {"position_encoding": "shaw"},
    "xl, zeros": {"memory_start": "zeros"},
    "xl, bands": {"cutoffs": [10, 20], "div_val": 2},
    "xl, untied": {"untie_r": True},
    "xl, heads of 64": {"d_head": 64, "mem_len": 24},
    "xl, heads of 96": {"d_head": 96, "mem_len": 12},
}
ADDRESSES = """
#include "STEP"
#include <stdlib.h>
static Matrix matrix(int type, long n, long k) {
    long panels = (n + LANES - 1) / LANES, steps = type == BFLOAT16 ? (k + 1) / 2 : k;
    Matrix m = {type, n, k, calloc(panels * steps, step_size(type)),
                type == INT8 ? calloc(n, 4) : NULL, calloc(n, 4)};
    return m;
}
int main() {
    const long counts[] = {1, 5, 31}, dims[] = {7, 64, 96};
    for (int i = 0; i < 36; i++) {
        int type = i / 9;
        long rows = counts[i % 3], dim = dims[i / 3 % 3];
        long heads = 2, shared = i % 2 + 1, width = 19, ffn = 37, length = 23, inner = heads * dim;
        long qkv = (heads + 2 * shared) * dim, turned = i % 2 ? 0 : dim / 2 * 2;
        long gated = i % 4 < 2, parallel = i % 8 < 4;
        int kind = type == INT8 ? 0 : type, size = kind ? 2 : 4;
        Layer layer = {matrix(type, qkv, width), matrix(type, width, inner), matrix(type, ffn, width),
                       matrix(type, width, ffn), gated ? matrix(type, ffn, width) : (Matrix){0},
                       calloc(2 * width, 4), calloc(2 * width, 4), NULL, calloc(inner, 4), calloc(dim, 4),
                       calloc(dim, 4)};
        Stack stack = {1, width, heads, shared, dim, ffn, 1, parallel, 1, SILU, 1e-5f, 1e-6f, &layer, NULL, {0}};
        LayerCache own = {calloc(rows * shared * length * dim, size), calloc(rows * shared * length * dim, size),
                          calloc(length * qkv, size), calloc(heads * length * dim, size),
                          calloc(heads * length, 4), turned ? calloc(length * turned, 4) : NULL};
        Cache cache = {kind, rows, length, qkv, turned, 0, 0, &own};
        float *x = calloc(rows * length * width, 4), *y = calloc(rows * length * width, 4),
              *scratch = malloc(4 * scratch_size(&stack, &cache, 1));
        steps(&stack, &cache, x, length, y, 1, scratch);
        float *s2 = malloc(4 * rows * (width + 1)), *y2 = malloc(4 * rows * ffn);
        linear(&layer.fc1, x, rows, y2, 1, s2);
        long bounds[] = {0, 20, 41, 60};
        Band bands[] = {{{0}, matrix(type, 22, width)}, {matrix(type, 7, width), matrix(type, 21, 7)},
                        {matrix(type, 5, width), matrix(type, 19, 5)}};
        Output output = {3, width, width, bounds, bands};
        float *s3 = malloc(4 * best_size(&output, rows, 1)), *scores = malloc(4 * rows * 60);
        int64_t *words = malloc(8 * rows * 60), forbidden[] = {0, 59, -1, 60};
        best(&output, x, rows, 1, forbidden, 4, scores, words, 1, s3);
        best(&output, x, rows, 60, forbidden, 4, scores, words, 1, s3);
        Matrix projections[] = {matrix(kind, width, 7), matrix(kind, width, 19)};
        const void *tables[] = {calloc(20 * 7, size), calloc(21 * 19, size)};
        Embedding embedding = {2, width, width, kind, bounds, tables, projections, 2};
        float *s4 = malloc(4 * rows * (3 * width + 1));
        for (long r = 0; r < rows; r++) words[r] = r % 41;
        if (!embed(&embedding, words, rows, x, y, 1, s4)) return 1;
        free(scratch); free(x); free(y); free(s2); free(y2); free(s3); free(s4); free(scores); free(words);
    }
    return 0;
}
"""
needs_compiler = pytest.mark.skipif(decoding_kernels() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A random model by its name."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    dictionary = Dictionary()
    for word in range(VOCABULARY - 4):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(folder / "dict.txt")

    def language_model(**settings):
        naive.checkpoint(folder / "c.pt", VOCABULARY, tokens_per_sample=LENGTH, **settings)
        return load_language_models([folder / "c.pt"], folder / "dict.txt")[0][0]

    def transformer_xl(**settings):
        sizes = {"n_layer": 2, "d_model": 20, "n_head": 2, "d_head": 7, "d_inner": 24, "mem_len": 8}
        torch.manual_seed(0)
        cfg = TransformerXLConfig(**{**sizes, "tokens_per_sample": LENGTH, "no_apex": True, **settings})
        return noisy(TransformerXL(TransformerXLDecoder(cfg, VOCABULARY)))

    def decoder(**settings):
        sizes = {
            "decoder_layers": 2,
            "decoder_embed_dim": 20,
            "decoder_ffn_embed_dim": 37,
            "decoder_attention_heads": 2,
        }
        torch.manual_seed(0)
        cfg = TransformerLMConfig(**{**sizes, "tokens_per_sample": LENGTH, "no_apex": True, **settings})
        return noisy(TransformerLanguageModel(TransformerDecoder(cfg, VOCABULARY, padding_idx=1)))

    def make(name):
        for family, names in ((language_model, LANGUAGE_MODELS), (transformer_xl, TRANSFORMER_XL), (decoder, DECODERS)):
            if name in names and name not in made:
                made[name] = family(**names[name])
        return made[name]

    return make


@torch.no_grad()
def noisy(model):
    """*model* with random biases and gains, too."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def segments(reader, tokens, count=3):
    """Hidden states [B, C] of token after token, through several segments."""
    cache = reader.new_cache(tokens.size(0))
    for _ in range(count):
        for column in range(tokens.size(1)):
            yield reader.read(tokens[:, column : column + 1], cache)[:, -1]
        if reader.model.memory_length:
            cache.next_segment()
        else:
            cache.clear()


def random_tokens(rows):
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(rows))


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *TRANSFORMER_XL, *DECODERS])
def test_kernels_compute_what_the_modules_do(load, name, rows):
    model, tokens = load(name), random_tokens(rows)
    for int8 in (False, True):
        slow, fast = Reader(model, int8=int8, kernels=False), Reader(model, int8=int8)
        assert fast.packed is not None and slow.packed is None
        for expected, found in zip(segments(slow, tokens), segments(fast, tokens), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(fast.log_probs(found), slow.log_probs(expected), rtol=1e-5, atol=1e-5)


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.15), (torch.float16, 0.015)])
@pytest.mark.parametrize(
    "name", ["shortformer", "bands", "xl", "xl, shaw", "xl, heads of 64", "modern, memory", "parallel"]
)
def test_kernels_agree_with_the_modules_in_half_precision(load, name, dtype, tolerance):
    model, tokens = load(name), random_tokens(5)
    slow, fast = Reader(model, dtype, kernels=False), Reader(model, dtype)
    assert fast.packed is not None and fast.new_cache(1).layers[0].keys.dtype == dtype
    for expected, found in zip(segments(slow, tokens), segments(fast, tokens), strict=True):
        difference = (fast.log_probs(found) - slow.log_probs(expected)).abs()
        assert difference.max() < tolerance and difference.mean() < tolerance / 5


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("name", ["shortformer", "bands", "tied bands", "xl, bands"])
@pytest.mark.parametrize("count", [1, 3, 9, 25, 100])
def test_best_words_are_those_of_the_whole_distribution(load, name, count):
    reader, forbidden = Reader(load(name)), [0, 3, 12, 39]
    hidden = torch.cat(list(segments(reader, random_tokens(3))))
    lprobs = reader.log_probs(hidden)
    lprobs[:, forbidden] = -torch.inf
    expected = lprobs.topk(min(count, VOCABULARY))
    for rows in (slice(0, None), *(slice(i, i + 1) for i in range(12))):  # alone, a row may skip bands
        scores, words = reader.best(hidden[rows], count, forbidden)
        finite = expected.values[rows] > -torch.inf
        assert torch.equal(words[finite], expected.indices[rows][finite])
        torch.testing.assert_close(scores.softmax(-1), expected.values[rows].softmax(-1))


@needs_compiler
@torch.inference_mode()
def test_bands_that_cannot_reach_the_best_words_are_not_computed(load):
    reader = Reader(load("bands"))
    hidden = torch.cat(list(segments(reader, random_tokens(1))))
    expected = [reader.best(row[None], 4) for row in hidden]
    for _, words in reader.packed.bands[1:]:
        words.tensors[0].fill_(torch.nan)  # the best words of a band that is computed are NaN
    found = [reader.best(row[None], 4) for row in hidden]
    skipped = [not scores.isnan().any() for scores, _ in found]
    assert 0 < sum(skipped) < len(hidden)
    for skips, some, others in zip(skipped, found, expected, strict=True):
        assert not skips or torch.equal(some[1], others[1])


@needs_compiler
@torch.inference_mode()
def test_of_equal_scores_the_first_words_are_best_and_nan_comes_before_all(load):
    reader = Reader(load("baseline"))
    hidden = torch.zeros(2, reader.packed.width)
    scores, words = reader.best(hidden, 5, forbidden=[1])
    assert words.tolist() == [[0, 2, 3, 4, 5]] * 2 and not scores.isnan().any()
    panels = reader.packed.bands[0][1].tensors[0]
    panels[25 // panels.size(2), :, 25 % panels.size(2)] = torch.nan  # word 25
    scores, words = reader.best(hidden, 5)
    assert words.tolist() == [[25, 0, 1, 2, 3]] * 2 and scores.isnan().sum(1).tolist() == [1, 1]


@needs_compiler
@torch.inference_mode()
def test_tokens_together_are_tokens_one_by_one(load):
    reader, tokens = Reader(load("shortformer")), random_tokens(3)
    both = reader.new_cache(3), reader.new_cache(3)
    together = reader.read_each(tokens, both[0])
    one_by_one = torch.cat([reader.read(tokens[:, i : i + 1], both[1]) for i in range(LENGTH)], dim=1)
    torch.testing.assert_close(together, one_by_one)
    assert both[0].length == both[1].length == LENGTH


@needs_compiler
@torch.inference_mode()
def test_rows_may_leave_and_part(load):
    model, tokens = load("shortformer"), random_tokens(4)
    results = []
    for reader in (Reader(model, kernels=False), Reader(model)):
        cache = reader.new_cache(4)
        reader.read(tokens[:, :3], cache)
        cache.select_rows([0, 1, 2])
        first = reader.read(tokens[:3, 3:4], cache)
        room = cache.layers[0].keys.data_ptr()
        cache.select_rows([1, 2, 0])
        second = reader.read(tokens[[1, 2, 0], 4:5], cache)
        assert cache.layers[0].keys.data_ptr() == room, "as many rows stay in their memory"
        cache.select_rows([1, 2, 2, 0, 1])
        results.append((first, second, reader.read(tokens[[2, 0, 0, 1, 2], 5:6], cache)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("name", ["xl, bands", "parallel, gated", "modern, shared keys"])
def test_results_do_not_depend_on_the_number_of_threads(load, name, monkeypatch):
    monkeypatch.setattr("fairseq.inference.kernels.LEAST_WORK", 1)
    model, tokens, threads = load(name), random_tokens(3), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        several = list(segments(Reader(model), tokens))
    finally:
        torch.set_num_threads(threads)
    for found, expected in zip(several, segments(Reader(model, kernels=False), tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
@torch.inference_mode()
def test_more_tokens_than_the_segment_has_room_for_are_rejected(load):
    reader = Reader(load("shortformer"))
    with pytest.raises(ValueError, match="9 tokens: the cache's segment has room for 8"):
        reader.read_each(torch.zeros(1, 9, dtype=torch.long), reader.new_cache(1))


@pytest.mark.parametrize("token", [1 << 40, -1])
def test_tokens_outside_of_the_vocabulary_are_an_error(load, token):
    reader = Reader(load("shortformer"))
    if reader.packed is None:
        pytest.skip("no compiler")
    with pytest.raises(IndexError), torch.inference_mode():
        reader.read_each(torch.tensor([[token]]), reader.new_cache(1))


def test_without_a_compiler_the_modules_read(load, monkeypatch, caplog):
    monkeypatch.setenv("CC", "/nowhere/cc")
    native.library.cache_clear()
    try:
        reader = Reader(load("baseline"))
        with torch.inference_mode():
            assert reader.packed is None and len(list(segments(reader, random_tokens(1)))) == 3 * LENGTH
    finally:
        native.library.cache_clear()
    assert "decoding kernels: not compiled (" in caplog.text


def test_a_model_that_is_watched_or_extended_is_read_by_its_modules(load):
    model = load("baseline")
    hook = model.decoder.layers[0].register_forward_hook(lambda *_: None)
    assert Reader(model).packed is None
    hook.remove()

    class Extended(type(model)):
        pass

    assert Reader(Extended(model.decoder)).packed is None
    for part, value in (("activation_fn", "tanh"), ("parallel", True), ("final_layer_norm", RMSNorm(20))):
        changed = copy.deepcopy(load("no biases"))
        setattr(changed.decoder.layers[1], part, value)
        assert Reader(changed).packed is None, "layers differ"
    normalised = runs.model_of(runs.SHORTFORMER, "--qk-norm").eval()
    assert Reader(normalised).packed is None, "without rotation, the kernels have no norm of queries and keys"


def test_weights_are_cast_once_and_the_model_stays_as_it_was(load):
    model = load("tied bands")
    copy = inference_copy(model, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in copy.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "norm" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "norm" not in name} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert copy.output_layer.tail[0][2].weight is copy.decoder.embed_tokens.weights_for_band(1)[0]


@pytest.mark.parametrize("int8", [False, True])
def test_weights_that_were_cast_do_not_keep_the_original(load, int8):
    model = copy.deepcopy(load("tied bands"))
    original = weakref.ref(model.decoder.layers[0].fc1.weight)
    reader = Reader(model, torch.bfloat16, int8=int8)
    del model
    gc.collect()
    assert original() is None
    reader.read(torch.tensor([[4]]), reader.new_cache(1))


@pytest.mark.parametrize("machine", [[], *([["-mno-avx512f"]] if HAS_AVX512 else [])])
def test_the_address_sanitizer_finds_nothing_in_the_kernels(tmp_path, machine):
    # Calls of kernels that do not compile must fail: they are no reason to skip.
    (tmp_path / "main.c").write_text("int main(void) { return 0; }")
    command = [*os.environ.get("CC", "cc").split(), "-O0", "-march=native", *machine]
    command += ["-fsanitize=address,undefined", "-w", tmp_path / "main.c", "-o", tmp_path / "main", "-lm"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("the compiler has no address sanitizer")
    (tmp_path / "main.c").write_text(ADDRESSES.replace("STEP", str(SOURCE)))
    subprocess.run(command, check=True)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_int8_is_symmetric_and_has_a_scale_for_each_output():
    weight = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1], [9], [0], [2]])
    values, scale = quantize(weight)
    assert (
        values.dtype == torch.int8 and values.min() >= -127 and (values[weight[:, 0] != 0].abs().amax(1) == 127).all()
    )
    assert ((weight - values * scale[:, None]).abs() <= scale[:, None] * 0.501).all()
    assert torch.equal(dequantized(dequantized(weight)), dequantized(weight))
