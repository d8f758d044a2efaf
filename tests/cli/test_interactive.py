"""fairseq-interactive: prompts in, running text out, the same by pipe and by file; text and tokens,
there and back."""

from __future__ import annotations

import io
import json
import logging
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import naive
import pytest
import runs
import sacremoses
import warm
from mistakes import user_error

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.inference import Search
from fairseq.inference import interactive as prompts
from fairseq.inference.text import SPACES, detokenizer_of, never_written
from fairseq.inference.writer import search_of
from fairseq.text import raw_text
from fairseq.text.dictionary import Dictionary
from fairseq_cli import interactive
from fairseq_cli.generate import GenerateConfig
from fairseq_cli.interactive import InteractiveConfig, get_interactive_generation_parser

SHORTFORMER = runs.GOLDEN / "shortformer_stage2.pt"
BASELINE = runs.GOLDEN / "baseline.pt"
FLAGS = "--task language_modeling --cpu --max-new-tokens 25"
SAMPLING = "--sampling --sampling-topk 40"
PROMPTS = "= dun =\nshouth gres\n\nvoshamzath chen selkum sairoth . plom , plom\n"


def run(*flags, data=runs.DATA):
    args = options.parse_args_and_arch(get_interactive_generation_parser(), [str(data), *runs.words(*flags)])
    interactive.main(args)


@pytest.fixture
def pipe(monkeypatch):
    """Puts bytes into stdin."""

    def fill(content):
        stdin = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)

    return fill


# ---- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [SAMPLING, "", "--beam 3", f"{SAMPLING} --num-samples 3", f"{SAMPLING} --json"])
@pytest.mark.parametrize("checkpoint", [SHORTFORMER, BASELINE], ids=["shortformer", "baseline"])
def test_pipe_and_file_give_the_same_texts_in_the_same_order(checkpoint, how, pipe, capsys, tmp_path):
    (tmp_path / "prompts").write_text(PROMPTS)
    pipe(PROMPTS.encode())
    run(FLAGS, how, "--path", checkpoint)
    streamed = capsys.readouterr().out
    for batch_size in (1, 3, 64):
        run(FLAGS, how, "--path", checkpoint, "--input", tmp_path / "prompts", "--batch-size", batch_size)
        assert capsys.readouterr().out == streamed
    texts = streamed.splitlines() if "--json" in how else streamed.split("-" * 8 + "\n")
    assert len(texts) == 4 * (3 if "--num-samples" in how else 1)


def test_text_is_that_of_the_python_interface(pipe, capsys):
    model = LanguageModel.from_pretrained(SHORTFORMER, runs.DATA)
    pipe(b"shouth gres\n")
    run(FLAGS, SAMPLING, "--json --seed 6 --path", SHORTFORMER)
    found = json.loads(capsys.readouterr().out)
    words = [token if token != "</s>" else "\n" for token in (model.dictionary[i] for i in found["tokens"])]
    text = model.sample("shouth gres", max_tokens=25, top_k=40, seed=6)
    assert text.split() == ["shouth", "gres", *" ".join(words).split()]
    assert (found["prompt"], found["sample"], found["text"]) == (0, 0, "shouth gres")


def test_a_terminal_a_pipe_python_and_passages_choose_tokens_alike_by_default(monkeypatch, capsys):
    model = LanguageModel.from_pretrained(SHORTFORMER, runs.DATA)
    lines = model.sample("shouth gres", seed=1).removeprefix("shouth gres ").split("\n")
    for is_terminal in (True, False):
        stdin = SimpleNamespace(buffer=io.BytesIO(b"shouth gres\n"), isatty=lambda answer=is_terminal: answer)
        monkeypatch.setattr(sys, "stdin", stdin)
        run("--cpu --json --path", SHORTFORMER)
        tokens = json.loads(capsys.readouterr().out)["tokens"]
        assert [model.dictionary[token] for token in tokens] == " </s> ".join(lines).split()
    assert search_of(InteractiveConfig()) == search_of(GenerateConfig()) == Search()


def test_seed_and_prompt_number_decide_what_is_sampled(pipe, capsys):
    def texts(*flags):
        pipe(b"gres\ngres\n")
        run(FLAGS, SAMPLING, "--path", SHORTFORMER, *flags)
        return capsys.readouterr().out.split("-" * 8 + "\n")

    first, again, other = texts("--seed 1"), texts("--seed 1"), texts("--seed 2")
    assert first == again and len({*first, *other}) == 4


def test_tokens_are_shown_as_they_are_chosen(monkeypatch, pipe):
    shown = []
    monkeypatch.setattr(prompts, "print", lambda *text, **how: shown.append((*text, how["flush"])), raising=False)
    pipe(b"gres\n")
    run(FLAGS, SAMPLING, "--path", SHORTFORMER)
    assert len(shown) == 27 and all(flush for *_, flush in shown)
    assert sum(bool(text) for text, _ in shown) > 20


def test_unknown_words_are_named_in_one_warning(tmp_path, caplog, capsys):
    (tmp_path / "prompts").write_text("gres quux <unk> plom\nzork gres quux\n")
    with caplog.at_level(logging.WARNING):
        run(FLAGS, "--path", BASELINE, "--input", tmp_path / "prompts")
    assert [record.getMessage() for record in caplog.records] == [
        "57.1 % of 7 tokens are read as <unk>, not in the dictionary: quux zork"
    ]
    assert capsys.readouterr().out.startswith("gres <unk> <unk> plom ")


def test_prompt_longer_than_the_model_looks_back_is_read_and_told(pipe, caplog, capsys):
    pipe(b"gres " * 300 + b"\n" + b"gres\n")
    with caplog.at_level(logging.WARNING):
        run(FLAGS, "--path", SHORTFORMER)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == "prompt 1 (301 tokens): longer than segment and memory of the model, 128 tokens"
    assert capsys.readouterr().out.startswith("gres gres gres")


MISTAKES = {
    "": r"--path: name a checkpoint",
    "--path {model} --input {folder}/none": r"--input .*none: file not found",
    "--path {model} --input {folder}": r"--input .*: cannot be read \(Is a directory",
    "--path {model} --input {folder}/empty": r"--input .*empty: is empty; give a file",
    "--path {model} --input {folder}/latin": r"--input .*latin: line 2, byte 3: not UTF-8",
    "--path {model} --num-samples 2 --beam 1": r"--num-samples: 2 continuations .* without --sampling",
    "--path {model} --num-samples 2 --beam 4": r"--num-samples: 2 continuations .* without --sampling",
    "--path {model} --beam 2 --sampling": r"--beam 2 --sampling: .*give one",
    "--path {model} --batch-size 0": r"--batch-size 0: must be at least 1",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_told_in_one_line(flags, tmp_path, pipe):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes(b"gres\ngr\xe9s\n")
    pipe(b"g\xe9s\n")
    with user_error(MISTAKES[flags]) as error:
        run("--cpu", flags.format(model=BASELINE, folder=tmp_path))
    assert "\n" not in error.value.with_flags


def test_a_byte_that_is_not_utf8_does_not_end_a_session(pipe, capsys, caplog):
    pipe(b"\xef\xbb\xbfg\xe9s\ngres\n")
    with caplog.at_level(logging.WARNING):
        run(FLAGS, "--path", BASELINE, "--max-new-tokens 1 --json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == [0, 1] and lines[1]["text"] == "gres"
    assert "stdin: line 1, byte 5: not UTF-8, read as U+FFFD" in caplog.messages


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(pipe, capsys, tmp_path):
    outputs = []
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfgres\n")
    pipe(b"\xef\xbb\xbfgres\n")
    for flags in ([], ["--input", tmp_path / "prompts"]):
        run(FLAGS, "--path", BASELINE, "--max-new-tokens 1 --json", *flags)
        outputs.append(json.loads(capsys.readouterr().out)["text"])
    assert outputs == ["gres", "gres"]


def test_a_line_of_stdin_has_a_limit(monkeypatch):
    monkeypatch.setattr(raw_text, "LONGEST_ROW", 1 << 20)
    stdin = SimpleNamespace(buffer=io.BufferedReader(runs.Endless(2 << 20)), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(UserError, match="^stdin: line 1: longer than 1 MiB; split it$"):
        run(FLAGS, "--path", BASELINE)


def test_nothing_at_all_on_stdin_ends_cleanly(pipe, capsys):
    pipe(b"")
    run(FLAGS, "--path", BASELINE)
    assert capsys.readouterr().out == ""


def test_interruption_and_a_closed_pipe_end_without_a_traceback():
    endless = "--cpu --sampling --max-new-tokens 1000000 --path", SHORTFORMER
    broken, stopped = (
        warm.start("interactive.py", runs.DATA, endless, text=False, stdin=subprocess.PIPE) for _ in range(2)
    )
    for process in (broken, stopped):
        process.stdin.write(b"gres\n")
        process.stdin.flush()
        assert process.stdout.read(20).startswith(b"gres ")
    broken.stdout.close()
    stopped.send_signal(signal.SIGINT)
    for process, code in ((broken, 141), (stopped, 130)):
        assert process.wait(runs.TIMEOUT) == code
        assert b"Traceback" not in process.stderr.read()
        process.stdin.close()
        process.stderr.close()
    stopped.stdout.close()


def test_output_that_has_not_every_character_shows_the_rest():
    flags = runs.words(runs.DATA, "--cpu --max-new-tokens 3 --path", SHORTFORMER)
    command = [sys.executable, str(runs.ROOT / "interactive.py"), *flags]  # the encoding is the interpreter's
    environment = runs.environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, env=environment, input="é – gres\n".encode(), capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(rb"\xe9 \u2013 gres"), done.stderr


# ---- text --------------------------------------------------------------------------------------


def dictionary_of(*symbols):
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


@pytest.mark.parametrize(
    "words, text",
    [
        ('He said : " it is 5 % " ( so ) , Mr Dun \'s .', 'He said: "it is 5% "(so), Mr Dun\'s.'),
        ("a well @-@ known 20 @,@ 000 , 3 @.@ 5 @-@ fold one", "a well-known 20,000, 3.5-fold one"),
        ("= = Life cycle = =", "Life cycle"),
        ("= Dun @-@ Laoghaire ( town ) =", "Dun-Laoghaire (town)"),
        ("= not a heading", "= not a heading"),
        ("= x = y", "= x = y"),
        ("= =", "= ="),
        ("<unk> & <unk> &lt;", "<unk> & <unk> &lt;"),
    ],
)
def test_words_become_running_text(words, text):
    dictionary = dictionary_of(*dict.fromkeys(words.split()), "word")
    assert detokenizer_of(dictionary).decode([dictionary.index(word) for word in words.split()]) == text.replace(
        '% "(', '%" ('
    )


def test_subwords_are_joined():
    subwords = ["un@@", "know@@", "n", "thing@@", "s", ",", "a@@"]
    dictionary = dictionary_of(*subwords)
    assert detokenizer_of(dictionary, "@@ ").decode(map(dictionary.index, subwords)) == "unknown things, a"
    pieces = ["▁un", "known", "▁things", ",", "</s>", "▁", "un"]
    dictionary = dictionary_of("▁un", "known", "▁things", ",", "▁", "un")
    text = detokenizer_of(dictionary, "sentencepiece").decode(map(dictionary.index, pieces))
    assert text == "unknown things,\nun"


@pytest.mark.parametrize("seed", range(8))
def test_text_that_comes_in_pieces_is_that_of_the_whole(seed):
    choice = random.Random(seed)
    words = [
        "=",
        "@-@",
        "@,@",
        '"',
        "'",
        "'s",
        "(",
        ")",
        ",",
        ".",
        "$",
        "%",
        "–",
        "dun",
        "gre@@",
        "plom",
        "Vas",
        "5",
        ":",
    ]
    dictionary = dictionary_of(*words)
    detokenizer = detokenizer_of(dictionary, "@@ " if seed % 2 else None)
    tokens = [choice.choice([2, 4, *range(4, len(dictionary))]) for _ in range(300)]
    stream, shown, place = detokenizer.stream(), "", 0
    while place < len(tokens):
        size = choice.choice([1, 1, 1, 2, 20])
        shown += stream.add(tokens[place : place + size])
        place += size
    assert shown + stream.end() == detokenizer.decode(tokens)


MARKS = ['"', "'", "''", "``", "`", "„", "“", "”", "'s", "(", ")", ",", ".", "$", "¿", "%", "&", "&quot;"]


@pytest.mark.parametrize(
    "words",
    [
        ["dun", "gres", "'", "漢", "漢字", "x-y", *MARKS],
        ["dun", "gres", "'", '"'],
        ["plom", '"', "„"],
        MARKS[:8],
        ["(", '"', "'", "s"],
        [",", "."],
        ["漢", '"'],
    ],
)
def test_long_line_is_put_together_a_few_words_at_a_time_as_if_at_once(words, monkeypatch):
    whole = sacremoses.MosesDetokenizer(lang="en").detokenize
    lengths = []

    def counted(self, tokens, **how):
        lengths.append(len(tokens))
        return whole(tokens, **how)

    monkeypatch.setattr(sacremoses.MosesDetokenizer, "detokenize", counted)
    dictionary = dictionary_of(*words, "word")
    line = random.Random(5).choices(words, k=1500)
    stream = detokenizer_of(dictionary).stream()
    shown = "".join(stream.add([dictionary.index(word)]) for word in line)
    assert shown + stream.end() == whole(line, unescape=False)
    assert max(lengths) < 100 and sum(lengths) < 100 * len(line)


def test_what_follows_a_prompt_is_shown_apart_and_joins_it():
    dictionary = dictionary_of("=", "Dun", "well", "@-@", "known", "town")
    for prompt, after, parts in (
        ("= Dun", "town =", ("= Dun", " town =")),
        ("= Dun =", "</s> town", ("Dun", "\n" + "town")),
        ("well @-@", "known town", ("well-", "known town")),
        ("Dun", "town", ("Dun", " town")),
        ("", "Dun", ("", "Dun")),
    ):
        stream = detokenizer_of(dictionary).stream()
        before = stream.add(map(dictionary.index, prompt.split())) + stream.pause()
        assert (before, stream.add(map(dictionary.index, after.split())) + stream.end()) == parts


def test_bytes_are_text_and_back():
    dictionary = dictionary_of(*map(str, range(256)))
    detokenizer = detokenizer_of(dictionary)
    tokens, unknown = detokenizer.encode("Köln – “5”")
    assert not unknown and len(tokens) == len("Köln – “5”".encode())
    assert detokenizer.decode([*tokens, 2, *detokenizer.encode("ä")[0]]) == "Köln – “5”\nä"
    stream = detokenizer.stream()
    first, second = detokenizer.encode("ä")[0]
    assert (stream.add([first]), stream.add([second]), stream.add([second, first]), stream.end()) == ("", "ä", "�", "�")
    assert dictionary_of("65").symbols and detokenizer_of(dictionary_of("65")).encode("AB") == ([4, 3], ["66"])


@pytest.mark.parametrize("space", [*SPACES, None])
def test_characters_are_text_and_back(space):
    dictionary = dictionary_of("a", "b", "'", ".", *([space] if space else []))
    detokenizer = detokenizer_of(dictionary)
    tokens, unknown = detokenizer.encode("ab a. cab")
    assert unknown == ["c"] and len(tokens) == 9
    assert detokenizer.decode(tokens) == "ab a. <unk>ab"
    assert detokenizer.decode([4, 2, 5]) == ("a\nb" if space else "a b")  # text8 has no lines: its spaces end them


def test_what_is_never_written():
    dictionary = dictionary_of("a", "madeupword")
    dictionary.pad_to_multiple_(8)
    assert [dictionary[i] for i in never_written(dictionary)] == [
        "<s>",
        "<pad>",
        "<unk>",
        "madeupword0000",
        "madeupword0001",
    ]
    listed = Dictionary.of_listed(["<eos>", "a", "<unk>", "b"], {"eos": "<eos>", "unk": "<unk>"})
    assert never_written(listed) == [2]


def test_characters_are_what_a_model_of_characters_reads_and_writes(tmp_path, pipe, capsys):
    dictionary = dictionary_of(*"abcdefgh_,.'")
    dictionary.save(tmp_path / "dict.txt")
    naive.checkpoint(tmp_path / "c.pt", len(dictionary))
    pipe(b"bad cab, a\n")
    run("--cpu --sampling --max-new-tokens 200 --path", tmp_path / "c.pt", data=tmp_path / "dict.txt")
    text = capsys.readouterr().out
    assert text.startswith("bad cab, a") and len(text) == 10 + 200 + 1 and "_" not in text and " " in text[10:]
