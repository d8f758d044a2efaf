"""Calls of fairseq's leaf modules, made by this package and by the original: plain arguments in,
plain values out."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

SUBWORDS = ("sentencepiece", "wordpiece", "letter", "silence", "_EOW", "subword_nmt", "@@ ")


def of(module: str) -> Any:
    """The module *module* of fairseq; a dataset's, which this package has in ``fairseq.data``."""
    try:
        return importlib.import_module(f"fairseq.{module}")
    except ModuleNotFoundError:
        return importlib.import_module(f"fairseq.{module.rpartition('.')[0]}")


def tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.long) for row in rows]


def plain(value: Any) -> Any:
    """*value* with lists for tensors and arrays."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def collate_tokens(rows: list[list[int]], left_pad: bool, moves: bool, length: int | None, multiple: int) -> Any:
    return plain(of("data.data_utils").collate_tokens(tensors(rows), 1, 2, left_pad, moves, length, multiple))


def post_process(text: str, symbol: str | None) -> str:
    return of("data.data_utils").post_process(text, symbol)


def masks(lengths: list[int]) -> Any:
    data_utils, lens = of("data.data_utils"), torch.tensor(lengths)
    return plain([data_utils.lengths_to_padding_mask(lens), data_utils.lengths_to_mask(lens)])


def numbers_of_seeds(seed: int, further: list[int]) -> Any:
    with of("data.data_utils").numpy_seed(seed, *further):
        return plain(np.random.randint(1 << 30, size=3))


def positions(rows: list[list[int]], right_to_left: bool) -> Any:
    utils, tokens = of("utils"), torch.tensor(rows)
    moved = utils.convert_padding_direction(tokens, 1, right_to_left=right_to_left, left_to_right=not right_to_left)
    return plain([utils.make_positions(tokens, 1), moved, utils.strip_pad(tokens[0], 1)])


def perplexity(loss: float, digits: int, base: int) -> float:
    return of("utils").get_perplexity(loss, digits, base)


def applied(sample: Any) -> Any:
    def doubled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: doubled(one) for name, one in value.items()}
        return [doubled(one) for one in value] if isinstance(value, list) else torch.tensor([value])

    return plain(of("utils").apply_to_sample(lambda tensor: tensor * 2, doubled(sample)))


def limits(values: list[Any]) -> Any:
    return plain(of("utils").resolve_max_positions(*[tuple(v) if isinstance(v, list) else v for v in values]))


def literals(text: str) -> Any:
    utils = of("utils")
    return plain([utils.eval_str_list(text, type=float), utils.eval_str_dict(text)])


def activations(name: str, values: list[float]) -> Any:
    return plain(of("utils").get_activation_fn(name)(torch.tensor(values)))


def shards(count: int, shards: int, group: int, skip: bool) -> Any:
    iterators = of("data.iterators")
    each = [list(iterators.ShardedIterator(list(range(count)), shards, n, fill_value=-1)) for n in range(shards)]
    counted = iterators.CountingIterator(list(range(count)))
    grouped = list(iterators.GroupedIterator(counted, group, skip_remainder_batch=skip))
    counted = iterators.CountingIterator(list(range(count)))
    counted.skip(min(2, count))
    return [each, grouped, counted.n, list(counted), len(counted)]


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def epochs(batches: int, seed: int, world: int, rank: int, read: int, shuffle: bool) -> Any:
    """The batches of two epochs, interrupted after *read* batches of the second."""
    iterators = of("data.iterators")

    def made() -> Any:
        sampler = [[2 * n, 2 * n + 1] for n in range(batches)]
        return iterators.EpochBatchIterator(Numbers(2 * batches), list, sampler, seed, world, rank)

    first, found = made(), []
    found.append(list(first.next_epoch_itr(shuffle=shuffle)))
    second = first.next_epoch_itr(shuffle=shuffle)
    found.append([next(second) for _ in range(min(read, len(second)))])
    again = made()
    again.load_state_dict(first.state_dict())
    found.append(list(again.next_epoch_itr(shuffle=shuffle)))
    return [found, again.epoch, again.next_epoch_idx, len(again), again.end_of_epoch()]


def meters(values: list[tuple[float, int]], digits: int | None) -> Any:
    meters = of("logging.meters")
    average, total = meters.AverageMeter(round=digits), meters.SumMeter(round=digits)
    for value, count in values:
        average.update(value, count)
        total.update(value)
    again = meters.AverageMeter()
    again.load_state_dict(average.state_dict())
    return [average.avg, average.smoothed_value, total.smoothed_value, again.avg, meters.safe_round(1.256, 2)]


def metrics(values: list[tuple[str, float, int]]) -> Any:
    metrics = of("logging.metrics")
    metrics.reset()
    with metrics.aggregate("outer") as outer, metrics.aggregate():
        for number, (name, value, weight) in enumerate(values):
            with metrics.aggregate("inner", new_root=number % 2 == 1):
                metrics.log_scalar(name, value, weight, priority=number, round=3)
        metrics.log_derived("ppl", lambda meters: len(meters.keys()))
    saved = metrics.state_dict()
    metrics.load_state_dict(saved)
    return [outer.get_smoothed_values(), metrics.get_smoothed_values("inner"), sorted(saved)]


class Rows:
    """A dataset of lists, for those that wrap another."""

    def __new__(cls, rows: list[list[int]]) -> Any:
        base = of("data.fairseq_dataset").FairseqDataset

        class Made(base):  # type: ignore[misc, valid-type]
            sizes = np.array([len(row) for row in rows])

            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.tensor(rows[index], dtype=torch.long)

            def __len__(self) -> int:
                return len(rows)

            def collater(self, samples: Any) -> Any:
                return of("data.data_utils").collate_tokens(samples, 1)

            def num_tokens(self, index: int) -> int:
                return len(rows[index])

            def size(self, index: int) -> int:
                return len(rows[index])

        return Made()


def everything(dataset: Any) -> Any:
    """Examples, sizes, order and one batch of *dataset*."""
    items = [dataset[index] for index in range(len(dataset))]
    tokens = [int(dataset.num_tokens(index)) for index in range(len(dataset))]
    return plain([items, tokens, dataset.ordered_indices(), dataset.collater(items)])


def wrapped(kind: str, rows: list[list[int]], value: int) -> Any:
    module, name = WRAPPERS[kind]
    make = getattr(of(module), name)
    return everything(make(Rows(rows), value))


WRAPPERS = {
    "prepend": ("data.prepend_token_dataset", "PrependTokenDataset"),
    "append": ("data.append_token_dataset", "AppendTokenDataset"),
    "truncate": ("data.shorten_dataset", "TruncateDataset"),
    "offset": ("data.offset_tokens_dataset", "OffsetTokensDataset"),
    "roll": ("data.roll_dataset", "RollDataset"),
}


def cropped(rows: list[list[int]], length: int, seed: int, epoch: int) -> Any:
    dataset = of("data.shorten_dataset").RandomCropDataset(Rows(rows), length, seed)
    dataset.set_epoch(epoch)
    return plain([dataset[index] for index in range(len(rows))])


def concatenated(first: list[list[int]], second: list[list[int]], ratios: list[int]) -> Any:
    dataset = of("data.concat_dataset").ConcatDataset([Rows(first), Rows(second)], ratios)
    items = [dataset[index] for index in range(len(dataset))]
    return plain([items, dataset.sizes, dataset.ordered_indices(), dataset.collater(items)])


def joined(rows: list[list[int]], order: list[int]) -> Any:
    first = of("data.sort_dataset").SortDataset(Rows(rows), np.array([order[n % 3] for n in range(len(rows))]))
    dataset = of("data.concat_sentences_dataset").ConcatSentencesDataset(first, Rows(rows[::-1]))
    return [everything(dataset), plain([dataset.sizes, [dataset.size(index) for index in range(len(rows))]])]


def monolingual(rows: list[list[int]], length: int | None, count: int | None) -> Any:
    words, module = of("data.dictionary").Dictionary(), of("data.monolingual_dataset")
    sizes = [len(row) for row in rows]
    dataset = module.MonolingualDataset(Rows(rows), sizes, words, fixed_pad_length=length, pad_to_bsz=count)
    return plain([dataset.ordered_indices(), dataset.collater([dataset[index] for index in range(len(rows))])])


def nested(rows: list[list[int]], left: bool) -> Any:
    padded = of("data.pad_dataset").PadDataset(Rows(rows), 1, left)
    numel = of("data.numel_dataset").NumelDataset(Rows(rows), reduce=True)
    parts = {"id": of("data.id_dataset").IdDataset(), "net_input": {"tokens": padded, "count": numel}}
    dataset = of("data.nested_dictionary_dataset").NestedDictionaryDataset(parts, sizes=[Rows(rows).sizes])
    samples = [dataset[index] for index in range(len(rows))]
    return plain([dataset.collater(samples), dataset.ordered_indices(), [dataset.num_tokens(0), dataset.size(0)]])


def pairs(rows: list[list[int]], feeds: bool, left: bool) -> Any:
    samples = [{"id": n, "source": torch.tensor(r), "target": torch.tensor(r[::-1])} for n, r in enumerate(rows)]
    # Equal lengths may be in any order.
    batch = plain(of("data.language_pair_dataset").collate(samples, 1, 2, left, not left, feeds))
    lengths = batch["net_input"].pop("src_lengths")
    order = sorted(range(len(rows)), key=lambda place: batch["id"][place])
    sort = lambda column: [column[place] for place in order]  # noqa: E731
    inputs = {name: sort(column) for name, column in batch["net_input"].items()}
    return [lengths, inputs, sort(batch["target"]), batch["nsentences"], batch["ntokens"]]


def smoothed(rows: list[list[float]], targets: list[int], epsilon: float, reduce: bool) -> Any:
    module = of("criterions.label_smoothed_cross_entropy")
    lprobs = torch.tensor(rows).log_softmax(-1)
    return plain(module.label_smoothed_nll_loss(lprobs, torch.tensor(targets), epsilon, 1, reduce))


def embedded(rows: list[list[int]], dim: int, learned: bool) -> Any:
    module = of("modules.positional_embedding").PositionalEmbedding(16, dim, 1, learned)
    if learned:
        with torch.no_grad():
            module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight))
    return plain(module(torch.tensor(rows)))


def attention(seed: int, length: int, padded: int, causal: bool, bias_kv: bool, zero: bool) -> Any:
    """Output and weights, and the outputs token by token."""
    module = of("modules.multihead_attention").MultiheadAttention(
        8, 2, bias=True, add_bias_kv=bias_kv, add_zero_attn=zero, self_attention=True
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(length, 2, 8, generator=generator)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, length - min(padded, length - 1) :] = True
    mask = torch.full((length, length), -torch.inf).triu(1) if causal else None
    module.eval()
    output, weights = module(x, x, x, key_padding_mask=padding, attn_mask=mask)
    steps: list[Any] = []
    if not (bias_kv or zero):
        state: dict[str, Any] = {}
        steps = [module(x[t : t + 1], x[t : t + 1], x[t : t + 1], incremental_state=state)[0] for t in range(length)]
    return plain([output, weights, steps])


def words(lines: list[str], threshold: int, size: int, factor: int) -> Any:
    dictionary = of("data.dictionary").Dictionary()
    encoded = [dictionary.encode_line(line) for line in lines]
    dictionary.finalize(threshold, size, factor)
    again = [dictionary.encode_line(line, add_if_not_exist=False, reverse_order=True) for line in lines]
    texts = [dictionary.string(row, None, False, None, "?", True) for row in again]
    return plain([encoded, dictionary.symbols, dictionary.count[4:], again, texts, dictionary.unk_string(True)])
