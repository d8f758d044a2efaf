"""What programs elsewhere do with exported folders; a script that needs torch and transformers, not
this package.

``python outside.py FOLDER …`` prints one JSON object: for each folder, for each use, "yes", the
error, or "–" where it does not apply. ``expected.npz`` in a folder has ``auto``, the class that
predicts, ``text`` [2, T] and its ``log_probs``, of words [2, T, V] or of being replaced [2, T], and
``words``, a text, with its ``ids``. A decoder's also has ``greedy``, the first five tokens of the
first row and their continuation.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TRUST = {"trust_remote_code": True}
NEW = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
DTYPE = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"


class Folder:
    """An exported folder, and what is expected of it."""

    def __init__(self, path: Path) -> None:
        self.path, expected = path, np.load(path / "expected.npz")
        self.text, self.log_probs = (torch.from_numpy(expected[name]) for name in ("text", "log_probs"))
        self.greedy, self.ids, self.words = (
            expected["greedy"].tolist() if "greedy" in expected else None,
            expected["ids"].tolist(),
            str(expected["words"]),
        )
        self.auto = str(expected["auto"])
        self.decodes = self.greedy is not None
        # One segment; encoders have no cache.
        self.uncached = {"use_cache": False} if self.decodes else {}

    def model(self, auto: str = "", source: Any = None, **settings: Any) -> Any:
        kind = getattr(transformers, auto or self.auto)
        return kind.from_pretrained(source or self.path, **TRUST, **settings).eval()

    def tokenizer(self, source: Any = None) -> Any:
        return transformers.AutoTokenizer.from_pretrained(source or self.path, **TRUST)

    def check(self, logits: Any, places: float = 1e-5) -> None:
        torch.testing.assert_close(self.log_probs_of(logits), self.log_probs, atol=places, rtol=1e-6)

    def log_probs_of(self, logits: Any) -> Any:
        """Of words, or of being replaced."""
        logits = logits.float()
        return logits.log_softmax(-1) if logits.dim() == 3 else torch.nn.functional.logsigmoid(logits)


def local_folder(folder: Folder) -> None:
    for attention in ("eager", "sdpa"):
        folder.check(folder.model(attn_implementation=attention)(folder.text).logits)


def layout_of_the_hub(folder: Folder) -> None:
    repository = Path(os.environ["HF_HOME"]) / "hub" / f"models--me--{folder.path.name}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "blobs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted(path for path in folder.path.iterdir() if path.is_file())):
        # As the hub's client does: the files are links to others without a name.
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    name = f"me/{folder.path.name}"
    folder.check(folder.model(source=name)(folder.text).logits)
    assert folder.tokenizer(name)(folder.words)["input_ids"] == folder.ids


def generate(folder: Folder) -> None:
    model, prompt = folder.model(), folder.text[:1, :5]
    assert model.generate(prompt, **NEW)[0].tolist() == folder.greedy
    short = {**NEW, "max_new_tokens": 3}  # within one segment
    assert model.generate(prompt, use_cache=False, **short)[0].tolist() == folder.greedy[:8]
    padded = torch.cat([torch.ones(1, 2, dtype=torch.long), prompt], dim=1)
    both = torch.cat([padded, folder.text[1:, :7]])
    mask = torch.ones_like(both)
    mask[0, :2] = 0
    for beams in (1, 3):
        found = model.generate(both, attention_mask=mask, num_beams=beams, **NEW)
        assert found[0, 2:].tolist() == model.generate(prompt, num_beams=beams, **NEW)[0].tolist()


def hidden_states(folder: Folder) -> None:
    model = folder.model()
    want = model(folder.text, output_hidden_states=True).hidden_states
    model.config.output_hidden_states = True
    assert len(model(folder.text).hidden_states) == len(want) > 2
    assert isinstance(model(folder.text, return_dict=False), tuple)
    if not folder.decodes:
        return
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    steps = model.generate(folder.text[:1, :5], **asked, **NEW).hidden_states
    assert len(steps) == NEW["max_new_tokens"] and len(steps[-1]) == len(want)


def attention(folder: Folder) -> None:
    model = folder.model(attn_implementation="eager")
    weights = model(folder.text, output_attentions=True, **folder.uncached).attentions
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(weights[0].shape[:-1]))


def embeddings(folder: Folder) -> None:
    model = folder.model()
    folder.check(model(inputs_embeds=model.get_input_embeddings()(folder.text), **folder.uncached).logits)


def classifier(folder: Folder) -> None:
    for auto in ("AutoModel", "AutoModelForSequenceClassification"):
        output = folder.model(auto)(folder.text)
        assert bool(torch.isfinite(output[0]).all())


def save_and_load(folder: Folder) -> None:
    with tempfile.TemporaryDirectory() as out:
        model, tokenizer = folder.model(), folder.tokenizer()
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        folder.check(folder.model(source=out)(folder.text).logits)
        assert folder.tokenizer(out)(folder.words)["input_ids"] == folder.ids


def from_config(folder: Folder) -> None:
    config = transformers.AutoConfig.from_pretrained(folder.path, **TRUST)
    model = getattr(transformers, folder.auto).from_config(config, **TRUST).eval()
    assert model(folder.text).logits.shape == folder.log_probs.shape
    model.load_state_dict(folder.model().state_dict())
    folder.check(model(folder.text).logits)


def tokenizer(folder: Folder) -> None:
    found = folder.tokenizer()
    assert found(folder.words)["input_ids"] == folder.ids
    known = folder.words.rpartition(" ")[0]
    assert found.decode(folder.ids, skip_special_tokens=True).startswith(known)
    batch = found([folder.words, folder.words[:9]], padding=True, return_tensors="pt")
    assert batch.input_ids.shape == batch.attention_mask.shape
    spans = found(folder.words, return_offsets_mapping=True)["offset_mapping"]
    assert len(spans) == len(folder.ids)


def other_tokenizers(folder: Folder) -> None:
    for path in folder.path.glob("tokenizers/*"):
        found, expected = folder.tokenizer(path), json.loads((path / "expected.json").read_text())
        assert found(expected["text"])["input_ids"] == expected["ids"], path.name
        assert found.decode(expected["ids"], skip_special_tokens=True) == expected["decoded"], path.name


def pipeline(folder: Folder) -> None:
    parts = {"model": folder.model(), "tokenizer": folder.tokenizer()}
    if folder.auto == "AutoModelForMaskedLM":
        text = f"{folder.words} {parts['tokenizer'].mask_token}"
        assert len(transformers.pipeline("fill-mask", **parts)(text)) == 5
        return
    if not folder.decodes:
        assert len(transformers.pipeline("feature-extraction", **parts)(folder.words)[0]) == len(folder.ids)
        return
    generator = transformers.pipeline("text-generation", **parts)
    text = generator(folder.words[:9], max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith(folder.words[:3])


def half_precision(folder: Folder) -> None:
    logits = folder.log_probs_of(folder.model(**{DTYPE: torch.bfloat16})(folder.text).logits)
    assert float((logits - folder.log_probs).abs().mean()) < 0.1


def gradient_checkpointing(folder: Folder) -> None:
    model, gradients = folder.model().train(), []
    labels = folder.text if folder.log_probs.dim() == 3 else folder.text % 2
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        model(folder.text, labels=labels, **folder.uncached).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.gradient_checkpointing_enable()
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def trainer(folder: Folder) -> None:
    torch.manual_seed(1)
    model = folder.model("AutoModelForSequenceClassification")
    rows = torch.randint(4, int(folder.text.max()), (8, 6))
    examples = [{"input_ids": row, "labels": row[0] % 2} for row in rows]
    with tempfile.TemporaryDirectory() as out:
        flags = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
        settings = transformers.TrainingArguments(out, max_steps=12, learning_rate=1e-2, logging_steps=1, **flags)
        training = transformers.Trainer(model, settings, train_dataset=examples)
        training.train()
        losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def lora(folder: Folder) -> None:
    import peft

    model = peft.get_peft_model(folder.model(), peft.LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
        want = model(folder.text).logits
        assert float((folder.log_probs_of(want) - folder.log_probs).abs().max()) > 1e-3, "adapters that change nothing"
        if folder.decodes:
            torch.testing.assert_close(model(folder.text, use_cache=True).logits, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model.merge_and_unload()(folder.text).logits, want, atol=1e-4, rtol=1e-4)


def int8(folder: Folder) -> None:
    model = torch.ao.quantization.quantize_dynamic(folder.model(), {torch.nn.Linear}, dtype=torch.qint8)
    for cached in ({}, {"use_cache": True}) if folder.decodes else ({},):
        logits = folder.log_probs_of(model(folder.text, **{**folder.uncached, **cached}).logits)
        assert 0 < float((logits - folder.log_probs).abs().mean()) < 0.2


def exported_graph(folder: Folder) -> None:
    model = folder.model()
    mask = torch.ones_like(folder.text)
    given = {"attention_mask": mask, **folder.uncached}
    graph = torch.export.export(model, (folder.text,), given, strict=False).module()
    folder.check(graph(folder.text, **given).logits)


def full_graph(folder: Folder) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(folder.model(), fullgraph=True, backend="eager")
    for given in ({}, {"attention_mask": torch.ones_like(folder.text)}):
        folder.check(compiled(folder.text, **given, **folder.uncached).logits)


def device_map(folder: Folder) -> None:
    folder.check(folder.model(device_map="cpu")(folder.text).logits)


CHECKS: dict[str, Callable[[Folder], None]] = {
    "a local folder, eager and sdpa": local_folder,
    "the hub's layout": layout_of_the_hub,
    "`generate`, padded, beams": generate,
    "`output_hidden_states`": hidden_states,
    "`output_attentions`": attention,
    "`inputs_embeds`": embeddings,
    "`AutoModel`, classification": classifier,
    "`save_pretrained`": save_and_load,
    "`from_config`": from_config,
    "`AutoTokenizer`": tokenizer,
    "tokenizers of subwords": other_tokenizers,
    "`pipeline`": pipeline,
    "bfloat16": half_precision,
    "gradient checkpointing": gradient_checkpointing,
    "`Trainer`": trainer,
    "`device_map`": device_map,
    "peft, LoRA on `all-linear`, merged": lora,
    "dynamic int8": int8,
    "`torch.export`": exported_graph,
    "`torch.compile(fullgraph=True)`": full_graph,
}


def outcome(check: Callable[[Folder], None], folder: Folder) -> str:
    if check is generate and not folder.decodes:
        return "–"
    if check is other_tokenizers and not (folder.path / "tokenizers").exists():
        return "–"
    grad = check not in (gradient_checkpointing, trainer)
    try:
        with torch.no_grad() if grad else torch.enable_grad():
            check(folder)
    except Exception as error:  # the reason in the table
        return f"{type(error).__name__}: {error}"[:400]
    return "yes"


def main() -> None:
    """Print what every exported folder can be used for."""
    transformers.utils.logging.set_verbosity_error()
    table = {
        name: {title: outcome(check, folder) for title, check in CHECKS.items()}
        for name, folder in ((path, Folder(Path(path))) for path in sys.argv[1:])
    }
    ours = [name for name in sys.modules if name.split(".")[0] in ("fairseq", "fairseq_cli")]
    print(json.dumps({"version": transformers.__version__, "table": table, "ours": ours}))


if __name__ == "__main__":
    main()
