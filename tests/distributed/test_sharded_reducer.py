"""A module in parts computes what the whole one does, and any tensor of it can be cut, loaded and
stored."""

from __future__ import annotations

import socket
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mistakes import user_error
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn import functional as F

from fairseq.config.settings import DistributedConfig
from fairseq.distributed import World, sharding
from fairseq.distributed.sharding import ShardedReducer, build_device, is_sharded, shard_of
from fairseq.distributed.tensor_part import TensorPart
from fairseq.errors import UserError

SHARDED = DistributedConfig(ddp_backend="fully_sharded")
PAIRS = DistributedConfig(ddp_backend="fully_sharded", shard_group_size=2)
META = torch.device("meta")


class Matrix(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.dtype, x.dtype
        return F.linear(x.to(self.weight.dtype), self.weight).float()


class RowNorm(nn.Module):
    """A norm by its name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.dtype
        return x * self.weight


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = Matrix(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.second = RowNorm()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.norm.weight.dtype
        return x + self.second(self.norm(self.matrix(x).to(self.norm.weight.dtype)))


class Model(nn.Module):
    """Embeddings tied with the output, a layer, a bias that not every batch uses, a frozen
    parameter and a buffer."""

    scale: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.layer = Layer()
        self.output = nn.Linear(4, 6, bias=False)
        self.output.weight = self.embed.weight
        self.bias = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.full((4,), seed + 2.0), requires_grad=False)
        self.register_buffer("scale", torch.tensor(seed + 3.0))

    def forward(self, tokens: Tensor, biased: bool = True) -> Tensor:
        x = self.layer(self.embed(tokens)) * self.frozen * self.scale
        loss = self.output(x).logsumexp(-1).sum() - self.output(x)[..., 0].sum()
        return loss + (self.bias.square() + self.bias).sum() * 7 if biased else loss


class Graph(nn.Module):
    """What computes the loss of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        loss: Tensor = self.model(*args)
        return loss


def tokens_of(rank: int, batch: int = 0) -> Tensor:
    return torch.tensor([[rank, (rank + 1 + batch) % 6, 5 - rank]])


def sharded(world: World, cfg: DistributedConfig = SHARDED, dtype: Any = None) -> ShardedReducer:
    """Of a model with rank 0's values; other ranks' are on no device, or others for the third."""
    with META if world.rank in (1, 3) else nullcontext():
        model = Model(world.rank)
    return ShardedReducer(Graph(model), [model.layer], [], world, cfg, dtype)


def whole_of(reducer: Any, world: World, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The whole tensors whose parts each process has in *tensors*, put together from those of one
    group."""
    parts = world.gather([(n, p.local, p.first, p.shape) for n, p in tensors.items()], everywhere=True)
    found = {name: torch.full(shape, torch.nan) for name, _, _, shape in parts[0]}
    for of_rank in parts:
        for name, local, first, _ in of_rank:
            found[name][first : first + len(local)] = local.detach()
    return found


def gradients(reducer: Any, world: World) -> dict[str, Tensor]:
    whole = {name: reducer.full(part, part.grad) for name, part in reducer.named_parameters()}
    return whole_of(reducer, world, {name: part for name, part in whole.items() if part is not None})


def of_whole(size: int, batches: int = 1, biased: Any = lambda rank, batch: True) -> dict[str, Tensor]:
    """The mean over *size* processes of the sum of gradients of *batches*, by name."""
    graph = Graph(Model())
    for rank in range(size):
        for batch in range(batches):
            graph(tokens_of(rank, batch), biased(rank, batch)).backward()
    return {name: p.grad / size for name, p in graph.named_parameters() if p.grad is not None}


# ---- computation -------------------------------------------------------------------------------


def trained(world: World, cfg: DistributedConfig, batches: int) -> Any:
    reducer = sharded(world, cfg)
    for batch in range(batches):
        with reducer.accumulate(last=batch == batches - 1):
            reducer.module(tokens_of(world.rank, batch)).backward()
    reducer.reduce()
    left = [p.grad for p in reducer.sharded.values()]
    reducer.reduce()  # of nothing new
    members = dist.get_process_group_ranks(reducer.group)
    total = reducer.total_norm(torch.cat([p.grad.flatten() for _, p in reducer.named_parameters()]).norm())
    return gradients(reducer, world), left, members, total


@pytest.mark.parametrize("cfg, size", [(SHARDED, 2), (PAIRS, 4)], ids=["one group", "two groups"])
def test_gradients_in_parts_are_the_mean_over_processes_of_all_batches(
    tmp_path: Path, cfg: DistributedConfig, size: int
) -> None:
    expected = of_whole(size, batches=2)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for rank, (found, left, members, total) in enumerate(on_ranks(trained, size, tmp_path, cfg, 2)):
        assert found.keys() == expected.keys() and "model.frozen" not in found
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=name)
        assert left == [None] * len(left) and members == ([0, 1] if rank < 2 else [2, 3])
        torch.testing.assert_close(total, norm)


def separate(world: World) -> Any:
    """What is gathered after a forward pass, and the gradients."""
    model = Model()
    model.output.weight = nn.Parameter(model.embed.weight.detach().clone())
    reducer = ShardedReducer(Graph(model), [model.layer], [model.embed], world, SHARDED, None)
    loss = reducer.module(tokens_of(world.rank))
    weights = model.embed.weight, model.layer.matrix.weight, model.output.weight
    is_gathered = [not hasattr(weight, "placements") for weight in weights]
    loss.backward()
    reducer.reduce()
    return is_gathered, gradients(reducer, world)


def test_embeddings_are_free_after_the_forward_pass_and_the_output_layer_stays(tmp_path: Path) -> None:
    tied = of_whole(2)["model.embed.weight"]
    for is_gathered, found in on_ranks(separate, 2, tmp_path):
        assert is_gathered == [False, False, True]
        torch.testing.assert_close(found["model.embed.weight"] + found["model.output.weight"], tied)


def losses(world: World) -> Any:
    reducer = sharded(world)
    first = reducer.module(tokens_of(0)).item()
    state = Graph(Model(9)).state_dict()
    reducer.module.load_state_dict(state)
    reducer.reset()
    loaded = reducer.module(tokens_of(0)).item()
    parts = {name: reducer.full(part, part) for name, part in reducer.named_parameters()}
    parameters = whole_of(reducer, world, parts)
    seen = {name: p.requires_grad for name, p in reducer.module.named_parameters()}
    tied = reducer.module.model.output.weight is reducer.module.model.embed.weight
    return first, loaded, parameters, seen, tied


def test_every_process_computes_with_rank_0s_values_and_then_with_those_that_are_loaded(tmp_path: Path) -> None:
    expected = Graph(Model(9))
    alone = [Graph(Model())(tokens_of(0)).item(), expected(tokens_of(0)).item()]
    for first, loaded, parameters, seen, tied in on_ranks(losses, 2, tmp_path):
        assert [first, loaded] == pytest.approx(alone)
        assert all(
            torch.equal(parameters[name], value)
            for name, value in expected.named_parameters()
            if name in seen and seen[name]
        )
        assert seen == {name: p.requires_grad for name, p in expected.named_parameters()} and tied


def steps(world: World) -> Any:
    """Losses of three updates by the parts."""
    reducer = sharded(world)
    found = []
    for _ in range(3):
        loss = reducer.module(tokens_of(world.rank))
        with reducer.accumulate(last=True):
            loss.backward()
        reducer.reduce()
        with torch.no_grad():
            for _, part in reducer.named_parameters():
                part.sub_(part.grad, alpha=0.01)
                part.grad = None
        reducer.reset()
        found.append(float(world.sum(loss.detach())) / world.size)
    return found


def test_an_update_of_the_parts_is_one_of_the_whole(tmp_path: Path) -> None:
    graph, expected = Graph(Model()), []
    for _ in range(3):
        loss = (graph(tokens_of(0)) + graph(tokens_of(1))) / 2
        graph.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in graph.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)
        expected.append(loss.item())
    assert on_ranks(steps, 2, tmp_path) == [pytest.approx(expected)] * 2


def unused(world: World) -> Any:
    """Gradients of two updates: one process uses the bias in one of two batches; none does."""
    reducer, found = sharded(world), []
    for is_used in (True, False):
        for batch in range(2):
            with reducer.accumulate(last=batch == 1):
                biased = is_used and world.rank == batch == 0
                reducer.module(tokens_of(world.rank, batch), biased).backward()
        reducer.reduce()
        found.append(gradients(reducer, world))
        for _, part in reducer.named_parameters():
            part.grad = None
    return found


def test_a_parameter_has_a_gradient_if_any_process_used_it(tmp_path: Path) -> None:
    expected = of_whole(2, batches=2, biased=lambda rank, batch: False)
    bias = torch.full((3,), 7 / 2)  # the derivative of 7 (b² + b), of one of two processes
    for used, by_none in on_ranks(unused, 2, tmp_path):
        torch.testing.assert_close(used, {**expected, "model.bias": bias})
        # None, not zeros: decay and momentum would move it.
        torch.testing.assert_close(by_none, expected)


def low(world: World) -> Any:
    reducer = sharded(world, dtype=torch.bfloat16)
    reducer.module(tokens_of(world.rank)).backward()
    layer = reducer.module.model.layer
    types = (layer.matrix.seen, layer.seen, layer.second.seen, next(iter(reducer.parts.values())).dtype)
    root = nn.Sequential(nn.Sequential(Matrix(1, 2, bias=False)))
    small = ShardedReducer(root, [root[0]], [], world, SHARDED, torch.bfloat16)
    root(torch.tensor([[1.0 if world.rank == 0 else 2.0**-8]])).sum().backward()
    small.reduce()
    ((_, part),) = small.named_parameters()
    return types, part.grad


def test_a_layer_with_its_norms_is_in_low_precision_sums_of_gradients_and_the_rest_are_not(tmp_path: Path) -> None:
    for types, gradient in on_ranks(low, 2, tmp_path):
        assert types == ((torch.bfloat16, torch.float32), torch.bfloat16, torch.bfloat16, torch.float32)
        assert gradient.dtype == torch.float32
        assert gradient.tolist() == [[(1 + 2.0**-8) / 2]], "bfloat16 would round the sum to 1"


def buffers(world: World) -> Any:
    matrix = Matrix(2, 2, bias=False)
    root = nn.Sequential(nn.Sequential(matrix))
    for module in (root, matrix):
        module.register_buffer("table", torch.tensor([world.rank + 3.0]) if module is root else root.table)
    ShardedReducer(root, [root[0]], [], world, SHARDED, None)
    return root.table is matrix.table, type(root.table) is Tensor, root.table.item()


def test_a_buffer_of_a_layer_and_the_model_stays_one_and_has_rank_0s_value(tmp_path: Path) -> None:
    assert on_ranks(buffers, 2, tmp_path) == [(True, True, 3.0)] * 2


class Sharded(nn.Identity):
    """What PyTorch makes of a module; it does nothing."""

    set_force_sum_reduction_for_comms = set_reduce_scatter_unused_params = lambda self, enable: None


@pytest.mark.parametrize("offload, device", [(False, "cuda"), (True, "cuda"), (True, "cpu")])
def test_parameters_wait_in_host_memory_if_asked_for_which_is_pinned_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, offload: bool, device: str
) -> None:
    policies = []

    def shard(module: Any, *, offload_policy: Any, **_: Any) -> nn.Module:
        policies.append(offload_policy)
        return Sharded()

    monkeypatch.setattr(fsdp, "fully_shard", shard)
    monkeypatch.setattr(sharding, "_mesh", lambda world, size: SimpleNamespace(get_group=str))
    monkeypatch.setattr(sharding, "_move", lambda *_: None)
    monkeypatch.setattr(ShardedReducer, "_record_use", lambda *_: None)
    cfg = DistributedConfig(ddp_backend="fully_sharded", shard_group_size=2, cpu_offload=offload)
    ShardedReducer(Graph(nn.Identity()), [nn.Identity()], [], World(0, 2, torch.device(device)), cfg, None)
    expected = fsdp.CPUOffloadPolicy(pin_memory=device == "cuda") if offload else fsdp.OffloadPolicy()
    assert policies == [expected] * 2  # of a layer and of the root


def quiet(world: World) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reducer = sharded(world, DistributedConfig(ddp_backend="fully_sharded", cpu_offload=True))
        with reducer.accumulate(last=True):
            reducer.module(tokens_of(world.rank)).backward()
        reducer.reduce()
        for text in ("FSDP2-wrapped module: its output is modified in place", "of the user"):
            warnings.warn(text, UserWarning, stacklevel=1)
    for name, gradient in of_whole(2).items():
        torch.testing.assert_close(gradients(reducer, world)[name], gradient)
    return [text for text in (str(warning.message) for warning in caught) if "FSDP" in text or "user" in text]


def test_parameters_may_wait_in_host_memory_and_only_warnings_of_outputs_are_not_shown(tmp_path: Path) -> None:
    assert on_ranks(quiet, 2, tmp_path) == [["of the user"]] * 2


# ---- parts -------------------------------------------------------------------------------------


def cut(world: World) -> Any:
    reducer = sharded(world)
    part = dict(reducer.named_parameters())["model.embed.weight"]
    bias = dict(reducer.named_parameters())["model.bias"]
    whole = torch.arange(24.0).view(6, 4)
    mine = TensorPart(torch.full((3, 4), 7.0), 3 * world.rank, torch.Size([6, 4]))
    owned = [reducer.local_shard(part, value) for value in (whole, mine, whole[0], torch.tensor(3.0), "text")]
    short = reducer.local_shard(bias, torch.tensor([1.0, 2.0, 3.0]))
    stored = [
        reducer.full(part, part),
        reducer.full(bias, bias),
        reducer.full(part, torch.tensor(3.0)),
        reducer.full(part, 4),
    ]
    source = reducer.full_parameter(part) is reducer.module.model.embed.weight
    state = {**reducer.module.state_dict(keep_vars=True), "other": whole}
    parts = reducer.consolidated(state)
    same = parts["model.embed.weight"] is parts["model.output.weight"]
    kept = parts["other"] is whole and parts["model.scale"].item() == 3
    fields = [
        (p.local.requires_grad, p.local.detach().clone(), p.first, p.shape) for p in (*stored[:2], parts["model.bias"])
    ]
    return owned, short, fields, stored[2:], source, same, kept, sorted(parts)


def test_tensors_are_cut_by_rows_and_stored_with_the_number_of_their_first(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(6, 4)
    model = Model()
    for rank, found in enumerate(on_ranks(cut, 2, tmp_path)):
        owned, short, fields, others, source, same, kept, names = found
        rows = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(owned[0], whole[rows]) and torch.equal(owned[1], torch.full((3, 4), 7.0))
        assert torch.equal(owned[2], whole[0]) and owned[3:] == [torch.tensor(3.0), "text"]
        assert short.tolist() == [[1.0, 2.0], [3.0]][rank]
        assert others == [torch.tensor(3.0), 4] and source and same and kept
        assert names == sorted([*Graph(model).state_dict(), "other"])
        embed, bias, of_state = fields
        assert torch.equal(embed[1], model.embed.weight[rows]) and embed[2:] == (3 * rank, (6, 4))
        assert bias[2:] == of_state[2:] == (2 * rank, (3,)) and not (embed[0] or bias[0] or of_state[0])


def loaded(world: World) -> Any:
    reducer = sharded(world)
    before = {name: part.clone() for name, part in reducer.named_parameters()}
    model = reducer.module.model
    part = TensorPart(torch.full((3, 4), 7.0), 3 * world.rank, torch.Size([6, 4]))
    state = {**Model(9).state_dict(), "embed.weight": part, "output.weight": part}
    del state["bias"]
    missing = model.load_state_dict(state, strict=False).missing_keys  # of a child, as a model's is loaded
    reducer.reset()
    after = dict(reducer.named_parameters())
    same = torch.equal(after["model.bias"], before["model.bias"])
    wrong = ""
    try:
        model.load_state_dict({**state, "embed.weight": torch.zeros(2, 4)}, strict=False)
    except RuntimeError as error:
        wrong = str(error)
    return missing, same, after["model.embed.weight"].detach(), after["model.layer.matrix.weight"].detach(), wrong


def test_whole_tensors_and_parts_are_loaded_as_parts(tmp_path: Path) -> None:
    for rank, (missing, same, embed, matrix, wrong) in enumerate(on_ranks(loaded, 2, tmp_path)):
        assert missing == ["bias"] and same
        assert torch.equal(embed, torch.full((3, 4), 7.0))
        assert torch.equal(matrix, Model(9).layer.matrix.weight[2 * rank : 2 * rank + 2])
        assert "size mismatch for embed.weight" in wrong, "as of a whole module"


# ---- division ----------------------------------------------------------------------------------


class Hosts(World):
    """A job whose processes run on machines of these names."""

    names = ("",)

    def gather(self, value: Any, everywhere: bool = False) -> list[Any]:
        return list(self.names) if everywhere and value == socket.gethostname() else []


@pytest.mark.parametrize(
    "names, rank, place",
    [
        ("aabb", 1, (1, 2)),
        ("aabb", 2, (0, 2)),
        ("aaaa", 3, (3, 4)),
        ("abcd", 1, (1, 4)),
        ("aaab", 3, (3, 4)),
        ("aaabbb", 4, (1, 3)),
    ],
)
def test_processes_of_a_machine_share_a_copy_where_all_machines_have_as_many(
    names: str, rank: int, place: tuple[int, int]
) -> None:
    world = Hosts(rank, len(names))
    object.__setattr__(world, "names", tuple(names))
    assert shard_of(SHARDED, world) == place


def test_groups_have_the_size_that_is_asked_for_and_divide_the_processes() -> None:
    assert [shard_of(PAIRS, World(rank, 6)) for rank in (0, 3, 4)] == [(0, 2), (1, 2), (0, 2)]
    with user_error("^--shard-group-size 2: must divide the number of processes, 5$"):
        shard_of(PAIRS, World(0, 5))


def test_only_ranks_above_0_of_a_sharded_job_build_without_memory() -> None:
    whole = DistributedConfig()
    assert [is_sharded(cfg, World(0, size)) for cfg in (SHARDED, whole) for size in (1, 2)] == [
        False,
        True,
        False,
        False,
    ]
    devices = [build_device(cfg, World(rank, 2)) for cfg in (SHARDED, whole) for rank in (0, 1)]
    assert devices[1] == META and all(isinstance(devices[i], nullcontext) for i in (0, 2, 3))
    assert isinstance(build_device(SHARDED, World(0, 1)), nullcontext)


def test_notes_of_which_updates_change_single_rows_are_refused() -> None:
    module = nn.Sequential(nn.Embedding(6, 4, sparse=True))
    with user_error("^--ngram-notes, --word-notes: not with --ddp-backend fully_sharded; give 0$"):
        ShardedReducer(module, [], [], World(0, 2), SHARDED, None)


def test_an_older_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for old in (object, None):
        monkeypatch.setattr(fsdp, "FSDPModule", old)
        with user_error("^--ddp-backend fully_sharded: needs a newer PyTorch than"):
            ShardedReducer(Model(), [], [], World(0, 2), SHARDED, None)
    monkeypatch.delattr(fsdp, "FSDPModule")
    with pytest.raises(UserError, match="needs a newer PyTorch"):
        ShardedReducer(Model(), [], [], World(0, 2), SHARDED, None)
