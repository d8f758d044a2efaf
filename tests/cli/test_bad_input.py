"""A user's mistake in ``fairseq-train`` is one line that names the flag or file, with exit code 2."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
import sys

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq_cli import train as train_command

TRAIN = f"{runs.BASELINE} --max-update 2"


@pytest.fixture
def mistake(monkeypatch, capsys, tmp_path):
    """Run the command on a mistake; returns the line on stderr that tells of it."""

    def run(*flags, data=runs.DATA, base=TRAIN):
        words = runs.words("--save-dir", tmp_path / "checkpoints", base)
        # exact words, so that values may hold spaces
        monkeypatch.setattr(sys, "argv", ["train.py", *([] if data is None else [str(data)]), *words, *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            train_command.cli_main()
        stderr = capsys.readouterr().err.splitlines()
        assert end.value.code == 2, stderr
        assert len(stderr) == 1 and stderr[0].startswith("train.py: error: "), stderr
        return stderr[0].removeprefix("train.py: error: ")

    return run


@pytest.fixture
def data(tmp_path):
    """A copy of the data that may be damaged."""
    return shutil.copytree(runs.DATA, tmp_path / "data-bin")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    runs.train(folder, TRAIN, "--disable-validation")
    return folder / "checkpoint_last.pt"


# --- flags


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "--arch transformer_lm_wiki104",
            "--arch transformer_lm_wiki104: no such architecture; did you mean transformer_lm_wiki103",
        ),
        ("--arch xyz", "--arch xyz: no such architecture; known: "),
        ("--task language_modelling", "--task language_modelling: no such task; did you mean language_modeling?"),
        ("--criterion adaptive_los", "--criterion adaptive_los: no such criterion; did you mean adaptive_loss?"),
        ("--optimizer adm", "--optimizer adm: no such optimizer; did you mean adam or lamb?"),
        ("--lr-scheduler cosin", "--lr-scheduler cosin: no such learning-rate schedule; did you mean cosine?"),
        ("--activation-fn rely", "--activation-fn rely: choose from relu"),
        ("--max-updates 3", "--max-updates: no such flag; did you mean --max-update"),
        ("--tokens_per_sample 3", "--tokens_per_sample: no such flag; did you mean --tokens-per-sample"),
        ("--qqqqqq", "--qqqqqq: no such flag; see --help"),
        ("more words", "unrecognized arguments: more; see --help"),
        ("--arch", "argument --arch/-a: expected one argument"),
        ("--max-update", "argument --max-update: expected one argument"),
    ],
)
def test_names_that_do_not_exist(mistake, flags, line):
    assert mistake(*flags.split()).startswith(line)


def test_no_data(mistake):
    assert mistake(data=None, base="--cpu").startswith("the following arguments are required: DATA")


@pytest.mark.parametrize(
    "flags",
    [
        *(
            "--dropout 1",
            "--dropout -0.1",
            "--dropout nan",
            "--dropout much",
            "--attention-dropout 2",
            "--relu-dropout 1",
        ),
        *("--decoder-layers 0", "--decoder-layers 1.5", "--decoder-embed-dim 0", "--decoder-attention-heads 0"),
        *("--lr 0", "--lr -1", "--lr inf", "--lr a", "--lr ,", "--clip-norm -1", "--max-update -1", "--max-epoch x"),
        *("--update-freq 0", "--update-freq 1,0", "--update-freq ,", "--max-tokens 0", "--batch-size 0"),
        *("--tokens-per-sample 0", "--tokens-per-sample -5", "--seed -1", "--seed 99999999999999999999999"),
        *("--fp16-init-scale 0", "--min-loss-scale 0", "--save-interval 0", "--keep-last-epochs -2", "--patience -2"),
        *("--log-interval 0", "--log-format xml", "--num-workers -1", "--required-batch-size-multiple 0"),
        *("--momentum 1", "--weight-decay -1", "--sample-break-mode paragraph", "--ddp-backend horovod"),
        *("--distributed-world-size 0", "--dataset-impl lazy", "--adaptive-softmax-factor 0.5", "--curriculum -1"),
        *("--stop-time-hours -1", "--bucket-cap-mb 0", "--validate-interval 0", "--max-target-positions 0"),
    ],
)
def test_values_out_of_range_name_their_flag(mistake, flags):
    name = flags.split()[0]
    line = mistake(*flags.split())
    assert line.startswith({"--relu-dropout": "--activation-dropout"}.get(name, name))


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--fp16 --bf16", "--fp16 --bf16: choose one"),
        ("--memory-efficient-fp16 --bf16", "--memory-efficient-fp16 --bf16: choose one"),
        (
            "--adaptive-softmax-cutoff 200,1200 --adaptive-input-cutoff 200,1200",
            "--adaptive-softmax-cutoff 200,1200: the last",
        ),
        (
            "--adaptive-softmax-cutoff 600,200",
            "--adaptive-softmax-cutoff 600,200: cutoffs must be positive and ascending",
        ),
        ("--adaptive-input-cutoff 0,600", "--adaptive-input-cutoff 0,600: cutoffs must be positive and ascending"),
        ("--adaptive-input-cutoff 100,600", "--tie-adaptive-weights: --adaptive-input-cutoff and"),
        ("--adaptive-input-factor 2", "--tie-adaptive-weights: --adaptive-input-factor and"),
        ("--decoder-input-dim 16", "--tie-adaptive-weights: --decoder-input-dim and"),
        ("--decoder-embed-dim 8", "--adaptive-softmax-factor 4.0: band 2"),
        ("--decoder-attention-heads 5", "--decoder-attention-heads 5: must divide --decoder-embed-dim 32"),
        ("--share-decoder-input-output-embed", "--share-decoder-input-output-embed: with --adaptive-input use"),
        ("--character-embeddings", "--character-embeddings: not supported"),
        (
            "--tokens-from-prev 16 --decoder-learned-pos",
            "--position-infused-attention, --tokens-from-prev: need sinusoidal",
        ),
        (
            "--tokens-from-prev 16 --sample-break-mode eos",
            "--sample-break-mode eos: streams, which a model with memory reads",
        ),
        (
            "--tokens-per-sample 65",
            "--max-tokens 64: a block has 65 tokens; raise --max-tokens or lower --tokens-per-sample",
        ),
        ("--tokens-from-prev 65 --tokens-per-sample 65", "--max-tokens 64: a block has 65 tokens"),
        ("--max-tokens-valid 8", "--max-tokens-valid 8: a block has 16 tokens; raise --max-tokens-valid"),
        ("--arch transformer_lm --adaptive-softmax-cutoff 5 --tie-adaptive-weights", "--tie-adaptive-weights: needs"),
        (
            "--arch transformer_lm",
            "--criterion adaptive_loss: the model's softmax has no bands",
        ),
        ("--lr-scheduler cosine --min-lr 0.05", "--min-lr 0.05: must be less than --lr 0.05"),
        ("--lr-scheduler cosine --max-lr 0.01", "--max-lr 0.01: must be greater than --lr 0.05"),
        (
            "--lr-scheduler polynomial_decay --total-num-update 5 --warmup-updates 5",
            "--total-num-update 5: must be greater",
        ),
        ("--optimizer adam --adam-betas 0.9", "--adam-betas 0.9: expected two numbers"),
        ("--best-checkpoint-metric bleu", "--best-checkpoint-metric bleu: not a figure of validation"),
        ("--optimizer-overrides {", "--optimizer-overrides {: expected a dict"),
        ("--optimizer-overrides __import__('os')", "--optimizer-overrides __import__('os'): expected a dict"),
        ("--valid-subset test,", "--valid-subset 'test,': empty name"),
        ("--max-target-positions 8", "valid: nothing is left of this split"),
        ("--max-target-positions 15", "test: 143 blocks are longer than the model's 15 positions"),
    ],
)
def test_settings_that_contradict_one_another(mistake, flags, line):
    assert mistake(*flags.split()).startswith(line)


@pytest.mark.parametrize(
    "stages, line",
    [
        *(
            (text, f"--stages {text}: ")
            for text in ("16", "16:", ":5", "16:5,", "16:5;32:9", "a:b", "0:5", "16:0", "16:-5")
        ),
        ("16:5,32:5", "--stages 16:5,32:5: updates count from the start"),
        ("16:9,32:5", "--stages 16:9,32:5: updates count from the start"),
        ("16:5,128:9", "--max-tokens 64: --stages 16:5,128:9 needs 128"),
    ],
)
def test_stages_that_cannot_be(mistake, stages, line):
    assert mistake("--stages", stages, base=runs.BASELINE).startswith(line)


def test_stages_and_another_max_update(mistake):
    assert mistake("--stages", "16:5,32:9").startswith("--max-update 2: --stages ends at update 9")


def test_no_size_of_a_batch(mistake):
    assert mistake(base="--cpu --max-update 2 --arch transformer_lm_tiny --valid-subset test").startswith(
        "--max-tokens or --batch-size: one of them is needed"
    )


# --- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for GPUs that are not there")
@pytest.mark.parametrize(
    "flags, line",
    [
        ("--distributed-world-size 2", "--distributed-world-size 2: this machine has 0 GPUs; add --cpu"),
        ("--distributed-backend nccl", "--distributed-backend nccl: needs a GPU, and there is none"),
    ],
)
def test_cuda_asked_for_and_absent(mistake, flags, line):
    base = TRAIN.replace("--cpu", "")
    assert mistake(*flags.split(), base=base).startswith(line)


# --- configuration and plug-ins


@pytest.mark.parametrize(
    "text, line",
    [
        ("decoder_layer: 3", "decoder_layer: no such setting; did you mean decoder_layers"),
        ("- 1\n- 2", "expected `name: value` lines, found list"),
        ("dropout: 0.1\nlr: [", "not valid YAML at line 2"),
        ("dropout: !!python/object/apply:os.system ['false']", "not valid YAML"),
    ],
)
def test_config_files_that_cannot_be(mistake, tmp_path, text, line):
    (tmp_path / "c.yaml").write_text(text)
    assert mistake("--config", tmp_path / "c.yaml").startswith(f"--config {tmp_path}/c.yaml: {line}")


@pytest.mark.parametrize(
    "text, line",
    [
        ("decoder_ffn_embed: wide", "--decoder-ffn-embed-dim: expected a whole number, got 'wide'"),
        ("no_save: sometimes", "--no-save: expected true or false, got 'sometimes'"),
        ("arch: transformer", "--arch transformer: no such architecture"),
        ("keep_last_epochs: -7", "--keep-last-epochs -7: must be at least -1"),
    ],
)
def test_values_in_config_files(mistake, tmp_path, text, line):
    (tmp_path / "c.yaml").write_text(text.replace("embed:", "embed_dim:"))
    base = "--cpu --max-tokens 64 --tokens-per-sample 16"
    assert mistake("--config", tmp_path / "c.yaml", base=base).startswith(line)


def test_config_file_sets_what_flags_leave_open(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "arch: shortformer_tiny\nrelu-dropout: 0.25\nmax_sentences: 3\nlr: 0.5\ndropout: 0.4\n"
    )
    args = runs.arguments("--tokens-per-sample 16 --dropout 0.2 --config", tmp_path / "c.yaml")
    assert (args.arch, args.activation_dropout, args.batch_size, args.lr) == ("shortformer_tiny", 0.25, 3, [0.5])
    assert (args.dropout, args.tokens_from_prev) == (0.2, 16), "flags win; the architecture fills the rest"


def test_config_file_that_is_not_there(mistake, tmp_path):
    assert mistake("--config", tmp_path / "none").startswith(f"--config {tmp_path}/none: cannot be read")


@pytest.mark.parametrize("name, line", [("none", "no such folder"), ("torch", "another package"), ("a.b", "no dots")])
def test_user_dirs_that_cannot_be(mistake, tmp_path, name, line):
    if name != "none":
        (tmp_path / name).mkdir()
    found = mistake("--user-dir", tmp_path / name)
    assert found.startswith(f"--user-dir {tmp_path / name}: ") and line in found


# --- data


def test_data_folder_that_is_not_there(mistake, tmp_path):
    assert mistake(data=tmp_path / "none").startswith(
        f"{tmp_path}/none: no such folder; make it with fairseq-preprocess"
    )


@pytest.mark.parametrize("name", ["dict.txt", "valid.bin", "valid.idx", "test.bin", "test.idx"])
def test_data_file_that_is_not_there(mistake, data, name):
    (data / name).unlink()
    assert mistake(data=data).startswith(f"{data}/{name}: ")


@pytest.mark.parametrize("size", [0, 1, -1, -24])
@pytest.mark.parametrize("name", ["valid.bin", "valid.idx", "test.bin", "test.idx"])
def test_data_file_that_is_truncated(mistake, data, name, size):
    content = (data / name).read_bytes()
    (data / name).write_bytes(content[:size])
    assert str(data) in mistake(data=data)


def test_data_file_that_is_corrupt(mistake, data):
    content = bytearray((data / "valid.idx").read_bytes())
    content[60:64] = b"\xff\xff\xff\x7f"
    (data / "valid.idx").write_bytes(content)
    assert mistake(data=data).startswith(f"{data}/valid.idx: ")


def test_dictionary_of_other_data(mistake, data):
    lines = (data / "dict.txt").read_text().splitlines(keepends=True)
    (data / "dict.txt").write_text("".join(lines[:700]))
    assert mistake(data=data).startswith(f"{data}/valid.bin: token ")


@pytest.mark.parametrize("content", [b"", b"w", b"word\n", b"word 1\nword 2\n", b"\xff\xfe 1\n", b"word many\n"])
def test_dictionary_that_is_none(mistake, data, content):
    (data / "dict.txt").write_bytes(content)
    assert mistake(data=data).startswith(f"{data}/dict.txt: ")


def test_split_that_does_not_exist(mistake):
    assert mistake("--train-subset", "trian").startswith(f"{runs.DATA}/trian.idx: ")


def test_validation_set_empty_after_filtering(mistake):
    flags = "--max-target-positions 8 --train-subset test --valid-subset valid --skip-invalid-size-inputs-valid-test"
    line = mistake(*flags.split())
    assert line.startswith("valid: nothing is left of this split")


# --- checkpoints


def test_checkpoint_that_is_not_there(mistake, tmp_path):
    assert mistake("--restore-file", tmp_path / "none.pt").startswith(
        f"--restore-file {tmp_path}/none.pt: no such checkpoint"
    )


@pytest.mark.parametrize("size", [0, 10, 5000, -100])
def test_checkpoint_that_is_truncated(mistake, trained, tmp_path, size):
    (tmp_path / "cut.pt").write_bytes(trained.read_bytes()[:size])
    assert mistake("--restore-file", tmp_path / "cut.pt").startswith(f"{tmp_path}/cut.pt: ")


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--decoder-layers 3", ["missing (decoder.layers.2."]),
        ("--decoder-layers 1", ["unexpected (decoder.layers.1."]),
        ("--decoder-ffn-embed-dim 48", ["of another shape (decoder.layers.0.fc1.weight [64, 32] for [48, 32]"]),
    ],
)
def test_checkpoint_of_another_architecture_says_which_parameters_differ(mistake, trained, flags, parts):
    line = mistake("--restore-file", trained, *flags.split())
    assert line.startswith(f"{trained}: does not fit this model: parameters ")
    assert all(part in line for part in parts)


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--optimizer adam", "made with optimizer FairseqNAG, not FairseqAdam; give --reset-optimizer"),
        (
            "--criterion cross_entropy",
            "made with criterion AdaptiveLoss, not CrossEntropyCriterion; give --reset-optimizer",
        ),
    ],
)
def test_checkpoint_of_another_optimizer_or_criterion(mistake, trained, flags, line):
    assert mistake("--restore-file", trained, "--max-update", 9, *flags.split()) == f"{trained}: {line}"


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_hostile_checkpoint_is_refused_and_nothing_is_run(mistake, tmp_path, write):
    write({"model": {}, "args": Hostile(tmp_path / "run")}, tmp_path / "hostile.pt")
    assert mistake("--restore-file", tmp_path / "hostile.pt").startswith(f"{tmp_path}/hostile.pt: ")
    assert not (tmp_path / "run").exists()


def test_hostile_settings_in_a_checkpoint_are_data(trained, tmp_path):
    state = checkpoint.read(trained)
    state["args"]["optimizer_overrides"] = f"__import__('os').system('touch {tmp_path}/run')"
    torch.save(state, tmp_path / "hostile.pt")
    runs.train(tmp_path / "c", TRAIN, "--max-update 3 --no-save --restore-file", tmp_path / "hostile.pt")
    assert not (tmp_path / "run").exists()


def test_save_dir_that_is_a_file(mistake, tmp_path):
    (tmp_path / "checkpoints").write_text("")
    assert mistake().startswith(f"--save-dir {tmp_path}/checkpoints: cannot be made")


# --- no space left


def test_old_checkpoint_survives_when_no_space_is_left(mistake, tmp_path, monkeypatch):
    runs.train(tmp_path / "checkpoints", TRAIN)
    old = (tmp_path / "checkpoints" / "checkpoint_last.pt").read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    line = mistake("--max-update", 4)
    assert line.startswith(f"{tmp_path}/checkpoints/checkpoint_best.pt: cannot be written (No space left on device)")
    assert (tmp_path / "checkpoints" / "checkpoint_last.pt").read_bytes() == old
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_best.pt", "checkpoint_last.pt"]


def test_old_checkpoint_survives_when_writing_stops_halfway(mistake, tmp_path):
    runs.train(tmp_path / "checkpoints", TRAIN)
    old = (tmp_path / "checkpoints" / "checkpoint_last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        line = mistake("--max-update", 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written (File too large)" in line
    assert (tmp_path / "checkpoints" / "checkpoint_last.pt").read_bytes() == old
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_best.pt", "checkpoint_last.pt"]


# --- the command itself


@pytest.mark.parametrize(
    "flags, line",
    [
        (["nowhere", TRAIN], "train.py: error: nowhere: no such folder"),
        ([runs.DATA, TRAIN, "--restore-file hostile.pt --no-save"], "train.py: error: hostile.pt: cannot be read as"),
    ],
)
def test_command_prints_one_line_and_no_traceback(flags, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.pt").write_bytes(pickle.dumps({"model": {}, "args": Hostile(tmp_path / "run")}))
    result = runs.command("train.py", *flags)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line) and result.stderr.count("\n") == 1


def test_nothing_is_left_behind_by_a_mistake(mistake, tmp_path):
    mistake("--decoder-attention-heads", "5")
    folder = tmp_path / "checkpoints"
    assert not folder.exists() or not list(folder.iterdir())
