"""torch.ops.fovea: the ops as custom ops of torch, so that torch.compile goes through them.

Arguments and meaning are those of fovea.ops; every attention op returns (out, lse). Inference only.
"""

from typing import Optional

import torch
from torch import Tensor

from fovea import ops

__all__ = ["attention_decode", "attention_prefill", "gqa_append", "kv_append", "merge_state",
           "mla_decode"]


def _op(name, mutates=()):
    return torch.library.custom_op(f"fovea::{name}", mutates_args=mutates)


def _state(q, width):
    """What an attention op over q [T, N, ...] returns, without values."""
    return (q.new_empty(q.shape[0], q.shape[1], width),
            q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))


@_op("mla_decode")
def mla_decode(q_latent: Tensor, q_pe: Tensor, cache: Tensor, block_table: Tensor,
               seq_lens: Tensor, query_start_loc: Tensor, sm_scale: float, causal: bool = True,
               window_left: int = -1, attention_chunk: int = 0, soft_cap: float = 0.0,
               sinks: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    return ops.mla_decode(q_latent, q_pe, cache, block_table, seq_lens, sm_scale=sm_scale,
                          query_start_loc=query_start_loc, causal=causal, window_left=window_left,
                          attention_chunk=attention_chunk, soft_cap=soft_cap, sinks=sinks,
                          return_lse=True)


@mla_decode.register_fake
def _(q_latent, *args, **kwargs):
    return _state(q_latent, q_latent.shape[2])


@_op("attention_decode")
def attention_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
                     seq_lens: Tensor, query_start_loc: Tensor, sm_scale: float,
                     causal: bool = True, window_left: int = -1, attention_chunk: int = 0,
                     soft_cap: float = 0.0,
                     sinks: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    return ops.attention_decode(q, (k_cache, v_cache), block_table, seq_lens, sm_scale=sm_scale,
                                query_start_loc=query_start_loc, causal=causal,
                                window_left=window_left, attention_chunk=attention_chunk,
                                soft_cap=soft_cap, sinks=sinks, return_lse=True)


@attention_decode.register_fake
def _(q, k_cache, v_cache, *args, **kwargs):
    return _state(q, v_cache.shape[3])


@_op("attention_prefill")
def attention_prefill(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                      sm_scale: float, causal: bool = True, window_left: int = -1,
                      attention_chunk: int = 0, soft_cap: float = 0.0,
                      sinks: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    return ops.attention_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, sm_scale=sm_scale,
                                 causal=causal, window_left=window_left,
                                 attention_chunk=attention_chunk, soft_cap=soft_cap, sinks=sinks,
                                 return_lse=True)


@attention_prefill.register_fake
def _(q, k, v, *args, **kwargs):
    return _state(q, v.shape[2])


@_op("merge_state")
def merge_state(prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor,
                sinks: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    return ops.merge_state(prefix_out, prefix_lse, suffix_out, suffix_lse, sinks=sinks)


@merge_state.register_fake
def _(prefix_out, *args, **kwargs):
    return _state(prefix_out, prefix_out.shape[2])


@_op("kv_append", mutates=["cache"])
def kv_append(kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    ops.kv_append(kv_c, k_pe, slot_mapping, cache)


@_op("gqa_append", mutates=["k_cache", "v_cache"])
def gqa_append(k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor,
               v_cache: Tensor) -> None:
    ops.gqa_append(k, v, slot_mapping, (k_cache, v_cache))
