"""fairseq-interactive: prompts in, running text out, the same by pipe and by file; text and tokens,
there and back."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
from types import SimpleNamespace

import naive
import pytest
import runs
import warm
from mistakes import user_error

from fairseq.config import options
from fairseq.hub import LanguageModel
from fairseq.inference import Search
from fairseq.inference import interactive as prompts
from fairseq.inference.writer import search_of
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


@pytest.mark.parametrize("how", ["", "--beam 3", f"{SAMPLING} --num-samples 3", f"{SAMPLING} --json"])
@pytest.mark.parametrize("checkpoint", [SHORTFORMER, BASELINE], ids=["shortformer", "baseline"])
def test_pipe_and_file_give_the_same_texts_in_the_same_order(checkpoint, how, pipe, capsys, tmp_path):
    (tmp_path / "prompts").write_text(PROMPTS)
    pipe(PROMPTS.encode())
    run(FLAGS, how, "--path", checkpoint)
    streamed = capsys.readouterr().out
    for batch_size in (1, 3):
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


def test_characters_are_what_a_model_of_characters_reads_and_writes(tmp_path, pipe, capsys):
    dictionary = Dictionary()
    for symbol in "abcdefgh_,.'":
        dictionary.add_symbol(symbol)
    dictionary.save(tmp_path / "dict.txt")
    naive.checkpoint(tmp_path / "c.pt", len(dictionary))
    pipe(b"bad cab, a\n")
    run("--cpu --sampling --max-new-tokens 200 --path", tmp_path / "c.pt", data=tmp_path / "dict.txt")
    text = capsys.readouterr().out
    assert text.startswith("bad cab, a") and len(text) == 10 + 200 + 1 and "_" not in text and " " in text[10:]
