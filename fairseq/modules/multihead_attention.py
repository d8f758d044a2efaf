"""``fairseq.modules.MultiheadAttention``: attention for [T, B, C] with fairseq's constructor, names
and state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.incremental_decoding_utils import State, get_incremental_state, set_incremental_state
from fairseq.modules.fairseq_modules import FairseqDropout, quant_noise


def _mask_for_xformers(mask: Tensor, to_dtype: torch.dtype | None = None) -> Tensor:
    """*mask*, false or −∞ where nothing is read, as *to_dtype*; integers and bools of torch mean
    the opposite."""
    kinds = (torch.float, torch.float16, torch.bool, torch.uint8)
    dtype = mask.dtype if to_dtype is None else to_dtype
    if mask.dtype not in kinds or dtype not in kinds:
        raise ValueError(f"mask of {mask.dtype} as {dtype}: expected one of {kinds}")
    reads = mask == 0 if mask.is_floating_point() else ~mask.bool()
    if mask.is_floating_point() and dtype.is_floating_point:
        return mask.to(dtype)
    return (
        reads.to(dtype)
        if not dtype.is_floating_point
        else torch.zeros(mask.shape, dtype=dtype).masked_fill(~reads, -torch.inf)
    )


class MultiheadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, §3.2.2), whose parts a plug-in may replace.

    Raises:
        NotImplementedError: quantisation noise or xformers is asked for.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        xformers_att_config: str | None = None,
        xformers_blocksparse_layout: Tensor | None = None,
        xformers_blocksparse_blocksize: int | None = 16,
    ) -> None:
        super().__init__()
        if xformers_att_config is not None:
            raise NotImplementedError("MultiheadAttention: xformers_att_config is not implemented; use None")
        if embed_dim % num_heads:
            raise AssertionError(f"embed_dim {embed_dim} must be divisible by num_heads {num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.qkv_same_dim = self.kdim == self.vdim == embed_dim
        self.dropout_module = FairseqDropout(dropout)
        self.scaling = self.head_dim**-0.5
        self.self_attention, self.encoder_decoder_attention = self_attention, encoder_decoder_attention
        # Order k, v, q, out: checkpoints of fairseq number the optimizer's state by the order of
        # the parameters.
        self.k_proj = quant_noise(nn.Linear(self.kdim, embed_dim, bias), q_noise, qn_block_size)
        self.v_proj = quant_noise(nn.Linear(self.vdim, embed_dim, bias), q_noise, qn_block_size)
        self.q_proj = quant_noise(nn.Linear(embed_dim, embed_dim, bias), q_noise, qn_block_size)
        self.out_proj = quant_noise(nn.Linear(embed_dim, embed_dim, bias), q_noise, qn_block_size)
        row = torch.empty(1, 1, embed_dim)
        self.bias_k = nn.Parameter(row.clone()) if add_bias_kv else None
        self.bias_v = nn.Parameter(row.clone()) if add_bias_kv else None
        self.add_zero_attn = add_zero_attn
        self.beam_size, self.onnx_trace = 1, False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values, which are fairseq's."""
        # As if the three were one matrix [3 C, C], whose Xavier bound is smaller by √2: √(6 / (C +
        # 3 C)).
        for part in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(part.weight, gain=2**-0.5 if self.qkv_same_dim else 1)  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.out_proj.weight)  # type: ignore[arg-type]
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)  # type: ignore[arg-type]
        for row in (self.bias_k, self.bias_v):
            if row is not None:
                nn.init.xavier_normal_(row)

    def prepare_for_onnx_export_(self) -> None:
        self.onnx_trace = True

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: State | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T, B, C] and the weights: [B, T, S], or [H, B, T, S] of each head.

        Args:
            query, key, value: [T, B, C], [S, B, C], [S, B, C]; without key and value the query.
            key_padding_mask: true at padding, [B, S].
            incremental_state: keys and values of earlier calls, which are read and replaced.
            static_kv: they are the same in every call.
            attn_mask: added to the scores, or bool and true where attention may not read: [T, S].
            before_softmax: return scores and values instead.
        """
        need_weights = need_weights or need_head_weights
        length, batch, _ = query.shape
        saved = self._get_input_buffer(incremental_state) if incremental_state is not None else {}
        key = query if key is None and not self.encoder_decoder_attention else key
        q = self._heads(self.q_proj(query) * self.scaling, batch)  # (B, H, T, D)
        if static_kv and "prev_key" in saved:
            key = None
        k = v = None
        if key is not None:
            keys, values = self.k_proj(key), self.v_proj(key if value is None or self.self_attention else value)
            if self.bias_k is not None:
                keys, values, key_padding_mask, attn_mask = self._add_bias(
                    keys, values, key_padding_mask, attn_mask, batch
                )
            k, v = self._heads(keys, batch), self._heads(values, batch)  # (B, H, S, D)
        if incremental_state is not None:
            k, v, key_padding_mask = self._with_saved(saved, k, v, key_padding_mask, static_kv)
            entry = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": key_padding_mask}
            self._set_input_buffer(incremental_state, entry)
        if k is None or v is None:
            raise AssertionError("key: attention to an encoder needs keys")
        if key_padding_mask is not None and key_padding_mask.dim() == 0:
            key_padding_mask = None
        if self.add_zero_attn:
            zeros = k.new_zeros(batch, self.num_heads, 1, self.head_dim)
            k, v = torch.cat([k, zeros], 2), torch.cat([v, zeros], 2)
            key_padding_mask, attn_mask = self._pad_masks(key_padding_mask, attn_mask)
        scores = self.apply_sparse_mask(q @ k.transpose(2, 3), length, k.size(2), batch)  # (B, H, T, S)
        if attn_mask is not None:
            mask = attn_mask if attn_mask.dim() != 3 else attn_mask.view(batch, -1, *attn_mask.shape[1:])
            scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None].bool(), -torch.inf)
        if before_softmax:
            return scores.flatten(0, 1), v.flatten(0, 1)
        weights = F.softmax(scores, -1, dtype=torch.float32)
        mixed = self.dropout_module(weights.type_as(scores)) @ v  # (B, H, T, D)
        output = self.out_proj(mixed.permute(2, 0, 1, 3).reshape(length, batch, -1))  # (T, B, C)
        if not need_weights:
            return output, None
        return output, weights.transpose(0, 1) if need_head_weights else weights.mean(1)

    def apply_sparse_mask(self, attn_weights: Tensor, tgt_len: int, src_len: int, bsz: int) -> Tensor:
        """The scores [B, H, T, S]; a plug-in may change them."""
        return attn_weights

    def _heads(self, x: Tensor, batch: int) -> Tensor:
        """[S, B, C] → [B, H, S, D]."""
        return x.reshape(-1, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _add_bias(
        self, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, bsz: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values [S, B, C] with the learned ones at the end, and the masks of all."""
        assert self.bias_k is not None and self.bias_v is not None
        k = torch.cat([k, self.bias_k.expand(1, bsz, -1)])
        v = torch.cat([v, self.bias_v.expand(1, bsz, -1)])
        return k, v, *self._pad_masks(key_padding_mask, attn_mask)

    @staticmethod
    def _pad_masks(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Both masks with a key at the end that all may read."""
        padding = None if key_padding_mask is None else F.pad(key_padding_mask, (0, 1))
        return padding, None if attn_mask is None else F.pad(attn_mask, (0, 1))

    def _with_saved(
        self, saved: Any, k: Tensor | None, v: Tensor | None, padding: Tensor | None, static_kv: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Keys, values and padding after the ones of earlier calls; with *static_kv* the earlier
        ones alone."""
        before = saved.get("prev_key")
        if before is None:
            return k, v, padding
        if static_kv or k is None or v is None:
            k, v = before, saved["prev_value"]
        else:
            k, v = torch.cat([before, k], 2), torch.cat([saved["prev_value"], v], 2)
        former = saved.get("prev_key_padding_mask")
        return k, v, self._append_prev_key_padding_mask(padding, former, k.size(0), k.size(2), static_kv)

    @staticmethod
    def _append_prev_key_padding_mask(
        key_padding_mask: Tensor | None,
        prev_key_padding_mask: Tensor | None,
        batch_size: int,
        src_len: int,
        static_kv: bool,
    ) -> Tensor | None:
        """The padding of all keys, bool [B, S], where one of both masks is missing or shorter."""
        if prev_key_padding_mask is not None and static_kv:
            return prev_key_padding_mask
        parts = [mask for mask in (prev_key_padding_mask, key_padding_mask) if mask is not None]
        if not parts:
            return None
        missing = src_len - sum(mask.size(1) for mask in parts)
        if missing > 0:
            filler = parts[0].new_zeros(batch_size, missing)
            parts = [*parts, filler] if key_padding_mask is None else [filler, *parts]
        return torch.cat([mask.float() for mask in parts], 1)

    def reorder_incremental_state(self, incremental_state: State, new_order: Tensor) -> State:
        """Follow a beam's choice of rows."""
        saved = self._get_input_buffer(incremental_state)
        if not saved:
            return incremental_state
        chosen = {name: None if value is None else value.index_select(0, new_order) for name, value in saved.items()}
        return self._set_input_buffer(incremental_state, chosen)

    def set_beam_size(self, beam_size: int) -> None:
        self.beam_size = beam_size

    def _get_input_buffer(self, incremental_state: State | None) -> dict[str, Tensor | None]:
        """Keys, values [B, H, S, D] and padding of earlier calls."""
        return self.get_incremental_state(incremental_state, "attn_state") or {}

    def _set_input_buffer(self, incremental_state: State, buffer: dict[str, Tensor | None]) -> State:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)

    get_incremental_state = get_incremental_state
    set_incremental_state = set_incremental_state

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Split the joint projection of fairseq before 0.8 in *state_dict*."""
        prefix = f"{name}." if name else ""
        for kind in ("weight", "bias"):
            joint = state_dict.pop(f"{prefix}in_proj_{kind}", None)
            for part, rows in zip("qkv", joint.chunk(3) if joint is not None else (), strict=False):
                state_dict[f"{prefix}{part}_proj.{kind}"] = rows
