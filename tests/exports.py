"""Language models of every kind, exported for transformers, for the tests."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import DATA, arguments, model_of
from torch import Tensor

from fairseq import checkpoint
from fairseq.config import options
from fairseq.interop.hugging_face import decoders
from fairseq.models.loading import stored_parameters
from fairseq.text.dictionary import Dictionary
from fairseq_cli import export_model, import_model
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.import_model import get_import_parser

BASE = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-attention-heads 4"
BASE += " --tokens-per-sample 8 --max-tokens 64"
LM = f"--arch transformer_lm {BASE} --criterion cross_entropy"
TINY = f"--arch transformer_lm_tiny {BASE} --criterion adaptive_loss"
BANDS = "--adaptive-softmax-cutoff 200,600 --criterion adaptive_loss"
XL = "--arch transformer_xl --criterion cross_entropy --n-layer 2 --n-head 4 --d-model 32 --d-inner 48 --max-tokens 64"
XL += " --tokens-per-sample 8 --mem-len 8"
MODELS = {
    "baseline": TINY,
    "projections not tied": f"{LM} {BANDS} --adaptive-input --adaptive-input-cutoff 200,600 --tie-adaptive-weights",
    "narrow ends": f"{TINY} --decoder-input-dim 16 --decoder-output-dim 16",
    "adaptive output alone": f"{LM} {BANDS}",
    "plain": f"{LM} --decoder-input-dim 16 --decoder-output-dim 24",
    "gpt": f"{LM} --decoder-learned-pos --share-decoder-input-output-embed --activation-fn gelu_accurate",
    "post-norm": f"{LM} --no-decoder-normalize-before --layernorm-embedding --no-token-positional-embeddings",
    "position-infused": f"{TINY} --position-infused-attention",
    "shortformer": f"--arch shortformer_tiny {BASE} --criterion adaptive_loss --tokens-from-prev 12",
    "shortformer with norms": f"--arch shortformer_tiny {BASE} --criterion adaptive_loss --tokens-from-prev 12 "
    "--qk-norm --activation-fn relu_squared --token-shift 2",
    "shortformer with notes": f"--arch shortformer_tiny {BASE} --criterion adaptive_loss --tokens-from-prev 12 "
    "--ngram-notes 40 --word-notes 30",
    "token shift and notes": f"{TINY} --token-shift 3 --ngram-notes 40 --word-notes 30",
    "rotary": f"{LM} --rotary-fraction 0.5 --qk-norm --decoder-norm rms --decoder-gated-ffn --activation-fn silu "
    "--decoder-kv-heads 2 --decoder-biases qkv --tokens-from-prev 12 --no-scale-embedding",
    "parallel": f"{LM} --rotary-fraction 1 --rotary-scaling 4 --rotary-trained-positions 16 --qk-norm "
    "--decoder-parallel-residual --attention-window 5 --decoder-biases none --decoder-normalize-before",
    "transformer-xl": XL,
    "transformer-xl bands": f"{XL} --cutoffs 200,600 --div-val 2 --tie-projs tails --untie-r --pre-lnorm",
    "transformer-xl window": f"{XL} --clamp-len 5 --same-length --d-embed 16 --cutoffs 200 --tie-projs 0,1 --d-head 12",
    "transformer-xl with notes": f"{XL} --pre-lnorm --ngram-notes 40 --word-notes 30",
    "transformer-xl shaw": f"{XL} --position-encoding shaw",
    "transformer-xl zeros": f"{XL} --cutoffs 200,600 --memory-start zeros --mem-len 12 --no-tie-weight",
}
WORDS = 1200


def parsed(parser: Any, *argv: object) -> Any:
    return options.parse_args_and_arch(parser, [str(word) for word in argv])


def exported(source: Path, out: Path, *flags: object) -> Path:
    export_model.main(parsed(get_export_parser(), source, "--to", "hf", "--out", out, *flags))
    return out


def imported(source: Path, out: Path) -> Path:
    import_model.main(parsed(get_import_parser(), source, "--from", "hf", "--out", out))
    return out / "checkpoint.pt"


def made(name: str) -> Any:
    """The model *name*; see :func:`perturbed`."""
    return perturbed(MODELS[name])


def perturbed(*flags: str) -> Any:
    """A model with parameters far enough from their initial values that every one matters."""
    model = model_of(*flags, "--cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    if getattr(model.decoder, "word_notes", None) is not None:
        # The dictionary has whole words only: let most symbols continue a word or be continued.
        model.decoder.word_notes.parts[4:] = torch.arange(WORDS - 4) % 4
    return model


def saved(model: Any, folder: Path, *flags: str) -> Path:
    """A checkpoint of *model* with its ``dict.txt``."""
    folder.mkdir()
    shutil.copy(DATA / "dict.txt", folder)
    state = {"args": vars(arguments(*flags)), "model": stored_parameters(model), "extra_state": {"val_loss": 9.5}}
    checkpoint.save(folder / "checkpoint.pt", {**state, "optimizer_history": [{"num_updates": 1234}]})
    return folder / "checkpoint.pt"


def theirs(model: Any) -> Any:
    """*model* in the code that exported folders have."""
    pytest.importorskip("transformers")
    config = decoders.configuration(model, Dictionary.load(DATA / "dict.txt"), "model")
    code = importlib.import_module(f"fairseq.interop.hugging_face.exported.modeling_{config['settings']['arch']}")
    loaded, info = code.FairseqForCausalLM.from_pretrained(
        None, config=code.FairseqConfig(**config), state_dict=decoders.tensors(model), output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return loaded.eval()


def tokens(rows: int, count: int) -> Tensor:
    return torch.randint(4, WORDS, (rows, count), generator=torch.Generator().manual_seed(1))


def keep_code_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers keep the code of exports in *folder*, instead of the user's cache."""
    library = pytest.importorskip("transformers.dynamic_module_utils")
    monkeypatch.setattr(library, "HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
