"""The label-smoothed loss and its gradients are those of the full matrix of log-probabilities."""

from __future__ import annotations

import pytest
import runs
import torch

from fairseq.tasks import setup_task

PLAIN = f"{runs.BASELINE.replace('adaptive_loss', 'label_smoothed_cross_entropy')} --label-smoothing 0.2"


def loss_and_gradients(flags):
    args = runs.arguments(flags, runs.NO_DROPOUT)
    task = setup_task(args)
    torch.manual_seed(1)
    model, criterion = task.build_model(args), task.build_criterion(args)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(4, 1000, (3, 8), generator=generator)
    target = torch.randint(4, 1000, (3, 8), generator=generator)
    target[2, 5:] = task.source_dictionary.pad()
    sample = {"net_input": {"src_tokens": tokens}, "target": target, "ntokens": 21, "nsentences": 3}
    return model, criterion, sample


@pytest.mark.parametrize("adaptive", [False, True])
def test_loss_is_that_of_smoothed_targets(adaptive):
    flags = PLAIN if adaptive else f"{PLAIN} --arch transformer_lm --decoder-layers 1"
    model, criterion, sample = loss_and_gradients(flags)
    loss, size, sums = criterion(model, sample)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    lprobs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
    words = lprobs.size(-1)
    wanted = nll = 0.0
    for row, targets in zip(lprobs.flatten(0, 1), sample["target"].flatten().tolist(), strict=True):
        if targets != 1:
            smoothed = torch.full((words,), 0.2 / words)
            smoothed[targets] += 0.8
            wanted = wanted - (smoothed * row).sum()
            nll = nll - row[targets].item()
    wanted.backward()
    assert size == 21 and loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert sums["nll_loss"].item() == pytest.approx(nll, rel=1e-5) and sums["loss"].item() == loss.item()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, atol=1e-4, rtol=1e-4), name


def test_under_autocast_the_smoothing_term_is_in_float32():
    model, criterion, sample = loss_and_gradients(f"{PLAIN} --arch transformer_lm --decoder-layers 1")
    with torch.no_grad():
        model.output_layer.weight += 0.3  # a mean whose products bfloat16 would round far beyond the differences
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(**sample["net_input"])[0].detach().float()
        loss, _, sums = criterion.compute_loss(model, (hidden, {}), sample)
    term = (loss.detach() - sums["nll_loss"]).double()
    keep = sample["target"] != 1
    states, weight = hidden[keep].double(), model.output_layer.weight.double()
    wanted = 0.2 * ((states * weight[sample["target"][keep]]).sum() - (states @ weight.T).mean(-1).sum())
    assert float(term) == pytest.approx(float(wanted.detach()), rel=1e-4)


def test_the_log_has_both_losses(tmp_path):
    (line,) = runs.updates(
        runs.train(tmp_path, PLAIN, "--arch transformer_lm --max-update 1 --no-save --disable-validation")
    )
    assert line["ppl"] == pytest.approx(2 ** line["nll_loss"], rel=1e-3) and line["loss"] != line["nll_loss"]


def test_loss_and_gradients_need_no_value_of_the_device():
    model, criterion, sample = loss_and_gradients(PLAIN)
    sample = criterion.prepare(model, sample)  # on the host
    tokens, target = (tensor.to("meta") for tensor in (sample["net_input"]["src_tokens"], sample["target"]))
    model.to("meta")  # whose tensors have no values: reading one is an error
    loss, *_ = criterion(model, {**sample, "net_input": {"src_tokens": tokens}, "target": target})
    loss.backward()
    assert loss.device.type == "meta" and all(p.grad is not None for p in model.parameters())
