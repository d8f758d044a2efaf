"""Notes for rare words: vectors added to an encoder's input
and averaged from its output (Wu et al. 2021, §3).

A note is not a parameter: gradients never reach the table. No temporary tensor is as large as the
table, no shape depends on tensor values, and results are deterministic: equal inputs give equal
bits on any device.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules import devices
from fairseq.notes.settings import FORMS

INIT_STD = 0.02


class NoteDictionary(nn.Module):
    """A table of notes [N, C], float32 in any precision of the model.

    Occurrences of rare words are *spans* [S, 4], int64: row, first token, end (exclusive), word.
    Spans of a row do not overlap, unless the caller passes such spans: a token in several spans
    reads the mean of their notes.

    Args:
        words: number of rare words N.
        dim: width C of embeddings and hidden states.
        note_lambda: weight λ of a note in the input, in [0, 1].
        note_gamma: weight γ of an update's notes in the table, in [0, 1].
        note_half_window: tokens k on either side of a word that its note is taken from.
        context: notes are taken without the word's own tokens. These are in all of its windows, so
            that they drown out what differs; a word with nothing around it gives no note.
        read_window: tokens up to k before and after a rare word read its note, too; a token that
            belongs to a rare word itself reads the note of that word only, other tokens read the
            mean of the notes in reach.
        init_std: standard deviation of the initial notes.
        form: ``literal``, the paper's formula, or ``centred``. A written note is nearly the mean of
            all notes, which tells words with notes from others and nothing else. The centred form
            reads s · (table[w] − m) instead, with m the mean of the written notes, scaled to the
            norm of the embedding that it is mixed with; a word reads its note once it has been
            written, and its first note replaces the initial one.
        until: number of updates after which no note is read or taken; None: never.

    Attributes:
        table: [N, C].
        tokens_after: tokens behind a word that its note is taken from.
        moments: of the centred form: the sum of the written notes, the sum of their squared norms,
            and their number, float64 [C + 2].
        digest: SHA-256 of the words, uint8 [32]; zeros for unnamed words.
        taken: occurrences averaged into each note [N], int64.
        written: number of the update that last wrote each note [N], int32; 0 for an initial one.
        updates: updates so far, int64.

    Raises:
        ValueError: an argument is out of range.
    """

    table: Tensor
    digest: Tensor
    taken: Tensor
    written: Tensor
    updates: Tensor
    moments: Tensor

    def __init__(
        self,
        words: int,
        dim: int,
        note_lambda: float = 0.5,
        note_gamma: float = 0.1,
        note_half_window: int = 16,
        *,
        context: bool = False,
        read_window: bool = False,
        init_std: float = INIT_STD,
        form: str = "literal",
        until: int | None = None,
    ) -> None:
        super().__init__()
        if words < 1 or dim < 1:
            raise ValueError(f"a note dictionary of {words} words and width {dim}; both must be at least 1")
        if not 0 <= note_lambda <= 1 or not 0 <= note_gamma <= 1:
            raise ValueError(f"note_lambda {note_lambda}, note_gamma {note_gamma}: must lie in [0, 1]")
        if note_half_window < 0:
            raise ValueError(f"note_half_window {note_half_window}: must be at least 0")
        if context and note_half_window == 0:
            raise ValueError("note_half_window 0: must be at least 1 for notes of the context")
        if form not in FORMS:
            raise ValueError(f"form {form!r}: must be one of {', '.join(FORMS)}")
        self.note_lambda = note_lambda
        self.note_gamma = note_gamma
        self.note_half_window = note_half_window
        self.tokens_after = note_half_window
        self.context = context
        self.read_window = read_window
        self.centred = form == "centred"
        self.until = until
        # Drawn on the CPU, so that notes begin alike on every device.
        table = torch.empty(words, dim, device="cpu").float()
        self.register_buffer("table", table.normal_(0, init_std, generator=generator_apart("notes")))
        self.register_buffer("digest", torch.zeros(32, dtype=torch.uint8))
        self.register_buffer("taken", torch.zeros(words, dtype=torch.int64))
        self.register_buffer("written", torch.zeros(words, dtype=torch.int32))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        if self.centred:
            self.register_buffer("moments", torch.zeros(dim + 2, dtype=torch.float64))

    def name_words(self, words: Sequence[str]) -> NoteDictionary:
        """Set ``digest`` for *words* [N], in order,
        so that a checkpoint with other words is rejected.

        Raises:
            ValueError: the number of words is not N.
        """
        if len(words) != self.table.size(0):
            raise ValueError(f"{len(words)} words for {self.table.size(0)} notes")
        digest = hashlib.sha256("\n".join(words).encode()).digest()
        self.digest.copy_(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        return self

    def extra_repr(self) -> str:
        words, dim = self.table.shape
        return f"{words}, {dim}, λ={self.note_lambda}, γ={self.note_gamma}, k={self.note_half_window}"

    def read(
        self,
        x: Tensor,
        spans: Tensor,
        longest: int | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Mix notes into the input: (1 − λ) x + λ note(w)
        at the tokens of a rare word w, x elsewhere.

        note(w) is table[w], or in the centred form ‖x‖ · (table[w] − m) / σ, where σ² is the mean
        squared distance of the written notes from their mean m.

        Args:
            x: sums of token and position embeddings [B, T, C].
            spans: occurrences [S, 4].
            longest: most tokens of a span; None: computed from the spans, which synchronises a GPU.
            project: projection of notes [S, C] to the width of *x*; None if it is C.

        Returns:
            [B, T, C], of x's type.
        """
        # With a projection the empty sum is computed: every rank needs its gradient.
        if spans.size(0) == 0 and project is None:
            return x
        batch, tokens, _ = x.shape
        values, readable = self._notes_of(spans[:, 3])  # (S, C), (S)
        if project is not None:
            values = project(values)
        flat, weight = self._reading(spans, batch, tokens, _longest(spans, longest))  # (S, W), (S, W)
        if readable is not None:
            weight = weight * readable[:, None]
        # The number of notes at each token: where windows overlap, their notes are averaged.
        share = torch.zeros(batch * tokens, device=x.device).index_add_(0, flat.flatten(), weight.flatten())
        noted = share > 0
        weight = weight * (self.note_lambda / share.where(noted, 1.0))[flat]
        notes = weight[..., None] * values[:, None]  # (S, W, C)
        if self.centred:
            # Detached: the norm is only a scale; embeddings would be trained through it otherwise.
            notes = notes * x.detach().float().norm(dim=-1).flatten()[flat][..., None]
        notes = notes.to(x.dtype)
        keep = torch.ones_like(share).masked_fill_(noted, 1 - self.note_lambda).to(x.dtype)
        mixed = (x * keep.view(batch, tokens, 1)).contiguous()  # x may be a transposed view
        # Other tokens only get zeros added, so without
        # overlaps the order of additions does not matter.
        mixed.view(batch * tokens, -1).index_add_(0, flat.flatten(), notes.flatten(0, 1))
        return mixed

    @torch.no_grad()
    def take(self, hidden: Tensor, spans: Tensor, lengths: Tensor, longest: int | None = None) -> tuple[Tensor, Tensor]:
        """Average the last hidden states around every rare word:
        over tokens [s − k, t + k) of its row.

        With ``context`` the word's own tokens [s, t) are left out.

        Args:
            hidden: last hidden states [B, T, C].
            spans: occurrences [S, 4], (row, s, t, word).
            lengths: tokens of each row without padding [B]; windows are clipped to them.
            longest: as for :meth:`read`.

        Returns:
            Sums of notes [N, C] and their counts [N], sparse, with S values each, one an
            occurrence: the arguments of :meth:`write`, which may be added over batches.
        """
        words, dim = self.table.shape
        row, first, end, word = spans.unbind(1)
        low = (first - self.note_half_window).clamp(min=0)
        high = torch.minimum(end + self.tokens_after, lengths[row])
        width = min(_longest(spans, longest) + 2 * self.note_half_window, hidden.size(1))
        flat, inside = _token_indices(row, low, high, width, hidden.size(1))  # (S, W)
        if self.context:
            inside = inside & ~_in_word(flat, spans, hidden.size(1))
        if self.until is not None:
            inside = inside & (self.updates < self.until)
        states = hidden.detach().flatten(0, 1).float()  # (B * T, C)
        # Sums windows without a tensor of all their states, [S, W, C].
        total = F.embedding_bag(flat, states, mode="sum", per_sample_weights=inside.float())  # (S, C)
        count = inside.sum(1)
        notes = total / count.clamp(min=1)[:, None]
        index = word[None]
        # Checking indices on a GPU would synchronise; they are in range by construction.
        return (
            torch.sparse_coo_tensor(index, notes, (words, dim), check_invariants=False),
            torch.sparse_coo_tensor(index, (count > 0).long(), (words,), check_invariants=False),
        )

    @torch.no_grad()
    def write(self, sums: Tensor, counts: Tensor) -> None:
        """End an update: table[w] ← (1 − γ) table[w] + γ
        sums[w] / counts[w] where counts[w] > 0, in place.

        Args:
            sums: [N, C], sparse as returned by :meth:`take`, or dense.
            counts: [N], likewise; whole numbers of any type.
        """
        sums, counts = sums.to(self.table.dtype), counts.to(self.taken.dtype)
        self.updates += 1
        total = counts
        if counts.is_sparse:
            # Whole numbers: their sum is the same in any order,
            # so this is deterministic on a GPU, too.
            total = torch.zeros_like(self.taken).index_add_(0, counts._indices()[0], counts._values())
        # Before the counts of this update are added.
        known = self.taken > 0
        self.taken += total
        self.written.copy_(torch.where(total > 0, self.updates.int(), self.written))
        if not sums.is_sparse:
            after = self._updated(self.table, sums, total, known)
            self._count(self.table, after, known, total > 0)
            self.table.copy_(after)
        elif sums._nnz() > 0:
            word, notes, first = _by_word(sums._indices()[0], sums._values())
            before, count = self.table[word], total[word]
            after = self._updated(before, notes, count, known[word])
            self._count(before, after, known[word], first & (count > 0))
            self.table[word] = after

    def _updated(self, table: Tensor, sums: Tensor, counts: Tensor, known: Tensor) -> Tensor:
        """Rows of *table* after an update; *known* are those that an earlier one has written."""
        counts = counts[:, None]
        # The mean over an update's occurrences (Wu et al.
        # 2021, §3): note ← (1 − γ) note + γ · mean.
        mean = sums / counts.clamp(min=1)
        moved = (1 - self.note_gamma) * table + self.note_gamma * mean
        # The first note replaces the initial one: a share of random numbers would set apart words
        # that were written seldom.
        if self.centred:
            moved = torch.where(known[:, None], moved, mean)
        return torch.where(counts > 0, moved, table)

    def _count(self, before: Tensor, after: Tensor, known: Tensor, changed: Tensor) -> None:
        """Bring the moments up to date with the rows [R, C] that an update changed, each once."""
        if self.centred:
            # In float64: moments are brought up to date
            # by differences, whose rounding errors add up.
            new, old = devices.exact(after * changed[:, None]), devices.exact(before * (changed & known)[:, None])
            added = (changed & ~known).sum().to(new.device)
            self.moments += torch.cat(((new - old).sum(0), (new.square() - old.square()).sum()[None], added[None]))

    def _notes_of(self, word: Tensor) -> tuple[Tensor, Tensor | None]:
        """What each of the words [S] reads, [S, C],
        and whether it reads it, [S]; None: all of them do."""
        notes = F.embedding(word, self.table)
        active = None if self.until is None else (self.updates < self.until).expand(len(word))
        if not self.centred:
            return notes, active
        count = self.moments[-1].clamp(min=1)
        mean = self.moments[:-2] / count
        variance = self.moments[-2] / count - mean.square().sum()
        # Equal notes differ by rounding only: below a 10,000th of their norm there is nothing to
        # tell words apart.
        readable = (self.taken[word] > 0) & (variance > 1e-8 * self.moments[-2] / count)
        scaled = (notes - mean.float().to(notes.device)) * variance.clamp(min=1e-12).rsqrt().float()
        return scaled, readable if active is None else readable & active

    def _reading(self, spans: Tensor, batch: int, tokens: int, longest: int) -> tuple[Tensor, Tensor]:
        """Tokens that read the note of each span, as indices in the flattened batch, and their
        weights: [S, W]."""
        row, first, end, _ = spans.unbind(1)
        if not self.read_window:
            flat, inside = _token_indices(row, first, end.clamp(max=tokens), min(longest, tokens), tokens)
            return flat, inside.float()
        k = self.note_half_window
        low, high = (first - k).clamp(min=0), (end + k).clamp(max=tokens)
        flat, inside = _token_indices(row, low, high, min(longest + 2 * k, tokens), tokens)
        inner = inside & _in_word(flat, spans, tokens)
        counted = torch.zeros(batch * tokens, device=spans.device).index_add_(
            0, flat.flatten(), inner.flatten().float()
        )
        return flat, (inner | (inside & (counted == 0)[flat])).float()

    def _load_from_state_dict(self, state: object, prefix: str, *args: object) -> None:
        """Load a checkpoint. Moments that do not fit its table,
        as in an average of checkpoints, are replaced."""
        super()._load_from_state_dict(state, prefix, *args)
        if self.centred and not self.table.is_meta:
            rows = devices.exact(self.table[self.taken > 0])
            size = rows.new_tensor([len(rows)])
            moments = torch.cat((rows.sum(0), rows.square().sum()[None], size))
            if not torch.allclose(self.moments, moments, rtol=1e-6, atol=1e-6):  # a resumed run keeps every bit
                self.moments.copy_(moments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoteDictionary:
        """Move the module, but keep the precision of notes: in half precision small updates of a
        mean are lost."""
        buffers = {name: getattr(self, name) for name in ("table", *(["moments"] if self.centred else []))}

        def moved(x: Tensor) -> Tensor:
            if x.dtype == torch.float64 and not devices.has_float64(fn(torch.empty(0)).device):
                return x  # moments stay on the host
            return fn(x)

        super()._apply(moved, recurse)
        for name, value in buffers.items():
            if getattr(self, name).dtype != value.dtype:
                setattr(self, name, value.to(getattr(self, name).device))
        return self


class CausalNoteDictionary(NoteDictionary):
    """Notes for causal models: no prediction depends on later tokens.

    The note of a rare word would reveal the following tokens of the word. So it is read only where
    the word is known to be complete, and only from its second occurrence on, after it has been
    written. It is averaged over the word and the *k* tokens before it.

    Args:
        delay: 0 if the last token of a word shows that it ends (``@@``
            marks tokens that do not), 1 if only the next token does (``▁``
            marks tokens that begin a word): then that one reads the note.
    """

    def __init__(self, *args: Any, delay: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.read_window:
            raise ValueError("read_window: tokens before a word must not read its note in a causal model")
        self.delay = delay
        self.tokens_after = 0

    def _reading(self, spans: Tensor, batch: int, tokens: int, longest: int) -> tuple[Tensor, Tensor]:
        row, _, end, word = spans.unbind(1)
        flat, inside = _token_indices(row, end - 1 + self.delay, (end + self.delay).clamp(max=tokens), 1, tokens)
        return flat, (inside & (self.taken[word] > 0)[:, None]).float()


def generator_apart(purpose: str) -> torch.Generator:
    """Return a generator for *purpose*, seeded from
    the global seed without advancing the global generator.

    So a model draws the same initial weights with and without notes.
    """
    return torch.Generator().manual_seed((torch.initial_seed() * 31 + zlib.crc32(purpose.encode())) % 2**63)


def _longest(spans: Tensor, longest: int | None) -> int:
    if longest is not None or spans.size(0) == 0:
        return longest or 1
    return max(1, int((spans[:, 2] - spans[:, 1]).amax()))


def _token_indices(row: Tensor, low: Tensor, high: Tensor, width: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Indices of tokens [low, high) of *row* in a flattened batch,
    and the mask of valid columns: [S, W].

    The other of the *width* columns repeat the first index.
    """
    position = low[:, None] + torch.arange(width, device=row.device)
    inside = position < high[:, None]
    return row[:, None] * tokens + position.where(inside, low[:, None]).clamp(max=tokens - 1), inside


def _in_word(flat: Tensor, spans: Tensor, tokens: int) -> Tensor:
    """Whether the tokens *flat* [S, W], indices in a flattened batch, belong to the word of their
    span [S, 4]."""
    row, first, end, _ = spans.unbind(1)
    position = flat - row[:, None] * tokens
    return (position >= first[:, None]) & (position < end[:, None])


def _by_word(word: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the *values* [S, C] of equal words, in their order: words [S], sums [S, C], and which
    rows count [S].

    The shape is fixed: U different words are in the first
    U rows, and the rest repeats the first one.
    """
    # Stable: values of one word are added in the order of their occurrence, on every device.
    word, order = word.sort(stable=True)
    rows = torch.arange(len(word), device=word.device)
    begins = torch.ones_like(word)
    begins[1:] = word[1:] != word[:-1]
    group = begins.cumsum(0) - 1
    # First row of each group; groups that do not exist begin at the end and are empty.
    starts = torch.full_like(rows, len(word)).scatter_reduce_(0, group, rows, "amin")
    # One thread sums a bag in order, unlike index_add on a GPU: the result is deterministic.
    sums = F.embedding_bag(order, values, starts, mode="sum")
    first = rows <= group[-1]
    valid = rows.where(first, 0)
    return word[starts[valid]], sums[valid], first
