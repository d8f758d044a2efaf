"""Damage that fuzzing found to end in a traceback."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from exports import MODELS, exported, imported, made, saved
from mistakes import user_error

from fairseq.errors import UserError
from fuzz.readers import SEEDS, read_checkpoint, read_tokenizer, resume

CHECKPOINT = SEEDS / "checkpoint" / "shortformer.pt"


def replace(state, path, value):
    """Set the value at *path*, keys and numbers; of a mapping's first key where it is None."""
    *parents, last = path
    place = state
    for key in parents:
        place = place[next(iter(place)) if key is None else key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value


@pytest.mark.parametrize(
    "path, value",
    [
        (("extra_state", "average", "mean", 0), torch.zeros(3)),
        (("extra_state", "average", "weights"), []),
        (("extra_state", "average", "weights", 0), torch.tensor(3.0)),
        (("extra_state", "carried", "memory"), 3),
        (("extra_state", "carried", "memory", 0), {"x": 1}),
        (("extra_state", "carried", "memory", 0), torch.zeros(2, 3)),
        (("extra_state", "random", 0), {}),
        (("extra_state", "random", 0), torch.zeros(3)),
        (("args", "no_scale_embedding"), torch.zeros(0)),
        (("args", "dropout"), [torch.zeros(2)]),
        (("extra_state", "train_iterator", "read", "count"), float("nan")),
        (("extra_state", "train_iterator", "read", "step"), 0),
        (("extra_state", "train_iterator", "read", "order"), 5),
        (("extra_state", "sums", "train", "totals"), [None]),
        (("extra_state", "sums", "train", "totals"), torch.zeros(2)),
        (("extra_state", "sums", "train", "names", 0), 7),
        (("extra_state", "sums", "train", "names", 1), "loss"),
        (("extra_state", "sums", "train", "names"), ["nll_loss", "ntokens"]),
        (("extra_state", "sums", "train", "figures", "gnorm"), torch.zeros(2)),
        (("extra_state", "sums", "train", "updates"), -1),
        (("last_optimizer_state", "state", None, "exp_avg"), b"x"),
        (("last_optimizer_state", "state", None, "exp_avg"), torch.tensor(3)),  # a kernel wrote beyond it
        (("last_optimizer_state", "state", None, "exp_avg_sq"), KeyError),
        (("last_optimizer_state", "param_groups", 0, "betas"), ()),
        (("last_optimizer_state", "param_groups", 0, "eps"), torch.zeros(3)),
        (("optimizer_history", 0, "criterion_name"), "x" * 5000),
    ],
)
def test_a_training_state_that_cannot_be_restored_is_one_line(tmp_path, path, value):
    state = copy.deepcopy(torch.load(CHECKPOINT, weights_only=True))
    replace(state, path, value)
    torch.save(state, tmp_path / "c.pt")
    with pytest.raises(UserError) as error:
        resume(tmp_path / "c.pt")
    assert len(str(error.value)) < 2000


def test_subword_codes_of_another_version(tmp_path):
    seed = SEEDS / "tokenizer" / "subword_nmt"
    (tmp_path / "dict.txt").write_bytes((seed / "dict.txt").read_bytes())
    (tmp_path / "tokenization.json").write_text((seed / "tokenization.json").read_text().replace("0.2", "9.2"))
    with pytest.raises(UserError, match="version 9.2 of subword-nmt codes"):
        read_tokenizer(tmp_path)


def test_a_weight_without_dimensions_is_one_line(tmp_path):
    state = torch.load(CHECKPOINT, weights_only=True)
    state["model"]["decoder.embed_tokens.embeddings.0.0.weight"] = torch.tensor(1.0)
    torch.save(state, tmp_path / "c.pt")
    with pytest.raises(UserError, match="decoder.embed_tokens.embeddings.0.0.weight|dictionary of"):
        read_checkpoint(tmp_path / "c.pt")


def test_settings_that_contain_themselves_are_read_once(tmp_path):
    state = torch.load(CHECKPOINT, weights_only=True)
    endless: list = []
    endless += [endless] * 50
    state["args"]["decoder_layers_to_keep"] = endless
    torch.save(state, tmp_path / "c.pt")
    with pytest.raises(UserError):
        read_checkpoint(tmp_path / "c.pt")


def test_a_setting_of_an_export_that_is_no_number_is_named_with_its_file(tmp_path):
    source = saved(made("baseline"), tmp_path / "in", MODELS["baseline"])
    folder = exported(source, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["tokens_per_sample"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with user_error(rf"^{folder}/config\.json: its setting tokens_per_sample is True, not a count"):
        imported(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
