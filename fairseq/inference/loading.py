"""What an evaluation or a generation reads: models from checkpoints, and a split or a text."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq import checkpoint
from fairseq.checkpoint.manager import find_checkpoint, is_model
from fairseq.config import fields
from fairseq.config.command_settings import ModelPathConfig, TextFormatConfig
from fairseq.config.registry import ARCHITECTURES, CRITERIONS, EXTENSIONS, MODELS, TASKS, extensions_of
from fairseq.config.settings import CommonConfig, DataConfig, MemoryConfig, Settings, StreamConfig, typed_settings
from fairseq.distributed import World
from fairseq.errors import UserError, nearest
from fairseq.models.base import BaseFairseqModel
from fairseq.models.language_model import language_model
from fairseq.models.loading import NEUTRAL, check_supported, load_parameters, strip_for_inference
from fairseq.tasks.dictionary_digest import ADVICE, check_dictionary, dictionary_of
from fairseq.tasks.fairseq_task import FairseqTask, setup_task
from fairseq.text.dictionary import Dictionary
from fairseq.text.raw_text import STDIN, format_of
from fairseq.text.text_corpus import TextCorpus, TextReader

logger = logging.getLogger(__name__)

EMBEDDINGS = ("decoder.embed_tokens", "encoder.sentence_encoder.embed_tokens")

OVERRIDES = "`model_overrides`"
CHOICES = {"task": TASKS, "criterion": CRITERIONS}
DEFAULT_TASK = TASKS.default
OF_THE_COMMAND = frozenset({*fields.defaults(CommonConfig), "dataset_impl", "num_workers"})  # not the checkpoint's
OF_DATA = frozenset({*fields.defaults(DataConfig), "data", "max_sentences"})  # read by no model


def existing_checkpoint(path: str) -> str:
    """Return the path of the checkpoint at *path*, or of the best one in that folder.

    Raises:
        UserError: there is none, which is seen here before other models are measured.
    """
    found = find_checkpoint(path)
    if not os.path.exists(found):
        raise UserError(f"{found}: file not found; check the path")
    return str(found)


def data_and_models(cfg: ModelPathConfig, data: str) -> tuple[str, list[str]]:
    """Return the data and the checkpoints that ``--path`` and DATA name; a folder is the best
    checkpoint in it.

    Without ``--path`` DATA is a model, a checkpoint or its folder, and its dictionary and tokenizer
    are the data.

    Raises:
        UserError: there is neither, a file is missing, a folder has no checkpoint, DATA is a model
            without the split to read, or another file although a split is to be read.
    """
    reads_split = not (getattr(cfg, "text", None) or hasattr(cfg, "input"))
    if reads_split and os.path.isfile(data) and not is_model(Path(data)):
        advice = f", or the model as DATA and `text` {data}" if hasattr(cfg, "text") else ""
        raise UserError(f"DATA: {data}: is a file; give the folder that fairseq-preprocess wrote{advice}")
    # A path with a colon that is there is one checkpoint, as with DATA.
    names = [cfg.path] if cfg.path and os.path.exists(cfg.path) else (cfg.path or "").split(":")
    if paths := [path for path in names if path]:
        return data, [existing_checkpoint(path) for path in paths]
    source = Path(data)
    if not os.path.exists(source):
        raise UserError(f"DATA: {source}: file or folder not found; give a model or a data folder")
    if not is_model(source):
        raise UserError(
            "`path`: name a checkpoint, or several joined by colons, or give a model as DATA: "
            f"{source} has no checkpoint"
        )
    path = find_checkpoint(source)
    if reads_split and not any(path.parent.glob("*.idx")):
        if hasattr(cfg, "text"):
            raise UserError(f"`text`: give a text to read; {source} is a model, which has no splits")
        raise UserError(f"DATA: {source} is a model, which has no splits; give the data folder, and `path` {source}")
    return str(path.parent), [str(path)]


def stream_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings *flat* with ``sample_break_mode`` ``none``, for what reads a split as one
    stream.

    Raises:
        UserError: *flat* has another break mode.
    """
    # *flat* has what the command line gives; what it leaves open would be the checkpoint's.
    settings = {"sample_break_mode": "none", **flat}
    if (mode := settings["sample_break_mode"]) != "none":
        raise UserError(f"`sample_break_mode` {mode}: the split is read as one stream; use none")
    return settings


def refuse_two_texts(text: str | None, split: str) -> None:
    """Raise UserError if both ``--text`` and another *split* than the default were asked for."""
    if text is not None and split != StreamConfig.gen_subset:
        raise UserError(f"`gen_subset` {split}: has no effect with `text`; give one of them")


def read_text(
    path: str,
    form: TextFormatConfig,
    data: str,
    dictionary: Dictionary,
    world: World,
    documents: bool = False,
    lines_apart: bool = False,
) -> TextCorpus:
    """Return the tokens of a file of text, encoded as *data* was;
    without a tokenizer the file holds tokens.

    With *documents* sizes are of documents, rows of JSON lines or else lines, and the corpus has
    their texts.

    Raises:
        UserError: the file or the tokenizer cannot be used, or several processes would share stdin.
    """
    if path == STDIN and world.size > 1:
        raise UserError(f"`text` -: {world.size} processes cannot share stdin; save the text to a file")
    form_of_path = format_of(path, form.text_field, form.join_lines)
    reader = TextReader.of(data, dictionary)
    if documents:
        return reader.documents(reader.texts(path, form_of_path))
    return reader.read(path, form_of_path, lines_apart)


def load_models(
    paths: Sequence[str | Path],
    data: str | Path,
    overrides: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    states: Sequence[Mapping[str, object]] | None = None,
) -> tuple[list[BaseFairseqModel], FairseqTask, Settings]:
    """Load the models of several checkpoints with one dictionary, in evaluation mode, on the CPU.

    A model has the settings of its checkpoint, changed by *overrides*, then by *settings*.
    Extensions are dropped, and their subsets of tokens not measured, unless settings that they name
    ask for it.

    Args:
        paths: checkpoints of this project or of fairseq, or their folders.
        data: folder made by ``fairseq-preprocess``, or a dictionary file.
        overrides: settings of the checkpoints to change (``--model-overrides``).
        settings: further settings, e.g. a parsed command line. A larger ``tokens_per_sample`` also
            raises the number of positions unless positions are learned. Without it, all models have
            the first one's.
        states: the content of each checkpoint where it has been read already.

    Returns:
        The models, the task, and the settings of the first model.

    Raises:
        UserError: a checkpoint cannot be read, its architecture is unknown, its parameters do not
            match, or it was trained with another dictionary.
    """
    try:
        return _load(paths, data, overrides or {}, settings or {}, states)
    except UserError as error:
        message = error.args[0]
        if overrides and not message.startswith(OVERRIDES):
            raise UserError(f"{OVERRIDES} {fields.truncate(overrides)}: {message}") from None
        raise


def _load(
    paths: Sequence[str | Path],
    data: str | Path,
    overrides: Mapping[str, object],
    settings: Mapping[str, object],
    states: Sequence[Mapping[str, Any]] | None,
) -> tuple[list[BaseFairseqModel], FairseqTask, Settings]:
    flags, extensions = dict(settings), [EXTENSIONS[name] for name in EXTENSIONS]
    models, task, first = [], None, None
    for number, path in enumerate(map(str, map(find_checkpoint, paths))):
        state = checkpoint.load(path, only="model") if states is None else states[number]
        args = _arguments(path, state["args"], overrides, flags)
        args, parameters = strip_for_inference(args, state["model"])
        args = {**args, "task": overrides.get("task", args["task"]), "data": str(data)}
        begins = bool(args.get("add_bos_token", False))
        if first is not None and begins != bool(first.flat.get("add_bos_token", False)):
            advice = "give models that were trained with the same setting"
            raise UserError(f"{path}: has `add_bos_token` {begins}, unlike {paths[0]}; {advice}")
        if task is None:
            first = typed_settings(functools.reduce(lambda args, part: part.eval_overrides(args), extensions, args))
            task = setup_task(first, Dictionary.load(data) if os.path.isfile(data) else None)
            if "tokens_per_sample" in args:
                # Models that are averaged must read the same blocks.
                flags["tokens_per_sample"] = args["tokens_per_sample"]
        _check_size(path, parameters, task.source_dictionary, data)
        check_dictionary(state, path, dictionary_of(task))
        model_settings = typed_settings(args)
        model = task.build_model(model_settings)
        load_parameters(model, parameters, path)
        models.append(model.eval())
    if task is None or first is None:
        raise UserError("`path`: name at least one checkpoint")
    return models, task, first


def load_language_models(
    paths: Sequence[str | Path],
    data: str | Path,
    overrides: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
) -> tuple[list[BaseFairseqModel], FairseqTask, Settings]:
    """Load models that predict the next token; see :func:`load_models`.

    Raises:
        UserError: as :func:`load_models`, or a model is no language model.
    """
    models, task, trained = load_models(paths, data, overrides, settings)
    for path, model in zip(paths, models, strict=True):
        language_model(model, str(path))
    return models, task, trained


def check_no_begin(task: FairseqTask, path: str | Path) -> None:
    """Raise UserError if *task*, of the model at *path*,
    puts ``<s>`` before rows, for readers that do not."""
    if task.cfg.add_bos_token:
        raise UserError(f"{path}: was trained with `add_bos_token`, which is not supported here; give another model")


def _arguments(
    path: str, stored: Mapping[str, object], overrides: Mapping[str, object], flags: Mapping[str, object]
) -> Mapping[str, object]:
    """The settings of the model in the checkpoint at *path*."""
    args = {n: value for n, value in stored.items() if n not in _of_the_command(flags)} | dict(overrides)
    arch = str(args.get("arch"))
    if arch not in ARCHITECTURES:
        raise UserError(
            f"{path}: unknown architecture {arch}; {nearest(arch, ARCHITECTURES)} (plug-ins need `user_dir`)"
        )
    model = MODELS[ARCHITECTURES[arch].model]
    args = dict(args)
    _check_overrides(overrides, stored, args, flags)
    check_supported(model.unread(args), path)
    args = ARCHITECTURES[arch].complete(args)
    _check_memory_settings(arch, flags)
    is_other = "mask_prob" in stored or stored.get("task") == "sentence_prediction" or not model.predicts_next_token
    if flags.get("task") == DEFAULT_TASK and is_other:
        # The default of most commands, which is for language models.
        flags = {name: value for name, value in flags.items() if name != "task"}
    # A classifier's dictionary may be next to its checkpoint.
    args = {"task": DEFAULT_TASK, "finetune_from_model": path, **args, **flags}
    if "tokens_per_sample" in args:
        args["max_target_positions"] = _positions(path, stored, args)
    if "seed" not in flags and not _is_seed(args.get("seed", 1)):
        del args["seed"]  # fairseq's may be larger, and few readers need it
    return {**args, **fields.checked(CommonConfig, args)}


def _is_seed(value: object) -> bool:
    with contextlib.suppress(UserError):
        fields.checked(CommonConfig, {"seed": value})
        return True
    return False


def _of_the_command(flags: Mapping[str, object]) -> frozenset[str]:
    """Settings that a command with *flags* has instead of the checkpoint: devices and precisions.
    The seed, by which the tokens of a masked model are chosen, only if it is given."""
    return OF_THE_COMMAND if "seed" in flags else OF_THE_COMMAND - {"seed"}


def _check_overrides(
    overrides: Mapping[str, object], stored: Mapping[str, object], args: Mapping[str, Any], flags: Mapping[str, object]
) -> None:
    """Raise UserError for *overrides* that neither
    the parts selected by *args* nor the loading reads."""
    criterion = {**args, **flags}.get("criterion")
    names = {"task": str(args.get("task", "language_modeling")), "criterion": str(criterion)}
    parts = [MODELS[ARCHITECTURES[args["arch"]].model]]
    parts += [registry[names[kind]] for kind, registry in CHOICES.items() if names[kind] in registry]
    read = {"arch", "task", "criterion", *NEUTRAL}
    read |= {setting for name in EXTENSIONS for setting in EXTENSIONS[name].loading_settings}
    extensions = [EXTENSIONS[name] for part in parts for name in extensions_of(part)]
    for reader in (*parts, *extensions):
        read |= set(fields.defaults(reader.config_class)) if reader.config_class else set()
    for part in parts:
        read |= stored.keys() - part.unread(stored).keys()
    read = (read | {"seed"}) - _of_the_command(flags)
    for name in map(str, overrides):
        if name in OF_DATA:
            if name in flags or name not in fields.defaults(DataConfig):
                flag = "DATA" if name == "data" else f"`{name}`"
                logger.warning("%s %s: no effect; give %s", OVERRIDES, name, flag)
        elif name in OF_THE_COMMAND and name in flags:
            raise UserError(f"{OVERRIDES} {name}: not a setting of the model; give `{name}`")
        elif name not in read:
            raise UserError(f"{OVERRIDES} {name}: no such setting of {args['arch']}; {nearest(name, read)}")


def _check_memory_settings(arch: str, flags: Mapping[str, object]) -> None:
    """Raise UserError for memory settings that the model does not have."""
    settings = MODELS[ARCHITECTURES[arch].model].config_class
    known = fields.defaults(settings) if settings else {}
    for name in fields.defaults(MemoryConfig):
        if name in flags and name not in known:
            raise UserError(f"`{name}`: {arch} has no such setting; leave it out")


def _positions(path: str, stored: Mapping[str, Any], args: Mapping[str, Any]) -> int:
    """Maximal tokens of a row: as in training;
    more for longer blocks unless positions are learned."""
    length = args["tokens_per_sample"]
    positions = args.get("max_target_positions") or stored.get("tokens_per_sample", length)
    for name, value in (("tokens_per_sample", length), ("max_target_positions", positions)):
        if type(value) is not int or not 0 < value <= fields.LARGEST_INT:
            raise UserError(f"{path}: its setting {name} is {fields.truncate(value)}, not a count; override it")
    if length > positions and args.get("decoder_learned_pos", False):
        raise UserError(f"`tokens_per_sample` {length}: {path} has {positions} positions; give {positions} or less")
    return max(positions, length)


def _check_size(path: str, parameters: Mapping[str, Tensor], dictionary: Dictionary, data: str | Path) -> None:
    tables = [parameters[f"{table}.weight"] for table in EMBEDDINGS if f"{table}.weight" in parameters] or [
        parameters[name]
        for name in parameters
        if name.startswith(f"{EMBEDDINGS[0]}.embeddings.") and name.endswith(".0.weight")
    ]
    # All bands of adaptive inputs, whose sizes add up to the vocabulary.
    trained = sum(table.size(0) for table in tables if table.dim() > 0)
    if trained and trained != len(dictionary):
        raise UserError(
            f"{path}: was trained with a dictionary of {trained} symbols, but {data}'s has {len(dictionary)}; " + ADVICE
        )
