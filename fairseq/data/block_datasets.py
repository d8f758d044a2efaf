"""``fairseq.data``: lines and blocks of a corpus, and masking, as datasets that plug-ins
compose."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.data.data_utils import collate
from fairseq.data.dataset import Sample
from fairseq.data.datasets import BaseWrapperDataset, FairseqDataset, ListDataset
from fairseq.data.folders import open_corpus
from fairseq.data.indexed_dataset import Corpus, IndexedCorpus
from fairseq.data.masking import Masking, special_symbols
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary

# So many numbers to a row that tokens of different rows have different random numbers.
LARGEST_ROW = 1 << 32


class IndexedDataset(ListDataset):
    """The lines of *corpus*, or of the files at a path, as int64 [T] each."""

    # Lines of one length, such as labels, are a tensor, not a list.
    collater = FairseqDataset.collater

    def __init__(self, corpus: Corpus | str, *unused: object) -> None:
        self.corpus: Any = IndexedCorpus(corpus) if isinstance(corpus, str) else corpus
        super().__init__(self.corpus.tokens, np.asarray(self.corpus.sizes))

    def __getitem__(self, index: int) -> Tensor:
        start, end = self.corpus.offsets[index : index + 2]
        return torch.from_numpy(np.asarray(self.corpus.tokens[start:end]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.corpus.sizes)

    @staticmethod
    def exists(path: str) -> bool:
        """Return whether there are files at *path*."""
        return dataset_exists(path)


def load_indexed_dataset(
    path: str, dictionary: object = None, dataset_impl: str | None = None, combine: bool = False, default: str = "mmap"
) -> IndexedDataset | None:
    """The lines of the data at *path*, a folder and the name of a split; None if there are none.

    Raises:
        UserError: files are damaged, or were made with another dictionary.
    """
    folder, split = os.path.split(path)
    if not os.path.isfile(f"{path}.idx"):
        return None
    words: Any = dictionary
    return IndexedDataset(open_corpus(folder or ".", split, words, combine=combine))


def make_dataset(
    path: str, impl: str = "mmap", fix_lua_indexing: bool = False, dictionary: object = None
) -> IndexedDataset | None:
    """The lines of the files at *path*; None if there are none."""
    return IndexedDataset(path) if os.path.isfile(f"{path}.idx") else None


def dataset_exists(path: str, impl: str = "mmap") -> bool:
    """Return whether there are files at *path*."""
    return all(os.path.isfile(f"{path}.{kind}") for kind in ("idx", "bin"))


def get_available_dataset_impl() -> list[str]:
    """The layouts of files."""
    return ["mmap"]


class TruncatedDictionary:
    """The first *length* symbols of *wrapped_dict*; others are unknown."""

    def __init__(self, wrapped_dict: Dictionary, length: int) -> None:
        self.wrapped_dict, self.length = wrapped_dict, min(len(wrapped_dict), length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        return self.wrapped_dict[index if index < self.length else self.wrapped_dict.unk()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped_dict, name)

    def index(self, word: str) -> int:
        index = self.wrapped_dict.index(word)
        return index if index < self.length else self.wrapped_dict.unk()


def _corpus_of(dataset: FairseqDataset) -> Any:
    """The examples of *dataset* as the lines of a corpus."""
    if isinstance(dataset, IndexedDataset):
        return dataset.corpus
    rows = [np.asarray(dataset[index]) for index in range(len(dataset))]
    sizes = np.array([len(row) for row in rows], dtype=np.int32)
    tokens = np.concatenate([*rows, np.empty(0, np.int64)])
    return SimpleNamespace(tokens=tokens, sizes=sizes, offsets=np.append(0, np.cumsum(sizes)))


class TokenBlockDataset(FairseqDataset):
    """The examples of *dataset* cut into blocks, as :class:`~fairseq.data.token_blocks.TokenBlocks`
    does.

    With *include_targets* an example is (source, target, the tokens before the source).
    """

    def __init__(
        self,
        dataset: FairseqDataset,
        sizes: object,
        block_size: int | None,
        pad: int | None,
        eos: int | None,
        break_mode: str | None = None,
        include_targets: bool = False,
        document_sep_len: int = 1,
        **unused: object,
    ) -> None:
        if document_sep_len != 1 and break_mode == "complete_doc":
            raise UserError(f"TokenBlockDataset: `document_sep_len` {document_sep_len} is not implemented; use 1")
        # Tasks that pad themselves give None: no block of theirs is padded.
        ids = {"pad": 1 if pad is None else pad, "eos": 2 if eos is None else eos}
        self.blocks = TokenBlocks(_corpus_of(dataset), block_size or 1, break_mode or "none", **ids)
        self.pad, self.include_targets = pad, include_targets

    @property
    def sizes(self) -> np.ndarray:
        return self.blocks.sizes

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        sample = self.blocks.batch(np.array([index]))
        target, source = sample["target"][0], sample["net_input"]["src_tokens"][0]
        if not self.include_targets:
            return target
        start = int(self.blocks.starts[index])
        # The source begins with the token before the block, at `start - 1`; the tokens before the
        # source begin one earlier. Before the corpus stands `</s>`, and before that nothing, which
        # is padding.
        before = int(self.blocks.corpus.tokens[start - 2]) if start > 1 else self.blocks.eos if start else self.pad
        return source, target, torch.cat([source.new_tensor([before]), source[:-1]])

    collater = ListDataset.collater


class MonolingualDataset(FairseqDataset):
    """Blocks of source and next tokens: of a :class:`TokenBlockDataset` with *targets*, or of rows
    without."""

    def __init__(
        self,
        dataset: FairseqDataset,
        sizes: object,
        src_vocab: Dictionary,
        tgt_vocab: object = None,
        add_eos_for_other_targets: bool = False,
        shuffle: bool = False,
        targets: Sequence[str] | None = None,
        add_bos_token: bool = False,
        fixed_pad_length: int | None = None,
        pad_to_bsz: int | None = None,
        **unused: object,
    ) -> None:
        if targets not in (None, ["future"]):
            raise UserError(f"MonolingualDataset: targets {targets} are not implemented; use ['future']")
        self.dataset, self.sizes, self.vocab, self.shuffle = dataset, np.array(sizes), src_vocab, shuffle
        self.targets = targets
        self.bos = [src_vocab.bos()] if add_bos_token else []
        self.fixed_pad_length, self.pad_to_bsz = fixed_pad_length, pad_to_bsz

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, object]:
        # As in fairseq, rows of a dataset without targets are their own.
        source, target, _ = (self.dataset[index],) * 3 if self.targets is None else self.dataset[index]
        first = source.new_tensor(self.bos)
        return {"id": index, "source": torch.cat([first, source]), "target": torch.cat([first, target])}

    def collater(self, samples: Sequence[dict[str, Any]]) -> Sample:
        return collate(samples, self.vocab.pad(), self.vocab.eos(), self.fixed_pad_length, self.pad_to_bsz)

    def ordered_indices(self) -> np.ndarray:
        # As in fairseq, the permutation's values order examples of one size.
        values = np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))
        return np.lexsort((values, self.sizes))


class LMContextWindowDataset(BaseWrapperDataset):
    """Blocks of *tokens_per_sample* tokens after up to *context_window* tokens that were read
    before them.

    It remembers the rows that it collated: batches must be asked for in order. Targets of the
    context are *pad_idx*.
    """

    def __init__(self, dataset: FairseqDataset, tokens_per_sample: int, context_window: int, pad_idx: int) -> None:
        super().__init__(dataset)
        self.longest, self.window, self.pad = tokens_per_sample + context_window, context_window, pad_idx
        self.read = torch.empty(0, dtype=torch.int64)

    def ordered_indices(self) -> np.ndarray:
        return np.arange(len(self))

    def collater(self, samples: Sequence[Any]) -> Sample:
        batch = self.dataset.collater(samples)
        inputs = batch["net_input"]
        shape = (len(inputs["src_tokens"]), inputs["src_tokens"].size(1) + self.window)
        tokens, targets = (torch.full(shape, self.pad) for _ in range(2))
        starts = []
        for row, (source, target) in enumerate(zip(inputs["src_tokens"], batch["target"], strict=True)):
            source = source[source.ne(self.pad)]
            # A line that is longer than a block leaves less room, or none.
            room = max(min(self.window, self.longest - len(source)), 0)
            context = self.read[max(len(self.read) - room, 0) :]
            start = len(context)
            tokens[row, : start + len(source)] = self.read = torch.cat([context, source])
            targets[row, start : start + len(target)] = target
            inputs["src_lengths"][row] += start
            starts.append(start)
        inputs["src_tokens"] = tokens
        return {**batch, "target": targets, "start_indices": starts}


class MaskTokensDataset(BaseWrapperDataset):
    """Rows in which tokens other than special symbols are chosen for prediction, as
    ``--task masked_lm`` does.

    A chosen token becomes *mask_idx*, stays with *leave_unmasked_prob* or becomes a random word
    with *random_token_prob*; with *return_masked_tokens* the row has the chosen tokens, and
    *pad_idx* elsewhere.
    """

    @classmethod
    def apply_mask(
        cls, dataset: FairseqDataset, *args: Any, **options: Any
    ) -> tuple[MaskTokensDataset, MaskTokensDataset]:
        """Sources and targets."""
        sources, targets = ({**options, "return_masked_tokens": masked} for masked in (False, True))
        return cls(dataset, *args, **sources), cls(dataset, *args, **targets)

    def __init__(
        self,
        dataset: FairseqDataset,
        vocab: Dictionary,
        pad_idx: int,
        mask_idx: int,
        return_masked_tokens: bool = False,
        seed: int = 1,
        mask_prob: float = 0.15,
        leave_unmasked_prob: float = 0.1,
        random_token_prob: float = 0.1,
        freq_weighted_replacement: bool = False,
        mask_whole_words: Tensor | None = None,
        mask_multiple_length: int = 1,
        **unused: object,
    ) -> None:
        super().__init__(dataset)
        if mask_multiple_length != 1:
            raise UserError("MaskTokensDataset: `mask_multiple_length` is not implemented; use 1")
        special = special_symbols(vocab)
        # A dictionary of fairseq has `<mask>` as a word: it must be neither chosen nor drawn as a
        # random word.
        special[mask_idx] = True
        self.masking = Masking(
            *(seed, mask_prob, leave_unmasked_prob, random_token_prob, mask_idx, special),
            continues=None if mask_whole_words is None else mask_whole_words.numpy() == 0,
            joins=np.zeros_like(special),
            counts=np.where(special, 0.0, vocab.count) if freq_weighted_replacement else None,
        )
        self.pad_idx, self.targets, self.epoch = pad_idx, return_masked_tokens, 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        tokens = np.asarray(self.dataset[index], np.int64)[None]
        if (tokens == self.masking.mask).any():
            raise UserError(f"MaskTokensDataset: row {index} has the mask symbol already")
        positions = index * LARGEST_ROW + np.arange(tokens.size)[None]
        source, chosen = self.masking.apply(tokens, positions, np.array([index]), self.epoch)
        return torch.from_numpy(np.where(chosen, tokens, self.pad_idx) if self.targets else source)[0]
