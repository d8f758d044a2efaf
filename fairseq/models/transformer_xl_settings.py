"""Settings of Transformer-XL."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag
from fairseq.config.settings import MemoryConfig
from fairseq.config.shared import MOST_LAYERS, BlockConfig, ModelConfig, NGramNotesConfig, check_cutoffs
from fairseq.errors import SettingError

BY_DISTANCE = ("relative", "shaw")


@dataclass(frozen=True)
class TransformerXLConfig(NGramNotesConfig, BlockConfig, ModelConfig, MemoryConfig):
    """The settings of a Transformer-XL."""

    n_layer: int = flag(12, "number of layers", low=1, high=MOST_LAYERS)
    n_head: int = flag(8, "attention heads of each layer", low=1)
    d_model: int = flag(512, "width of the model", low=1)
    d_head: int | None = flag(None, "width of a head (default: `d_model` / `n_head`)", low=1)
    d_inner: int = flag(2048, "width of the feed-forward networks", low=1)
    d_embed: int | None = flag(None, "width of the first band of embeddings (default: `d_model`)", low=1)
    dropout: float = flag(0.1, "dropout, except of attention weights", low=0, below=1)
    dropatt: float = flag(0.0, "dropout of attention weights", low=0, below=1)
    variational_dropout: bool = flag(False, "one dropout mask for all time steps of a row")
    pre_lnorm: bool = flag(False, "pre-norm: layer norm before each part of a layer")
    untie_r: bool = flag(False, "separate biases u, v for each layer")
    cutoffs: list[int] | None = flag(None, "adaptive input and softmax: first word id of each tail band")
    div_val: int = flag(1, "width ratio of successive bands", low=1)
    tie_weight: bool = flag(True, "tie the output weights to the input embeddings", negative=True)
    tie_projs: str = flag(
        "none",
        "bands with tied projections: none, tails (all but the first), all, or numbers",
        const="tails",
        metavar="BANDS",
    )
    position_encoding: str = flag(
        "relative",
        "relative (Transformer-XL), shaw (learned relative), absolute (sinusoids), learned (every layer)",
        choices=("relative", "shaw", "absolute", "learned"),
    )
    max_relative_length: int | None = flag(
        None, "rows of the tables of shaw and learned (default: `tokens_per_sample` + `mem_len` of training)", low=1
    )
    memory_start: str = flag(
        "empty",
        "initial memory: empty, or zero vectors as in Hugging Face's model",
        choices=("empty", "zeros"),
    )
    init_std: float = flag(0.02, "standard deviation of initial weights", low=0, high=1)

    @property
    def memory_length(self) -> int:
        return self.mem_len

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.d_head or self.d_model // self.n_head

    @property
    def table_length(self) -> int:
        """Rows of the position tables of shaw and learned."""
        return self.max_relative_length or self.tokens_per_sample + self.memory_length

    def at_block_length(self, tokens: int, longest: int) -> dict[str, object]:
        """Learned tables are made for the longest blocks."""
        return {"max_relative_length": longest + self.memory_length} if self.max_relative_length is None else {}

    def with_memory(self, tokens: int, longest: int) -> dict[str, object] | None:
        """Learned tables are made for the run's memory."""
        is_longer = self.max_relative_length is None and longest > self.memory_length
        return None if is_longer and self.position_encoding in ("shaw", "learned") else {"mem_len": tokens}

    def tied_projections(self) -> frozenset[int]:
        """Return the bands of ``tie_projs``; raise SettingError if one does not exist."""
        bands = len(self.cutoffs or []) + 1
        bands_by_name = {"none": range(0), "tails": range(1, bands), "all": range(bands)}
        if self.tie_projs in bands_by_name:
            return frozenset(bands_by_name[self.tie_projs])
        numbers = self.tie_projs.split(",")
        if not all(number.strip().isdecimal() and int(number) < bands for number in numbers):
            raise SettingError(
                f"`tie_projs` {self.tie_projs}: choose none, tails, all, or numbers of bands from 0 to {bands - 1}"
            )
        return frozenset(map(int, numbers))

    def check(self) -> None:
        if self.d_head is None and self.d_model % self.n_head:
            raise SettingError(f"`n_head` {self.n_head}: must divide `d_model` {self.d_model}, or give `d_head`")
        self.check_vocabulary()
        bands = len(self.cutoffs or [])
        if (self.d_embed or self.d_model) < self.div_val**bands:
            raise SettingError(f"`div_val` {self.div_val}: band {bands} would have no width; use a smaller one")
        self.tied_projections()
        self._check_positions()

    def check_vocabulary(self, vocabulary: int | None = None) -> None:
        """Raise SettingError if a band, where the number of words is known, has none."""
        if self.cutoffs is not None:
            check_cutoffs("cutoffs", self.cutoffs, vocabulary)

    def _check_positions(self) -> None:
        encoding = self.position_encoding
        if self.clamp_len == 0:
            raise SettingError("`clamp_len` 0: all distances would be one; use a positive number, or -1 for no clamp")
        if self.clamp_len > 0 and encoding != "relative":
            raise SettingError(
                f"`clamp_len` {self.clamp_len}: only `position_encoding` relative has distances to clamp"
            )
        if self.same_length and self.mem_len == 0:
            raise SettingError(
                "`same_length`: needs memory to see as many keys everywhere; give `mem_len`, or leave it out"
            )
        if self.mem_len and encoding not in BY_DISTANCE:
            raise SettingError(
                f"`mem_len` {self.mem_len}: with `position_encoding` {encoding} a memory's positions would be the "
                "segment's; use 0, or relative positions"
            )
        if encoding in ("relative", "absolute") and self.d_model % 2:
            raise SettingError(f"`d_model` {self.d_model}: sinusoids come in pairs; use an even number")
