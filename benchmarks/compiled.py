"""The kernels that compiled layers launch, counted on the graphs that torch.compile's AOT autograd
makes of them.

A layer is traced on the fake GPU, decomposed and divided into forward and backward as for inductor;
what inductor would fuse is a model of its scheduler, not a run of it. Between two products, or a
product and attention, operators on the same elements and reductions of rows are one kernel, which
reads its inputs and writes what others read. Sums over rows, for the gradients of biases and gains,
are kernels of their own, which compute anew what they read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map, tree_unflatten

from benchmarks.launches import Kernel, Launches, costs, part_of, size_of, tensors_of
from fairseq.modules.attention import Bidirectional
from fairseq.modules.relative_attention import RelativePositions

_REDUCTIONS = {"sum", "mean", "amax", "var_mean"}
# Arguments of layers with tensors in them, which are inputs of the graph.
register_pytree_node(Bidirectional, lambda x: ([x.padding], None), lambda fields, _: Bidirectional(*fields))
register_pytree_node(
    RelativePositions, lambda x: (list(vars(x).values()), None), lambda fields, _: RelativePositions(*fields)
)


class CompiledLayers:
    """Layers, alike, that from now on count as compiled; :attr:`launches` get their kernels.

    One graph serves all of them, as in training with ``--compile``; here its sizes are constants.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.launches: Launches | None = None
        self._graphs: dict[Any, Callable[..., Any]] = {}
        eager = layers[0].forward
        for layer in layers:
            layer.forward = self._forward_of(layer, layers[0], eager)

    def _forward_of(self, layer: nn.Module, first: nn.Module, eager: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            # Constants and the shapes of tensors; values differ, but are not looked at.
            key = tuple(map(repr, leaves)), layer.training, torch.is_grad_enabled(), tuple(x.dtype for x in tensors)
            if key not in self._graphs:
                self._graphs[key] = self._graph(first, eager, leaves, spec)
            return self._unrecorded(self._graphs[key], dict(layer.named_parameters()), tensors)

        return forward

    def _graph(self, module: nn.Module, eager: Callable[..., Any], leaves: list[Any], spec: Any) -> Callable[..., Any]:
        def call(parameters: dict[str, Tensor], tensors: list[Tensor]) -> Any:
            values = iter(tensors)
            args, kwargs = tree_unflatten([next(values) if isinstance(x, Tensor) else x for x in leaves], spec)
            with mock.patch.object(module, "forward", eager), mock.patch("torch.compiler.is_compiling", lambda: True):
                return functional_call(module, parameters, args, kwargs)

        return aot_function(
            call,
            fw_compiler=self._recorded,
            bw_compiler=self._recorded,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def _recorded(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        kernels = kernels_of(gm.graph)

        def run(*args: Any) -> Any:
            if self.launches is not None:
                self.launches.kernels += kernels
            return self._unrecorded(gm.forward, *args)

        return make_boxed_func(run)

    def _unrecorded(self, function: Callable[..., Any], *args: Any) -> Any:
        launches = self.launches
        if launches is None:
            return function(*args)
        before, launches.records = launches.records, False
        try:
            return function(*args)
        finally:
            launches.records = before


def kernels_of(graph: fx.Graph) -> list[Kernel]:
    """The kernels of a *graph* whose nodes know their tensors, as the compiler would launch
    them."""
    return _Schedule(graph).kernels()


class _Schedule:
    """Nodes of a graph in groups, each a kernel."""

    def __init__(self, graph: fx.Graph) -> None:
        self.level: dict[fx.Node, int] = {}  # number of products before it, on the longest way
        self.products: list[fx.Node] = []
        self.columns: set[fx.Node] = set()  # sums over rows, and what is computed of them only
        self.group: dict[fx.Node, fx.Node] = {}  # of each fused node the next of its group; the last is itself
        self.inputs: dict[fx.Node, list[fx.Node]] = {}  # of each node that computes, views included
        self.outputs: set[fx.Node] = set()
        for node in graph.nodes:
            self._add(node)
        self._postpone()
        for node in self.group.keys() - self.columns:
            for source in self._sources(node) & self.group.keys() - self.columns:
                if self.level[source] == self.level[node]:
                    self._join(node, source)
        self._join_readers()

    def kernels(self) -> list[Kernel]:
        """One for each product and for each group."""
        kernels = []
        for node in self.products:
            name, (args, kwargs, out) = _name(node), tree_map(_value, (node.args, node.kwargs, node), is_leaf=_is_node)
            part = part_of(name, node.target) or "layers"
            kernels += [Kernel(name, part, *cost) for cost in costs(name, node.target, args, kwargs, out)]
        members = defaultdict(set)
        for node in self.group:
            members[self._root(node)].add(node)
        written = self._written()
        for nodes in members.values():
            read: dict[fx.Node, float] = defaultdict(float)
            for view in self._read(nodes, written):  # parts of a tensor, or all of it in another shape
                read[self._source(view)] += _bytes(view)
            total = sum(min(size, _bytes(source)) for source, size in read.items()) + sum(map(_bytes, nodes & written))
            kernels.append(Kernel("sum over rows" if nodes & self.columns else "fused", "layers", 0.0, total))
        return kernels

    def _add(self, node: fx.Node) -> None:
        if node.op == "output":
            self.outputs = {self._source(x) for x in node.all_input_nodes}
        if node.op != "call_function":
            return
        if self._is_view(node):
            if self._source(node) is node:  # one of a product's results
                self.level[node] = self.level[node.all_input_nodes[0]]
            return
        self.inputs[node] = node.all_input_nodes
        sources = self._sources(node) & self.level.keys()
        self.level[node] = max((self.level[x] + (x not in self.group) for x in sources), default=0)
        if part_of(_name(node), node.target) or _name(node) == "embedding_dense_backward":
            self.products.append(node)
            return
        self.group[node] = node
        sums = sources & self.columns
        if _is_column(node):
            self.columns.add(node)
        elif sums and all(_count(x) == _count(node) for x in sums):
            self.columns.add(node)
            for x in sums:
                self._join(node, x)
        else:
            self.level[node] += bool(sums)

    def _postpone(self) -> None:
        """Move fused nodes to the level at which the first other needs them; sums over rows can
        wait."""
        readers: dict[fx.Node, list[int]] = defaultdict(list)
        for node in reversed(self.inputs):
            if node in self.group and node not in self.columns:
                self.level[node] = min(readers[node], default=self.level[node])
            if node not in self.columns:
                for source in self._sources(node):
                    readers[source].append(self.level[node])

    def _join_readers(self) -> None:
        """Join groups of one level that read the same tensor."""
        written = self._written()
        readers: dict[Any, fx.Node] = {}
        for node in self.group:
            for view in self._read({node}, written):
                key = self._source(view), self.level[node], node in self.columns
                self._join(node, readers.setdefault(key, node))

    def _written(self) -> set[fx.Node]:
        """Fused nodes whose results other kernels read; sums over rows compute them anew."""
        written = self.outputs & self.group.keys()
        for node in self.inputs:
            for source in self._sources(node) & self.group.keys():
                elsewhere = node not in self.group or self._root(node) != self._root(source)
                if elsewhere and (not _is_column(node) or _name(source) in _REDUCTIONS):
                    written.add(source)
        return written

    def _read(self, nodes: set[fx.Node], written: set[fx.Node]) -> set[fx.Node]:
        """What the kernel of *nodes* reads, views included."""
        read, waiting = set(), list(nodes)
        while waiting:
            for view in self.inputs[waiting.pop()]:
                source = self._source(view)
                if source in self.group and source not in written and source not in nodes:
                    waiting.append(source)
                elif source not in nodes:
                    read.add(view)
        return read

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        return set(map(self._source, self.inputs[node]))

    def _is_view(self, node: fx.Node) -> bool:
        return node.target.__name__ == "getitem" or getattr(node.target, "is_view", False)  # type: ignore[union-attr]

    def _source(self, node: fx.Node) -> fx.Node:
        """What *node* is a view of; each of a product's results is itself."""
        while node.op == "call_function" and self._is_view(node):
            viewed = node.all_input_nodes[0]
            if viewed in self.level and viewed not in self.group and not self._is_view(viewed):
                return node if isinstance(_value(viewed), list | tuple) else viewed
            node = viewed
        return node

    def _root(self, node: fx.Node) -> fx.Node:
        while self.group[node] is not node:
            node = self.group[node]
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        self.group[self._root(one)] = self._root(other)


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _value(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _name(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]


def _bytes(node: fx.Node) -> float:
    return sum(map(size_of, tensors_of(_value(node))))


def _count(node: fx.Node) -> int:
    return sum(tensor.numel() for tensor in tensors_of(_value(node)))


def _is_column(node: fx.Node) -> bool:
    """Return whether *node* is a sum over rows: not, or not only, over the last dimension."""
    if _name(node) not in _REDUCTIONS:
        return False
    dims: Any = node.args[1] if len(node.args) > 1 else None
    last = _value(node.args[0]).dim() - 1
    return dims is None or any(dim % (last + 1) != last for dim in ([dims] if isinstance(dims, int) else dims))
