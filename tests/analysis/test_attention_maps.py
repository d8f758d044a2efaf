"""fairseq-analyze attention: averages over distance against naive accumulation, its files, and
mistakes in one line."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import naive
import numpy as np
import pytest
import runs
import torch
from mistakes import user_error
from torch import nn

from fairseq.analysis import plots
from fairseq.analysis.attention_maps import AttentionReader, attention_modules, distances
from fairseq.analysis.attention_report import parse_heads
from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.models.base import FairseqLanguageModel
from fairseq.text.dictionary import Dictionary
from fairseq_cli import analyze
from fairseq_cli.analyze import get_attention_parser

BASELINE, SHORTFORMER = runs.GOLDEN / "baseline.pt", runs.GOLDEN / "shortformer_stage2.pt"

FILES = {"attention.npz", "results.json"} | {f"attention-{name}.png" for name in ("distance", "position", "terms")}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def transformer_xl(tmp_path_factory):
    """A Transformer-XL of 2 layers with 2 heads, segments of 16 and memory of 24, after a few
    updates."""
    folder = tmp_path_factory.mktemp("xl")
    flags = "--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test --batch-size 4 --mem-len 24"
    runs.train(folder, flags, "--tokens-per-sample 16 --optimizer adam --lr 0.01 --max-update 5 --no-epoch-checkpoints")
    return folder / "checkpoint_last.pt"


@pytest.fixture
def undrawn(monkeypatch):
    """The names of pictures in place of their content, for tests of the files: drawing takes
    seconds."""
    for name in ("draw_distances", "draw_terms", "draw_position"):
        monkeypatch.setattr(plots, name, lambda path, *rest, name=name: path.write_bytes(name.encode()))


def run(*flags, data=runs.DATA):
    """Run the command in this process; returns its figures. A list holds words that are not to be
    split."""
    argv = [word for flag in flags for word in ([str(f) for f in flag] if isinstance(flag, list) else flag.split())]
    return analyze.attention(options.parse_args_and_arch(get_attention_parser(), [str(data), "--cpu", *argv]))


class ThreeBack(nn.Module):
    """Attention whose head 0 looks three tokens back (or as far as it can), and head 1 at
    itself."""

    num_heads = 2

    def forward(self, x, memory=None, positions=None, visible=None, cache=None, past_length=0):
        return x

    def weights(self, x, memory, positions, visible):
        queries = x.size(1)
        keys = queries + (0 if memory is None else memory.size(1))
        found = torch.zeros(x.size(0), 2, queries, keys)
        for i in range(queries):
            found[:, 0, i, max(0, keys - queries + i - 3)] = 1
            found[:, 1, i, keys - queries + i] = 1
        return found

    def terms(self, x, memory, positions, visible):
        weights = self.weights(x, memory, positions, visible)
        ahead = torch.where(distances(*weights.shape[2:]) < 0, 1e4, 0.0)  # what must be masked
        return {name: ahead + scale * weights for name, scale in zip("abcd", (0, 50, 5, 0), strict=True)}


class Stub(FairseqLanguageModel):
    """A model of one such layer, which remembers *memory* tokens."""

    def __init__(self, memory):
        super().__init__(nn.Module())
        self.decoder.layers = nn.ModuleList([nn.Module()])
        self.decoder.layers[0].self_attn = ThreeBack()
        self.memory_length = memory

    def forward(self, tokens, memory=None):
        x = tokens[..., None].float()
        old = None if memory is None else memory[0]
        self.decoder.layers[0].self_attn(x, memory=old)
        seen = x if memory is None else torch.cat([memory[0], x], dim=1)
        return x, {"memory": [seen[:, -self.memory_length :]] if self.memory_length else None}


def stub_reader(memory, tokens=103, length=8, rows=1):
    dictionary = Dictionary()
    for word in "abcdefg":
        dictionary.add_symbol(word)
    ids = np.arange(tokens) % 7 + dictionary.nspecial
    corpus = SimpleNamespace(tokens=ids, sizes=np.array([tokens]), offsets=np.array([0, tokens]))
    blocks = TokenBlocks(corpus, length, "none", pad=dictionary.pad(), eos=dictionary.eos())
    return AttentionReader(Stub(memory), blocks, dictionary, rows=rows, terms=True)


def stub_maps(memory, rows=1, position=50):
    return stub_reader(memory, rows=rows).read([position])


@pytest.mark.parametrize("rows", [1, 3])
def test_attention_that_looks_three_back_peaks_at_three(rows):
    maps = stub_maps(memory=12, rows=rows)
    assert maps.attention.shape == (1, 2, 20)
    assert maps.attention[0, 0].tolist() == [0, 0, 0, 1] + [0] * 16
    assert maps.attention[0, 1].tolist() == [1] + [0] * 19
    assert maps.mean_distance().tolist() == [[3, 0]] and maps.widest() == [(0, 0)]
    # Of the 13 segments two in each row have no full memory; the last segment has 7 tokens.
    assert maps.queries == {1: 103 - 16, 3: 103 - 3 * 16}[rows]
    assert (maps.reach[:13] == 1).all() and (np.diff(maps.reach[12:]) < 0).all()


def test_without_memory_every_token_counts_and_reach_says_how_far_they_see():
    maps = stub_maps(memory=0, rows=2)
    assert maps.queries == 103
    full, last = 12, 7  # segments of 8 tokens, and the tokens of the thirteenth
    expected = [(full * (8 - d) + max(0, last - d)) / 103 for d in range(8)]
    np.testing.assert_allclose(maps.reach, expected)
    # The first three tokens of each segment cannot look three back and look at the segment's first
    # instead.
    np.testing.assert_allclose(maps.attention[0, 0], [13 / 103] * 3 + [(103 - 39) / 103] + [0] * 4)
    np.testing.assert_allclose(maps.given_reach(maps.attention)[0, 0, 3], 1)


def test_terms_are_softmaxes_of_what_a_query_sees():
    maps = stub_maps(memory=12)
    assert sorted(maps.terms) == ["a", "b", "c", "d"]
    for term in maps.terms.values():
        np.testing.assert_allclose(term.sum(-1), 1)
    assert maps.terms["b"][0, 0, 3] == pytest.approx(1) and maps.terms["b"][0, 1, 0] == pytest.approx(1)
    # (c) is e⁵ at distance 3 among S − 1 ones, where the queries of a segment see 13 to 20 keys;
    # the last sees 19.
    seen = np.array([*range(13, 21)] * 10 + [*range(13, 20)])
    assert maps.terms["c"][0, 0, 3] == pytest.approx(np.mean(np.exp(5) / (np.exp(5) + seen - 1)), rel=1e-6)
    assert maps.terms["a"][0, 0, 0] == pytest.approx(np.mean(1 / seen))


@pytest.mark.parametrize("position, words", [(50, 13 + 50 % 8), (3, 4), (0, 1)])
def test_words_stand_at_their_distance(position, words):
    maps = stub_maps(memory=12, position=position)
    (at,) = maps.at_positions
    before = ["abcdefg"[place % 7] for place in range(position - 1, -1, -1)] + ["</s>"]
    assert at.words == before[:words] and at.target == "abcdefg"[position % 7]
    assert at.weights.shape == (1, 2, words)
    assert at.weights[0, 0].argmax() == min(3, words - 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_several_positions_are_each_what_they_are_alone_and_stand_in_their_order(rows):
    chosen = [50, 3, 49, 102]
    together = stub_reader(memory=12, rows=rows).read(chosen).at_positions
    for position, at in zip(chosen, together, strict=True):
        (alone,) = stub_maps(memory=12, rows=rows, position=position).at_positions
        assert (at.position, at.words, at.target) == (position, alone.words, alone.target)
        np.testing.assert_array_equal(at.weights, alone.weights)


def test_positions_are_rows_one_under_another(transformer_xl, tmp_path, monkeypatch):
    drawn = {}

    def draw(panel, rows, scale):
        drawn[panel.get_subplotspec().rowspan.start] = rows.copy()
        return draw_rows(panel, rows, scale)

    draw_rows = plots._draw_rows
    with monkeypatch.context() as patch:
        patch.setattr(plots, "_draw_rows", draw)
        patch.setattr(plots, "draw_distances", lambda path, maps: path.write_bytes(b""))
        flags = "--heads 0:1,1:0 --positions 90,5,91,90 --first-tokens 200 --batch-size 2 --no-terms"
        figures = run(["--path", transformer_xl, "--results-path", tmp_path], flags)
    assert figures["at_positions"] == [90, 5, 91]
    with np.load(tmp_path / "attention.npz") as saved:
        assert saved["positions"].tolist() == [90, 5, 91] and saved["words"].shape == (3, 24 + 12)
        assert (saved["words"][1, 6:] == "").all() and (saved["words"][1, :6] != "").all()
        assert np.isnan(drawn[0]).sum(1).tolist() == [1, 30, 0]  # distances that a row does not have
        np.testing.assert_array_equal(np.nan_to_num(drawn[0]), saved["at_position"][:, 0, 1])
        np.testing.assert_array_equal(np.nan_to_num(drawn[1]), saved["at_position"][:, 1, 0])
    assert (tmp_path / "attention-position.png").read_bytes().startswith(b"\x89PNG")


class Watched(naive.NaiveLM):
    """The naive model, which notes what each head of each query attends to: (layer, head) →
    [[weight by distance]]."""

    def attention(self, name, context, queries, infused):
        dim, heads = self.args["decoder_embed_dim"], self.args["decoder_attention_heads"]
        placed = context + torch.stack([self.position(i) for i in range(len(context))]) if infused else context
        query, key = self.linear(f"{name}.q_proj", placed), self.linear(f"{name}.k_proj", placed)
        for head in range(heads):
            part = slice(head * dim // heads, (head + 1) * dim // heads)
            for place in range(len(context) - queries, len(context)):
                scores = key[: place + 1, part] @ query[place, part] / (dim / heads) ** 0.5
                self.seen[int(name.split(".")[2]), head].append(scores.softmax(0).flip(0).numpy())
        return super().attention(name, context, queries, infused)

    def read(self, source, length, rows, memory):
        """Averages [L, H, D] over the positions whose memory is full, and how many those are."""
        layers, heads = self.args["decoder_layers"], self.args["decoder_attention_heads"]
        sums, queries = np.zeros((layers, heads, memory + length)), 0
        segments = -(-len(source) // length)
        in_row = -(-segments // rows)
        cache = None
        for number in range(segments):
            cache = cache if number % in_row else None
            self.seen = {(layer, head): [] for layer in range(layers) for head in range(heads)}
            _, cache = self.hidden(source[number * length : (number + 1) * length], cache)
            if (number % in_row) * length < memory:
                continue
            queries += len(self.seen[0, 0])
            for (layer, head), found in self.seen.items():
                for weights in found:
                    sums[layer, head, : len(weights)] += weights
        return sums / queries, queries


@pytest.mark.parametrize(("memory", "rows"), [(0, 1), (11, 2)])
def test_averages_are_those_of_naive_accumulation(memory, rows, tmp_path, undrawn):
    vocabulary = len(Dictionary.load(str(runs.DATA / "dict.txt")))
    kind = {"tokens_from_prev": memory, "position_infused_attention": True} if memory else {}
    args, state = naive.checkpoint(tmp_path / "model.pt", vocabulary, tokens_per_sample=6, **kind)
    run(["--path", tmp_path / "model.pt", "--results-path", tmp_path], f"--first-tokens 57 --batch-size {rows}")
    tokens = IndexedCorpus(str(runs.DATA / "test")).tokens[:57]
    source = torch.from_numpy(np.concatenate([[naive.EOS], tokens[:-1]]).astype(np.int64))
    expected, queries = Watched(args, state).read(source, 6, rows, memory)
    with np.load(tmp_path / "attention.npz") as saved:
        assert saved["queries"] == queries
        np.testing.assert_allclose(saved["attention"], expected, atol=1e-6)
        np.testing.assert_allclose(saved["attention"].sum(-1), 1, atol=1e-6)
        assert saved["words"].dtype.kind == "U" and not any(name.startswith("term") for name in saved)


def test_without_path_the_model_that_is_drawn_is_the_one_named(tmp_path, undrawn):
    data = tmp_path / "run"
    shutil.copytree(runs.DATA, data)
    vocabulary = len(Dictionary.load(str(data / "dict.txt")))
    for seed, name in enumerate(("checkpoint_best.pt", "checkpoint_last.pt")):
        naive.checkpoint(data / name, vocabulary, seed=seed, tokens_per_sample=6)
    last = data / "checkpoint_last.pt"
    named = run(["--path", last, "--results-path", tmp_path / "a"], "--first-tokens 57", data=data)
    alone = run(["--results-path", tmp_path / "b"], "--first-tokens 57", data=last)
    assert alone["checkpoint"] == str(last) and alone["mean_distance"] == named["mean_distance"]


def test_a_transformer_xl_shows_everything(transformer_xl, tmp_path, capsys):
    flags = "--heads 0:1,1:0 --position 90 --first-tokens 200 --batch-size 2"
    figures = run(["--path", transformer_xl, "--results-path", tmp_path], flags)
    assert figures["segment"] == 16 and figures["memory"] == 24 and figures["rows"] == 2
    with np.load(tmp_path / "attention.npz") as saved:
        for name in ("attention", "term_a", "term_b", "term_c", "term_d"):
            assert saved[name].shape == (2, 2, 40)
            np.testing.assert_allclose(saved[name].sum(-1), 1, atol=1e-6)
        np.testing.assert_allclose(saved["at_position"].sum(-1), 1, atol=1e-6)
        far = (saved["attention"] * np.arange(40)).sum(-1)
    np.testing.assert_allclose(json.loads((tmp_path / "results.json").read_text())["mean_distance"], far)
    assert f"| 1 | {far[1].mean():.1f} |" in capsys.readouterr().out
    for name in ("distance", "position", "terms"):
        assert (tmp_path / f"attention-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["baseline", "shortformer", "transformer-xl"])
def test_maps_in_lower_precision_are_those_of_full_precision(model, transformer_xl, tmp_path, undrawn):
    path = {"baseline": BASELINE, "shortformer": SHORTFORMER, "transformer-xl": transformer_xl}[model]
    found = {}
    for precision in ("", "--bf16", "--fp16"):
        run(["--path", path], f"--first-tokens 300 {precision} --results-path", [tmp_path / f"out{precision}"])
        with np.load(tmp_path / f"out{precision}" / "attention.npz") as file:
            found[precision] = file["attention"]
    for precision in ("--bf16", "--fp16"):
        np.testing.assert_allclose(found[precision], found[""], atol=0.02)


def test_memory_that_is_not_filled_is_told_with_the_flags_that_decide_it(transformer_xl, tmp_path):
    place = ["--path", transformer_xl, "--results-path", tmp_path / "x"]
    ways = r"a shorter memory \(--mem-len\), more tokens \(--first-tokens\) or a longer split"
    for flags in ("--mem-len 2000000000", "--first-tokens 2"):
        with user_error(rf"tokens do not fill the memory of \d+; give {ways}$"):
            run(place, flags)
    with user_error(rf"9 tokens in 3 rows .*; give fewer rows \(--batch-size.*\), {ways}$"):
        run(place, "--first-tokens 9 --batch-size 3")
    assert not (tmp_path / "x").exists()


def test_results_are_all_of_one_run(transformer_xl, tmp_path, monkeypatch, undrawn):
    place = ["--path", transformer_xl, "--first-tokens", 100, "--results-path", tmp_path / "results"]
    run(place, "--heads 0:0")
    before = {file.name: file.read_bytes() for file in (tmp_path / "results").iterdir()}
    assert set(before) == FILES

    def interrupted(path, at, heads):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plots, "draw_position", interrupted)
        for folder in (tmp_path / "results", tmp_path / "new"):
            with pytest.raises(KeyboardInterrupt):
                run(["--path", transformer_xl, "--results-path", folder], "--first-tokens 100 --no-terms")
    assert {file.name: file.read_bytes() for file in (tmp_path / "results").iterdir()} == before
    assert not (tmp_path / "new").exists()
    run(place, "--no-terms")
    after = {file.name for file in (tmp_path / "results").iterdir()}
    assert after == FILES - {"attention-terms.png"}


def test_heads_are_drawn_once():
    assert parse_heads("0:1, 1:0,0:1,1:0", 2, 2) == [(0, 1), (1, 0)]


def test_same_length_and_another_memory_can_be_looked_at(transformer_xl, tmp_path, undrawn):
    run(["--path", transformer_xl, "--results-path", tmp_path], "--mem-len 40 --same-length --first-tokens 100")
    with np.load(tmp_path / "attention.npz") as saved:
        for name in ("attention", "term_a", "term_b", "term_c", "term_d"):
            assert (saved[name][..., :40] > 0).all() and (saved[name][..., 40:] == 0).all()
    run(
        ["--path", transformer_xl, "--results-path", tmp_path],
        "--mem-len 40 --same-length --first-tokens 100 --no-terms",
    )
    with np.load(tmp_path / "attention.npz") as saved:
        assert "term_b" not in saved
    assert not (tmp_path / "attention-terms.png").exists()


def test_a_position_with_full_memory_is_chosen_by_the_seed():
    reader = stub_reader(memory=30, rows=2)
    found = [reader.choose_position(seed) for seed in range(40)]
    assert found == [reader.choose_position(seed) for seed in range(40)]
    # Rows of seven and six segments of 8 tokens, of which the first four do not have 30 tokens
    # before them.
    assert {*found} == {39, 47, 55, 95, 102}


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--results-path out", "--path: name a checkpoint"),
        (f"--path {BASELINE}", "--results-path: is missing"),
        (f"--path {BASELINE}:{SHORTFORMER} --results-path out", "--path: 2 checkpoints"),
        (f"--path {BASELINE} --results-path out --terms", "--terms: needs relative attention"),
        (f"--path {BASELINE} --results-path out --heads 0", "--heads 0: expected layer:head pairs"),
        (f"--path {BASELINE} --results-path out --heads 0:1,", "--heads 0:1,: expected layer:head pairs"),
        (f"--path {BASELINE} --results-path out --heads 0:1,2:0", "--heads 2:0: out of range; layers go from 0 to 1"),
        (f"--path {BASELINE} --results-path out --heads -1:0", "--heads"),
        (f"--path {BASELINE} --results-path out --position -1", "--positions -1: must be at least 0"),
        (f"--path {BASELINE} --results-path out --position 2292", "--positions 2292: must be from 0 to"),
        (f"--path {BASELINE} --results-path out --first-tokens 9 --position 9", "--positions 9: must be from 0 to 8"),
        (f"--path {BASELINE} --results-path out --positions 3,2292", "--positions 2292: must be from 0 to 2291"),
        (f"--path {BASELINE} --results-path out --positions 3,x", "--positions: expected a whole number, got 'x'"),
        (f"--path {BASELINE} --results-path /dev/null/x", "--results-path /dev/null/x: cannot be written"),
        (
            f"--path {SHORTFORMER} --results-path out --first-tokens 64",
            "64 tokens do not fill the memory of 64; give more",
        ),
        (f"--path {SHORTFORMER} --results-path out --batch-size 40", "do not fill the memory of 64; give fewer rows"),
        (f"--path {SHORTFORMER} --results-path out --batch-size 40 --position 3", "do not fill the memory of 64"),
        (f"--path {BASELINE} --results-path out --gen-subset nothing", "nothing.idx: file not found"),
        (f"--path {BASELINE} --results-path out --sample-break-mode eos", "--sample-break-mode eos: the split is read"),
    ],
)
def test_mistakes_are_one_line(flags, line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fairseq-analyze", "attention", str(runs.DATA), "--cpu", *flags.split()])
    with pytest.raises(SystemExit) as end:
        analyze.cli_main()
    stderr = [text for text in capsys.readouterr().err.splitlines() if "error:" in text]
    assert end.value.code == 2 and len(stderr) == 1 and line in stderr[0]
    assert not list(tmp_path.rglob("*.*"))


def test_a_model_that_does_not_show_its_attention_is_refused():
    model = Stub(0)
    model.decoder.layers[0].self_attn = nn.Identity()
    with pytest.raises(UserError, match="path: Stub exposes no attention weights"):
        attention_modules(model)


def test_without_matplotlib_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with user_error(r"--results-path: plots need matplotlib.*pip install matplotlib"):
        run(["--path", BASELINE, "--results-path", tmp_path / "x"])
    assert not (tmp_path / "x").exists()
