"""Every family trains, resumes, is scored, writes and is exported on a device that accepts no
tensor of the host."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exports
import noted
import numpy as np
import pytest
import runs
import sentences
import strict
import torch
import torch.nn.functional as F
from mistakes import user_error
from strict import on_device, on_strict_device

from fairseq.analysis import plots
from fairseq.config import options
from fairseq.data import iterator
from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter, token_dtype
from fairseq.errors import UserError
from fairseq.hub import LanguageModel, MaskedLanguageModel, load_scorer
from fairseq.kernels import arguments
from fairseq.models.transformer_lm import TransformerDecoder
from fairseq.modules import devices
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary
from fairseq.training import loop
from fairseq.training import update as update_module
from fairseq_cli import eval_lm, finetune, generate
from fairseq_cli.analyze import attention, get_attention_parser, get_recl_parser, recl
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.finetune import get_finetune_parser
from fairseq_cli.generate import get_generation_parser

COMMON = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 8 --max-tokens 32
    --required-batch-size-multiple 1 --optimizer adam --lr 0.01 --clip-norm 0.1 --seed 3 --log-format json
    --log-interval 1 --no-epoch-checkpoints --max-valid-steps 1 --update-freq 2 --ema-decay 0.9"""
SIZES = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2"
ADAPTIVE = f"{COMMON} {SIZES} --criterion adaptive_loss"
PLAIN = f"{COMMON} --criterion cross_entropy"
DECODERS = {
    "baseline": f"--arch transformer_lm_tiny {ADAPTIVE}",
    "shortformer": f"--arch shortformer_tiny {ADAPTIVE} --tokens-from-prev 8",
    "fast, with notes": f"--arch transformer_lm_fast_tiny {ADAPTIVE} --ngram-notes 99",
    "gpt2": f"--arch gpt2_tiny {PLAIN}",
    "llama": f"--arch llama_tiny {PLAIN} --tokens-from-prev 8",
    "pythia": f"--arch pythia_tiny {PLAIN}",
    "transformer-xl": f"{exports.XL} {PLAIN} --mem-len 8",
    "transformer-xl bands": f"{exports.MODELS['transformer-xl bands']} {PLAIN} --same-length --clamp-len 5",
    "lstm": f"--arch lstm_lm_tiny {PLAIN}",
}
OF_A_STATE = ("baseline", "fast, with notes", "shortformer", "transformer-xl", "lstm")  # the others have one of these
REMEMBERING = ("shortformer", "llama", "transformer-xl", "transformer-xl bands")
SCORINGS = ("", "--context-window 4", "--context-window 7")
SCORINGS_WITH_MEMORY = ("", "--sliding-inf 1")
OF_NOTES = f"{noted.SIZES} --update-freq 2 --ema-decay 0.9 --no-epoch-checkpoints"
ENCODERS = {
    "bert": noted.BERT,
    "electra": noted.ELECTRA,
    "bert with notes": noted.TNF_BERT,
    "electra with notes": noted.TNF_ELECTRA,
}
DROPOUT = "--dropout 0.1"
EXPORTED = ("baseline", "shortformer with norms", "transformer-xl bands")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short corpus: token by token it is read in a second."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(runs.DATA / "dict.txt", folder)
    tokens = IndexedCorpus(str(runs.DATA / "valid")).tokens
    for split, part in (("valid", tokens[:300]), ("test", tokens[300:330])):
        with IndexedWriter(folder / split, token_dtype(len(Dictionary.load(folder / "dict.txt")))) as writer:
            writer.add(part, np.array([len(part)]))
    return folder


@pytest.fixture(scope="module")
def with_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noted.corpus(tmp_path_factory.mktemp("noted"))


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Context in which runs train on *device*."""
    before, runs.DEVICE = runs.DEVICE, device
    yield
    runs.DEVICE = before


def check_losses(folder: Path, data: Path, *flags: Any, rel: float = 1e-3) -> Path:
    """Losses and gradient norms of two updates, which end in the checkpoint that is returned, are
    those on the CPU, but for rounding."""
    settings = vars(runs.arguments(*flags, data=data))
    dropouts = [name for name, value in settings.items() if "drop" in name and isinstance(value, float)]
    flags = (*flags, *(f"--{name.replace('_', '-')} 0" for name in dropouts), "--max-update 2")
    log: list[list[dict[str, Any]]] = []
    for device in (runs.DEVICE, "cpu"):
        with on(device):
            save = "--no-save" if device == "cpu" else ""
            log.append(runs.updates(runs.train(folder / device, *flags, save, data=data)))
    assert len(log[0]) == len(log[1]) == 2
    for ours, theirs in zip(*log, strict=True):
        assert {name: ours[name] for name in ("loss", "gnorm")} == pytest.approx(
            {name: theirs[name] for name in ("loss", "gnorm")}, rel=rel
        )
    return folder / runs.DEVICE / "checkpoint_last.pt"


def resumed(folder: Path, data: Path, *flags: Any) -> Path:
    """The checkpoint of two updates; that of one and one is the same, bit for bit."""
    flags = (*flags, "--deterministic" if runs.DEVICE == "cuda" else "")
    runs.train(folder / "whole", *flags, "--max-update 2", data=data)
    for updates in (1, 2):
        runs.train(folder / "parts", *flags, f"--max-update {updates}", data=data)
    whole, parts = (folder / name / "checkpoint_last.pt" for name in ("whole", "parts"))
    one, other = runs.content(whole), runs.content(parts)
    assert all(tensor.device.type == "cpu" for tensor in one["model"].values())
    for extra in (one["extra_state"], other["extra_state"]):
        for name in ("best", "without_improvement"):  # the first part ends with a validation
            del extra[name]
    assert runs.difference(one, other) is None
    return whole


def parsed(parser: Any, *flags: Any) -> Any:
    return options.parse_args_and_arch(parser, runs.words(*map(str, flags)))


def check_scores(file: Path, data: Path, *flags: Any) -> None:
    """Log-probabilities of the test split are those on the CPU."""
    lprobs = []
    for cpu in ("", "--cpu"):
        out = file.parent / f"scores{cpu}.npz"
        eval_lm.main(parsed(get_eval_lm_parser(), data, "--path", file, "--save-token-scores", out, cpu, *flags))
        with np.load(out) as scores:
            lprobs.append(scores["lprobs"])
        out.unlink()
    np.testing.assert_allclose(*lprobs, rtol=1e-4, atol=1e-4)


def check_texts(file: Path, data: Path, *flags: Any) -> None:
    """Generated tokens are those on the CPU."""
    flags = ("--path", file, "--gen-subset test --context-tokens 9 --max-new-tokens 6 --num-samples 2", *flags)
    texts = [
        [passage.continuation.tokens for passage in generate.main(parsed(get_generation_parser(), data, cpu, *flags))]
        for cpu in ("", "--cpu")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", DECODERS)
@on_device
def test_a_decoder_trains_resumes_is_scored_writes_and_is_exported(name: str, data: Path, tmp_path: Path) -> None:
    file = check_losses(tmp_path, data, DECODERS[name])
    if name in OF_A_STATE:
        file = resumed(tmp_path, data, DECODERS[name], DROPOUT)
    # Windows cost a pass per token, through the same layers: one family without memory has them.
    windows = SCORINGS if name == "baseline" else SCORINGS[:1]
    for flags in SCORINGS_WITH_MEMORY if name in REMEMBERING else windows:
        check_scores(file, data, "--max-tokens 64 --tokens-per-sample 8", flags)
    for flags in ("--beam 2", "--sampling --sampling-topk 5 --seed 2"):
        check_texts(file, data, flags)
    if name != "lstm":
        exports.exported(file, tmp_path / "hf")


@pytest.mark.parametrize("name", ENCODERS)
@on_device
def test_an_encoder_trains_resumes_is_scored_and_is_exported(name: str, with_notes: Path, tmp_path: Path) -> None:
    check_losses(tmp_path, with_notes, ENCODERS[name], OF_NOTES)
    file = resumed(tmp_path, with_notes, ENCODERS[name], OF_NOTES)
    check_scores(file, with_notes, "--gen-subset valid")
    exports.exported(file, tmp_path / "hf")
    model = load_scorer(file)
    assert isinstance(model, MaskedLanguageModel)
    assert model.fill("ax <mask> by")


@pytest.mark.parametrize("name", DECODERS)
@on_strict_device
def test_a_decoder_trains_is_scored_and_writes_without_float64(name: str, data: Path, tmp_path: Path) -> None:
    strict.backend().has_float64 = False
    file = check_losses(tmp_path, data, DECODERS[name])
    check_scores(file, data, "--max-tokens 64 --tokens-per-sample 8")
    for flags in ("--beam 2", "--sampling --sampling-topp 0.9 --seed 2"):
        check_texts(file, data, flags)


@pytest.mark.parametrize("name, form", [*((name, "") for name in ENCODERS), ("bert with notes", "--note-form centred")])
@on_strict_device
def test_an_encoder_trains_and_is_scored_without_float64(
    name: str, form: str, with_notes: Path, tmp_path: Path
) -> None:
    strict.backend().has_float64 = False
    file = check_losses(tmp_path, with_notes, ENCODERS[name], OF_NOTES, form)
    check_scores(file, with_notes, "--gen-subset valid")


@on_strict_device
def test_a_device_without_float64_refuses_it_and_numbers_in_float64_are_on_the_host() -> None:
    strict.backend().has_float64 = False
    x = torch.rand(3, device=strict.NAME)
    for refused in (x.double, lambda: torch.zeros(2, dtype=torch.float64, device=strict.NAME)):
        with pytest.raises(TypeError, match="no float64"):
            refused()
    assert devices.exact(x).dtype == torch.float64 and not strict.is_strict(devices.exact(x))


@on_device
def test_notes_of_a_causal_model(with_notes: Path, tmp_path: Path) -> None:
    flags = (noted.CAUSAL, "--notes --note-context --update-freq 2 --log-interval 1 --no-epoch-checkpoints")
    check_losses(tmp_path, with_notes, *flags)
    file = resumed(tmp_path, with_notes, *flags)
    check_scores(file, with_notes, "--gen-subset valid --max-tokens 48 --tokens-per-sample 12")


@pytest.mark.parametrize(
    "precision, name",
    [
        ("--fp16", "shortformer"),
        ("--fp16", "transformer-xl"),
        ("--fp16", "fast, with notes"),
        ("--memory-efficient-fp16", "fast, with notes"),
        ("--bf16", "llama"),
        pytest.param(
            *("--bf16", "lstm"),
            marks=pytest.mark.skipif(
                torch.backends.cpu.get_cpu_capability() == "AVX2", reason="torch has no bfloat16 LSTM for AVX2"
            ),
        ),
    ],
)
@on_device
def test_half_precision(precision: str, name: str, data: Path, tmp_path: Path) -> None:
    check_losses(tmp_path, data, DECODERS[name], precision, rel=0.03)
    log = runs.updates(
        runs.train(tmp_path, DECODERS[name], precision, "--fp16-init-scale 1e9 --max-update 2", data=data)
    )
    # The first updates overflow.
    assert len(log) == 2 and (precision == "--bf16" or log[-1]["loss_scale"] < 1e9)
    eval_lm.main(parsed(get_eval_lm_parser(), data, "--path", tmp_path / "checkpoint_last.pt", precision))


@on_strict_device
def test_stages_profile_and_optimizers(data: Path, tmp_path: Path) -> None:
    shortformer = f"--arch shortformer_tiny {ADAPTIVE}"
    log = runs.train(tmp_path / "stages", shortformer, "--stages 8:2,16:4 --profile 1:2 --async-save", data=data)
    assert [line["tokens_per_sample"] for line in runs.updates(log)] == [8, 8, 16, 16]
    for optimizer in ("nag", "sgd --momentum 0.9", "sgd", "adafactor", "muon"):
        check_losses(tmp_path / optimizer, data, DECODERS["baseline"], "--optimizer", optimizer)


@on_strict_device
def test_updates_that_are_not_finite(data: Path, tmp_path: Path) -> None:
    norm = update_module.norm_and_factor

    def spoiled(parameters: Any, *args: Any) -> Any:
        parameters[0].grad.fill_(torch.inf)
        return norm(parameters, *args)

    update_module.norm_and_factor = spoiled
    with user_error("the gradient of"):
        runs.train(tmp_path, DECODERS["baseline"], DROPOUT, "--max-update 2", data=data)


@on_strict_device
def test_batches_that_exceed_the_memory(data: Path, tmp_path: Path) -> None:
    step, failed = FairseqTask.step, []

    def first_fails(*args: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("strict out of memory")
        return step(*args)

    FairseqTask.step = first_fails
    with pytest.raises(UserError, match="out of GPU memory in update 1 on "):
        runs.train(tmp_path, DECODERS["baseline"], "--max-update 1 --no-save", data=data)


@pytest.mark.parametrize("has_float64", [True, False])
@on_strict_device
def test_classification(has_float64: bool, tmp_path: Path) -> None:
    strict.backend().has_float64 = has_float64
    sentences.write_dictionary(tmp_path / "bin")
    sentences.write_task(tmp_path / "MR", train=16, dev=8)
    sentences.write_pretrained(tmp_path / "bert.pt", tmp_path / "bin", "--token-types 0", tnf=True)
    common = ("--glue-task MR --log-format none --path", tmp_path / "bert.pt", "--data-bin", tmp_path / "bin")
    flags = (*common, "--seeds 1 --lrs 0.01 --max-epoch 1 --batch-size 8 --save-dir", tmp_path / "out")
    assert finetune.main(parsed(get_finetune_parser(), tmp_path / "MR", *flags))["runs"]


@pytest.mark.parametrize("has_float64", [True, False])
@on_strict_device
def test_analyses_and_the_python_interface(has_float64: bool, data: Path, tmp_path: Path) -> None:
    strict.backend().has_float64 = has_float64
    plots._save = lambda figure, path, *rest: path.write_bytes(b"")  # drawing takes seconds
    golden = runs.GOLDEN / "shortformer_stage2.pt"
    flags = ("--gen-subset test --step 4 --max-context 8 --positions 5 --out", tmp_path / "recl")
    recl(parsed(get_recl_parser(), data, "--path", golden, *flags))
    flags = ("--path", runs.GOLDEN / "baseline.pt", "--tokens-per-sample 8 --out", tmp_path / "attention")
    attention(parsed(get_attention_parser(), data, *flags))
    model, host = (LanguageModel.from_pretrained(golden, data, device=name) for name in ("auto", "cpu"))
    assert next(model.model.parameters()).device.type == strict.NAME
    tokens = IndexedCorpus(str(data / "test")).tokens
    texts = [" ".join(model.dictionary[token] for token in tokens[:count]) for count in (5, 9)]
    for ours, theirs in zip(model.score(texts), host.score(texts), strict=True):
        torch.testing.assert_close(ours[1].cpu(), theirs[1], rtol=1e-4, atol=1e-4)
    assert model.sample(texts[0], 4, seed=1) == host.sample(texts[0], 4, seed=1)


@on_strict_device
def test_the_code_of_an_export() -> None:
    for name in EXPORTED:
        ours = exports.theirs(exports.made(name))
        moved = copy.deepcopy(ours).to(strict.NAME)
        tokens = exports.tokens(2, 6)
        mask = torch.ones_like(tokens)
        mask[0, :2] = 0
        one, other = (model(tokens.to(model.device), attention_mask=mask.to(model.device)) for model in (ours, moved))
        torch.testing.assert_close(other.logits.cpu(), one.logits, rtol=1e-4, atol=1e-4)
        texts = [model.generate(tokens.to(model.device), max_new_tokens=2, do_sample=False) for model in (ours, moved)]
        assert torch.equal(texts[0], texts[1].cpu())


@on_strict_device
def test_a_tensor_that_a_forward_pass_leaves_on_the_host_is_found(data: Path, tmp_path: Path) -> None:
    embed = TransformerDecoder.embed
    planted = lambda self, *args, **kwargs: embed(self, *args, **kwargs) + torch.zeros(1)  # noqa: E731
    TransformerDecoder.embed = planted
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        runs.train(tmp_path, DECODERS["baseline"], "--max-update 1", data=data)


@on_strict_device
def test_the_device_refuses_what_cuda_refuses() -> None:
    x, host = torch.randn(4, 8, device=strict.NAME), torch.zeros(4, 8)
    for refused in (
        lambda: x + host,
        lambda: host.add_(x),
        lambda: torch.zeros(()).add_(x),
        lambda: x @ host.T,
        lambda: torch.cat([x, host]),
        lambda: F.embedding(torch.tensor([1]), x),
        lambda: x.index_select(0, torch.tensor(1)),
        lambda: x.masked_fill_(torch.zeros(4, 8, dtype=torch.bool), 1),
        lambda: x.uniform_(generator=torch.Generator()),
    ):
        with pytest.raises(RuntimeError, match=r"device|is on cpu|generator|output with shape"):
            refused()
    with pytest.raises(TypeError, match="can't convert strict:0"):
        x.numpy()
    assert strict.is_strict(x + torch.ones(())) and strict.is_strict(torch.where(x > 0, x, torch.tensor(0.0)))
    assert not strict.is_strict(x.cpu()) and strict.is_strict(x[torch.tensor([0, 1])])


@on_strict_device
def test_code_in_c_is_not_given_memory_of_the_device() -> None:
    with pytest.raises(AssertionError, match="fairseq.kernels.arguments reads memory of the device"):
        arguments.call(print, torch.zeros(3, device=strict.NAME))


@on_strict_device
def test_the_device_has_random_numbers_of_its_own() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = torch.randn(3, device=strict.NAME)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(torch.randn(3, device=strict.NAME), one)
    model = torch.nn.Linear(3, 3)
    weight = model.weight
    assert model.to(strict.NAME).weight is weight and strict.is_strict(weight)


NARROW = "--decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 4"
CUTOFFS = "--adaptive-input-cutoff 50,100 --adaptive-softmax-cutoff 50,100"
PUBLISHED = {  # with all their layers, in which the number of launches lies
    "shortformer_wiki103": f"{NARROW} {CUTOFFS} --criterion adaptive_loss --optimizer nag --lr 0.01 --clip-norm 0.1",
    "llama_135m": f"{NARROW} --decoder-kv-heads 2 --criterion cross_entropy --optimizer adam --lr 0.01 --clip-norm 1",
    # Notes of pairs: PyTorch waits once more on a GPU, where it adds up sparse gradients.
    "llama_tiny": "--ngram-notes 99 --criterion cross_entropy --optimizer adam --lr 0.01 --clip-norm 1",
}


@pytest.mark.parametrize("arch, launches", [("shortformer_wiki103", 2307), ("llama_135m", 6309), ("llama_tiny", 563)])
@on_strict_device
def test_an_update_waits_once_and_launches_no_more_than_before_and_a_validation_waits_at_its_end(
    arch: str, launches: int, data: Path, tmp_path: Path
) -> None:
    counts: list[tuple[int, int]] = []
    waits_before_copies: list[int] = []
    evaluate, copy_batch = loop.evaluate, iterator._to_device

    def count() -> None:
        counts.append((strict.backend().launches, strict.backend().waits))

    def counted_update(*args: Any) -> bool:
        count()
        return update_module.update(*args)

    def counted_validation(state: Any, batches: Any) -> Any:
        count()
        meter = evaluate(state, batches)
        count()
        return meter

    def counted_copy(*args: Any) -> Any:
        waits_before_copies.append(strict.backend().waits)
        return copy_batch(*args)

    loop.update, loop.evaluate, iterator._to_device = counted_update, counted_validation, counted_copy
    flags = "--cpu --train-subset valid --valid-subset test --tokens-per-sample 8 --batch-size 4 --bf16 --no-save"
    runs.train(tmp_path, f"--arch {arch}", PUBLISHED[arch], flags, "--max-update 5 --batch-size-valid 1", data=data)
    # From one update to the next, with what the loop and the log do.
    (before, waits), (after, more) = counts[3:5]
    assert more - waits == 1 and after - before <= launches, (after - before, more - waits)
    assert waits_before_copies[4] == waits, "the next batch is copied before the update is waited for"
    # Of four batches, before its figures are read.
    (_, waits), (_, more) = counts[-2:]
    assert more == waits
