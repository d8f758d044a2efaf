"""Training masked language models: learns, resumes to the bit, does not depend on processes,
refuses nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import warm
from mistakes import user_error
from runs import DATA, arguments, content, difference, losses, records, summaries, train, updates

from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.tasks import setup_task

SMALL = """--cpu --task masked_lm --train-subset valid --valid-subset test --encoder-layers 1 --encoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --max-positions 24 --tokens-per-sample 24 --max-tokens 240
    --required-batch-size-multiple 1 --optimizer adam --lr-scheduler fixed --lr 0.003 --clip-norm 1 --seed 3
    --log-format json --log-interval 1 --no-epoch-checkpoints"""
BERT = f"--arch bert_tiny --criterion masked_lm {SMALL}"
ELECTRA = f"--arch electra_tiny --criterion electra --encoder-input-dim 12 {SMALL}"
NO_DROPOUT = "--dropout 0 --attention-dropout 0"
KINDS = pytest.mark.parametrize("flags", [BERT, ELECTRA], ids=["bert", "electra"])


def test_the_loss_falls_in_training_and_validation(tmp_path: Path) -> None:
    log = train(tmp_path, BERT, "--max-epoch 2 --sample-break-mode complete --no-save")
    found = losses(log)
    assert found[-1] < found[0]
    validated = [line["loss"] for line in summaries(log, "test")]
    assert len(validated) == 2 and validated[1] < validated[0]


@KINDS
def test_an_interrupted_run_goes_on_to_the_bit(flags: str, tmp_path: Path) -> None:
    flags = f"{flags} --max-tokens 480"  # an epoch has 6 updates
    whole = train(tmp_path / "whole", flags, "--max-update 9 --save-interval-updates 4")
    train(tmp_path / "parts", flags, "--max-update 4")
    rest = train(tmp_path / "parts", flags, "--max-update 9 --save-interval-updates 4")
    assert updates(rest) == updates(whole)[4:]
    last = "checkpoint_last.pt"
    assert difference(content(tmp_path / "whole" / last), content(tmp_path / "parts" / last)) is None


def test_two_processes_and_two_batches_an_update_are_one_process(tmp_path: Path) -> None:
    run = f"{ELECTRA} {NO_DROPOUT} --max-update 6 --sample-break-mode none --batch-size"
    one = losses(train(tmp_path / "one", f"{run} 10 --max-tokens 1000"))
    twice = losses(train(tmp_path / "twice", f"{run} 5 --max-tokens 1000 --update-freq 2"))
    flags = f"{run} 5 --max-tokens 1000 --distributed-world-size 2 --save-dir"
    result = warm.command("train.py", DATA, flags, tmp_path / "two")
    assert result.returncode == 0, result.stderr
    two = losses(records(result.stdout))
    assert len(one) == 6
    assert twice == pytest.approx(one, abs=1e-5) and two == pytest.approx(one, abs=1e-5)


def naive_sizes(lines: list[int], tokens: int, positions: int) -> list[int]:
    """Sizes of the rows that fairseq makes of whole *lines*, those of lines beyond *positions*
    cut."""
    rows: list[int] = []
    for line in lines:
        if rows and rows[-1] + line <= tokens:
            rows[-1] += line
        else:
            rows.append(1 + line)  # after the begin symbol
    return [size for row in rows for size in pieces(row - 1, positions - 1)]


def pieces(tokens: int, longest: int) -> list[int]:
    return [1 + min(longest, tokens - start) for start in range(0, tokens, longest)]


@pytest.mark.parametrize(("limits", "longest"), [("512", 512), ("40", 40), ("512 --max-tokens 60", 60)])
@pytest.mark.parametrize("training", [True, False])
def test_lines_longer_than_a_block_stay_whole_up_to_the_models_positions(
    limits: str, longest: int, training: bool
) -> None:
    args = arguments(BERT, "--max-tokens 1000 --max-positions", *limits.split())
    task = setup_task(args)
    model = task.build_model(args)
    rows = task.iterator("valid", model, task.build_criterion(args), training=training).dataset
    lines = IndexedCorpus(DATA / "valid").sizes.tolist()
    assert max(lines) > 60
    assert rows.sizes.tolist() == naive_sizes(lines, 24, longest)


def test_generator_and_discriminator_share_their_embeddings_and_both_learn(tmp_path: Path) -> None:
    log = train(tmp_path, ELECTRA, "--max-epoch 4 --lr 0.01 --sample-break-mode none --no-save")
    first, *_, last = summaries(log, "test")
    assert last["generator_loss"] < first["generator_loss"] and last["discriminator_loss"] < first["discriminator_loss"]
    assert 0.05 < last["replaced"] < 0.16 and 0.5 < last["discriminator_accuracy"] <= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mask-prob 0", "--mask-prob 0.0: must be greater than 0"),
        ("--mask-prob 1", "--mask-prob 1.0: must be less than 1"),
        ("--leave-unmasked-prob -0.1", "--leave-unmasked-prob -0.1: must be at least 0"),
        ("--random-token-prob 1.1", "--random-token-prob 1.1: must be at most 1"),
        ("--leave-unmasked-prob 0.6 --random-token-prob 0.6", "--random-token-prob 0.6: .* the sum is above 1"),
        ("--tokens-per-sample 1", "--tokens-per-sample 1: must be at least 2"),
        ("--max-positions 16", "longer than the model's 16 positions"),
        ("--encoder-attention-heads 3", "--encoder-attention-heads 3: must divide --encoder-embed-dim 16"),
        ("--criterion electra", "--criterion electra: BertModel has no generator"),
        (
            "--criterion adaptive_loss",
            "--criterion: BertModel is an encoder, which does not predict the next token; use --criterion masked_lm",
        ),
        ("--arch electra_tiny", "--criterion masked_lm: ElectraModel is not BERT; use --criterion electra"),
        ("--arch electra_tiny --criterion electra --generator-size 0", "--criterion electra: .* no generator"),
        ("--arch electra_tiny --criterion electra --generator-size 2", "--generator-size 2.0: must be at most 1"),
        ("--arch electra_tiny --criterion electra --generator-size 0.01", "heads do not divide a generator of width 0"),
        ("--arch electra_tiny --criterion electra --discriminator-weight -1", "--discriminator-weight -1.0: must be"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(flags: str, message: str, tmp_path: Path) -> None:
    with user_error(message) as refusal:
        train(tmp_path / "out", BERT, flags, "--max-update 1")
    assert "\n" not in refusal.value.with_flags


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    flags = "--cpu --task masked_lm --arch transformer_lm_tiny --criterion masked_lm --lr 0.1 --max-tokens 640"
    with user_error("--criterion masked_lm: TransformerLanguageModel is not an encoder"):
        train(tmp_path / "out", flags, "--adaptive-softmax-cutoff 200 --adaptive-input-cutoff 200")
    flags = flags.replace("--criterion masked_lm", "--criterion cross_entropy")
    with user_error("--task: it masks tokens, but TransformerLanguageModel predicts the next"):
        train(tmp_path / "out", flags, "--adaptive-softmax-cutoff 200 --adaptive-input-cutoff 200")


def test_a_listed_dictionary_without_mask_symbol_is_refused_for_training(tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text("#specials bos=<s> pad=<pad> eos=</s>\n<s> 0\n<pad> 0\n</s> 0\nword 0\n")
    args = arguments(BERT, data=tmp_path)
    task = setup_task(args)
    with user_error(r"dict.txt: --task masked_lm needs a mask symbol.* name one as mask=WORD"):
        task.masking()


@torch.no_grad()
def test_validation_is_the_same_in_batches_of_any_size(tmp_path: Path) -> None:
    args = arguments(BERT)
    torch.manual_seed(1)
    task = setup_task(args)
    model, criterion = task.build_model(args).eval(), task.build_criterion(args)
    totals = []
    for rows in (1, 7):
        args.batch_size, args.max_tokens = rows, None
        batches = [s for s in task.iterator("test", model, criterion, training=False) if s is not None]
        parts = [criterion(model, sample) for sample in batches]
        totals.append((float(sum(loss for loss, *_ in parts)), sum(size for _, size, _ in parts)))
    assert totals[0][1] == totals[1][1] and totals[0][0] == pytest.approx(totals[1][0], rel=1e-5)
