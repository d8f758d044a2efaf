"""Plug-ins call models of this package as fairseq's: they and their decoders return logits."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F

from fairseq import checkpoint_utils, tasks
from fairseq.config import options, registry
from fairseq.errors import UserError
from fairseq.models.views import LogitsModel, logits_model, plain, view
from fairseq.sequence_generator import SequenceGenerator
from fairseq_cli import eval_lm
from fairseq_cli.generate import get_generation_parser

TINY = """--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16
    --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --dropout 0 --tokens-per-sample 16 --max-tokens 64"""
TASK = """
import torch
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("logits_task")
class Task(LanguageModelingTask):
    def __init__(self, args, dictionary, output_dictionary=None, targets=None):
        super().__init__(args, dictionary, output_dictionary, targets)
        self.every = args.every

    @staticmethod
    def add_args(parser):
        parser.add_argument("--every", type=int, default=1)
        LanguageModelingTask.add_args(parser)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        model.train()
        assert torch.initial_seed() == self.args.seed + update_num
        tokens, logits = sample["net_input"]["src_tokens"], model(**sample["net_input"])[0]
        assert logits.shape == (*tokens.shape, len(self.target_dictionary))
        state, steps = {}, []
        for length in range(1, 4):
            steps.append(model.decoder(tokens[:, :length], None, incremental_state=state)[0])
        torch.testing.assert_close(torch.cat(steps, 1), logits[:, :3], atol=1e-4, rtol=0)
        loss, size, log = criterion(model, sample)
        optimizer.backward(loss)
        return loss, size, log
"""


def test_a_view_returns_logits_and_shares_everything_else() -> None:
    model = runs.model_of(TINY).eval()
    tokens, seen = torch.tensor([[5, 6, 7], [8, 9, 10]]), logits_model(model)
    hidden = model(tokens)[0]
    logits = F.linear(hidden, model.output_layer.weight)
    assert isinstance(seen, LogitsModel) and isinstance(seen, type(model)) and logits_model(seen) is seen
    assert plain(seen) is model and seen.train().training and model.training and not seen.eval().training
    assert [id(p) for p in seen.parameters()] == [id(p) for p in model.parameters()]
    assert torch.equal(seen(tokens, src_lengths=None)[0], logits)
    assert torch.equal(seen.extract_features(tokens)[0], hidden)
    assert torch.equal(seen.decoder.output_layer(hidden), logits)
    last = seen.decoder(tokens, None, incremental_state={}, return_attn=False)[0]
    # A product of other rows may round otherwise.
    torch.testing.assert_close(last, logits[:, -1:])
    assert last.requires_grad
    for part in (seen, seen.decoder):
        torch.testing.assert_close(part.get_normalized_probs((logits,), log_probs=True), logits.log_softmax(-1))
    assert torch.equal(model(tokens)[0], hidden), "the original stays as it is"
    twin = copy.deepcopy(seen)
    torch.nn.init.zeros_(seen.decoder.embed_tokens.weight)
    assert torch.equal(twin(tokens)[0], logits) and not torch.equal(seen(tokens)[0], logits)
    assert twin.state_dict().keys() == model.state_dict().keys() and plain(twin) is not model
    with pytest.raises(UserError, match="TransformerDecoder: alignment_layer is not implemented; leave it out"):
        seen.decoder(tokens, alignment_layer=1)


def test_an_adaptive_softmax_is_normalised_by_its_own_bands() -> None:
    model = runs.model_of(f"{TINY} --adaptive-softmax-cutoff 100,300").eval()
    tokens = torch.tensor([[5, 6, 7]])
    seen, hidden = view(LogitsModel, model), model(tokens)[0]
    assert torch.equal(seen(tokens)[0], hidden)
    lprobs = seen.get_normalized_probs(seen(tokens), log_probs=True)
    torch.testing.assert_close(lprobs, model.output_layer.log_probs(hidden))
    torch.testing.assert_close(lprobs.exp(), seen.decoder.get_normalized_probs(seen(tokens), log_probs=False))


def test_a_plugins_steps_and_script_read_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.TASKS, "_parts", {**registry.TASKS.parts()})
    monkeypatch.delitem(sys.modules, "logits_plugin", raising=False)
    folder = tmp_path / "logits_plugin"
    folder.mkdir()
    (folder / "__init__.py").write_text(TASK)
    # One batch an epoch: plug-ins read blocks in another order.
    every = f"{TINY} --cpu --train-subset valid --max-tokens 4000 --max-update 2"
    every += " --optimizer sgd --lr 0.1 --log-format json --log-interval 1"
    alone = runs.losses(runs.train(tmp_path / "alone", every, "--no-save"))
    log = runs.train(tmp_path / "run", every, "--task logits_task --no-epoch-checkpoints --user-dir", folder)
    assert runs.losses(log) == pytest.approx(alone, abs=1e-5) and len(alone) == 2

    path = tmp_path / "run" / "checkpoint_last.pt"
    words = f"{runs.DATA} --path {path} --task logits_task --gen-subset test --tokens-per-sample 16 --max-tokens 64"
    args = options.parse_args_and_arch(get_generation_parser(), [*words.split(), "--user-dir", str(folder), "--cpu"])
    assert args.max_tokens == 64 and args.max_sentences is None and args.no_beamable_mm is False and args.every == 1
    task: Any = tasks.setup_task(args)
    task.load_dataset(args.gen_subset)
    [model], _ = checkpoint_utils.load_model_ensemble(args.path.split(":"), task=task)
    model.make_generation_fast_(beamable_mm_beam_size=args.beam, need_attn=args.print_alignment)
    batches = task.get_batch_iterator(task.datasets["test"], args.max_tokens, args.max_sentences)
    loss = count = 0
    for sample in batches.next_epoch_itr(shuffle=False):
        lprobs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True).detach()
        loss += float(F.nll_loss(lprobs.flatten(0, 1), sample["target"].flatten(), ignore_index=1, reduction="sum"))
        count += int((sample["target"] != 1).sum())
    words = ["--path", str(path), "--user-dir", str(folder), "--cpu", "--gen-subset", "test"]
    metrics = eval_lm.main(options.parse_args_and_arch(eval_lm.get_eval_lm_parser(), [str(runs.DATA), *words]))
    assert math.exp(loss / count) == pytest.approx(metrics["perplexity"], rel=1e-4) and count == metrics["tokens"]
    generator = SequenceGenerator(tgt_dict=task.target_dictionary, max_len_b=5)
    rows = torch.tensor([[5, 6], [7, 8]])
    found = generator.generate([model], {"net_input": {"src_tokens": rows}}, rows, bos_token=2)
    with torch.no_grad():
        first = int(model(torch.tensor([[2, 5, 6]]))[0][0, -1].argmax())
    assert found[0][0]["tokens"][:3].tolist() == [5, 6, first]
