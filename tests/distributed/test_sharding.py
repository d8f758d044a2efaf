"""Processes that hold parts of the parameters train as processes that hold all of them, and as one
process."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from jobs import run_all
from ranks import on_ranks
from states import restored
from torch._dynamo.testing import CompileCounter

from fairseq import checkpoint
from fairseq.checkpoint import CheckpointManager, manager
from fairseq.config import options
from fairseq.config.settings import CheckpointConfig, training_settings
from fairseq.distributed import World
from fairseq.distributed.sharding import ShardedReducer
from fairseq.errors import UserError
from fairseq.models import layerwise
from fairseq.training import train
from fairseq_cli import eval_lm
from fairseq_cli.checkpoint import get_merge_parser, merge
from fairseq_cli.eval_lm import get_eval_lm_parser

SHARDED = "--ddp-backend fully_sharded"
PLAIN = "--ddp-backend no_c10d"
ADAM = "--optimizer adam --weight-decay 0.01 --lr 0.002 --no-epoch-checkpoints"
TIED = "--tie-adaptive-weights --tie-adaptive-proj"
LM = [runs.BASELINE, TIED, runs.NO_DROPOUT, ADAM, "--max-update 8 --save-interval-updates 5"]
SHORTFORMER = [runs.SHORTFORMER, runs.NO_DROPOUT, ADAM, "--max-update 8 --save-interval-updates 5"]
HALF = "--max-tokens 32 --max-tokens-valid 320"
LOG = "--no-save --max-update 5"  # runs whose log alone is read
WHOLE = "--max-tokens 64 --max-tokens-valid 640"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and logs of runs of two processes."""
    folder = tmp_path_factory.mktemp("two")
    cases = {
        "lm": [LM, HALF, SHARDED],
        "resumed": [LM, HALF, SHARDED, "--restore-file", folder / "lm" / "checkpoint_1_5.pt"],
        "async": [LM, HALF, SHARDED, "--async-save"],
        "whole": [LM, HALF, PLAIN],
        "weights": [LM, HALF, SHARDED, "--max-update 1 --disable-validation --no-save-optimizer-state"],
        "from-whole": [LM, HALF, SHARDED, "--restore-file", folder / "whole" / "checkpoint_1_5.pt"],
        "shortformer": [SHORTFORMER, HALF, SHARDED],
        "twice": [LM, HALF, SHARDED, LOG, "--update-freq 2"],
        "recomputed": [LM, HALF, SHARDED, LOG, "--dropout 0.2 --attention-dropout 0.1 --checkpoint-activations"],
        "dropout": [LM, HALF, PLAIN, LOG, "--dropout 0.2 --attention-dropout 0.1"],
        "offloaded": [LM, HALF, SHARDED, "--no-save --cpu-offload"],
        "averaged": [LM, HALF, SHARDED, LOG, "--average-weights-from 3 --ema-decay 0.6"],
        "averaged-whole": [LM, HALF, PLAIN, LOG, "--average-weights-from 3 --ema-decay 0.6"],
        "bf16": [LM, HALF, SHARDED, LOG, "--bf16"],
        "bf16-whole": [LM, HALF, PLAIN, LOG, "--bf16"],
        "fp16": [LM, HALF, SHARDED, "--no-save --fp16 --fp16-init-scale 1e6"],
        "fp16-whole": [LM, HALF, PLAIN, "--no-save --fp16 --fp16-init-scale 1e6"],
        "uneven": [LM, SHARDED, LOG, "--tokens-per-sample 600 --max-tokens 1200"],
    }
    refused = {name: [LM, HALF, SHARDED, flags] for name, (flags, _) in REFUSED.items()}
    return folder, run_all(folder, 2, {**cases, **refused}, refused)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, two: Any) -> tuple[Path, dict[str, Any]]:
    """Folder and logs of runs of four processes, which go on where two stopped."""
    folder = tmp_path_factory.mktemp("four")
    quarter = [SHARDED, "--max-tokens 16 --no-last-checkpoints --disable-validation"]
    cases = {
        "shortformer": [SHORTFORMER, quarter, "--no-save --restore-file", two[0] / "shortformer" / "checkpoint_1_5.pt"],
        "hybrid": [LM, quarter, "--shard-group-size 2 --max-update 5"],
        "hybrid-twice": [LM, quarter, "--shard-group-size 2 --update-freq 2", LOG],
    }
    return folder, run_all(folder, 4, cases)


def losses(log: list[dict[str, Any]]) -> list[float]:
    return runs.losses(log) + [line["loss"] for line in runs.summaries(log, "test")]


def norms(log: list[dict[str, Any]]) -> list[float]:
    return [line["gnorm"] for line in runs.updates(log)]


def assert_follows(log: Any, other: Any, loss: float = 1e-5, norm: float = 1e-4) -> None:
    assert len(losses(log)) > 0
    assert losses(log) == pytest.approx(losses(other), abs=loss)
    assert norms(log) == pytest.approx(norms(other), rel=norm)


@pytest.mark.parametrize(("name", "flags"), [("lm", LM), ("shortformer", SHORTFORMER)])
def test_sharded_processes_follow_one_process(two: Any, tmp_path: Path, name: str, flags: Any) -> None:
    alone = runs.train(tmp_path, flags, WHOLE)
    assert_follows(two[1][name], alone)
    ours, theirs = (runs.content(folder / "checkpoint_last.pt")["model"] for folder in (two[0] / name, tmp_path))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key.endswith("k_proj.bias"):
            continue  # its gradient is zero but for rounding, which Adam divides by itself
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-4, msg=key)


def test_a_resumed_run_is_bit_identical_to_the_uninterrupted_one(two: Any) -> None:
    folder, logs = two
    assert runs.updates(logs["resumed"]) == runs.updates(logs["lm"])[5:]
    ends = [runs.content(folder / name / "checkpoint_last.pt") for name in ("lm", "resumed")]
    assert runs.difference(*ends) is None


PAIRS = {
    "recomputed": ("dropout", 1e-5, 1e-4),
    "averaged": ("averaged-whole", 1e-5, 1e-4),
    "offloaded": ("lm", 0.0, 0.0),
    "bf16": ("bf16-whole", 2e-2, 2e-2),  # norms of layers are rounded where they are sharded
    "fp16": ("fp16-whole", 2e-3, 1e-2),
}


@pytest.mark.parametrize("name", PAIRS)
def test_sharded_processes_follow_replicated_ones(two: Any, name: str) -> None:
    other, loss, norm = PAIRS[name]
    assert_follows(two[1][name], two[1][other], loss, norm)
    if name == "bf16":  # the initial gains and biases are numbers of bfloat16
        assert losses(two[1][name])[0] == pytest.approx(losses(two[1][other])[0], abs=1e-5)


def test_batches_added_up_are_one_larger_batch(two: Any, tmp_path: Path) -> None:
    assert_follows(two[1]["twice"], runs.train(tmp_path, LM, LOG, "--max-tokens 128"))


def test_batches_added_up_in_groups_of_processes_are_one_larger_batch(two: Any, four: Any) -> None:
    assert runs.losses(four[1]["hybrid-twice"]) == pytest.approx(runs.losses(two[1]["twice"]), abs=1e-5)


def updated_weights(world: World, folder: Path, flags: Any) -> tuple[dict[str, torch.Tensor], int]:
    """The average of weights after a few updates, and how many graphs were made of layers."""
    graphs = CompileCounter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerwise, "BACKEND", graphs)
        steps = "--update-freq 2 --stages 8:2,16:4 --tokens-from-prev 8 --ema-decay 0.6 --disable-validation"
        words = runs.arguments("--save-dir", folder, runs.SHORTFORMER, runs.NO_DROPOUT, ADAM, HALF, steps, flags)
        train(training_settings(words), world)
    return runs.content(folder / "checkpoint_last.pt")["model"], graphs.frame_count


def test_recomputed_and_compiled_layers_are_sharded(tmp_path: Path) -> None:
    """With memory, stages, several batches an update and averages of weights."""
    importlib.import_module("torch.distributed.fsdp")  # once, before the processes are forked
    found = {}
    together = f"{SHARDED} --compile --checkpoint-activations --checkpoint-policy selective"
    for name, backend in (("together", together), ("whole", PLAIN)):
        (tmp_path / name).mkdir()
        found[name] = on_ranks(updated_weights, 2, tmp_path / name, tmp_path / name / "run", backend)
    for (weights, graphs), (expected, none) in zip(*found.values(), strict=True):
        assert graphs > 0 and none == 0
        for key, value in expected.items():
            if not key.endswith("k_proj.bias"):  # its gradient is rounding, which Adam divides by itself
                torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=1e-4, msg=key)


def gradients_between_batches(world: World, folder: Path) -> tuple[int, int]:
    """Bytes of all parameters, and the growth of all tensors by the first of an update's two
    batches."""
    sizes = []
    accumulate = ShardedReducer.accumulate

    def measured(reducer: ShardedReducer, last: bool) -> Any:
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        local = [tensor.to_local() if hasattr(tensor, "placements") else tensor for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in local if tensor.layout == torch.strided]
        sizes.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        return accumulate(reducer, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedReducer, "accumulate", measured)
        flags = [LM, "--max-tokens 32 --decoder-embed-dim 128", SHARDED, "--update-freq 2 --max-update 2 --no-save"]
        train(training_settings(runs.arguments("--save-dir", folder, flags, "--disable-validation")), world)
    model = runs.model_of(runs.BASELINE, TIED, "--decoder-embed-dim 128")
    return sum(p.numel() * 4 for p in model.parameters()), sizes[3] - sizes[2]  # of the second update


def test_a_process_holds_a_part_of_the_gradient_between_the_batches_of_an_update(tmp_path: Path) -> None:
    importlib.import_module("torch.distributed.fsdp")  # once, before the processes are forked
    for parameters, growth in on_ranks(gradients_between_batches, 2, tmp_path, tmp_path / "run"):
        assert 0.4 * parameters < growth < 0.6 * parameters


def test_a_process_without_a_batch_takes_part(two: Any, tmp_path: Path) -> None:
    alone = runs.train(tmp_path, LM, LOG, "--tokens-per-sample 600 --max-tokens 2400")
    assert_follows(two[1]["uneven"], alone)


REFUSED = {
    "dropped": ("--decoder-layerdrop 0.4", "leaves out layers"),
    "lamb": ("--optimizer lamb", "FairseqLAMB needs whole parameters"),
    "groups": ("--shard-group-size 3", "--shard-group-size 3: must divide the number of processes, 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused(two: Any, name: str) -> None:
    assert REFUSED[name][1] in (two[0] / f"{name}.error").read_text()


@pytest.mark.parametrize("flag", ["--cpu-offload", "--shard-group-size 2"])
def test_flags_of_sharding_need_the_backend(tmp_path: Path, flag: str) -> None:
    with pytest.raises(UserError, match="needs --ddp-backend fully_sharded"):
        runs.train(tmp_path, LM, flag)


@pytest.mark.parametrize("name", ["lm", "shortformer"])
def test_other_numbers_of_processes_go_on_in_the_data_with_their_memory(
    two: Any, four: Any, tmp_path: Path, name: str
) -> None:
    flags, saved = {"lm": LM, "shortformer": SHORTFORMER}[name], two[0] / name / "checkpoint_1_5.pt"
    rest = runs.losses(two[1][name])[5:]
    if name == "shortformer":
        assert runs.losses(four[1][name]) == pytest.approx(rest, abs=1e-5)
    alone = runs.train(tmp_path, flags, WHOLE, "--no-save --disable-validation --restore-file", saved)
    assert runs.losses(alone) == pytest.approx(rest, abs=1e-5)


def test_groups_of_processes_with_a_copy_each_follow_one_group(two: Any, four: Any) -> None:
    assert runs.losses(four[1]["hybrid"]) == pytest.approx(runs.losses(two[1]["lm"])[:5], abs=1e-5)
    folder = four[0] / "hybrid" / "checkpoint_1_5.pt"
    content = runs.content(folder)["model"]
    for name, value in runs.content(two[0] / "lm" / "checkpoint_1_5.pt")["model"].items():
        torch.testing.assert_close(content[name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_what_is_saved_in_the_background_is_the_state_at_its_update(two: Any) -> None:
    for file in ("checkpoint_1_5.pt", "checkpoint_last.pt"):
        assert runs.difference(*(runs.content(two[0] / run / file) for run in ("async", "lm"))) is None


def test_a_checkpoint_that_could_not_be_written_in_the_background_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UserError("checkpoint_last.pt: cannot be written")

    monkeypatch.setattr(manager, "save", full)
    with pytest.raises(UserError, match="cannot be written"):
        runs.train(tmp_path, LM, WHOLE, "--async-save --max-update 1 --disable-validation")


def test_sharded_training_goes_on_from_one_file(two: Any) -> None:
    assert runs.losses(two[1]["from-whole"]) == pytest.approx(runs.losses(two[1]["lm"])[5:], abs=1e-5)


def test_names_are_links_and_only_folders_with_a_name_are_kept(two: Any) -> None:
    names = {path.name: path.is_symlink() for path in (two[0] / "lm").glob("checkpoint*")}
    assert names == {
        "checkpoint_1_5.pt": True, "checkpoint_last.pt": True, "checkpoint_best.pt": True,
        "checkpoint_1_5.parts": False, "checkpoint_1_8.parts": False,
    }  # fmt: skip


def test_a_merged_checkpoint_is_that_of_replicated_training(two: Any, tmp_path: Path) -> None:
    def main(words: list[str]) -> None:
        merge(options.parse_args_and_arch(get_merge_parser(), words))

    source = str(two[0] / "lm" / "checkpoint_1_5.pt")
    main([source, str(tmp_path / "merged.pt")])
    merged, whole = runs.content(tmp_path / "merged.pt"), runs.content(two[0] / "whole" / "checkpoint_1_5.pt")
    assert merged.keys() == whole.keys() and merged["extra_state"].keys() == whole["extra_state"].keys()
    assert merged["last_optimizer_state"]["param_groups"] == whole["last_optimizer_state"]["param_groups"]
    tied = ("decoder.embed_tokens.embeddings.0.0.weight", "decoder.adaptive_softmax.head.word_proj.weight")
    assert len({merged["model"][name].data_ptr() for name in tied}) == 1
    resumed = [LM, WHOLE, "--no-save --disable-validation --restore-file"]
    assert runs.train(tmp_path, resumed, tmp_path / "merged.pt")
    main([source, str(tmp_path / "weights.pt"), "--no-save-optimizer-state"])
    for file in (tmp_path / "weights.pt", two[0] / "weights" / "checkpoint_last.pt"):
        assert "last_optimizer_state" not in checkpoint.read(file)


def test_evaluation_reads_the_folder(two: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("lm", "whole"):
        words = [str(runs.DATA), "--path", str(two[0] / name / "checkpoint_last.pt"), "--cpu"]
        found.append(eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), words))["perplexity"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def _flip(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "tensor": lambda folder: _flip(folder / "__1_0.distcp", 0.31),
    "truncated": lambda folder: os.truncate(folder / "__0_0.distcp", 5000),
    "missing": lambda folder: (folder / "__1_0.distcp").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_gives_way_to_the_newest_good_one(two: Any, tmp_path: Path, kind: str) -> None:
    for link, update in (("checkpoint_last.pt", 8), ("checkpoint_1_5.pt", 5)):
        shutil.copytree(two[0] / "lm" / f"checkpoint_1_{update}.parts", tmp_path / f"checkpoint_1_{update}.parts")
        os.symlink(f"checkpoint_1_{update}.parts", tmp_path / link)
    DAMAGE[kind](tmp_path / "checkpoint_1_8.parts")
    config = CheckpointConfig(save_dir=str(tmp_path))
    assert restored(CheckpointManager(config)) == tmp_path / "checkpoint_1_5.pt"
