"""The tokenizer that a command's flags describe."""

from __future__ import annotations

from fairseq.config.command_settings import TextConfig
from fairseq.config.registry import BPES, TOKENIZERS
from fairseq.errors import UserError
from fairseq.system.opening import read_named
from fairseq.text.tokenizers import Subwords, WordTokenizer
from fairseq.text.tokenizers.moses import Moses


def chosen_words(config: TextConfig) -> WordTokenizer | None:
    """Return the word tokenizer of ``--tokenizer``; UserError if it or a setting, as the language, is unknown."""
    if config.moses_source_lang != "en" and config.tokenizer != "moses":
        raise UserError("`moses_source_lang`: has an effect with `tokenizer` moses only; leave it out")
    if config.tokenizer is None:
        return None
    kind = TOKENIZERS[config.tokenizer]
    words = Moses(config.moses_source_lang) if kind is Moses else kind()
    try:
        words.check()
    except UserError as error:
        flag = "`moses_source_lang`" if kind is Moses else f"`tokenizer` {config.tokenizer}"
        raise UserError(f"{flag}: {error.args[0]}") from None
    return words


def chosen_subwords(config: TextConfig) -> Subwords | None:
    """Return the encoding of ``--bpe`` with the file ``--bpe-codes``, None without; UserError if it is invalid."""
    if config.bpe is None:
        if config.bpe_codes is not None:
            raise UserError("`bpe_codes`: needs the kind of the codes; add `bpe` subword_nmt, or another")
        return None
    kind = BPES[config.bpe]
    if config.bpe_codes is None:
        return None
    source, advice = f"`bpe_codes` {config.bpe_codes}", f"give the file of `bpe` {config.bpe}"
    content = read_named(config.bpe_codes, advice, "`bpe_codes`")
    if not content.strip():
        raise UserError(f"{source}: is empty; {advice}")
    subwords = kind(content, source)
    subwords.check()
    return subwords
