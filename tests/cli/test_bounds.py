"""What settings and files ask for is bounded: one line each, before memory or hours are spent."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import runs
from mistakes import user_error

from fairseq.config import options
from fairseq.config.fields import parse_dict
from fairseq.config.settings_file import read_yaml
from fairseq.errors import UserError
from fairseq.system.plugins import import_user_module
from fairseq.system.workers import Workers
from fairseq_cli import generate, interactive
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser

LARGEST = str(2**63 - 1)


@contextlib.contextmanager
def little_memory(more=1 << 30):
    """Let this process allocate at most *more* bytes: an unbounded read or model fails at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "flags",
    [
        *(f"--decoder-layers {LARGEST}", "--decoder-layers 1000000", "--lr 1e300", "--tokens-from-prev -1"),
        *("--nprocs-per-node 100000 --distributed-world-size 100000", "--max-update " + "9" * 5000),
        *("--dropout nan", "--activation-dropout 1", "--lr 0", "--update-freq 1,0", "--fp16-init-scale 0"),
    ],
)
def test_values_beyond_all_use_name_their_flag(mistake, flags):
    line = mistake(*flags.split())
    assert line.startswith(flags.split()[0]) and len(line) < 250


@pytest.mark.parametrize(
    "flags",
    [
        "--decoder-ffn-embed-dim 2000000000",
        "--decoder-embed-dim 1000000",
        "--decoder-learned-pos --max-target-positions 2000000000",
    ],
)
def test_a_model_larger_than_memory_is_one_line(mistake, flags):
    with little_memory():
        assert mistake(*flags.split()).startswith("out of host memory")


@pytest.mark.parametrize(
    "flag",
    [
        *("--valid-subset", "--save-dir", "--optimizer-overrides", "--update-freq", "--lr"),
    ],
)
def test_empty_values_name_their_flag(mistake, flag):
    assert flag in mistake(flag, "")


def test_overrides_with_other_keys_than_names():
    for text in ("{[]: 2}", "{1: 2}", "{" * 5000, "{'a'"):
        with user_error("--model-overrides .*expected a dict"):
            parse_dict("--model-overrides", text)


@pytest.mark.parametrize("parser", [get_generation_parser, get_interactive_generation_parser])
def test_samples_for_hours_are_rejected(parser):
    for flags in ("--num-samples 99999999999", "--num-samples 2000000000", "--beam 1000000"):
        with user_error(flags.split()[0]):
            options.parse_args_and_arch(parser(), [str(runs.DATA), "--path", "x", *flags.split()])


def test_too_many_tokens_of_all_samples_are_rejected_before_a_model_is_loaded():
    flags = [
        str(runs.DATA),
        "--path",
        "missing.pt",
        "--sampling",
        "--num-samples",
        "1000000",
        "--max-new-tokens",
        "10000000",
    ]
    for command, parser in (
        (generate, get_generation_parser),
        (interactive, get_interactive_generation_parser),
    ):
        with user_error(r"--num-samples: 1000000 .* are more than 100,000,000 tokens; lower"):
            command.main(options.parse_args_and_arch(parser(), flags))


# --- YAML


@pytest.mark.parametrize(
    "text",
    [
        *(
            "patience: 10:20",
            "patience: 1e400",
            "lr: [[1]]",
            "? [1, 2]\n: 3",
            "1: 2",
            "a: 1\n---\nb: 2",
            "weight_decay: .nan",
        ),
        *('tensorboard_logdir: "a\\0b"', "\0", "x: !!python/object/apply:os.system ['id']"),
    ],
)
def test_yaml_that_cannot_be_settings_is_one_line(mistake, tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    assert len(mistake("--config", tmp_path / "c.yaml")) < 400


@pytest.mark.parametrize("path", ["missing", "."])
def test_a_config_that_is_no_file(mistake, tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mistake("--config", path).startswith(f"--config {path}: ")


def test_a_config_may_hold_lists_and_overrides(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: [1, 2.5]\nmodel-overrides: {dropout: 0.1}\nstages: '8:1,16:2'\n")
    assert read_yaml(tmp_path / "c.yaml") == {
        "lr": ["1", "2.5"],
        "model_overrides": {"dropout": "0.1"},
        "stages": "8:1,16:2",
    }


# --- plug-ins


@pytest.mark.parametrize(
    "number, text, line, reason",
    [
        (1, "x = 1\ndef f(:\n", 2, "SyntaxError: "),
        (2, "\n\nimport no_such_module_here\n", 3, "ModuleNotFoundError: No module named 'no_such_module_here'"),
        (3, "import sys\nsys.exit(0)\n", 2, "SystemExit: 0"),
        (4, "def f():\n    raise ValueError('two\\nlines')\nf()\n", 2, "ValueError: two lines"),
    ],
)
def test_a_plugin_that_fails_names_its_line(mistake, tmp_path, number, text, line, reason):
    folder = tmp_path / f"plugin_that_fails_{number}"
    folder.mkdir()
    (folder / "__init__.py").write_text(text)
    found = mistake("--user-dir", folder)
    assert found.startswith(f"--user-dir {folder}: {folder}/__init__.py, line {line}: {reason}")


def test_an_empty_folder_beside_a_module_of_its_name_runs_nothing(mistake, tmp_path):
    (tmp_path / "plugin_empty").mkdir()
    (tmp_path / "plugin_empty.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert mistake("--user-dir", tmp_path / "plugin_empty").startswith(
        f"--user-dir {tmp_path}/plugin_empty: no __init__.py"
    )
    assert not (tmp_path / "ran").exists()


def test_a_module_found_before_the_plugin_does_not_run(mistake, tmp_path, monkeypatch):
    for place in ("first", "second"):
        (tmp_path / place / "plugin_twice").mkdir(parents=True)
        (tmp_path / place / "plugin_twice" / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path / "second")
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert "another module named plugin_twice is found first" in mistake("--user-dir", tmp_path / "second/plugin_twice")
    shutil.rmtree(tmp_path / "first")


def test_what_lies_beside_a_plugin_is_not_importable(tmp_path, monkeypatch):
    folder = tmp_path / "plugin_with_neighbours"
    folder.mkdir()
    (folder / "part.py").write_text("LOADED = True\n")
    (folder / "__init__.py").write_text(
        "from plugin_with_neighbours.part import LOADED\nfrom . import part\nimport plugin_neighbour\n"
    )
    for name in ("plugin_neighbour", "colorsys"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    before = list(sys.path)
    with pytest.raises(UserError, match="line 3: ModuleNotFoundError: No module named 'plugin_neighbour'"):
        import_user_module(str(folder))
    (folder / "__init__.py").write_text("from plugin_with_neighbours.part import LOADED\nimport colorsys\n")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import_user_module(str(folder))
    assert sys.modules["plugin_with_neighbours"].LOADED and sys.path == before
    assert not (tmp_path / "ran").exists()


def test_processes_of_preprocessing_know_the_plugin_of_a_tokenizer(tmp_path):
    folder = tmp_path / "plugin_of_words"
    folder.mkdir()
    (folder / "__init__.py").write_text("def shout(text):\n    return text.upper()\n")
    import_user_module(str(folder))
    with Workers(sys.modules["plugin_of_words"].shout, 2) as workers:
        assert list(workers.map([("a",), ("b",)])) == ["A", "B"]
