"""Staged training in one run equals one command a stage, and resumes in either stage."""

from __future__ import annotations

import gc
import shutil
import weakref

import pytest
import runs
import torch

from fairseq import checkpoint
from fairseq.checkpoint.store import copied
from fairseq.errors import UserError
from fairseq.training import loop, resume

# --- stages


STAGED = [runs.SHORTFORMER, runs.DROPOUT, runs.NAG, "--max-tokens 128"]


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A run of two stages, with a checkpoint every ten updates."""
    folder = tmp_path_factory.mktemp("staged")
    return folder, runs.train(folder, *STAGED, "--stages 16:12,32:24 --save-interval-updates 5")


def test_stages_in_one_run_equal_one_command_a_stage(tmp_path, staged):
    often = "--save-interval-updates 5"
    runs.train(tmp_path / "1", *STAGED, often, "--max-update 12 --tokens-per-sample 16 --tokens-from-prev 16")
    first = ["--restore-file", str(tmp_path / "1" / "checkpoint_last.pt")]
    second = "--max-update 24 --tokens-per-sample 32 --tokens-from-prev 32"
    log = runs.train(tmp_path / "2", *STAGED, often, second, first)
    one, two = runs.content(staged[0] / "checkpoint_last.pt"), runs.content(tmp_path / "2" / "checkpoint_last.pt")
    assert one["extra_state"].pop("stage") == {"number": 2, "tokens_per_sample": 32, "max_update": 24}
    assert runs.difference(one, two) is None
    second = [line for line in runs.updates(staged[1]) if line["stage"] == 2]
    assert [
        {k: v for k, v in line.items() if k not in ("stage", "tokens_per_sample")} for line in second
    ] == runs.updates(log)


@pytest.mark.parametrize("saved", [10, 20])
def test_staged_run_resumes_exactly_in_either_stage(tmp_path, staged, saved):
    source = next(path for path in staged[0].iterdir() if path.name.endswith(f"_{saved}.pt"))
    shutil.copy(source, tmp_path / "checkpoint_last.pt")
    log = runs.train(tmp_path, *STAGED, "--stages 16:12,32:24 --save-interval-updates 5")
    last = runs.content(tmp_path / "checkpoint_last.pt")
    assert runs.difference(last, runs.content(staged[0] / "checkpoint_last.pt")) is None
    assert runs.updates(log) == [line for line in runs.updates(staged[1]) if line["num_updates"] > saved]


def test_stages_are_written_in_log_and_checkpoint(staged):
    folder, log = staged
    told = {(line["num_updates"], line["stage"], line["tokens_per_sample"]) for line in runs.updates(log)}
    assert told == {(n, 1, 16) for n in range(1, 13)} | {(n, 2, 32) for n in range(13, 25)}
    stage = checkpoint.read(folder / "checkpoint_1_5.pt")["extra_state"]["stage"]
    assert stage == {"number": 1, "tokens_per_sample": 16, "max_update": 12}
    assert {line["test_tokens_per_sample"] for line in log if "test_loss" in line} == {16, 32}


def test_stages_of_a_baseline_with_learned_positions(tmp_path):
    flags = "--stages 8:2,32:4 --decoder-learned-pos --no-save --disable-validation"
    log = runs.train(tmp_path, runs.BASELINE, flags)
    assert [line["tokens_per_sample"] for line in runs.updates(log)] == [8] * 2 + [32] * 2


def test_stages_with_batches_and_rates_equal_commands_with_these_and_resume_exactly(tmp_path):
    flags = [runs.SHORTFORMER, runs.DROPOUT, runs.ADAM, "--no-epoch-checkpoints"]
    stages = "--stages 16:5:128:0.004,32:9:96:0.001,32:12 --save-interval-updates 9"
    log = runs.train(tmp_path / "staged", flags, stages)
    assert [line["wpb"] for line in runs.updates(log)] == [128.0] * 5 + [96.0] * 4 + [64.0] * 3
    assert [line["lr"] for line in runs.updates(log)][4:11] == pytest.approx(
        [
            0.004 * 5 / 9,
            0.001 * 6 / 9,
            0.001 * 7 / 9,
            0.001 * 8 / 9,
            0.001,
            0.002 * (9 / 10) ** 0.5,
            0.002 * (9 / 11) ** 0.5,
        ],
        rel=1e-3,
    )
    first = "--max-tokens 128 --lr 0.004 --max-update 5 --tokens-per-sample 16 --tokens-from-prev 16"
    runs.train(tmp_path / "1", flags, first)
    second = "--max-tokens 96 --lr 0.001 --max-update 9 --tokens-per-sample 32 --tokens-from-prev 32 --restore-file"
    runs.train(tmp_path / "2", flags, second, tmp_path / "1" / "checkpoint_last.pt")
    saved = next((tmp_path / "staged").glob("checkpoint_*_9.pt"))
    staged = runs.content(saved)
    assert staged["extra_state"].pop("stage")["number"] == 2
    assert runs.difference(staged, runs.content(tmp_path / "2" / "checkpoint_last.pt")) is None
    # The third stage has other rows of equal blocks, where a command of its own could not go on
    # within the epoch.
    rest = runs.train(tmp_path / "3", flags, stages, "--restore-file", saved)
    assert runs.updates(rest) == runs.updates(log)[9:]
    ends = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("staged", "3")]
    assert runs.difference(*ends) is None


XL = """--arch transformer_xl_tiny --criterion cross_entropy --cpu --train-subset valid --valid-subset test
    --tokens-per-sample 16 --required-batch-size-multiple 1 --cutoffs 200,600 --seed 3
    --log-format json --log-interval 1"""


@pytest.mark.parametrize(
    "model, without, cached",
    [
        (runs.SHORTFORMER, "--tokens-from-prev 0 --position-infused-attention", "--tokens-from-prev 16"),
        (XL, "--mem-len 0", "--mem-len 16"),
    ],
    ids=["shortformer", "transformer_xl"],
)
def test_a_stage_with_memory_after_an_epoch_of_shuffled_blocks_equals_two_commands_and_resumes(
    tmp_path, model, without, cached
):
    flags = [model, "--optimizer adam --lr 0.002 --max-tokens 64 --no-epoch-checkpoints --disable-validation"]
    passages, updates = "--passage-tokens 32", 42  # an epoch of the corpus
    stages = f"--stages 16+0:{updates},16+16:{updates + 6} {passages} --save-interval-updates {updates + 3}"
    log = runs.train(tmp_path / "staged", flags, stages)
    runs.train(tmp_path / "1", flags, without, f"--max-update {updates}")
    first = ["--restore-file", tmp_path / "1" / "checkpoint_last.pt"]
    second = runs.train(tmp_path / "2", flags, cached, passages, f"--max-update {updates + 6}", first)
    assert [line["loss"] for line in runs.updates(log)[updates:]] == [line["loss"] for line in runs.updates(second)]
    saved = next((tmp_path / "staged").glob(f"checkpoint_*_{updates + 3}.pt"))
    rest = runs.train(tmp_path / "3", flags, stages, "--restore-file", saved)
    assert runs.updates(rest) == runs.updates(log)[updates + 3 :]
    one, two, three = (runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("staged", "2", "3"))
    assert runs.difference(one, three) is None
    assert runs.difference(one["model"], two["model"]) is None


def test_a_stage_with_memory_needs_positions_that_allow_one(tmp_path):
    with pytest.raises(UserError, match=r"--stages: --arch transformer_lm_tiny has no memory of \+16 tokens"):
        runs.train(tmp_path, runs.BASELINE, "--stages 16+0:2,16+16:4")


def tensor_bytes():
    """Bytes of all tensors that exist."""
    kinds = (torch.Tensor, torch.nn.Parameter)  # not the fake ones that other tests leave behind
    tensors = [item for item in gc.get_objects() if type(item) in kinds and item.layout == torch.strided]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.fixture
def held(monkeypatch):
    """Bytes of all tensors at the end of a run's construction, after its restoration, and when it
    trains."""
    sizes = []

    def measured(owner, name, size_before=False):
        method = getattr(owner, name)

        def wrapper(run, *args, **keywords):
            if size_before:
                sizes.append(tensor_bytes())
            result = method(run, *args, **keywords)
            if not size_before:
                sizes.append(tensor_bytes())
            return result

        monkeypatch.setattr(owner, name, wrapper)

    measured(loop, "build_state")
    measured(resume, "restore")
    measured(loop.Run, "train", size_before=True)
    return sizes


def test_two_stages_never_hold_more_than_one_state_and_the_new_parameters(tmp_path, held):
    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes()
        runs.train(tmp_path, runs.SHORTFORMER, runs.ADAM, "--stages 8:3,16:6 --no-save --disable-validation")
    finally:
        gc.enable()
    first, trained, *second = (size - before for size in held)
    parameters = first
    assert first == trained and len(second) == 3, "built, trained; built, restored, trained"
    assert max(second) < 4.2 * parameters, "parameters and two moments of the first, parameters of the second"
    assert second[-1] < 3.2 * parameters, "what is left of the first stage goes when the second begins to train"


def test_no_tensor_of_a_stage_is_left_on_the_device_when_the_next_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "copied", lambda state, again: copied(state))  # as if all of it were on a device
    tensors, left = [], []
    build, train = loop.build_state, loop.Run.train

    def watched_build(*args):
        left.append(sum(reference() is not None for reference in tensors))
        return build(*args)

    def watched_train(run):
        train(run)
        trainer = run.state
        moments = [value for entry in trainer.optimizer.optimizer.state.values() for value in entry.values()]
        tensors.extend(map(weakref.ref, filter(torch.is_tensor, [*trainer.parameters, *moments])))

    monkeypatch.setattr(loop, "build_state", watched_build)
    monkeypatch.setattr(loop.Run, "train", watched_train)
    flags = "--stages 8:3,16:6 --no-save --disable-validation --checkpoint-activations"
    runs.train(tmp_path, runs.SHORTFORMER, runs.ADAM, flags)
    assert tensors and left == [0, 0]
