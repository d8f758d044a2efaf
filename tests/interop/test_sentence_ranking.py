"""fairseq's ``sentence_ranking``, and the encoders of text that plug-ins of its kind build."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F
from sentences import NO_DROPOUT, SIZES, WORDS, write_dictionary, write_folders, write_pretrained
from subword_encodings import MERGES, encodings

from fairseq import checkpoint
from fairseq.config import options
from fairseq.data import encoders
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.errors import UserError
from fairseq.tasks import setup_task
from fairseq.text.tokenizers.rules import BYTES
from fairseq_cli import validate

RANKING = f"""--cpu --task sentence_ranking --criterion sentence_ranking --arch bert_tiny {SIZES} {NO_DROPOUT}
    --num-classes 3 --batch-size 8 --required-batch-size-multiple 1 --optimizer adam --lr 0.01 --seed 3
    --log-format json --log-interval 1 --no-epoch-checkpoints"""


def write_questions(folder: Path, context: bool = True) -> Path:
    """Twelve questions of three candidates; the right one is the only one with the word w1."""
    dictionary = write_dictionary(folder / "words")
    for split in ("train", "valid"):
        right = [number % 3 for number in range(12)]
        columns: dict[str, list[Any]] = {"input0": ["w19 w18"] * 12} if context else {}
        for option in range(3):
            columns[f"input{option + 1}"] = [
                f"{WORDS[5 + number % 7]} {'w1' if option == answer else 'w2'}" for number, answer in enumerate(right)
            ]
        write_folders(folder / "data", split, columns, dictionary)
        (folder / "data" / "label").mkdir(exist_ok=True)
        (folder / "data" / "label" / f"{split}.label").write_text("".join(f"{answer}\n" for answer in right))
    return folder / "data"


def train(data: Path, save_dir: Path, *flags: Any) -> str:
    return runs.train(save_dir, RANKING, *flags, data=data)


@pytest.mark.parametrize("sizes", [f"--arch bert_tiny {SIZES} {NO_DROPOUT} --init-token 0", "--arch gpt2_tiny"])
def test_a_ranking_is_learned_and_its_choices_are_written(sizes: str, tmp_path: Path) -> None:
    data, file = write_questions(tmp_path), tmp_path / "choices.tsv"
    flags = RANKING.replace(f"--arch bert_tiny {SIZES} {NO_DROPOUT}", sizes)
    flags += " --max-update 60 --separator-token 2 --save-predictions"
    log = runs.train(tmp_path / "run", flags, file, data=data)
    assert runs.summaries(log, "valid")[-1]["accuracy"] == 100
    rows = [line.split("\t") for line in file.read_text().splitlines()][-12:]
    assert sorted(int(row[0]) for row in rows) == list(range(12))
    assert all(int(row[0]) % 3 == int(row[1]) == int(row[2]) for row in rows)


def test_a_ranking_is_validated_with_rows_cut_to_the_models_positions(tmp_path: Path) -> None:
    data = write_questions(tmp_path)
    flags = "--shorten-method truncate --max-positions 5 --max-option-length 2 --pooler-activation-fn relu"
    log = train(data, tmp_path / "run", "--max-update 2", flags)
    assert len(runs.losses(log)) == 2
    file = tmp_path / "run" / "checkpoint_last.pt"
    words = runs.words(data, "--path", file, "--cpu --criterion sentence_ranking")
    again = validate.main(options.parse_args_and_arch(validate.get_validation_parser(), words, task_defaults=False))[
        str(file)
    ]["valid"]
    last = runs.summaries(log, "valid")[-1]
    assert again["loss"] == pytest.approx(last["loss"], abs=1e-3)
    assert again["accuracy"] == pytest.approx(last["accuracy"], abs=0.01)


def test_a_pretrained_encoder_is_tuned_with_the_flags_of_fairseqs_example(tmp_path: Path) -> None:
    data = write_questions(tmp_path)
    encoder = write_pretrained(tmp_path / "encoder.pt", data / "input1")
    flags = f"""--restore-file {encoder} --reset-optimizer --reset-dataloader --reset-meters --init-token 0
        --separator-token 2 --max-option-length 8 --shorten-method truncate --adam-betas (0.9,0.98) --adam-eps 1e-06
        --clip-norm 0.0 --lr-scheduler fixed --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric
        --update-freq 2 --max-epoch 1"""
    log = train(data, tmp_path / "run", flags)
    stored = checkpoint.load(tmp_path / "run" / "checkpoint_best.pt")
    assert stored["extra_state"]["val_loss"] == pytest.approx(runs.summaries(log, "valid")[-1]["accuracy"], abs=0.01)
    # The rate is small: embeddings stay near their beginning, which another seed would not give.
    name = "encoder.sentence_encoder.embed_tokens.weight"
    torch.testing.assert_close(stored["model"][name], checkpoint.load(encoder)["model"][name], atol=0.02, rtol=0)
    with pytest.raises(UserError, match="lacks the head of this model; --reset-optimizer begins a new one"):
        train(data, tmp_path / "other", f"--restore-file {encoder} --max-epoch 1")


FIXED = "--lr-scheduler fixed"  # by a recipe the rate depends on the last update


def test_a_ranking_resumes_where_it_was(tmp_path: Path) -> None:
    data = write_questions(tmp_path, context=False)
    through = runs.losses(train(data, tmp_path / "through", f"--max-update 4 --no-save {FIXED}"))
    first = runs.losses(train(data, tmp_path / "parts", "--max-update 2", FIXED))
    second = runs.losses(train(data, tmp_path / "parts", "--max-update 4", FIXED))
    assert [*first, *second] == pytest.approx(through, abs=1e-5) and len(through) == 4


def test_the_loss_is_that_of_the_right_candidate_among_all(tmp_path: Path) -> None:
    data = write_questions(tmp_path)
    args = runs.arguments(RANKING, "--separator-token 2", data=data)
    task: Any = setup_task(args)
    model, criterion = task.build_model(args).eval(), task.build_criterion(args).eval()
    sample = task.dataset("valid").batch(range(4))
    row = sample["net_input2"]["src_tokens"][0].tolist()
    words = task.source_dictionary
    assert [words[index] for index in row] == ["w5", "w2", "</s>", "</s>", "w19", "w18", "</s>"]
    scores = [model(**sample[f"net_input{n}"])[0] for n in (1, 2, 3)]
    expected = F.cross_entropy(torch.cat(scores, 1), torch.tensor([0, 1, 2, 0]), reduction="sum")
    loss, size, sums = criterion(model, sample)
    torch.testing.assert_close(loss, expected)
    assert size == 4 and 0 <= int(sums["ncorrect"]) <= 4
    dummy = criterion(model, task.dummy_sample("cpu"))
    assert dummy[0] == 0 and dummy[1] == 0
    del sample["target"]
    assert criterion(model, sample)[0] == 0


def test_only_robertas_take_heads_of_plugins() -> None:
    args = runs.arguments(f"--cpu --task masked_lm --arch bert_tiny {SIZES} {NO_DROPOUT} --tokens-per-sample 16")
    with pytest.raises(UserError, match="BertModel: register_classification_head: use a roberta architecture"):
        setup_task(args).build_model(args).register_classification_head("first")


@pytest.mark.parametrize(
    "text, message",
    [("0\n", "1 lines where the inputs have 12; give one label for each row"), ("0\n" * 11 + "3\n", "line 12: .*3")],
)
def test_wrong_labels_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    data = write_questions(tmp_path)
    (data / "label" / "train.label").write_text(text)
    with pytest.raises(UserError, match=message):
        train(data, tmp_path / "run", "--max-update 1")


def test_a_missing_candidate_or_head_is_one_line(tmp_path: Path) -> None:
    data = write_questions(tmp_path)
    with pytest.raises(UserError, match=r"input4/train\.idx: file not found; binarise each input"):
        train(data, tmp_path / "run", "--max-update 1 --num-classes 4")
    flags = "--arch bert_tiny --task masked_lm --criterion sentence_ranking --max-update 1 --tokens-per-sample 16"
    with pytest.raises(UserError, match="sentence_ranking: BertModel has no head sentence_classification_head; use"):
        runs.train(tmp_path / "run", flags)
    with pytest.raises(UserError, match="--save-predictions .*file: cannot be written"):
        train(data, tmp_path / "run", "--max-update 1", "--save-predictions", tmp_path / "no" / "file")


def test_encoders_split_text_and_join_it_again(tmp_path: Path) -> None:
    text = "the lower river"
    for name, subwords in encodings().items():
        if name not in ("subword_nmt", "sentencepiece"):
            continue
        file = tmp_path / name
        file.write_bytes(subwords.content)
        setting = "sentencepiece_model" if name == "sentencepiece" else "bpe_codes"
        bpe: Any = encoders.build_bpe(Namespace(bpe=name, **{setting: str(file)}))
        assert bpe.encode(text) == subwords.encode([text])[0] and bpe.decode(bpe.encode(text)) == text
        if name == "sentencepiece":
            assert encoders.SentencepieceBPE(Namespace(**{setting: str(file)})).encode(text) == bpe.encode(text)
    characters: Any = encoders.build_bpe(Namespace(bpe="characters"))
    assert characters.encode("an ox") == "a n ▁ o x" and characters.decode("a n ▁ o x") == "an ox"
    assert encoders.build_bpe(Namespace(bpe=None)) is None and encoders.build_tokenizer(Namespace()) is None
    assert encoders.build_bpe(None) is None and isinstance(
        encoders.build_bpe(Namespace(_name="characters")), encoders.Characters
    )
    cfg = convert_namespace_to_omegaconf(Namespace(tokenizer="space"))
    assert encoders.build_tokenizer(cfg.tokenizer).decode("a b") == "a b" and encoders.build_bpe(cfg.bpe) is None
    moses: Any = encoders.build_tokenizer(Namespace(tokenizer="moses"))
    assert moses.encode("It isn't, no.") == "It isn &apos;t , no ." and moses.decode("isn &apos;t .") == "isn't."
    plain: Any = encoders.build_tokenizer(Namespace(tokenizer="moses", moses_no_escape=True))
    assert plain.encode("It isn't, no.") == "It isn 't , no ."
    with pytest.raises(UserError, match="bpe subword_nmt: needs its file; give it with bpe_codes"):
        encoders.build_bpe(Namespace(bpe="subword_nmt"))
    with pytest.raises(UserError, match="bpe bert: is not implemented"):
        encoders.build_bpe(Namespace(bpe="bert"))


def test_gpt2s_subwords_are_numbers_of_files_in_the_data_folder(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pairs = [line.split(" ") for line in MERGES.decode().splitlines()[1:]]
    numbers = {symbol: 7 * index for index, symbol in enumerate([*BYTES, *map("".join, pairs)])}
    (tmp_path / "encoder.json").write_text(json.dumps(numbers))
    (tmp_path / "vocab.bpe").write_bytes(MERGES)
    files = {"gpt2_encoder_json": str(tmp_path / "encoder.json"), "gpt2_vocab_bpe": str(tmp_path / "vocab.bpe")}
    alone = encoders.GPT2BPE(Namespace(**files))
    assert alone.decode(alone.encode("the lower")) == "the lower" and alone.encode("the").replace(" ", "").isdecimal()
    task: Any = setup_task(runs.arguments("--arch transformer_lm --tokens-per-sample 16 --max-tokens 64"))
    bpe = task.build_bpe(Namespace(bpe="gpt2", data=str(tmp_path)))
    symbols = bpe.encode(" the low <unk>").split()
    assert symbols[:2] == [str(numbers["Ġthe"]), str(numbers["Ġlow"])] and symbols[-1] == "<unk>"
    assert bpe.decode(f"{numbers['Ġthe']} <mask>") == " the<mask>" and task.build_tokenizer(Namespace()) is None
    with pytest.raises(UserError, match=r"encoder\.json: file not found; give GPT-2's"):
        task.build_bpe(Namespace(bpe="gpt2", data=str(runs.DATA)))
