"""Notes on every small batch, and what holds whatever the batch: devices, shapes, types,
settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import naive_notes
import pytest
import torch
from note_batches import DIM, dictionary, spans_of
from torch import Tensor, nn

from fairseq.notes.dictionary import CausalNoteDictionary, NoteDictionary

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TOKENS = 4
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (NoteDictionary, {}),
    (NoteDictionary, {"read_window": True}),
    (CausalNoteDictionary, {}),
    (CausalNoteDictionary, {"delay": 1}),
]


def spans_in_two_rows() -> Iterator[list[naive_notes.Span]]:
    """Every pair of words in a row of four tokens, beside a word of the second row."""
    words = [(first, end) for first in range(TOKENS) for end in range(first + 1, TOKENS + 1)]
    for one, other in itertools.combinations(words, 2):
        if one[1] <= other[0]:
            yield [(0, *other, 1), (1, 1, 2, 5), (0, *one, 3)]
    yield from ([(0, *one, 2)] for one in words)


def inputs(seed: int = 0, rows: int = 2) -> Tensor:
    return torch.randn(rows, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [0, 1, 2, 9])
def test_every_pair_of_words_is_read_through_its_window(k: int) -> None:
    notes, x = dictionary(note_lambda=0.25, note_half_window=k, read_window=True), inputs()
    for spans in spans_in_two_rows():
        expected = naive_notes.read_window(x, spans, notes.table, 0.25, k)
        torch.testing.assert_close(notes.read(x, spans_of(*spans)).double(), expected, **CLOSE)


@pytest.mark.parametrize("k", [0, 1, 2, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_every_pair_of_words_gets_the_mean_of_its_window(k: int, causal: bool) -> None:
    kind = CausalNoteDictionary if causal else NoteDictionary
    x, lengths = inputs(), torch.tensor([4, 3])
    for spans in spans_in_two_rows():
        notes = dictionary(kind, note_gamma=0.25, note_half_window=k)
        before = notes.table.clone()
        taken = []
        for span in spans:
            length = min(int(lengths[span[0]]), span[2] if causal else TOKENS)
            taken.append((span[3], naive_notes.note(x, span, length, k)))
        notes.write(*notes.take(x, spans_of(*spans), lengths))
        torch.testing.assert_close(notes.table.double(), naive_notes.write(before, taken, 0.25), **CLOSE)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("form", ["literal", "centred"])
def test_a_causal_note_is_read_at_the_token_that_ends_its_word(delay: int, form: str) -> None:
    notes, x = dictionary(CausalNoteDictionary, form=form, note_lambda=0.25, delay=delay), inputs()
    notes.write(*notes.take(inputs(1), spans_of((0, 0, 1, 1), (0, 2, 3, 2), (1, 1, 2, 5)), torch.tensor([4, 4])))
    for spans in spans_in_two_rows():
        ends = [(row, end - 1 + delay, end + delay, word) for row, _, end, word in spans]
        known = [span for span in ends if span[1] < TOKENS and span[3] in (1, 2, 5)]
        expected = naive_notes.read(x, known, notes.table, 0.25)
        if form == "centred":
            expected = naive_notes.centred(x, known, notes.table, {1, 2, 5}, 0.25)
        torch.testing.assert_close(notes.read(x, spans_of(*spans)).double(), expected, rtol=1e-4, atol=1e-4)


def test_words_that_occur_often_in_an_update_move_by_the_mean_of_their_occurrences() -> None:
    x = inputs()
    for words in itertools.product(range(3), repeat=4):
        spans = [(0, i, i + 1, word) for i, word in enumerate(words)]
        notes = dictionary(note_half_window=0, note_gamma=0.25)
        expected = naive_notes.write(notes.table, [(word, x[0, i].double()) for i, word in enumerate(words)], 0.25)
        notes.write(*notes.take(x, spans_of(*spans), torch.tensor([4, 4])))
        torch.testing.assert_close(notes.table.double(), expected, **CLOSE)
        assert notes.taken.tolist() == [words.count(word) for word in range(7)]


@pytest.mark.parametrize("kind, settings", KINDS, ids=str)
@pytest.mark.parametrize("form", ["literal", "centred"])
def test_the_longest_word_given_is_the_longest_word_found(kind: Any, settings: Any, form: str) -> None:
    x, spans, lengths = inputs(), spans_of((0, 0, 3, 1), (1, 1, 2, 5)), torch.tensor([4, 4])
    results = []
    for longest in (None, 3, 4):
        torch.manual_seed(1)
        notes = dictionary(kind, form=form, note_half_window=1, **settings)
        notes.write(*notes.take(x, spans, lengths, longest))
        results.append((notes.table, notes.read(x, spans, longest)))
    for table, read in results[1:]:
        torch.testing.assert_close(table, results[0][0])
        torch.testing.assert_close(read, results[0][1])


@pytest.mark.parametrize("until", [None, 3])
@pytest.mark.parametrize("form", ["literal", "centred"])
@pytest.mark.parametrize("kind, settings", KINDS, ids=str)
def test_everything_stays_on_the_device_of_the_notes(kind: Any, settings: Any, form: str, until: int | None) -> None:
    """Tensors of two devices cannot be mixed, and values of the meta device cannot be read."""
    notes = kind(7, 3, form=form, until=until, **settings).to("meta")
    x, spans = torch.empty(2, 6, 3, device="meta"), torch.empty(4, 4, dtype=torch.int64, device="meta")
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    read = notes.read(x, spans, 2)
    assert read.is_meta and read.shape == x.shape
    sums, counts = notes.take(read, spans, lengths, 2)
    assert sums.is_meta and counts.is_meta and sums.shape == (7, 3) and counts.shape == (7,)
    notes.write(sums, counts)
    notes.write(torch.empty(7, 3, device="meta"), torch.empty(7, device="meta"))
    assert all(buffer.is_meta for buffer in notes.buffers())
    with pytest.raises(RuntimeError):
        notes.read(x, spans)  # the longest word is a value


def test_a_batch_without_rare_words_is_read_as_it_is() -> None:
    notes, x = dictionary(), inputs()
    assert notes.read(x, spans_of()) is x
    notes.write(*notes.take(x, spans_of(), torch.tensor([4, 4])))
    assert notes.updates == 1 and not notes.taken.any()


def test_projected_notes_are_read_and_the_projection_gets_a_gradient_from_any_batch() -> None:
    notes, project = dictionary(note_lambda=0.25), nn.Linear(DIM, 5, bias=False)
    x = torch.randn(2, TOKENS, 5)
    read = notes.read(x, spans_of((0, 1, 3, 4)), project=project)
    torch.testing.assert_close(read[0, 1:3], 0.75 * x[0, 1:3] + 0.25 * project(notes.table[4]))
    assert torch.equal(read[0, 0], x[0, 0]) and torch.equal(read[1], x[1])
    for spans in (spans_of((0, 1, 3, 4)), spans_of()):
        project.weight.grad = None
        notes.read(x, spans, project=project).sum().backward()
        assert project.weight.grad is not None and bool(project.weight.grad.any()) == (len(spans) > 0)


def test_centred_notes_have_the_norm_of_the_input_after_their_projection() -> None:
    notes, project = dictionary(form="centred", note_lambda=0.25, note_half_window=0), nn.Linear(DIM, 5, bias=False)
    notes.write(*notes.take(inputs(), spans_of((0, 0, 1, 1), (0, 2, 3, 4)), torch.tensor([4, 4])))
    mean = (notes.table[1] + notes.table[4]) / 2
    deviation = (notes.table[4] - mean).norm()  # of two notes both are as far from their mean
    x = torch.randn(1, TOKENS, 5)
    read = notes.read(x, spans_of((0, 1, 2, 4)), project=project)
    expected = 0.75 * x[0, 1] + 0.25 * x[0, 1].norm() * project((notes.table[4] - mean) / deviation)
    torch.testing.assert_close(read[0, 1], expected)


@pytest.mark.parametrize("form", ["literal", "centred"])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_what_is_read_has_the_type_of_the_input_and_notes_are_taken_in_float32(kind: torch.dtype, form: str) -> None:
    notes, x = dictionary(form=form, note_half_window=0), inputs().to(kind)
    sums, _ = notes.take(x, spans := spans_of((0, 0, 1, 1), (0, 2, 3, 4)), torch.tensor([4, 4]))
    assert sums.dtype == torch.float32
    notes.write(*notes.take(x, spans, torch.tensor([4, 4])))
    assert notes.read(x, spans).dtype == kind


def test_the_norm_of_an_input_in_half_precision_does_not_overflow() -> None:
    notes = dictionary(form="centred", note_half_window=0, note_lambda=1.0)
    notes.write(*notes.take(inputs(), spans_of((0, 0, 1, 1), (0, 2, 3, 4)), torch.tensor([4, 4])))
    x = torch.full((1, TOKENS, DIM), 3e4).half()
    assert torch.isfinite(notes.read(x, spans_of((0, 1, 2, 4)))).all()  # its norm is 5.2e4, its square 2.7e9


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, -1.0])
def test_notes_that_differ_by_rounding_only_are_not_read_and_close_ones_are(scale: float) -> None:
    spans, lengths, x = spans_of((0, 0, 1, 1), (0, 1, 2, 4)), torch.tensor([2]), torch.randn(1, 2, DIM)
    for distance, differs in ((0.0, False), (1e-5, False), (1e-3, True)):
        notes = dictionary(form="centred", note_half_window=0)
        hidden = torch.ones(1, 2, DIM)
        hidden[0, 1] += distance
        notes.write(*notes.take(hidden * scale, spans, lengths))
        assert torch.equal(notes.read(x, spans), x) != differs


def test_differences_of_a_2500th_are_read_however_many_words_are_written() -> None:
    notes, x = dictionary(form="centred", note_half_window=0), torch.randn(1, 7, DIM)
    spans = spans_of(*((0, word, word + 1, word) for word in range(7)))
    hidden = 1 + 4e-4 * torch.tensor([(-1.0) ** word for word in range(7)])[None, :, None].expand(1, 7, DIM)
    notes.write(*notes.take(hidden, spans, torch.tensor([7])))
    assert (notes.read(x, spans) != x).any(-1).all()


def test_a_single_written_note_is_not_read() -> None:
    for seed in range(5):
        notes, x = dictionary(form="centred", note_half_window=0), inputs(seed)
        notes.write(*notes.take(x, spans_of((0, 1, 2, 4)), torch.tensor([4, 4])))
        assert torch.equal(notes.read(x, spans_of((0, 1, 2, 4), (1, 0, 2, 3))), x)


def test_notes_that_are_all_zero_are_not_read() -> None:
    notes, x = dictionary(form="centred", note_half_window=0), torch.randn(1, 2, DIM)
    spans = spans_of((0, 0, 1, 1), (0, 1, 2, 4))
    notes.write(*notes.take(torch.zeros(1, 2, DIM), spans, torch.tensor([2])))
    assert torch.equal(notes.read(x, spans), x)


# Settings


def test_defaults_are_the_papers() -> None:
    notes = NoteDictionary(2, 3)
    assert (notes.note_lambda, notes.note_gamma, notes.note_half_window) == (0.5, 0.1, 16)
    assert (notes.read_window, notes.centred, notes.until) == (False, False, None)
    assert CausalNoteDictionary(2, 3).delay == 0 and "moments" not in notes.state_dict()
    assert repr(notes) == "NoteDictionary(2, 3, λ=0.5, γ=0.1, k=16)"


@pytest.mark.parametrize("form", ["literal", "centred"])
def test_a_new_dictionary_has_seen_nothing(form: str) -> None:
    state = NoteDictionary(2, 3, form=form).state_dict()
    types = {"table": torch.float32, "digest": torch.uint8, "taken": torch.int64, "written": torch.int32}
    types |= {"updates": torch.int64} | ({"moments": torch.float64} if form == "centred" else {})
    shapes = {"table": (2, 3), "digest": (32,), "taken": (2,), "written": (2,), "updates": (), "moments": (5,)}
    assert {name: value.dtype for name, value in state.items()} == types
    assert {name: tuple(value.shape) for name, value in state.items()} == {name: shapes[name] for name in types}
    assert not any(value.any() for name, value in state.items() if name != "table")


@pytest.mark.parametrize("form", ["literal", "centred"])
def test_moving_a_dictionary_moves_all_of_it_and_keeps_types(form: str) -> None:
    notes = nn.Sequential(NoteDictionary(2, 3, form=form))
    notes.to(torch.float64)
    types = {buffer.dtype for buffer in notes.buffers()}
    notes.half()
    assert {buffer.dtype for buffer in notes.buffers()} == types
    assert types == {torch.float32, torch.uint8, torch.int64, torch.int32} | (
        {torch.float64} if form == "centred" else set()
    )
    notes.to("meta", torch.float16)
    assert all(buffer.is_meta for buffer in notes.buffers()) and notes[0].table.dtype == torch.float32
    assert notes[0].to("meta") is notes[0]


# Loading


def written(form: str = "centred", seed: int = 1) -> NoteDictionary:
    torch.manual_seed(seed)
    notes = dictionary(form=form, note_half_window=0)
    notes.write(*notes.take(inputs(seed), spans_of((0, 0, 1, 1), (0, 2, 3, 4)), torch.tensor([4, 4])))
    return notes


@pytest.mark.parametrize("form", ["literal", "centred"])
def test_a_loaded_dictionary_is_the_saved_one_bit_by_bit(form: str) -> None:
    state, other = written(form).state_dict(), nn.Sequential(dictionary(form=form))
    other.load_state_dict({f"0.{name}": value for name, value in state.items()})
    for name, value in other[0].state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("index", [0, -2, -1])
def test_moments_within_rounding_are_kept_and_others_replaced(index: int) -> None:
    state = written().state_dict()
    for factor, kept in ((1 + 1e-9, True), (1 + 1e-3, False)):
        moments = state["moments"].clone()
        moments[index] *= factor
        other = dictionary(form="centred")
        other.load_state_dict({**state, "moments": moments})
        assert torch.equal(other.moments, moments) == kept
        torch.testing.assert_close(other.moments, state["moments"], rtol=1e-7, atol=0)


def test_moments_that_differ_by_a_millionth_are_kept_and_by_three_replaced() -> None:
    state = written().state_dict()
    for difference, kept in ((1e-6, True), (3e-6, False)):
        moments = state["moments"].clone()
        moments[-1] += 2 * difference  # two words are written
        other = dictionary(form="centred")
        other.load_state_dict({**state, "moments": moments})
        assert torch.equal(other.moments, moments) == kept


def test_rounding_of_moments_near_zero_is_kept() -> None:
    hidden = torch.tensor([1.0, -1.0])[None, :, None].expand(1, 2, DIM)
    notes = dictionary(form="centred", note_half_window=0)
    notes.write(*notes.take(hidden, spans_of((0, 0, 1, 1), (0, 1, 2, 4)), torch.tensor([2])))
    for error, kept in ((5e-7, True), (5e-6, False)):
        moments = notes.moments.clone()
        moments[0] += error
        other = dictionary(form="centred")
        other.load_state_dict({**notes.state_dict(), "moments": moments})
        assert torch.equal(other.moments, moments) == kept


def test_moments_of_an_empty_dictionary_are_zero() -> None:
    state = dictionary(form="centred").state_dict()
    other = dictionary(form="centred")
    other.load_state_dict({**state, "moments": state["moments"] + 1})
    assert not other.moments.any()


def test_a_dictionary_on_the_meta_device_is_loaded_in_place_of_it() -> None:
    state, other = written().state_dict(), dictionary(form="centred").to("meta")
    other.load_state_dict(state, assign=True)
    assert torch.equal(other.moments, state["moments"]) and torch.equal(other.table, state["table"])
    meta = dictionary(form="centred").to("meta")
    meta.load_state_dict({name: value.to("meta") for name, value in state.items()})
    assert meta.moments.is_meta


def test_a_state_of_other_words_or_without_moments_is_reported() -> None:
    state = written().state_dict()
    del state["moments"]
    with pytest.raises(RuntimeError, match="moments"):
        dictionary(form="centred").load_state_dict(state)
    assert dictionary(form="centred").load_state_dict(state, strict=False).missing_keys == ["moments"]
