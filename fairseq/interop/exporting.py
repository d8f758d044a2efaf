"""Export a model as a Hugging Face transformers folder, or a language model as a checkpoint of
fairseq."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq import checkpoint, hub
from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.errors import UserError
from fairseq.evaluation.classifier import SentenceClassifier
from fairseq.interop.fairseq.to_fairseq0x import to_fairseq
from fairseq.interop.hugging_face import encoders, export, repositories
from fairseq.interop.hugging_face.encoder_names import EncoderLayout, classifier_parameters
from fairseq.interop.hugging_face.export import Export, write_texts
from fairseq.interop.hugging_face.model_folder import CONFIG, SAFE
from fairseq.interop.hugging_face.tokenizer_files import CODE, tokenizer_files
from fairseq.models.base import BaseFairseqModel
from fairseq.models.bert import BertModel
from fairseq.models.electra import ElectraModel
from fairseq.models.encoder import TransformerEncoder
from fairseq.models.encoder_settings import BertConfig
from fairseq.system.files import ARCHIVE, atomic_folder, prepare_file, remove_leftovers
from fairseq.tasks.dictionary_digest import check_dictionary
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer, find_tokenizer

WORDS = "vocab.txt"


def export_model(
    source: str,
    out: Path,
    data: str | None = None,
    half: str = "discriminator",
    with_revisions: bool = False,
    results: str | None = None,
    repository: str | None = None,
) -> None:
    """Write the model of the checkpoint *source* to the new folder *out*, for transformers.

    Args:
        data: data folder or ``dict.txt``; None: next to the checkpoint.
        half: of ELECTRA, ``discriminator`` or ``generator``.
        with_revisions: whether checkpoints by words are written, too, as subfolders.
        results: of an evaluation, for the model card.
        repository: ORG/NAME on the Hugging Face Hub, to upload the folder to.
    """
    if repository is not None:
        repositories.check_name(repository)
    # Of an export that was killed, which may be repeated.
    remove_leftovers(out)
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise UserError(f"`out` {out}: is a file or not empty; give a new folder")
    path = find_checkpoint(source)
    state = checkpoint.load(path, only="model")
    revisions = export.revisions(path.parent) if with_revisions else {}
    if with_revisions and not revisions:
        raise UserError(f"`revisions`: {path.parent} has no checkpoint_words_….pt; train with `save_interval_words`")
    with atomic_folder(out, flag="`out`", last="config.json") as folder:
        written = _export(half, path, state, Export(source, folder, data, results))
        for name, revision in revisions.items():
            (folder / name).mkdir()
            state = checkpoint.load(revision, only="model")
            _export(half, revision, state, Export(str(revision), folder / name, data))
    print(f"Wrote {out}: {written}")
    if revisions:
        print(f"Wrote {len(revisions)} revisions, as subfolders: {', '.join(revisions)}")
    if repository is not None:
        print(f"Uploaded to {repositories.upload(out, repository, [*revisions])}")


def _export(half: str, path: Path, state: dict[str, Any], job: Export) -> str:
    """Write the model of the checkpoint *path*,
    which holds *state*; return a description of the files."""
    if state["args"].get("task") == "sentence_prediction":
        _check_no_results(job)
        if half == "generator":
            raise UserError(f"`half` generator: {job.source} is a classifier; leave the flag out")
        return _export_classifier(SentenceClassifier.from_pretrained(path, job.data, state=state), job)
    model, task = hub.load_model(path, job.data, state=state)
    if model.predicts_next_token:
        if half == "generator":
            raise UserError(f"`half` generator: {job.source} is not an ELECTRA model; leave the flag out")
        return export.export(model, task, state, job)
    _check_no_results(job)
    return _export_encoder(model, task.source_dictionary, half, str(state["args"].get("arch")), job)


def _check_no_results(job: Export) -> None:
    if job.results is not None:
        raise UserError("`results`: encoders have no model card; leave it out")


def _export_encoder(model: BaseFairseqModel, dictionary: Dictionary, half: str, arch: str, job: Export) -> str:
    """Write an encoder, with the tokenizer next to its *dictionary*."""
    kind, encoder, state = _half(model, half, arch, job.source)
    layout = EncoderLayout(kind, encoder.cfg, len(dictionary), encoder.padding_idx)
    config = encoders.configuration(layout, _special_ids(dictionary))
    tokenizer = find_tokenizer(dictionary.path, dictionary.symbols) if dictionary.path is not None else None
    return _write(job.out, encoders.write(state, layout), config, dictionary, tokenizer)


def _export_classifier(classifier: SentenceClassifier, job: Export) -> str:
    """Write a fine-tuned encoder with its classification head, for
    ``AutoModelForSequenceClassification``."""
    model, task = classifier.model, classifier.task
    if model.is_decoder:
        raise UserError(f"{job.source}: no class of transformers has this head; export the pre-trained decoder instead")
    encoder, state = model.encoder.sentence_encoder, model.state_dict()
    head = task.cfg.pooler_activation_fn
    kind = _classifier_kind(encoder.cfg, head, str(task.settings.chosen.arch), job.source)
    layout = EncoderLayout(kind, encoder.cfg, len(task.dictionary), encoder.padding_idx)
    roles = _special_ids(task.dictionary)
    config = encoders.classifier_configuration(layout, roles, classifier.labels, task.cfg.pooler_dropout)
    names = classifier_parameters(layout, model.name, task.layout.outputs)
    # The exported tokenizer puts `<s>` first, and the head reads the state of the first token.
    if task.cfg.init_token not in (None, task.dictionary.bos()):
        raise UserError(f"{job.source}: its rows begin with id {task.cfg.init_token}, not with <s> as in transformers")
    tensors, separator = encoders.write(state, layout, names), task.cfg.separator_token
    return _write(job.out, tensors, config, task.dictionary, task.encode.tokenizer, separator)


def _classifier_kind(cfg: BertConfig, head: str, arch: str, source: str) -> str:
    """The kind of encoder whose class in transformers has these settings, and this activation
    *head* of the head.

    Raises:
        UserError: there is none.
    """
    # transformers fixes the activation by class: BERT's pooler and RoBERTa's head have tanh,
    # ELECTRA's head gelu; and only ELECTRA projects narrower embeddings.
    # An ELECTRA of one width is a BERT.
    if head == "tanh" and cfg.embedding_dim == cfg.encoder_embed_dim:
        return "roberta" if arch.startswith("roberta") else "bert"
    if head == "gelu":
        return "discriminator"
    raise UserError(
        f"{source}: no classifier of transformers has `pooler_activation_fn` {head} and embeddings of width "
        f"{cfg.embedding_dim} for states of width {cfg.encoder_embed_dim}; fine-tune with `pooler_activation_fn` gelu"
    )


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    dictionary: Dictionary,
    tokenizer: Tokenizer | None,
    separator: int | None = None,
) -> str:
    longest = config["max_position_embeddings"]
    # RoBERTa's positions begin behind the padding index: its table has rows that no token uses.
    longest -= dictionary.pad() + 1 if config["model_type"] == "roberta" else 0
    files = tokenizer_files(tokenizer, dictionary, longest, config["type_vocab_size"], separator)
    (folder / WORDS).write_text("".join(f"{word}\n" for word in dictionary.symbols), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder, dictionary.symbols)
    write_texts(folder, files)
    export.write_model(folder, tensors, config)
    code = "; the tokenizer needs trust_remote_code" if CODE in files else ""
    return f"{CONFIG}, {SAFE}, tokenizer: {config['architectures'][0]}{code}"


def export_to_fairseq(source: str, out: Path, data: str | None = None) -> None:
    """Write the checkpoint *source* as the file *out*, which fairseq evaluates and trains on.

    Its dictionary is compared with *data*, or where that is None with the ``dict.txt`` beside it,
    if there is one.
    """
    prepare_file("`out`", out, {"CHECKPOINT": source}, ARCHIVE)
    path = find_checkpoint(source)
    loaded = checkpoint.load(path)
    dictionary = Path(data) if data is not None else path.parent
    dictionary = dictionary / DICTIONARY if os.path.isdir(dictionary) else dictionary
    if data is not None or os.path.exists(dictionary):
        # Without `--data` a missing `dict.txt` is no error: fairseq gets the data's dictionary from
        # its own command line.
        check_dictionary(loaded, path, Dictionary.load(dictionary))
    state = to_fairseq(loaded, source)
    checkpoint.save(out, state)
    resumes = "with" if state["last_optimizer_state"] else "without"
    print(f"Wrote {out}: {state['args'].arch} for fairseq, {resumes} the optimizer's state")


def _half(
    model: BaseFairseqModel, half: str, arch: str, source: str
) -> tuple[str, TransformerEncoder, Mapping[str, Tensor]]:
    """Return kind, encoder and parameters of the model to write,
    with the parameter names of an encoder.

    Raises:
        UserError: the checkpoint does not contain that model.
    """
    state = model.state_dict()
    if isinstance(model, ElectraModel):
        if half == "discriminator":
            return "discriminator", model.encoder.sentence_encoder, state
        if model.generator is None:
            raise UserError(f"`half` generator: {source} has no generator; leave the flag out")
        names = [name for name in state if name.startswith("generator.")]
        parameters = {name.replace("generator.", "encoder.", 1): state[name] for name in names}
        return "generator", model.generator.sentence_encoder, parameters
    if not isinstance(model, BertModel):
        raise UserError(
            f"{source}: {type(model).__name__} is not an encoder; give a checkpoint of bert, roberta or electra"
        )
    encoder = model.encoder.sentence_encoder
    if half == "generator" and not arch.startswith("electra"):
        raise UserError(f"`half` generator: {source} is not an ELECTRA model; leave the flag out")
    # ELECTRA's classes are the only ones of transformers
    # with embeddings of another width than the layers.
    if arch == "electra_generator" or encoder.cfg.embedding_dim != encoder.cfg.encoder_embed_dim:
        return "generator", encoder, state
    # The names of a plug-in's architectures tell nothing; RoBERTa has one token type.
    unnamed = not arch.removeprefix("tnf_").startswith("bert") and encoder.cfg.token_types < 2
    return ("roberta" if arch.startswith("roberta") or unnamed else "bert"), encoder, state


def _special_ids(dictionary: Dictionary) -> dict[str, int]:
    ids = {"bos": dictionary.bos(), "pad": dictionary.pad(), "eos": dictionary.eos()}
    return {role: index for role, index in ids.items() if index >= 0}
