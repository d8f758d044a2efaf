"""A user's mistake in ``fairseq-train`` is one line that names the flag or file, with exit code
2."""

from __future__ import annotations

import pytest
import runs
import torch
from mistakes import user_error

from fairseq.data.samplers import Batching

# --- flags


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "--arch transformer_lm_wiki104",
            "--arch transformer_lm_wiki104: no such architecture; did you mean transformer_lm_wiki103",
        ),
        ("--arch xyz", "--arch xyz: no such architecture; known: "),
        ("--task language_modelling", "--task language_modelling: no such task; did you mean language_modeling"),
        ("--criterion adaptive_los", "--criterion adaptive_los: no such criterion; did you mean adaptive_loss?"),
        ("--optimizer adm", "--optimizer adm: no such optimizer; did you mean adam?"),
        ("--lr-scheduler cosin", "--lr-scheduler cosin: no such learning-rate schedule; did you mean cosine?"),
        ("--activation-fn rely", "--activation-fn rely: choose from relu"),
        ("--max-updates 3", "--max-updates: no such flag; did you mean --max-update"),
        ("--tokens_per_sample 3", "--tokens_per_sample: no such flag; did you mean --tokens-per-sample"),
        ("--qqqqqq", "--qqqqqq: no such flag; see --help"),
        ("more words", "unrecognized arguments: more; see --help"),
        ("--arch", "--arch/-a: expected one argument"),
        ("--max-update", "--max-update: expected one argument"),
        ("--stages -1:3", "--stages: expected one argument; write --stages=VALUE where it begins with -"),
    ],
)
def test_names_that_do_not_exist(mistake, flags, line):
    assert mistake(*flags.split()).startswith(line)


def test_no_data(mistake):
    assert mistake(data=None, base="--cpu").startswith("the following arguments are required: DATA")


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
        ("--decoder-embed-dim 8 --adaptive-softmax-factor 4", "--adaptive-softmax-factor 4.0: band 2"),
        ("--decoder-attention-heads 5", "--decoder-attention-heads 5: must divide --decoder-embed-dim 32"),
        ("--share-decoder-input-output-embed", "--share-decoder-input-output-embed: with --adaptive-input use"),
        ("--character-embeddings", "--character-embeddings: not supported"),
        (
            "--tokens-from-prev 16 --decoder-learned-pos",
            "--position-infused-attention, --tokens-from-prev: need sinusoidal",
        ),
        (
            "--tokens-from-prev 16 --sample-break-mode eos",
            "--sample-break-mode eos: models with memory",
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


def test_without_a_size_a_batch_has_eight_rows():
    assert runs.arguments("--arch transformer_lm_tiny").batch_size == 8
    assert runs.arguments("--arch transformer_lm_tiny --max-tokens 64").batch_size is None
    with user_error("--max-tokens or --batch-size: one of them is needed"):
        Batching(None, None).streams(8, 16)


# --- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for GPUs that are not there")
@pytest.mark.parametrize(
    "flags, line",
    [
        ("--distributed-world-size 2", "--distributed-world-size 2: this machine has 0 GPUs; add --cpu"),
        (
            "--cpu --distributed-world-size 2 --distributed-backend nccl",
            "--distributed-backend nccl: needs a GPU, and there is none",
        ),
    ],
)
def test_cuda_asked_for_and_absent(mistake, flags, line):
    base = runs.SHORT.replace("--cpu", "")
    assert mistake(*flags.split(), base=base).startswith(line)


# --- configuration and plug-ins


@pytest.mark.parametrize(
    "text, line",
    [
        ("decoder_layer: 3", "decoder_layer: no such setting; did you mean decoder_layers"),
        ("- 1\n- 2", "expected `name: value` lines, found list"),
        ("dropout: 0.1\nlr: [", "not valid YAML at line 2"),
        ("dropout: !!python/object/apply:os.system ['false']", "--dropout: expected a number"),
        ("no_save: sometimes", "--no-save: expected true or false, got 'sometimes'"),
        ("decoder_ffn_embed_dim: wide", "--decoder-ffn-embed-dim: expected a whole number, got 'wide'"),
        ("keep_last_epochs: -7", "--keep-last-epochs -7: must be at least -1"),
        ("lr: null", "--lr: a value is needed"),
        ("amp: true", "--amp: use --fp16"),
        ("num_shards: 2", "--num-shards 2: a split is read whole"),
        ("adam_eps: 1", "--adam-eps: belongs to --optimizer adam, muon, not to --optimizer nag"),
    ],
)
def test_config_files_that_cannot_be(mistake, tmp_path, text, line):
    (tmp_path / "c.yaml").write_text(text)
    assert mistake("--config", tmp_path / "c.yaml").startswith(f"--config {tmp_path}/c.yaml: {line}")


def test_an_architecture_in_a_config_file_that_there_is_not(mistake, tmp_path):
    (tmp_path / "c.yaml").write_text("arch: transfrmer_lm")
    line = mistake("--config", tmp_path / "c.yaml", base="--cpu --max-tokens 64 --tokens-per-sample 16")
    assert line.startswith("--arch transfrmer_lm: no such architecture")


def test_config_file_sets_what_flags_leave_open(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "arch: shortformer_tiny\nrelu-dropout: 0.25\nmax_sentences: 3\nlr: 0.5\ndropout: 0.4\n"
    )
    args = runs.arguments("--tokens-per-sample 16 --dropout 0.2 --config", tmp_path / "c.yaml")
    assert (args.arch, args.activation_dropout, args.batch_size, args.lr) == ("shortformer_tiny", 0.25, 3, [0.5])
    assert (args.dropout, args.tokens_from_prev) == (0.2, 16), "flags win; the architecture fills the rest"


def test_config_file_that_is_not_there(mistake, tmp_path):
    assert mistake("--config", tmp_path / "none").startswith(f"--config {tmp_path}/none: file not found")


@pytest.mark.parametrize("name, line", [("none", "folder not found"), ("torch", "different package"), ("a.b", "dots")])
def test_user_dirs_that_cannot_be(mistake, tmp_path, name, line):
    if name != "none":
        (tmp_path / name).mkdir()
    found = mistake("--user-dir", tmp_path / name)
    assert found.startswith(f"--user-dir {tmp_path / name}: ") and line in found
