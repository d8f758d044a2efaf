"""Models from elsewhere give the numbers of their own programs, and all commands read them."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path

import naive_xl
import numpy as np
import pytest
import runs
import torch
from imports import AUTHORS, HF, NAMES, SHAPES, SMALL, authors, golden, hugging_face, refusal, saved, some_tokens
from safetensors.torch import save_file

from fairseq import checkpoint
from fairseq.config import options
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm, import_model, preprocess
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.import_model import get_import_parser
from fairseq_cli.preprocess import get_preprocessing_parser

# The numbers of the originals


@dataclass
class Corpus:
    tokens: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray


@pytest.mark.parametrize("name", NAMES)
def test_authors_models_give_the_authors_numbers(name, tmp_path):
    config, expected = golden(name)
    argv = ["--config", AUTHORS / f"{name}.json"]
    model = LanguageModel.from_pretrained(authors(AUTHORS / f"{name}.state_dict.pt", tmp_path / "out", *argv))
    tokens = torch.from_numpy(expected["tokens"]).t()
    nll = model.score_tokens(tokens, config["tgt_len"], config["mem_len"])
    assert nll.dtype == torch.float32 and np.abs(nll.t().numpy() - expected["nll"]).max() < 1e-5
    longer = model.score_tokens(tokens, config["eval_tgt_len_long"], config["eval_mem_len_long"])
    assert np.abs(longer.t().numpy() - expected["nll_long"]).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_naive_implementation_gives_the_authors_numbers(name):
    config, expected = golden(name)
    state = torch.load(AUTHORS / f"{name}.state_dict.pt", weights_only=True)
    tokens = expected["tokens"].T[:1, :37]
    nll = naive_xl.nll(state, config, tokens, config["tgt_len"], config["mem_len"])
    assert np.abs(nll.T - expected["nll"][:36, :1]).max() < 1e-5


def test_saved_module_is_its_state_dict_and_settings(tmp_path):
    config = AUTHORS / "adaptive_div1.json"
    one = checkpoint.load(authors(AUTHORS / "adaptive_div1.model.pt", tmp_path / "a") / "checkpoint.pt")
    state_dict = AUTHORS / "adaptive_div1.state_dict.pt"
    other = checkpoint.load(authors(state_dict, tmp_path / "b", "--config", config) / "checkpoint.pt")
    assert one["args"] == other["args"] and one["model"].keys() == other["model"].keys()
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


def test_folder_of_the_authors_is_read_for_its_model(tmp_path):
    shutil.copy(AUTHORS / "adaptive_div1.model.pt", tmp_path / "model.pt")
    assert (authors(tmp_path, tmp_path / "out") / "checkpoint.pt").exists()


@pytest.mark.parametrize("start, file", [("empty", "expected.npz"), ("zeros", "zero_start.npz")])
def test_hugging_face_model_gives_its_numbers_from_either_start(start, file, tmp_path):
    with np.load(HF / "expected.npz") as inputs, np.load(HF / file) as expected:
        tokens, nll = torch.from_numpy(inputs["input_ids"]), expected["nll"]
    out = hugging_face(HF, tmp_path / "out")
    model = LanguageModel.from_pretrained(out, overrides={"memory_start": start})
    assert np.abs(model.score_tokens(tokens, 12, 24).numpy() - nll).max() < 1e-5
    assert model.model.cfg.memory_start == start


# Models that are not in golden/, against the naive implementation


@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_other_shapes_agree_with_the_naive_implementation(shape, tmp_path):
    config = {**SMALL, **SHAPES[shape]}
    given = {key: value for key, value in config.items() if key != "d_embed"}
    path, state = saved(tmp_path, given, naive_xl.random_state(config))
    model = LanguageModel.from_pretrained(authors(path, tmp_path / "out", "--config", tmp_path / "config.json"))
    tokens = some_tokens()
    choices = [(5, 6), (3, 11)] if config["mem_len"] else [(5, 0), (4, 0)]
    for segment, memory in choices:
        expected = naive_xl.nll(state, config, tokens.numpy(), segment, memory)
        assert np.abs(model.score_tokens(tokens, segment, memory).numpy() - expected).max() < 2e-5


def hf_folder(folder: Path, config: dict, file: str) -> dict:
    """A random model in Hugging Face's files; returns the authors' state dict, with biases a
    layer."""
    state = naive_xl.random_state(config)
    if config["untie_r"]:
        for layer in range(config["n_layer"]):
            for bias in ("r_w_bias", "r_r_bias"):
                state[f"layers.{layer}.dec_attn.{bias}"] = state[bias] + 0.1 * layer
        del state["r_w_bias"], state["r_r_bias"]
    theirs = {name if name.startswith("crit.") else f"transformer.{name}": value for name, value in state.items()}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        theirs[name] = theirs[name].flip(0).contiguous()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "transfo-xl", "eos_token_id": 2, **config}))
    if file.endswith(".bin"):
        torch.save(theirs, folder / file)
    else:  # which holds a tensor once: of tied ones, that of the input
        ties = [f"crit.out_projs.{band}" for band, tied in enumerate(config["tie_projs"]) if tied]
        ties += [name for name in theirs if name.startswith("crit.out_layers.") and name.endswith(".weight")]
        save_file({name: value for name, value in theirs.items() if name not in ties}, folder / file)
    return state


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("untie_r", [True, False])
def test_hugging_face_files_agree_with_the_naive_implementation(file, untie_r, tmp_path):
    config = {**SMALL, "untie_r": untie_r, "d_embed": 8, "div_val": 2, "tie_projs": [False, True, True]}
    state = hf_folder(tmp_path / "in", config, file)
    out = hugging_face(tmp_path / "in", tmp_path / "out")
    tokens = some_tokens()
    for start in ("empty", "zeros"):
        model = LanguageModel.from_pretrained(out, overrides={"memory_start": start})
        expected = naive_xl.nll(state, config, tokens.numpy(), 5, 6, start)
        assert np.abs(model.score_tokens(tokens, 5, 6).numpy() - expected).max() < 2e-5
    assert model.dictionary.eos() == 2


# Dictionaries and the other commands


@pytest.mark.parametrize("changes", [{"div_val": 2}, {"cutoffs": [], "tie_projs": []}])
def test_imported_model_is_evaluated_on_text_in_its_own_words(changes, tmp_path):
    config = {**SMALL, **changes}
    path, state = saved(tmp_path, config)
    out = authors(path, tmp_path / "out", "--config", tmp_path / "config.json")
    words = [f"token{index}" for index in range(40)]
    assert (out / "dict.txt").read_text() == "#specials eos=token0\n" + "".join(f"{word} 0\n" for word in words)
    ids = some_tokens(rows=1, length=23)[0].clamp(min=1).tolist()
    lines = [ids[:7], ids[7:15], ids[15:]]
    (tmp_path / "text").write_text("".join(" ".join(words[i] for i in line) + "\n" for line in lines))
    evaluated = evaluate(out, tmp_path, "--batch-size 2 --tokens-per-sample 5")
    corpus = [*lines[0], 0, *lines[1], 0, *lines[2], 0]
    assert evaluated["tokens"].tolist() == corpus
    half = 5 * 3  # two rows of three segments, the last one a token long
    rows = [[0, *corpus[:half]], [corpus[half - 1], *corpus[half:]]]
    expected = np.concatenate([naive_xl.nll(state, config, np.array([row]), 5, 6)[0] for row in rows])
    assert np.abs(evaluated["lprobs"] + expected).max() < 2e-5


def evaluate(out: Path, folder: Path, flags: str) -> dict[str, np.ndarray]:
    """``fairseq-preprocess`` of ``text`` with the imported dictionary, then ``fairseq-eval-lm``."""
    argv = f"--only-source --srcdict {out}/dict.txt --testpref {folder}/text --destdir {folder}/data"
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), argv.split()))
    assert (folder / "data" / "dict.txt").read_bytes() == (out / "dict.txt").read_bytes()
    argv = f"{folder}/data --cpu --path {out}/checkpoint.pt --save-token-scores {folder}/scores.npz {flags}"
    eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), argv.split()))
    with np.load(folder / "scores.npz") as scores:
        return dict(scores)


def hf_with_vocabulary(folder: Path, file: str, content: object) -> Path:
    shutil.copytree(HF, folder)
    path = folder / file
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif file == "vocab.bin":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    return folder


WORDS = ["<eos>", "the", "<unk>", *(f"wört{i}" for i in range(697))]
IDS = {word: index for index, word in enumerate(WORDS)}
PICKLED = {
    "counter": Counter(WORDS),
    "pattern": re.compile("x"),
    "places": defaultdict(list, {"a": [1]}),
    "min_freq": 0,
    "idx2sym": WORDS,
    "sym2idx": OrderedDict(IDS),
}


@pytest.mark.parametrize(
    "file, content",
    [
        ("vocab.txt", "".join(f"{word} 5\n" for word in WORDS)),
        ("vocab.json", json.dumps(IDS)),
        ("vocab.json", json.dumps(WORDS)),
        ("vocab.pkl", PICKLED),
        ("vocab.bin", PICKLED),
    ],
)
def test_vocabulary_of_the_folder_becomes_the_dictionary_with_its_ids(file, content, tmp_path):
    source = hf_with_vocabulary(tmp_path / "in", file, content)
    dictionary = LanguageModel.from_pretrained(hugging_face(source, tmp_path / "out")).dictionary
    assert dictionary.symbols == WORDS
    assert (dictionary.eos(), dictionary.unk(), dictionary.pad(), dictionary.bos()) == (0, 2, -1, -1)
    assert dictionary.encode("the unheard wört5").tolist() == [1, 2, 8, 0]


def test_words_that_text_cannot_hold_are_written_without_white_space(tmp_path):
    words = ["<eos>", "a b", "", "token2", "x", "x", "\u200b", "c\n", *WORDS[8:]]
    out = hugging_face(hf_with_vocabulary(tmp_path / "in", "vocab.pkl", words), tmp_path / "out")
    symbols = LanguageModel.from_pretrained(out).dictionary.symbols
    assert symbols[:8] == ["<eos>", "a<0x20>b", "<0x>", "token2", "x", "madeupword0005", "\u200b", "c<0x0A>"]
    assert symbols[8:] == WORDS[8:]


@pytest.mark.parametrize(
    "file, content, reason",
    [
        ("vocab.txt", "one\ntwo\n", "has 2 words, but its model 700"),
        ("vocab.json", "{", "not valid JSON"),
        ("vocab.json", '{"a": 0, "b": 2}', "unknown vocabulary format"),
        ("vocab.pkl", [1, 2], "unknown vocabulary format"),
        ("vocab.pkl", {"sym2idx": 3}, "unknown vocabulary format"),
    ],
)
def test_vocabulary_that_does_not_fit_is_refused(file, content, reason, tmp_path):
    source = hf_with_vocabulary(tmp_path / "in", file, content)
    assert reason in refusal(source, "--from", "hf-transfo-xl", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_for_a_model_that_came_without_words_is_refused_with_what_to_do(tmp_path):
    path, _ = saved(tmp_path, SMALL)
    out = authors(path, tmp_path / "out", "--config", tmp_path / "config.json")
    (tmp_path / "text").write_text("token1 token2\ntoken3 other\n")
    wanted = (
        f"'other': the dictionary {out}/dict.txt has placeholders (token0, token1, …) for words, because the model "
        "came without any; score ids with LanguageModel.score_tokens, or put the model's own words into its file, in "
        "the order of their ids"
    )
    with pytest.raises(UserError) as error:
        evaluate(out, tmp_path, "--batch-size 1")
    assert str(error.value) == wanted
    model = LanguageModel.from_pretrained(out)
    for ask in (model.score, model.sample):
        with pytest.raises(UserError) as error:
            ask("other")
        assert str(error.value) == wanted


def test_text_with_a_word_that_the_dictionary_does_not_have_is_refused_with_what_to_do(tmp_path):
    path, _ = saved(tmp_path, SMALL)
    out = authors(path, tmp_path / "out", "--config", tmp_path / "config.json")
    words = "".join(f"word{index} 1\n" for index in range(40))
    (out / "dict.txt").write_text(f"#specials eos=word0\n{words}")
    (tmp_path / "text").write_text("word1 word2\nword3 other\n")
    wanted = f"'other': the dictionary {out}/dict.txt has no such word, and no symbol for unknown ones; "
    for ask in (
        lambda: evaluate(out, tmp_path, "--batch-size 1"),
        lambda: LanguageModel.from_pretrained(out).score("other"),
    ):
        with pytest.raises(UserError) as error:
            ask()
        assert str(error.value).startswith(wanted) and "unk=WORD" in str(error.value)
    (out / "dict.txt").write_text(f"#specials eos=word0 unk=word1\n{words}")  # what the message proposes
    assert LanguageModel.from_pretrained(out).dictionary.encode("other").tolist() == [1, 0]


@pytest.mark.parametrize(
    "content, reason",
    [
        ("#specials eos=b\na 1\n", "line 1: eos=b: the dictionary has no such word"),
        ("#specials unk=a\na 1\n", "line 1: expected #specials eos=WORD"),
        ("#specials eos=a end=a\na 1\n", "line 1: expected #specials eos=WORD"),
        ("#specials eos=a\na 1\na 2\n", "line 3: 'a' is in the dictionary already"),
        ("#specials eos=a\na 1\nb\n", "line 3: expected `word count`"),
    ],
)
def test_damaged_dictionary_of_listed_symbols_is_refused(content, reason, tmp_path):
    (tmp_path / "dict.txt").write_text(content)
    with pytest.raises(UserError) as error:
        Dictionary.load(tmp_path / "dict.txt")
    assert str(error.value).startswith(f"{tmp_path}/dict.txt: {reason}")


def test_dictionary_of_listed_symbols_is_written_as_it_was_read(tmp_path):
    content = "#specials bos=<s> pad=p eos=a=b unk=u\nx 4\na=b 0\n<s> 3\np 0\nu 1\n#specials 7\n"
    (tmp_path / "dict.txt").write_text(content)
    dictionary = Dictionary.load(tmp_path / "dict.txt")
    assert dictionary.symbols == ["x", "a=b", "<s>", "p", "u", "#specials"] and dictionary.count == [4, 0, 3, 0, 1, 7]
    assert (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk()) == (2, 3, 1, 4)
    dictionary.save(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == content


@pytest.mark.parametrize("content", ["#specials 3\nb 2\n", "#specials eos=b 3\nb 2\n"])
def test_ordinary_dictionary_may_have_words_that_look_like_a_header(content, tmp_path):
    (tmp_path / "dict.txt").write_text(content)
    dictionary = Dictionary.load(tmp_path / "dict.txt")
    assert len(dictionary) == 6 and (dictionary.eos(), dictionary.pad(), dictionary.unk()) == (2, 1, 3)
    dictionary.save(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == content


def test_rows_are_filled_up_with_no_word_where_there_is_no_padding():
    tokens = np.arange(1, 8, dtype=np.uint16)
    corpus = Corpus(tokens, np.array([7], dtype=np.int32), np.array([0, 7]))
    sample = TokenBlocks(corpus, 4, "none", pad=-1, eos=0).batch(np.array([0, 1]))
    assert sample["net_input"]["src_tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, -1]]
    assert sample["target"].tolist() == [[1, 2, 3, 4], [5, 6, 7, -1]] and sample["ntokens"] == 7


def test_dictionary_must_be_given_where_none_is_beside_the_checkpoint(tmp_path):
    path, _ = saved(tmp_path, SMALL)
    out = authors(path, tmp_path / "out", "--config", tmp_path / "config.json")
    assert len(LanguageModel.from_pretrained(out / "checkpoint.pt").dictionary) == 40
    (out / "dict.txt").rename(tmp_path / "dict.txt")
    assert len(LanguageModel.from_pretrained(out, tmp_path / "dict.txt").dictionary) == 40
    with pytest.raises(UserError, match="dict.txt: file not found"):
        LanguageModel.from_pretrained(out)


class Vocab:
    """As the authors' code pickles it, but for what is not read."""


def vocabulary(path: Path, words: list[str], kind: str) -> Path:
    """A file of *words*: a list, or a corpus as old and new versions of torch write it."""
    if kind == "list":
        # Of a word that is listed again, the first line counts; other separators are no line ends.
        path.write_text("".join(f"{word}\u2028more 7\n" for word in [*words, words[1]]))
        return path
    corpus, corpus.vocab = (Vocab(),) * 2 if kind == "vocabulary" else (Vocab(), Vocab())
    corpus.vocab.__dict__.update(idx2sym=words, sym2idx=OrderedDict((w, i) for i, w in enumerate(words)), eos_idx=0)
    corpus.vocab.counter, corpus.train = Counter(words), torch.arange(9)
    torch.save(corpus, path, _use_new_zipfile_serialization=kind != "old corpus")
    return path


@pytest.mark.parametrize("kind", ["corpus", "old corpus", "vocabulary", "list"])
def test_the_page_on_the_authors_checkpoints_gives_the_authors_numbers(kind, tmp_path, capsys):
    page = (runs.ROOT / "docs" / "coming-from.md").read_text()
    commands = (
        page.split("### The authors' checkpoints")[1]
        .split("```bash\n")[1]
        .split("```")[0]
        .replace("\\\n", " ")
        .splitlines()
    )
    config, expected = golden("same_length_clamp")
    words = ["<eos>", *(f"w{index}" for index in range(1, config["vocab_size"]))]
    stream = expected["tokens"][:200, 0].tolist()
    text = "".join("\n" if index == 0 else f"{words[index]} " for index in stream)
    (tmp_path / "wiki.test.tokens").write_text(f"{text}\n")
    files = {
        "model.pt": f"{AUTHORS}/same_length_clamp.state_dict.pt --config {AUTHORS}/same_length_clamp.json",
        "cache.pt": str(vocabulary(tmp_path / "cache.pt", words, kind)),
        **{name: str(tmp_path / name) for name in ("imported", "authors-bin", "wiki.test.tokens")},
    }
    for name, path in files.items():
        commands = [re.sub(rf"(?<=[ ]){re.escape(name)}(?=[ /]|$)", path, command) for command in commands]
    parsers = {
        "fairseq-import": (import_model, get_import_parser),
        "fairseq-preprocess": (preprocess, get_preprocessing_parser),
        "fairseq-eval-lm": (eval_lm, get_eval_lm_parser),
    }
    for command in commands:
        name, *argv = command.split()
        # One row, as the reference reads the text.
        argv += ["--batch-size", "1", "--cpu"] * (name == "fairseq-eval-lm")
        program, parser = parsers[name]
        program.main(options.parse_args_and_arch(parser(), argv))
    state = torch.load(AUTHORS / "same_length_clamp.state_dict.pt", weights_only=True)
    settings = {**config, "same_length": True, "clamp_len": 400}
    nll = naive_xl.nll(state, settings, torch.tensor([[0, *stream, 0]]).numpy(), 64, 640)
    found = re.search(r"Loss \(base 2\): ([\d.]+)", capsys.readouterr().out)
    assert found and float(found[1]) == pytest.approx(float(nll.mean()) / np.log(2), abs=6e-5)


def test_a_vocabulary_of_another_size_or_with_code_in_it_is_refused(tmp_path):
    argv = [AUTHORS / "base.state_dict.pt", "--from", "transformer-xl", "--config", AUTHORS / "base.json"]
    small = vocabulary(tmp_path / "small.txt", ["<eos>", "a"], "list")
    assert refusal(*argv, "--vocab", small, "--out", tmp_path / "out").startswith(
        f"--vocab {small}: has 2 words, but the model 600; give its own"
    )
    evil = tmp_path / "evil.pt"
    evil.write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    assert "rejected: the pickle contains os.system" in refusal(*argv, "--vocab", evil, "--out", tmp_path / "out")
    assert "has no list of words" in refusal(*argv, "--vocab", argv[0], "--out", tmp_path / "out")


def test_imported_model_generates_and_trains_on(tmp_path):
    path, _ = saved(tmp_path, SMALL)
    out = authors(path, tmp_path / "out", "--config", tmp_path / "config.json")
    text = LanguageModel.from_pretrained(out).sample("token3 token4", max_tokens=30, seed=1)
    assert text.startswith("token3 token4") and len(text.split()) > 4
    (tmp_path / "text").write_text("token1 token2 token30\ntoken25 token9\n" * 20)
    prefs = f"--trainpref {tmp_path}/text --validpref {tmp_path}/text --destdir {tmp_path}/data"
    argv = f"--only-source --srcdict {out}/dict.txt {prefs}".split()
    preprocess.main(options.parse_args_and_arch(get_preprocessing_parser(), argv))
    model = "--arch transformer_xl --n-layer 2 --n-head 2 --d-model 12 --d-inner 16 --cutoffs 9,22 --mem-len 6"
    batches = "--tokens-per-sample 6 --batch-size 3 --required-batch-size-multiple 1 --max-update 20 --optimizer adam"
    flags = f"{model} {batches} --dropout 0 --lr 0.02 --cpu --seed 1 --log-format json --log-interval 1"
    log = runs.train(tmp_path / "run", flags, f"--restore-file {out}/checkpoint.pt", data=tmp_path / "data")
    losses = [
        float(line["train_inner"]["loss"]) if "train_inner" in line else float(line["loss"])
        for line in log
        if "loss" in line
    ]
    assert losses[-1] < losses[0] - 1
