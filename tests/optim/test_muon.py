"""Muon: its papers' formulas for the matrices of the layers, Adam for the rest, and a state that
travels."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest
import runs
import torch
from mistakes import user_error
from ranks import on_ranks
from small_runs import a_run

from fairseq.errors import UserError
from fairseq.models.layerwise import layers_of
from fairseq.optim import (
    FairseqOptimizer,
    build_optimizer,
    hidden_matrices,
    parameter_groups,
    register_optimizer,
)
from fairseq.optim import muon as muon_module
from fairseq.optim.groups import HIDDEN, NO_DECAY, OUTER, is_norm_or_bias
from fairseq.optim.lr_scheduler import build_lr_scheduler
from fairseq.optim.muon import Muon, orthogonal
from fairseq.training.parallel import check_optimizer

SHAPES = [(6, 4), (4, 6), (5, 5), (6, 4)]
ADAM = {"betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def parameters(shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def gradients(steps, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(steps)]


def groups(matrices, others):
    return [{"params": matrices, "group": HIDDEN}, {"params": others}]


def train(optimizer, params, grads):
    for step in grads:
        for p, grad in zip(params, step, strict=True):
            p.grad = grad.to(p.dtype)
        optimizer.step()


def newton_schulz(matrix, iterations):
    """The iteration of Jordan et al. 2024 as they print it: for wide matrices; tall ones are
    transposed before."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T, iterations).T
    x = matrix / matrix.pow(2).sum().sqrt()
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x


def muon(p, grads, lr, momentum, iterations, decay):
    """Liu et al. 2025, equations 1 to 4, with Nesterov momentum, a matrix at a time."""
    buffer = torch.zeros_like(p)
    for grad in grads:
        buffer = momentum * buffer + grad
        update = newton_schulz(grad + momentum * buffer, iterations)
        p = p - lr * (0.2 * max(p.shape) ** 0.5 * update + decay * p)
    return p


def test_matrices_follow_the_papers_formulas_in_float64():
    params, grads = parameters(), gradients(4)
    expected = [muon(p.detach().clone(), [g[i] for g in grads], 0.02, 0.9, 5, 0.1) for i, p in enumerate(params)]
    train(Muon([{"params": params, "group": HIDDEN}], 0.02, 0.9, 5, torch.float64, **ADAM), params, grads)
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-12)


def test_matrices_that_exceed_a_batch_are_updated_alike(monkeypatch):
    results = []
    for batch in (1, 48, 1 << 24):
        monkeypatch.setattr("fairseq.optim.muon.BATCH", batch)
        params = parameters()
        train(Muon([{"params": params, "group": HIDDEN}], 0.02, 0.9, 5, torch.float64, **ADAM), params, gradients(2))
        results.append(params)
    for other in results[1:]:
        for p, q in zip(results[0], other, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


SHARED = [(6, 4), (4, 6), (6, 4), (5, 5), (6, 4), (4, 6)]  # three, two and one of a shape


def shared_steps(world, dtype):
    """Parameters after three updates, and how many matrices this process iterated."""
    seen = []
    iterate = muon_module.orthogonal
    muon_module.orthogonal = lambda matrices, iterations: seen.append(len(matrices)) or iterate(matrices, iterations)
    params = parameters(SHARED, torch.float32)
    train(Muon([{"params": params, "group": HIDDEN}], 0.02, 0.9, 5, dtype, **ADAM), params, gradients(3, SHARED))
    return [p.detach() for p in params], sum(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processes_share_the_iterations_and_hold_what_one_process_computes(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(muon_module, "orthogonal", orthogonal)
    alone, count = shared_steps(None, dtype)
    (one, mine), (other, yours) = on_ranks(shared_steps, 2, tmp_path, dtype)
    # Sent, or iterated by each if there is no other of its shape.
    assert (count, mine, yours) == (18, 12, 9)
    for p, q, expected in zip(one, other, alone, strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 0.35), (torch.bfloat16, 0.4)])
def test_singular_values_become_one_and_singular_vectors_stay(shape, dtype, margin):
    matrix = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.mT @ orthogonal(matrix.to(dtype), 5).float() @ right.mT  # the result in the matrix's own axes
    diagonal = turned.diagonal(dim1=-2, dim2=-1)
    assert (diagonal.median(-1).values - 1).abs().max() < margin and diagonal.min() > 0
    assert (turned - torch.diag_embed(diagonal)).abs().max() < (1e-3 if dtype == torch.float32 else 0.05)


def test_a_zero_matrix_stays_zero():
    assert torch.equal(orthogonal(torch.zeros(1, 3, 4), 5), torch.zeros(1, 3, 4))


def test_other_parameters_are_adams():
    both, alone = parameters([(4, 4), (3, 5), (7,)]), parameters([(4, 4), (3, 5), (7,)])
    grads = gradients(3, [(4, 4), (3, 5), (7,)])
    train(Muon(groups(both[:1], both[1:]), 0.01, 0.95, 5, torch.float32, **ADAM), both, grads)
    settings = Namespace(optimizer="adam", lr=[0.01], adam_betas=[0.9, 0.98], weight_decay=0.1, no_apex=True)
    train(build_optimizer(settings, alone[1:]), alone[1:], [g[1:] for g in grads])
    assert all(torch.equal(p, q) for p, q in zip(both[1:], alone[1:], strict=True))


def test_the_matrices_of_the_layers_are_muons_whatever_their_shape():
    for flags, biases in ((runs.SHORTFORMER, set()), ("--arch transformer_xl_tiny", {"r_w_bias", "r_r_bias"})):
        model = runs.model_of(flags, "--tokens-per-sample 16 --max-tokens 64 --cpu")
        names = {id(p): name for name, p in model.named_parameters()}
        hidden = {names[id(p)] for p in hidden_matrices(layers_of(model))}
        assert hidden and all(".layers." in name and name.endswith("weight") for name in hidden)
        others = {name for name in names.values() if name not in hidden}
        assert {name for name in others if ".layers." in name and "norm" not in name.lower()} <= {
            name for name in others if name.endswith("bias")
        }
        assert biases <= {name.rpartition(".")[2] for name in others}
        assert any("embed" in name for name in others)


def test_groups_are_matrices_then_others_then_those_without_decay():
    layer = torch.nn.Linear(3, 4)
    outside = torch.nn.Linear(4, 2)
    named = [*layer.named_parameters("layer"), *outside.named_parameters("outside")]
    first, second, third = parameter_groups(named, True, hidden_matrices([layer]))
    assert first == {"params": [layer.weight], "group": HIDDEN}
    assert second == {"params": [outside.weight]}
    assert third == {"params": [layer.bias, outside.bias], "weight_decay": 0.0, "group": NO_DECAY}
    assert parameter_groups(named, False, [layer.weight])[1:] == [{"params": [layer.bias, *outside.parameters()]}]


def test_frozen_parameters_and_matrices_named_as_biases_are_not_among_hidden_matrices():
    layer = torch.nn.Linear(3, 4)
    layer.r_w_bias = torch.nn.Parameter(torch.zeros(2, 2))
    layer.filters = torch.nn.Parameter(torch.zeros(2, 2, 2))
    layer.frozen = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    named = list(layer.named_parameters())
    assert hidden_matrices([layer]) == [layer.weight]
    decayed, exempt = parameter_groups(named, True)
    assert decayed["params"] == [layer.weight, layer.filters] and exempt["params"] == [layer.bias, layer.r_w_bias]
    assert parameter_groups(named, False) == [layer.weight, layer.bias, layer.r_w_bias, layer.filters]


def test_parameters_of_equal_settings_form_groups_by_name_and_role():
    layer, outside = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    named = [*layer.named_parameters("layer"), *outside.named_parameters("outside")]
    roles = {}

    def group_of(name, role):
        roles[name] = role
        return {"lr_factor": 2.0} if role == HIDDEN else {"lr_factor": 3.0} if name == "outside.weight" else {}

    assert parameter_groups(named, True, [layer.weight], group_of) == [
        {"params": [layer.weight], "lr_factor": 2.0},
        {"params": [outside.weight], "lr_factor": 3.0},
        {"params": [layer.bias, outside.bias], "weight_decay": 0.0, "group": NO_DECAY},
    ]
    assert roles == dict(zip((n for n, _ in named), (HIDDEN, NO_DECAY, OUTER, NO_DECAY), strict=True))
    assert parameter_groups(named, False, [layer.weight], lambda name, role: {}) == [p for _, p in named]
    (all_alike,) = parameter_groups(named, False, [], lambda name, role: {"lr_factor": 2.0})
    assert all_alike == {"params": [p for _, p in named], "lr_factor": 2.0}


def test_a_plug_in_is_given_names_and_roles_and_its_rates_hold_after_a_restart():
    names, ratios = {}, {"factor": 0.5}

    class Optimizer(FairseqOptimizer):
        @classmethod
        def group_of(cls, name, role):
            names[name] = role
            return {"lr_factor": ratios["factor"]} if role == OUTER else {}

        def __init__(self, args, params):
            super().__init__(args)
            self._optimizer = torch.optim.SGD(params, lr=args.lr[0])

    register_optimizer("test_of_roles")(Optimizer)
    first = a_run("--optimizer test_of_roles --lr 0.1")
    hidden = set(map(id, hidden_matrices(layers_of(first.model))))
    for name, p in first.model.named_parameters():
        assert names.pop(name) == (HIDDEN if id(p) in hidden else NO_DECAY if is_norm_or_bias(name, p) else OUTER)
    assert not names and hidden
    rates = [(group.get("lr_factor"), group["lr"]) for group in first.optimizer.param_groups]
    assert rates == [(0.5, pytest.approx(0.05)), (None, pytest.approx(0.1))]
    ratios["factor"] = 0.25
    later = a_run("--optimizer test_of_roles --lr 0.1")
    later.optimizer.load_state_dict(first.optimizer.state_dict())
    assert [group["lr"] for group in later.optimizer.param_groups] == pytest.approx([0.025, 0.1])
    assert later.optimizer.get_lr() == pytest.approx(0.1)


def build(params, **settings):
    return build_optimizer(Namespace(**{"optimizer": "muon", "lr": [0.1], **settings}), params)


def test_each_group_has_its_rate_which_follows_the_schedule():
    params = parameters([(4, 4), (3,)])
    optimizer = build(groups(params[:1], params[1:]), muon_lr=0.4)
    args = Namespace(lr=[0.1], lr_scheduler="wsd", warmup_updates=4, max_update=10)
    schedule = build_lr_scheduler(args, optimizer)
    assert schedule.step_update(1) == pytest.approx(0.05) == optimizer.get_lr()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.05])


def test_the_state_is_restored_to_the_bit():
    shapes = [(4, 6), (5,)]
    params, grads = parameters(shapes, torch.float32), gradients(6, shapes)
    whole = build(groups(params[:1], params[1:]))
    train(whole, params, grads[:3])
    other = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = build(groups(other[:1], other[1:]))
    restored.load_state_dict(whole.state_dict())
    train(whole, params, grads[3:])
    train(restored, other, grads[3:])
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))


def restored(saved, given, overrides=None):
    """An optimizer of the settings *given*, with the state of one of the settings *saved*."""
    optimizers = [build(groups(parameters([(4, 6)]), parameters([(5,)])), **settings) for settings in (saved, given)]
    optimizers[1].load_state_dict(optimizers[0].state_dict(), overrides)
    return optimizers[1]


def test_a_restored_state_says_which_settings_it_put_in_force():
    saved = {"muon_momentum": 0.9, "adam_betas": [0.8, 0.9], "adam_eps": 1e-6, "weight_decay": 0.3}
    optimizer = restored(saved, {"muon_momentum": 0.5})
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.settings_in_force() == {**saved, "adam_torch_eps": False}


@pytest.mark.parametrize("given, expected", [({"muon_lr": 0.2}, 0.2), ({}, 0.1)])
def test_the_rate_of_hidden_matrices_is_that_of_the_command_line_not_of_the_state(given, expected):
    optimizer = restored({"muon_lr": 0.4}, given)
    assert optimizer.get_lr() == pytest.approx(0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([expected, 0.1])


@pytest.mark.parametrize("name", ["group", "lr_factor"])
def test_what_marks_a_group_of_parameters_is_no_setting_to_override(name):
    with pytest.raises(UserError, match=f"optimizer_overrides: no setting '{name}'"):
        restored({}, {}, {name: 2})


def test_half_precision_parameters_are_updated_in_float32():
    narrow, wide = parameters([(4, 6)], torch.bfloat16), parameters([(4, 6)], torch.bfloat16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in wide]
    grads = [[g.bfloat16() for g in step] for step in gradients(1, [(4, 6)])]
    for params in (narrow, wide):
        train(build([{"params": params, "group": HIDDEN}]), params, grads)
    assert torch.equal(narrow[0], wide[0].bfloat16())


def test_what_muon_cannot_train_is_refused():
    with pytest.raises(UserError, match="optimizer muon: the model has no transformer layers"):
        build(parameters([(3, 3)]))
    with user_error("--muon-momentum 1"):
        build(groups(parameters([(3, 3)]), []), muon_momentum=1)
    settings = SimpleNamespace(ddp_backend="fully_sharded")
    with user_error("--ddp-backend fully_sharded: FairseqMuon needs whole parameters"):
        check_optimizer(build([{"params": parameters([(3, 3)]), "group": HIDDEN}]), settings, SimpleNamespace(size=2))
