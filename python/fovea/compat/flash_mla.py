"""flash_mla's decode (github.com/deepseek-ai/FlashMLA) on fovea: change the import, nothing else.

Takes more than theirs: any block size, head count and width, float32 and float16, sinks on dense
attention. Refuses with NotImplementedError what nothing here implements: sparse indices and their
companions.
"""

from fovea import _core
from fovea._arrays import empty, shape_of
from fovea.ops import mla_decode

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*args, **kwargs):
    """(None, None): fovea plans inside the call. Takes whatever theirs takes."""
    return None, None


def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v,
                           tile_scheduler_metadata=None, num_splits=None, softmax_scale=None,
                           causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
                           extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
                           extra_topk_length=None):
    """Dense decode over a paged latent cache.

    Args:
        q: [batch, seq_len_q, num_heads_q, head_dim].
        k_cache: [num_blocks, page_block_size, 1, head_dim]; with is_fp8_kvcache rows of 656 bytes
            of a byte-wide dtype, DeepSeek's FP8 format.
        block_table: [batch, max_num_blocks] int32. cache_seqlens: [batch] int32.
        head_dim_v: width of the values, the first channels of a row.
        tile_scheduler_metadata, num_splits: not needed.
        softmax_scale: None takes head_dim ** -0.5, as theirs does. MLA's own scale comes from the
            width before absorption: pass it.
        causal: query tokens see what is not behind them; they stand at the end.
        attn_sink: [num_heads_q] float32.

    Returns:
        out [batch, seq_len_q, num_heads_q, head_dim_v] and lse [batch, num_heads_q, seq_len_q]
        float32, which is +inf for rows without keys, as theirs is.
    """
    sparse = dict(indices=indices, extra_k_cache=extra_k_cache, topk_length=topk_length,
                  extra_indices_in_kvcache=extra_indices_in_kvcache,
                  extra_topk_length=extra_topk_length)
    for name, value in sparse.items():
        if value is not None:
            raise NotImplementedError(f"{name} is given: fovea has no sparse attention")
    batch, queries, heads, width = shape_of(q, "q", 4)
    _, _, kv_heads, _ = shape_of(k_cache, "k_cache", 4)
    if kv_heads != 1:
        raise ValueError(f"k_cache has {kv_heads} heads; latent rows have one")
    if not 0 < head_dim_v < width:
        raise ValueError(f"head_dim_v is {head_dim_v}; it must be in (0, {width})")
    rows = k_cache[:, :, 0]
    if is_fp8_kvcache:
        format = _core.KvFormat.latent("fp8_ds_mla", head_dim_v, width - head_dim_v)
        rows = _core.KvCache.over(_as_bytes(rows), format)
    tokens = q.reshape(batch * queries, heads, width)
    out = empty(q, (batch, queries, heads, head_dim_v))
    lse = empty(q, (batch, heads, queries), "float32")
    # Theirs is [batch, heads, queries], fovea's [heads, tokens].
    _, flat = mla_decode(tokens[..., :head_dim_v], tokens[..., head_dim_v:], rows, block_table,
                         cache_seqlens, causal=causal, sinks=attn_sink,
                         sm_scale=width ** -0.5 if softmax_scale is None else softmax_scale,
                         out=out.reshape(batch * queries, heads, head_dim_v), return_lse=True)
    return out, batched_lse(flat, lse)


def batched_lse(flat, lse):
    """Fills [batch, heads, queries] from [heads, tokens]; -inf, of no keys, becomes +inf."""
    batch, heads, queries = lse.shape
    lse[...] = flat.reshape(heads, batch, queries).swapaxes(0, 1)
    lse[lse == float("-inf")] = float("inf")
    return lse


def _as_bytes(rows):
    """Rows of a byte-wide dtype as uint8, for torch and NumPy alike."""
    if hasattr(rows, "new_empty"):
        import torch
        return rows.view(torch.uint8)
    return rows.view("uint8")
