"""Today's decoders with all that decoders have: stages, memory, notes, muon, processes,
checkpoints, evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
from jobs import run_all

from fairseq.analysis import plots
from fairseq.config import options
from fairseq_cli import eval_lm
from fairseq_cli.analyze import attention, get_attention_parser, get_recl_parser, recl
from fairseq_cli.eval_lm import get_eval_lm_parser

LLAMA = """--arch llama_tiny --cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64
    --required-batch-size-multiple 1 --criterion adaptive_loss --adaptive-softmax-cutoff 200,600 --clip-norm 0.1
    --seed 3 --log-format json --log-interval 1 --no-epoch-checkpoints --tokens-from-prev 16"""
PYTHIA = LLAMA.replace("llama_tiny", "pythia_tiny") + " --attention-window 12"
ADAM = "--optimizer adam --lr 0.003"
MUON = "--optimizer muon --lr 0.003 --muon-lr 0.02"
TWO = "--max-tokens 32 --max-update 3 --disable-validation"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with memory, trained for a few updates in two stages."""
    folder = tmp_path_factory.mktemp("own")
    log = runs.train(folder, LLAMA, ADAM, "--stages 8:10,16:20 --tokens-from-prev 8 --disable-validation")
    assert runs.losses(log)[-1] < runs.losses(log)[0]
    shutil.copy(runs.DATA / "dict.txt", folder)
    return folder


@pytest.mark.parametrize("flags", [f"{LLAMA} {MUON} --dropout 0.1", f"{PYTHIA} {ADAM} --attention-dropout 0.1"])
def test_an_interrupted_run_goes_on_exactly(flags: str, tmp_path: Path) -> None:
    runs.train(tmp_path / "whole", flags, "--max-update 6 --save-interval-updates 4 --disable-validation")
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole" / "checkpoint_1_4.pt", tmp_path / "resumed" / "checkpoint_last.pt")
    runs.train(tmp_path / "resumed", flags, "--max-update 6 --save-interval-updates 4 --disable-validation")
    last = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "resumed")]
    assert runs.difference(*last) is None


def test_recomputed_activations_change_no_number(tmp_path: Path) -> None:
    flags = f"{LLAMA} {ADAM} --dropout 0.1 --max-update 4 --disable-validation --no-save"
    recomputed = "--checkpoint-activations"
    selective = f"{recomputed} --checkpoint-policy selective"
    logs = [runs.train(tmp_path, flags, more) for more in ("", recomputed, selective)]
    assert runs.losses(logs[0]) == runs.losses(logs[1]) == runs.losses(logs[2])


def test_two_processes_train_as_one_sharded_or_not(tmp_path: Path) -> None:
    cases = {
        f"{name}-{way}": [flags, ADAM, TWO, f"--ddp-backend {way}"]
        for name, flags in (("llama", LLAMA), ("pythia", PYTHIA))
        for way in ("c10d", "fully_sharded")
    }
    logs = run_all(tmp_path, 2, cases)
    for name, flags in (("llama", LLAMA), ("pythia", PYTHIA)):
        alone = runs.losses(runs.train(tmp_path / name, flags, ADAM, TWO, "--max-tokens 64"))
        for way in ("c10d", "fully_sharded"):
            assert runs.losses(logs[f"{name}-{way}"]) == pytest.approx(alone, abs=1e-4), way


def evaluated(folder: Path, out: Path, flags: str) -> dict[str, Any]:
    """``results.json`` of an evaluation of the model in *folder*."""
    argv = runs.words(runs.DATA, "--path", folder / "checkpoint_last.pt", "--cpu --gen-subset test", flags)
    eval_lm.main(options.parse_args_and_arch(get_eval_lm_parser(), [*argv, "--results-path", str(out)]))
    return dict(json.loads((out / "results.json").read_text()))


def test_token_by_token_evaluation_is_evaluation_without_overlap(own: Path, tmp_path: Path) -> None:
    plain = evaluated(own, tmp_path / "plain", "--max-tokens 16 --tokens-per-sample 16")
    single = evaluated(own, tmp_path / "single", "--max-tokens 16 --tokens-per-sample 16 --sliding-inf 1")
    assert single["loss_base2"] == pytest.approx(plain["loss_base2"], abs=1e-5)
    longer = evaluated(
        own, tmp_path / "longer", "--max-tokens 16 --tokens-per-sample 16 --model-overrides {'tokens_from_prev':48}"
    )
    assert longer["loss_base2"] != plain["loss_base2"]


def test_int8_weights_change_little(own: Path, tmp_path: Path) -> None:
    flags = "--max-tokens 16 --tokens-per-sample 16 --sliding-inf 1"
    plain, rounded = (evaluated(own, tmp_path / f"{more}o", f"{flags} {more}") for more in ("", "--int8"))
    assert rounded["loss_base2"] == pytest.approx(plain["loss_base2"], abs=0.05)
    assert rounded["loss_base2"] != plain["loss_base2"]


def test_context_lengths_and_attention_maps_of_a_decoder_with_memory(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "_save", lambda figure, path, *rest: path.write_bytes(b""))  # drawing takes seconds
    data = [str(runs.DATA), "--path", str(own / "checkpoint_last.pt"), "--cpu", "--gen-subset", "test"]
    maps = [*data, "--results-path", str(tmp_path / "maps"), "--tokens-per-sample", "16"]
    attention(options.parse_args_and_arch(get_attention_parser(), maps))
    assert [*(tmp_path / "maps").iterdir()]
    parser = get_recl_parser()
    lengths = [*data, "--results-path", str(tmp_path / "recl"), "--max-context", "32", "--step", "16"]
    lengths += ["--positions", "4"]
    recl(options.parse_args_and_arch(parser, lengths))
    assert [*(tmp_path / "recl").iterdir()]
