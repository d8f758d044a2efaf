"""Export of a language model: tensors, configuration, tokenizer, model card, and the code that
transformers runs.

The code of an exported folder is files of :mod:`fairseq.interop.hugging_face.exported`, as they
are. ``config.json`` holds the model's settings, from which that code and ``fairseq-import`` build
the model.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fairseq.checkpoint.manager import DICTIONARY, MILESTONE
from fairseq.errors import UserError
from fairseq.inference.loading import check_no_begin
from fairseq.interop.hugging_face import decoders, native
from fairseq.interop.hugging_face.model_folder import CONFIG, SAFE, read_json
from fairseq.interop.hugging_face.tokenizer_files import CODE, code, json_text, tokenizer_files
from fairseq.models.base import BaseFairseqModel
from fairseq.system.terminal import printable
from fairseq.system.version import __version__
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import find_tokenizer

SHARED = "modeling_fairseq"  # code of every decoder, which the code of its family imports
CARD = "README.md"
MODEL_CLASS = "FairseqForCausalLM"
AUTO_CLASSES = {
    "AutoModel": "FairseqModel",
    "AutoModelForCausalLM": MODEL_CLASS,
    "AutoModelForSequenceClassification": "FairseqForSequenceClassification",
}
MOST_CHARACTERS = 1000  # of a text in the model card
FIGURES = {  # of a results.json: name, format
    "perplexity": ("Perplexity of a token", ".2f"),
    "loss_base2": ("Bits per token", ".4f"),
    "word_perplexity": ("Perplexity of a word", ".2f"),
    "bits_per_character": ("Bits per character", ".4f"),
    "bits_per_byte": ("Bits per byte of raw text", ".4f"),
    "raw_word_perplexity": ("Perplexity of a word of raw text", ".2f"),
    "unknown_share": ("Share of `<unk>`", ".2%"),
    "tokens": ("Tokens", ",d"),
}


@dataclass(frozen=True)
class Export:
    """What is exported."""

    source: str  # the checkpoint
    out: Path  # an empty folder
    data: str | None = None  # data folder or ``dict.txt``; None: next to the checkpoint
    results: str | None = None  # ``results.json`` of ``fairseq-eval-lm`` or ``fairseq-harness``


def export(model: BaseFairseqModel, task: FairseqTask, state: Mapping[str, object], job: Export) -> str:
    """Write *model*, which was loaded from the checkpoint *state*; return a description of the
    files.

    Raises:
        UserError: the model cannot be expressed, or a file cannot be read.
    """
    dictionary = task.source_dictionary
    config = decoders.configuration(model, dictionary, job.source)
    check_no_begin(task, job.source)
    tokenizer = find_tokenizer(dictionary.path or job.source, dictionary.symbols)
    files = tokenizer_files(tokenizer, dictionary, config["max_position_embeddings"])
    results = _results(job.results) if job.results is not None else {}
    tensors, header, modules = _native(model, dictionary) or _custom(model, config)
    needs_code = bool(modules) or CODE in files
    # Of what is written: the tables of positions of transformers' classes have no rows for padding.
    weights = model.parameters() if modules else {tensor.data_ptr(): tensor for tensor in tensors.values()}.values()
    size = sum(tensor.numel() for tensor in weights)
    card = "\n".join(_card(config, state, results, size, needs_code)) + "\n"
    texts = {f"{name}.py": code(f"{name}.py") for name in modules}
    # Without the end-of-line symbol, at which a text goes on.
    left_out = "eos_token_id" if dictionary.stop() < 0 else None
    ids = {name: index for name, index in _special_ids(dictionary).items() if name != left_out}
    write_texts(job.out, {**texts, **files, CARD: card, "generation_config.json": json_text(ids)})
    dictionary.save(job.out / DICTIONARY)
    if tokenizer is not None:
        tokenizer.save(job.out, dictionary.symbols)
    # `fairseq-import` compares the digest: with another `dict.txt` every token would mean another
    # word.
    write_model(job.out, tensors, {**header, "dictionary": dictionary.digest(), **_special_ids(dictionary)})
    if modules:
        written = f"{CONFIG}, {SAFE}, {CARD}, tokenizer and code; transformers needs trust_remote_code=True"
        return f"{written}\n{native.why_not(model)}"
    more = "; the tokenizer needs trust_remote_code=True" if CODE in files else ""
    return f"{CONFIG}, {SAFE}, {CARD}, tokenizer: {header['architectures'][0]}{more}"


Written = tuple[dict[str, Tensor], dict[str, Any], tuple[str, ...]]
"""Tensors, ``config.json`` but for special symbols, and modules of code."""


def _native(model: BaseFairseqModel, dictionary: Dictionary) -> Written | None:
    """*model* as a class of transformers itself; None if there is none."""
    if not native.is_native(model):
        return None
    return native.tensors(model), native.configuration(model, len(dictionary)), ()


def _custom(model: BaseFairseqModel, config: Mapping[str, Any]) -> Written:
    family = f"modeling_{config['settings']['arch']}"
    auto = {name: f"{family}.{kind}" for name, kind in AUTO_CLASSES.items()}
    header = {
        "architectures": [MODEL_CLASS],
        "model_type": decoders.MODEL_TYPE,
        "auto_map": {"AutoConfig": f"{family}.FairseqConfig", **auto},
        "dtype": "float32",
    }
    return decoders.tensors(model), {**header, **config}, (SHARED, family)


def _results(path: str) -> dict[str, Any]:
    """Read the ``results.json`` at *path*; UserError if it is none, or a count is no whole
    number."""
    results = read_json(Path(path))
    for name, (_, form) in FIGURES.items():
        if form.endswith("d") and isinstance(value := results.get(name), float):
            raise UserError(f"`results` {path}: {name} {value}: must be a whole number; give a file of fairseq-eval-lm")
    return results


def revisions(folder: Path) -> dict[str, Path]:
    """Return the checkpoints by words or tokens of *folder* by the names of their revisions.

    The names are the BabyLM challenge's, ``chck_1M`` after a million words; after as many tokens it
    is ``tokens_1M``.
    """
    matches = [(match, path) for path in sorted(folder.iterdir()) if (match := MILESTONE.fullmatch(path.name))]
    checkpoints = sorted((match[1], int(match[2]), path) for match, path in matches)
    return {f"{'chck' if unit == 'words' else unit}_{_short(amount)}": path for unit, amount, path in checkpoints}


def _short(amount: int) -> str:
    for suffix, factor in (("M", 10**6), ("K", 10**3)):
        if amount % factor == 0:
            return f"{amount // factor}{suffix}"
    return str(amount)


def write_model(folder: Path, tensors: dict[str, Tensor], config: Mapping[str, object]) -> None:
    """Write the weights and the configuration to *folder*."""
    # Imported here, so that other commands start without it.
    from safetensors.torch import save_file

    save_file(tensors, folder / SAFE, {"format": "pt"})
    write_texts(folder, {CONFIG: json_text(config)})
    # The weights are as readable as the rest, by the umask; safetensors gives them to their owner
    # alone.
    (folder / SAFE).chmod(stat.S_IMODE((folder / CONFIG).stat().st_mode))


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write *texts* to *folder* under their names."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _special_ids(dictionary: Dictionary) -> dict[str, int]:
    """A text begins with the end-of-line symbol, and ends with it unless there is another one."""
    end = dictionary.eos() if dictionary.stop() < 0 else dictionary.stop()
    ids = {"bos_token_id": dictionary.eos(), "eos_token_id": end, "pad_token_id": dictionary.pad()}
    return {name: index for name, index in ids.items() if index >= 0}


def _card(
    config: Mapping[str, object],
    state: Mapping[str, Any],
    results: Mapping[str, object],
    size: int,
    needs_code: bool = True,
) -> Iterator[str]:
    """The lines of the model card; what checkpoint and results say in text stands in
    :func:`_code`."""
    trust = ", trust_remote_code=True" if needs_code else ""
    arch = str(state["args"].get("arch"))
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fairseq-short", arch]}
    # Through a YAML writer, because the architecture's name comes from a file and could end the
    # header.
    yield from ("---", yaml.safe_dump(head, sort_keys=False, allow_unicode=False).rstrip("\n"), "---", "")
    yield from (f"# {_code(arch)}", "")
    yield (
        f"A language model of {size:,} parameters: {config['num_hidden_layers']} layers of width "
        f"{config['hidden_size']}, {config['num_attention_heads']} heads, {config['vocab_size']:,} symbols, "
        f"a context of up to {config['max_position_embeddings']} tokens. "
        f"Trained with fairseq-short and exported with version {__version__}."
    )
    yield from ("", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield f'tokenizer = AutoTokenizer.from_pretrained("DIR"{trust})'
    yield f'model = AutoModelForCausalLM.from_pretrained("DIR"{trust})'
    yield 'prompt = tokenizer("The", return_tensors="pt")'
    yield "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50, do_sample=True, top_k=50)[0]))"
    yield from ("```", "", "## Measured figures", "", "| figure | value |", "| --- | --- |")
    rows = [*_training_figures(state), *_evaluation_figures(results)]
    yield from (f"| {name} | {value} |" for name, value in rows or [("none", "")])


def _training_figures(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    # Checkpoints made by importers have no history; such a card says nothing about training.
    history, extra = state.get("optimizer_history") or [], state.get("extra_state") or {}
    if history and history[-1].get("num_updates"):
        yield "Updates", f"{history[-1]['num_updates']:,}"
    if isinstance(extra.get("val_loss"), float):
        metric = state["args"].get("best_checkpoint_metric") or "loss"
        yield f"Validation during training, {_code(metric)}", f"{extra['val_loss']:.4f}"


def _evaluation_figures(results: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The figures of ``fairseq-eval-lm`` or ``fairseq-harness``, and the command."""
    for name, (title, form) in FIGURES.items():
        if isinstance(results.get(name), int | float):
            yield title, format(results[name], form)
    tasks = results.get("tasks")
    for task, metrics in tasks.items() if isinstance(tasks, dict) else ():
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(value, int | float):
                yield _code(f"{task}, {name}"), f"{value:.6g}"
    command = results.get("command")
    if isinstance(command, str):
        # Files of version 1.0 have the path of the installation.
        yield "Command", _code(re.sub(r"^/\S*/", "", command))


def _code(value: object) -> str:
    """*value* as a Markdown code span of one line, in which no HTML, link or other markup has a
    meaning.

    Its backticks become quotes and its bars are escaped, because a bar ends a cell of a table also
    in a code span.
    """
    text = " ".join(printable(str(value)).split())[:MOST_CHARACTERS]
    return "`" + (text.replace("`", "'").replace("|", "\\|") or " ") + "`"
