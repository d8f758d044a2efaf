"""LSTM language models agree with a loop over time steps, train, resume, and read token by
token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.errors import UserError
from fairseq.models.lstm_lm import LSTMDecoder, LSTMLanguageModel
from fairseq.models.lstm_lm_settings import LSTMLMConfig
from fairseq.modules.precision import Precision

SMALL = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --batch-size 4 --arch lstm_lm_tiny
    --optimizer adam --lr 0.01 --lr-scheduler fixed --log-format json --log-interval 1
    --required-batch-size-multiple 1"""


def decoder(**settings: Any) -> LSTMDecoder:
    torch.manual_seed(1)
    sizes = {"decoder_embed_dim": 6, "decoder_hidden_size": 5, "decoder_out_embed_dim": 7, "decoder_layers": 3}
    return LSTMDecoder(LSTMLMConfig(**{**sizes, **settings}), 20, 1).eval()


def by_steps(model: LSTMDecoder, tokens: Tensor) -> Tensor:
    """Logits from torch's cells, one time step after the other: input + the layer's previous state
    with residuals."""
    states = [(torch.zeros(len(tokens), 5), torch.zeros(len(tokens), 5)) for _ in model.layers]
    outputs = []
    for step in range(tokens.size(1)):
        x = model.embed_tokens(tokens[:, step])
        for number, cell in enumerate(model.layers):
            before = states[number][0]
            states[number] = cell(x, states[number])
            x = states[number][0] + (before if model.cfg.residuals else 0)
        outputs.append(states[-1][0])
    hidden = F.linear(torch.stack(outputs, 1), model.additional_fc.weight, model.additional_fc.bias)
    return F.linear(hidden, model.fc_out.weight, model.fc_out.bias)


@pytest.mark.parametrize("residuals", [False, True])
def test_all_steps_at_once_equal_a_loop_over_them(residuals: bool) -> None:
    model, tokens = decoder(residuals=residuals), torch.randint(2, 20, (3, 9))
    hidden, _ = model(tokens)
    expected = by_steps(model, tokens).log_softmax(-1)
    torch.testing.assert_close(model.output_distribution.log_probs(hidden), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residuals", [False, True])
def test_token_by_token_equals_all_at_once(residuals: bool) -> None:
    model, tokens = decoder(residuals=residuals), torch.randint(2, 20, (4, 8))
    cache = LSTMLanguageModel(model).new_cache(4)
    pieces = [model(piece, cache)[0] for piece in tokens.split([3, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens)[0])
    cache.select_rows([2, 2])
    again = model(tokens[[2, 2], -1:], cache)[0]
    longer = torch.cat([tokens, tokens[:, -1:]], 1)
    torch.testing.assert_close(again[:, 0], model(longer)[0][[2, 2], -1])


def test_each_layer_that_is_moved_gives_its_weights_to_torch_to_lay_them_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, flat = decoder(), []
    monkeypatch.setattr(torch.nn.LSTM, "flatten_parameters", lambda layer: flat.append(layer.all_weights))
    Precision().move(model, torch.device("cpu"))
    for cell, [weights] in zip(model.layers, flat[1::2], strict=True):  # after the one that is made
        expected = (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        assert [id(weight) for weight in weights] == [id(weight) for weight in expected]


def test_parameters_have_fairseqs_names() -> None:
    names = {name.removesuffix(".weight_ih") for name in decoder(decoder_layers=1).state_dict()}
    assert names == {
        "embed_tokens.weight", "layers.0", "layers.0.weight_hh", "layers.0.bias_ih", "layers.0.bias_hh",
        "additional_fc.weight", "additional_fc.bias", "fc_out.weight", "fc_out.bias",
    }  # fmt: skip
    tied = decoder(share_decoder_input_output_embed=True, decoder_out_embed_dim=6)
    assert not any(name.startswith("fc_out") for name in tied.state_dict())


@pytest.mark.parametrize("criterion", ["cross_entropy", "adaptive_loss", "label_smoothed_cross_entropy"])
def test_it_trains_and_resumes_exactly(criterion: str, tmp_path: Path) -> None:
    flags = [SMALL, f"--criterion {criterion}", "--residuals"]
    whole = runs.train(tmp_path / "a", *flags, "--max-update 12 --save-interval-updates 8 --disable-validation")
    assert runs.losses(whole)[-1] < runs.losses(whole)[0]
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "checkpoint_1_8.pt").rename(tmp_path / "b" / "checkpoint_last.pt")
    again = runs.train(tmp_path / "b", *flags, "--max-update 12 --disable-validation")
    assert runs.updates(again) == runs.updates(whole)[8:]


def test_tied_weights_and_wrong_sizes(tmp_path: Path) -> None:
    log = runs.train(tmp_path, SMALL, "--share-decoder-input-output-embed --max-update 3 --no-save")
    assert len(runs.losses(log)) == 3
    with pytest.raises(UserError, match="--share-decoder-input-output-embed: needs --decoder-out-embed-dim 32"):
        runs.train(tmp_path, SMALL, "--share-decoder-input-output-embed --decoder-out-embed-dim 8")
