"""Taking notes as the paper writes it down: one word, one token, one number after the other (Wu et
al. 2021, §3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[int, int, int, int]


def read(x: Tensor, spans: Sequence[Span], table: Tensor, note_lambda: float) -> Tensor:
    """input_i = (1 − λ)(position + token) + λ NoteDict(w) for every token i of a rare word w."""
    result = x.double().clone()
    for row, first, end, word in spans:
        for i in range(first, end):
            result[row, i] = (1 - note_lambda) * x[row, i].double() + note_lambda * table[word].double()
    return result


def read_window(x: Tensor, spans: Sequence[Span], table: Tensor, note_lambda: float, k: int) -> Tensor:
    """The same, and every other token within k of rare words with the mean of their notes."""
    result = x.double().clone()
    for row in range(x.size(0)):
        for i in range(x.size(1)):
            own = [w for r, s, t, w in spans if r == row and s <= i < t]
            near = own or [w for r, s, t, w in spans if r == row and s - k <= i < t + k]
            if near:
                note = sum(table[w].double() for w in near) / len(near)
                result[row, i] = (1 - note_lambda) * x[row, i].double() + note_lambda * note
    return result


def note(hidden: Tensor, span: Span, length: int, k: int, context: bool = False) -> Tensor | None:
    """Note(w, x) = 1 / (2k + t − s) · Σ c_j over tokens s − k … t + k, as many as the row has.

    With *context* without the tokens s … t; None if there are no others.
    """
    row, s, t, _ = span
    window = [j for j in range(s - k, t + k) if 0 <= j < length and not (context and s <= j < t)]
    if not window:
        return None
    total = torch.zeros(hidden.size(2), dtype=torch.float64)
    for j in window:
        total += hidden[row, j].double()
    return total / len(window)


def write(table: Tensor, notes: Sequence[tuple[int, Tensor]], gamma: float) -> Tensor:
    """NoteDict(w) = (1 − γ) NoteDict(w) + γ · the mean of the notes that an update took of w."""
    result = table.double().clone()
    for word in {w for w, _ in notes}:
        own = [n for w, n in notes if w == word]
        result[word] = (1 - gamma) * result[word] + gamma * sum(own) / len(own)
    return result


def centred(x: Tensor, spans: Sequence[Span], table: Tensor, written: set[int], note_lambda: float) -> Tensor:
    """input_i = (1 − λ) x_i + λ ‖x_i‖ (D(w) − m) / σ at the tokens of a written word, m and σ over
    written ones."""
    result = x.double().clone()
    if not written:
        return result
    notes = torch.stack([table[word].double() for word in sorted(written)])
    mean = notes.mean(0)
    deviation = (notes - mean).pow(2).sum(1).mean().sqrt()
    for row, first, end, word in spans:
        if word in written and deviation > 1e-4 * notes.pow(2).sum(1).mean().sqrt():
            for i in range(first, end):
                e = x[row, i].double()
                note = e.norm() * (table[word].double() - mean) / deviation
                result[row, i] = (1 - note_lambda) * e + note_lambda * note
    return result
