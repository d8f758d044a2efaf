"""Where only other lines with a rare word tell what is beside it, centred notes beat none; permuted
ones do not."""

from __future__ import annotations

import runs

from fairseq.config import options
from fairseq_cli import preprocess, validate
from fairseq_cli.preprocess import get_preprocessing_parser
from scripts import entity_corpus

# Weights of deviation 1 / sqrt(width): with 0.02, narrow post-norm models predict by frequency for
# long.
FLAGS = """--task tnf_masked_lm --criterion masked_lm --sample-break-mode eos --mask-prob 0.33 --mask-whole-words
    --leave-unmasked-prob 0 --random-token-prob 0 --encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 128
    --encoder-attention-heads 2 --max-positions 8 --init-std 0.18 --dropout 0 --attention-dropout 0 --cpu --seed 1
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 1 --lr 0.008 --lr-scheduler inverse_sqrt --warmup-updates 50
    --batch-size 128 --max-update 120 --no-epoch-checkpoints --disable-validation --log-format none"""


def losses(data, folder, model, keep):
    """The figures of *model*, trained on *data*."""
    runs.train(folder, FLAGS, model, data=data)
    file = folder / "checkpoint_last.pt"
    words = runs.words(data, "--path", file, "--valid-subset valid --cpu", keep)
    parsed = options.parse_args_and_arch(validate.get_validation_parser(), words, task_defaults=False)
    return validate.main(parsed)[str(file)]["valid"]


def test_centred_notes_tell_what_is_beside_a_rare_word_and_those_of_other_words_do_not(tmp_path):
    entity_corpus.write(tmp_path, entities=400, occurrences=16, subwords=32)
    flags = "--only-source --notes --note-min-count 16 --note-max-count 16 --destdir"
    words = runs.words(flags, tmp_path / "bin", "--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid")
    preprocess.main(get_preprocessing_parser().parse_args(words))
    without = losses(tmp_path / "bin", tmp_path / "none", "--arch bert_tiny", "--rare-words")
    noted = losses(tmp_path / "bin", tmp_path / "noted", "--arch tnf_bert_tiny --note-form centred", "--keep-notes")
    assert noted["note_1_loss"] < without["note_1_loss"] - 0.25
    assert noted["permuted_note_1_loss"] > without["note_1_loss"] + 0.25
    assert noted["note_far_loss"] > without["note_far_loss"] - 0.2, "a masked name can be known from nothing"
