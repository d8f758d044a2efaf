"""A criterion's own sums and figures reach log, validation and the choice of the best
checkpoint."""

from __future__ import annotations

import math
import sys

import pytest
import runs
import torch
import warm

from fairseq import checkpoint
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.logging import figures
from fairseq.logging.figures import Figure, Gathered, NamedSums, RunningSums, language_model_figures, ratio

CPU = torch.device("cpu")

PLUGIN = '''
import torch

from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import AdaptiveLoss, AdaptiveCriterionConfig
from fairseq.logging import figures
from fairseq.logging.figures import Figure, Gathered, ratio


@register_criterion("counting", dataclass=AdaptiveCriterionConfig)
class Counting(AdaptiveLoss):
    """Counts the targets that are odd, and gathers all of them."""

    def compute_loss(self, model, net_output, sample):
        loss, size, log = super().compute_loss(model, net_output, sample)
        real = sample["target"][sample["target"] != self.padding_idx]
        return loss, size, {**log, "odd": (real % 2).sum(), "targets": Gathered(real)}

    def figures(self):
        largest = Figure(lambda sums: float(sums["targets"].double().std()), ("targets",))
        return {**super().figures(), "odd_share": ratio("odd", "ntokens", 100.0), "deviation": largest}
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home") / "counting_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text(PLUGIN)
    yield ["--user-dir", folder, "--criterion counting"]
    sys.modules.pop("counting_parts", None)


def log_of(**sums):
    return {"loss": torch.tensor(6.0), "ntokens": 4, "nsentences": 2, **sums}


def test_figures_are_computed_from_totals_not_averaged_over_batches():
    meter = RunningSums(CPU)
    meter.add(NamedSums.of(log_of(right=torch.tensor(1)), 4, CPU))
    meter.add(NamedSums.of({**log_of(right=6), "ntokens": 12}, 12, CPU))
    report = meter.report({**language_model_figures(), "accuracy": ratio("right", "ntokens", 100.0)})
    assert report["accuracy"] == 100 * 7 / 16
    assert report["loss"] == pytest.approx(12 / 16 / math.log(2))
    assert report["ppl"] == pytest.approx(math.exp(12 / 16))
    assert (report["wpb"], report["bsz"]) == (8, 2)


def test_sums_that_only_some_batches_have_count_as_zero_in_the_others():
    one, other = NamedSums.of(log_of(a=1), 4, CPU), NamedSums.of(log_of(b=2), 4, CPU)
    both = one + other + one
    assert (float(both["a"]), float(both["b"]), float(both["ntokens"])) == (2, 2, 12)


def test_a_figure_whose_sums_are_missing_is_not_shown():
    meter = RunningSums(CPU)
    meter.add(NamedSums.of(log_of(found=Gathered(torch.ones(3))), 4, CPU))
    count = Figure(lambda sums: float(len(sums["found"])), ("found",))
    assert "count" not in meter.report({"count": count}), "predictions are gathered where it is asked for"
    meter.add(NamedSums.of(log_of(found=Gathered(torch.ones(3))), 4, CPU, gather=True))
    assert meter.report({"count": count})["count"] == 3


def test_predictions_of_a_validation_are_copied_once(monkeypatch):
    copied, join = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *rest: copied.append(sum(map(len, parts))) or join(parts, *rest))
    meter = RunningSums(CPU)
    for batch in range(50):
        meter.add(NamedSums.of(log_of(found=Gathered(torch.full((4,), batch))), 4, CPU, gather=True))
    meter.reduce(World())
    assert meter.totals.rows["found"].tolist() == [batch for batch in range(50) for _ in range(4)]
    assert sum(copied) == 200


def test_sums_are_reduced_over_ranks_and_predictions_joined_in_rank_order(monkeypatch):
    monkeypatch.setattr(World, "sum", lambda self, value: value.mul_(2))
    monkeypatch.setattr(World, "gather", lambda self, value, everywhere=False: [value, value + 10])
    sums = NamedSums.of(log_of(right=3, found=Gathered(torch.arange(2))), 4, CPU, gather=True)
    reduced = sums.reduced(World(0, 2, CPU))
    assert float(reduced["right"]) == 6 and reduced.rows["found"].tolist() == [0, 1, 10, 11]
    assert float(sums["right"]) == 3, "the sums of this rank stay as they are"


def test_sums_are_those_of_one_update_after_the_other_whenever_they_are_read(monkeypatch):
    monkeypatch.setattr(figures, "MOST_ADDED", 7)
    losses, norms = torch.rand(2, 40, generator=torch.Generator().manual_seed(1))
    loss = norm = 0.0
    meter, read = RunningSums(CPU), RunningSums(CPU)
    for number, (one, other) in enumerate(zip(losses, norms, strict=True)):
        loss, norm = loss + float(one), norm + float(other)
        names = {"right": 1} if number == 20 else {}
        for each in (meter, read):
            each.add(NamedSums.of({"loss": one, "ntokens": 4, "nsentences": 2, **names}, 4, CPU), gnorm=other)
        assert float(read.totals["loss"]) == loss
    for each in (meter, read):
        state = each.state_dict()
        assert (float(each.totals["loss"]), float(state["figures"]["gnorm"])) == (loss, norm)
        assert float(each.totals["right"]) == 1 and each.updates == 40
        assert state["totals"].untyped_storage().nbytes() == 8 * len(each.totals.names)


def test_a_saved_meter_goes_on():
    meter, other = RunningSums(CPU), RunningSums(CPU)
    meter.add(NamedSums.of(log_of(right=3), 4, CPU), gnorm=torch.tensor(2.0))
    other.load_state_dict(meter.state_dict())
    figures = {**language_model_figures(), "right": ratio("right", "ntokens")}
    assert other.report(figures) == meter.report(figures)


def test_a_plugins_figures_reach_log_validation_and_tensorboard(plugin, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = tmp_path / "board"
    flags = [runs.BASELINE, plugin, "--max-epoch 1 --no-save --tensorboard-logdir", board]
    log = runs.train(tmp_path, *flags)
    assert all(0 < line["odd_share"] < 100 for line in runs.updates(log))
    assert "deviation" not in runs.updates(log)[0], "no predictions are gathered in training"
    (validation,) = runs.summaries(log, "test")
    assert validation["odd_share"] > 0 and validation["deviation"] > 0
    events = accumulator.EventAccumulator(str(board / "test"))
    events.Reload()
    assert {"odd_share", "deviation"} <= set(events.Tags()["scalars"])


def test_a_plugins_figure_decides_which_checkpoint_is_the_best(plugin, tmp_path):
    log = runs.train(tmp_path, runs.BASELINE, plugin, "--max-update 4 --best-checkpoint-metric deviation")
    (validation,) = runs.summaries(log, "test")
    assert validation["best_deviation"] == validation["deviation"]
    state = checkpoint.read(tmp_path / "checkpoint_best.pt")
    assert state["extra_state"]["val_loss"] == validation["deviation"]
    with pytest.raises(UserError, match="--best-checkpoint-metric odd_shar: .*odd_share"):
        runs.train(tmp_path, runs.BASELINE, plugin, "--max-update 4 --best-checkpoint-metric odd_shar")


def test_figures_of_two_processes_are_those_of_one(plugin, tmp_path):
    flags = [runs.BASELINE, runs.NO_DROPOUT, plugin, "--max-update 4 --no-save"]
    result = warm.command("train.py", runs.DATA, flags, "--max-tokens 32 --distributed-world-size 2")
    assert result.returncode == 0, result.stderr
    two, one = runs.records(result.stdout), runs.train(tmp_path, *flags)
    for kind in ("odd_share", "deviation"):
        assert runs.summaries(two, "test")[0][kind] == pytest.approx(runs.summaries(one, "test")[0][kind], rel=1e-9)
    shares = ([line["odd_share"] for line in runs.updates(log)] for log in (two, one))
    assert next(shares) == pytest.approx(next(shares), rel=1e-9)
