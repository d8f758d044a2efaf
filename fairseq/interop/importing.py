"""Import a foreign model as a folder with ``checkpoint.pt`` and ``dict.txt``, which all commands
read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq import checkpoint
from fairseq.checkpoint.manager import DICTIONARY
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.interop.hugging_face import causal, decoders, encoders, model_folder, repositories, transfo_xl
from fairseq.interop.hugging_face.causal_names import EMBEDDINGS
from fairseq.interop.pickles import pickled_module
from fairseq.interop.pickles.named_tensors import cut
from fairseq.interop.transformer_xl import conversion
from fairseq.system.files import atomic_folder, remove_leftovers
from fairseq.system.opening import read_named
from fairseq.tasks import dictionary_digest
from fairseq.text.dictionary import FILLER, STOP, Dictionary, placeholder
from fairseq.text.tokenizers import TOKENIZATION, Subwords, Tokenizer, find_tokenizer
from fairseq.text.tokenizers.base import spelled
from fairseq.text.tokenizers.hf import GPT2, HuggingFace
from fairseq.text.tokenizers.sentencepiece import SentencePiece

CHECKPOINT = "checkpoint.pt"
FILES = (DICTIONARY, TOKENIZATION, CHECKPOINT)
NAMES = {  # names of special symbols in vocabularies
    "bos": ("<s>", "[CLS]"),
    "pad": ("<pad>", "[PAD]"),
    "eos": ("<eos>", "</s>", "<S>", "[SEP]"),
    "unk": ("<unk>", "<UNK>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}
NAMES_CAUSAL = {"unk": NAMES["unk"][:2]}
OF_PIECES = ("llama", "mistral")  # types of models whose ids are those of a SentencePiece model
UNREAD = (".model", ".tiktoken", "tekken.json")  # names, or their ends, of other tokenizers
LAYERS = ("n_layer", "encoder_layers", "decoder_layers")  # settings
# Transformer-XL's vocabularies have no `[SEP]` or `[CLS]`: there, these would be words of the text.
NAMES_XL = {"eos": NAMES["eos"][:3], "unk": NAMES["unk"][:2], "pad": NAMES["pad"][:1]}


@dataclass(frozen=True)
class Imported:
    """A foreign model."""

    model: dict[str, Tensor]  # parameters by name
    settings: dict[str, Any]  # ``args`` of the checkpoint
    size: int  # number of words of the model
    # In the order of their ids, None for an id that no text has; None: the source has no words.
    words: Sequence[str | None] | None
    ids: Mapping[str, int]  # special symbols by role that the source names by their ids
    names: Mapping[str, Sequence[str]]  # the names of special symbols, by role
    tokenizer: Tokenizer | None = None  # text to words and back; None: the source has none
    dictionary: Dictionary | None = None  # the source's own; None: it is made from *words*, *ids* and *names*


def import_model(
    source: Path,
    out: Path,
    source_format: str,
    config_file: str | None = None,
    vocabulary: str | None = None,
    without_tokenizer: bool = False,
    revision: str | None = None,
) -> None:
    """Write the model *source* of another program to the folder *out*.

    Args:
        source: a file or folder; with the format ``hf`` also ORG/NAME on the Hugging Face Hub.
        source_format: ``transformer-xl`` for the authors' files; ``hf-transfo-xl`` or ``hf`` for a
            folder of transformers.
        config_file: the authors' settings of the model, where *source* has none.
        vocabulary: the authors' ``cache.pt``, or a word on each line; None: placeholders.
        without_tokenizer: whether the tokenizer is left out.
        revision: branch or tag of ORG/NAME; None: its main branch.
    """
    _check(out)
    name = source.as_posix()
    if source_format == "hf" and not os.path.exists(source) and repositories.REPOSITORY.fullmatch(name):
        source = repositories.download(name, revision)
    elif revision is not None:
        raise UserError(f"`revision`: is for ORG/NAME on the Hugging Face Hub, which {source} is not; leave it out")
    if not os.path.exists(source):
        raise UserError(f"{source}: file or folder not found; check the path")
    imported = _read(source, source_format, config_file, without_tokenizer, vocabulary)
    dictionary = imported.dictionary or _dictionary(imported, source)
    state: dict[str, Any] = {
        "args": imported.settings,
        "model": imported.model,
        "optimizer_history": [],
        "extra_state": {},
    }
    if imported.words is not None:  # placeholders are there to be replaced
        state[dictionary_digest.KEY] = dictionary.digest()
    with atomic_folder(out, FILES, "`out`") as folder:
        checkpoint.save(folder / CHECKPOINT, state)
        dictionary.save(folder / DICTIONARY)
        if imported.tokenizer is not None:
            imported.tokenizer.save(folder, dictionary.symbols)
        # Inside, so that a model that cannot be built leaves no folder.
        try:
            load_models([folder / CHECKPOINT], folder / DICTIONARY)
        except UserError as error:
            # The user knows the settings by the file that they come from.
            origin = source / model_folder.CONFIG if os.path.isdir(source) else source
            raise type(error)(error.args[0].replace(str(folder / CHECKPOINT), str(origin))) from None
    kind = "its own words" if imported.words is not None else "placeholder words"
    kind += ", and a tokenizer" if imported.tokenizer is not None else "; text is split at white space"
    # Tied parameters share their memory and count once.
    parameters = sum({value.data_ptr(): value.numel() for value in imported.model.values()}.values())
    layers = next(imported.settings[name] for name in LAYERS if name in imported.settings)
    print(f"{name}: {layers} layers, {parameters:,} parameters, {len(dictionary):,} words")
    print(f"Wrote {out / CHECKPOINT} and {out / DICTIONARY} ({kind})")


def _read(
    source: Path, source_format: str, config_file: str | None, without_tokenizer: bool, vocabulary: str | None
) -> Imported:
    if source_format == "transformer-xl":
        state, embedded = pickled_module.read(source)
        if embedded is None and config_file is None:
            raise UserError(f"{source}: is a state dict without the model's settings; give `config` FILE.json")
        config = model_folder.read_json(Path(config_file)) if config_file is not None else {}
        model, settings = conversion.convert(state, {**(embedded or {}), **config}, str(source))
        listed = pickled_module.read_vocabulary(Path(vocabulary)) if vocabulary is not None else None
        size = _vocabulary_size(model)
        if listed is not None and len(listed) != size:
            raise UserError(f"`vocab` {vocabulary}: has {len(listed)} words, but the model {size}; give its own")
        # As those of enwik8 and text8.
        if listed is not None and not {*NAMES_XL["eos"]} & {*listed}:
            names, advice = ", ".join(NAMES_XL["eos"]), "write a text as one line"
            print(f"note: {vocabulary}: has no end of a line ({names}), {listed[0]} is used; {advice}", file=sys.stderr)
        return Imported(model, settings, size, listed, {}, NAMES_XL)
    if vocabulary is not None:
        raise UserError("`vocab`: not used for a Hugging Face folder, which has its own; leave it out")
    if config_file is not None:
        raise UserError("`config`: not used for a Hugging Face folder, which has a config.json; leave it out")
    kind: Any = "transfo-xl"
    if source_format == "hf":
        if not os.path.isdir(source):
            raise UserError(f"{source}: folder not found; give one with config.json and model.safetensors")
        kind = model_folder.read_json(source / model_folder.CONFIG).get("model_type")
    if kind == "transfo-xl":
        model, settings = transfo_xl.read(source)
        eos = transfo_xl.eos(source)
        ids = {} if eos is None else {"eos": eos}
        return Imported(model, settings, _vocabulary_size(model), model_folder.vocabulary(source), ids, NAMES_XL)
    if kind == decoders.MODEL_TYPE:
        return _exported(source)
    if kind in [*causal.FAMILIES]:
        # Of a decoder that `fairseq-export` wrote as a class of transformers.
        if os.path.exists(source / DICTIONARY):
            dictionary = _dictionary_of(source)
            decoder, tokenizer = causal.read(source, dictionary.pad()), find_tokenizer(source, dictionary.symbols)
            arguments = decoder.parameters, decoder.args, len(dictionary), dictionary.symbols
            return Imported(*arguments, {}, {}, tokenizer, dictionary)
        decoder, tokenizer = causal.read(source), None if without_tokenizer else _tokenizer(source, str(kind))
        size = decoder.parameters[EMBEDDINGS].size(0)
        found, begin = model_folder.vocabulary(source, of_tokenizer=True), model_folder.begin_symbol(source)
        if tokenizer is not None and isinstance(tokenizer.subwords, SentencePiece):
            adds_begin = model_folder.tokenizer_setting(source, "add_bos_token") is not False
            found, begin = tokenizer.subwords.pieces, tokenizer.subwords.begin if adds_begin else None
        words = _filled(found, size)
        # Texts begin with the symbol that ends a line here, in Llama with one of their own, which
        # takes this role. The model ends its texts with the other one.
        ids = decoder.ids if begin is None else {**decoder.ids, "eos": begin, STOP: decoder.ids["eos"]}
        if ids["eos"] == ids.get(STOP):
            del ids[STOP]
        return Imported(decoder.parameters, decoder.args, size, words, ids, NAMES_CAUSAL, tokenizer)
    if kind not in [*encoders.FAMILIES]:
        known = ", ".join((*encoders.FAMILIES, *causal.FAMILIES, "transfo-xl", decoders.MODEL_TYPE))
        raise UserError(f"{source / model_folder.CONFIG}: model_type is {cut(kind)}; known: {known}")
    return _encoder(source, str(kind), without_tokenizer)


def _encoder(source: Path, kind: str, without_tokenizer: bool) -> Imported:
    model, settings, ids = encoders.read(source)
    size = model["encoder.sentence_encoder.embed_tokens.weight"].size(0)
    words = _filled(model_folder.vocabulary(source), size)
    tokenizer: Tokenizer | None = None
    dictionary: Dictionary | None = None
    if not without_tokenizer:
        listed = [word or "" for word in words or []]
        # Of an encoder that `fairseq-export` wrote, whose tokenizer need not be one that
        # transformers reads. Its lines end in `</s>`, as in its corpus, unless it came from
        # elsewhere itself.
        if not os.path.exists(source / model_folder.TOKENIZER):
            tokenizer = find_tokenizer(source, listed)
        if tokenizer is not None and model_folder.tokenizer_setting(source, "keeps_lines") is False:
            dictionary = Dictionary.of_special_first(listed)
        tokenizer = tokenizer or _tokenizer(source, kind)
    return Imported(model, settings, size, words, ids, NAMES, tokenizer, dictionary)


def _exported(source: Path) -> Imported:
    """The model that ``fairseq-export`` wrote to the folder *source*."""
    dictionary = _dictionary_of(source)
    config = model_folder.read_json(source / model_folder.CONFIG)
    settings = config.get("settings")
    if not isinstance(settings, dict):
        raise UserError(f"{source / model_folder.CONFIG}: settings are missing; use a folder that fairseq-export wrote")
    model, settings = decoders.restored(model_folder.read_tensors(source), settings, dictionary, str(source))
    tokenizer = find_tokenizer(source, dictionary.symbols)
    return Imported(model, settings, len(dictionary), dictionary.symbols, {}, {}, tokenizer, dictionary)


def _dictionary_of(source: Path) -> Dictionary:
    """The dictionary that ``fairseq-export`` wrote to the folder
    *source*; UserError if it is another model's."""
    dictionary = Dictionary.load(source / DICTIONARY)
    digest = model_folder.read_json(source / model_folder.CONFIG).get("dictionary")
    dictionary_digest.check_dictionary({dictionary_digest.KEY: digest}, source / model_folder.CONFIG, dictionary)
    return dictionary


def _tokenizer(source: Path, kind: str) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder with a model of this *kind*, None if there is none;
    UserError if it is in a file that is not read."""
    # Merges alone are read as GPT-2's, whose rules of what is merged other models change.
    readers: dict[str, type[Subwords]] = {model_folder.TOKENIZER: HuggingFace, "merges.txt": GPT2}
    # In other families the ids of the model are not those of the pieces.
    if kind in OF_PIECES:
        readers["tokenizer.model"] = SentencePiece
    for name, reader in readers.items():
        path = source / name
        if os.path.exists(path):
            subwords = reader(read_named(path, "check its permissions"), str(path))
            subwords.check()
            return Tokenizer(subwords=subwords)
    for path in sorted(source.iterdir()):
        if {*path.suffixes, path.name} & {*UNREAD}:  # also `tokenizer.model.v3`
            raise UserError(
                f"{path}: a tokenizer that is not read; save it as {model_folder.TOKENIZER} with transformers, or give "
                "`no_tokenizer`"
            )
    return None


def _filled(words: Sequence[str] | None, size: int) -> list[str | None] | None:
    """*words* padded to *size*: embedding tables are often longer than vocabularies."""
    return words if words is None else [*words, *[None] * (size - len(words))]


def _check(out: Path) -> None:
    """Reject a folder that cannot be written before any work is done."""
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"`out` {out}: is not a folder; give a new folder")
    # Of an import that was killed, which may be repeated.
    remove_leftovers(out)
    # An earlier import may be replaced; a folder with other files is probably a mistake.
    there = [path.name for path in (sorted(out.iterdir()) if os.path.exists(out) else ()) if path.name not in FILES]
    if there:
        raise UserError(f"`out` {out}: contains other files ({there[0]}); give a new folder")


def _vocabulary_size(model: dict[str, Tensor]) -> int:
    tables = (value for name, value in model.items() if "embed_tokens" in name and name.endswith(".0.weight"))
    return sum(table.size(0) for table in tables)


def _dictionary(imported: Imported, source: Path) -> Dictionary:
    """The dictionary with the ids of the source, whose words are written as its tokenizer's symbols
    are; ``token0``, ``token1``, … if it has no words.

    The padding of an encoder is the id in its configuration. Other special symbols are words with
    the usual names, else the ids of the configuration; the end of a line defaults to id 0.
    """
    size = imported.size
    words = [placeholder(index) for index in range(size)] if imported.words is None else imported.words
    if len(words) != size:
        raise UserError(f"{source}: has {len(words)} words, but its model {size}; use the model's vocabulary")
    for role, index in imported.ids.items():
        if not 0 <= index < size:
            raise UserError(
                f"{source}: {role}_token_id is {cut(index)}, but there are {size} words; correct config.json"
            )
    # Of equal words, a text has the first.
    firsts = {word: index for index, word in reversed([*enumerate(words)]) if word is not None}
    table = spelled({index: word for word, index in firsts.items()})
    symbols = [table.get(index) or f"{FILLER}{index:04d}" for index in range(size)]
    roles = {role: symbols[index] for role, index in imported.ids.items()}
    # Reversed: of several names that there are, the first one counts.
    names_by_role = {role: name for role, names in imported.names.items() for name in reversed(names) if name in firsts}
    roles |= {role: name for role, name in names_by_role.items() if not (role == "pad" and "pad" in roles)}
    roles.setdefault("eos", symbols[0])
    return Dictionary.of_listed(symbols, roles)
