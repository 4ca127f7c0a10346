"""flash_attn's inference functions (github.com/Dao-AILab/flash-attention) on fovea.

Changing the import is enough. Takes more than theirs: any block size and width, values of another
width than keys, float32, CPUs. Refuses with NotImplementedError: dropout, ALiBi, rotation inside,
left padding, windows that look ahead.
"""

from fovea._arrays import empty, shape_of
from fovea.compat.flash_mla import batched_lse
from fovea.ops import attention_decode, attention_prefill, gqa_append

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _refuse(**options):
    for name, value in options.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{name} is given: fovea has no such option")


def _rules(causal, window_size, softcap):
    """Their window (left, right) as fovea's rules: nothing ahead, or everything."""
    left, right = window_size
    if right == 0:
        causal = True
    elif right > 0 and not causal:
        raise NotImplementedError(f"window_size is {tuple(window_size)}: fovea bounds what comes "
                                  "before a query; behind it a query sees all or nothing")
    return dict(causal=causal, window_left=left if left >= 0 else -1, soft_cap=softcap)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    """Ragged attention.

    Args:
        q: [total_q, heads, width]. k, v: [total_k, kv_heads, width]; with block_table
            [num_blocks, block_size, kv_heads, width].
        cu_seqlens_q, cu_seqlens_k: [batch + 1] int32. max_seqlen_q, max_seqlen_k: not needed.
        window_size: (left, right), -1: no bound.
        deterministic: results always are.
        return_attn_probs: True gives (out, lse, None): probabilities are never formed.

    Returns:
        out [total_q, heads, width]; lse [heads, total_q], +inf for rows without keys.
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    rules = _rules(causal, window_size, softcap)
    keys = dict(k=k, v=v) if block_table is None else dict(cache=(k, v), block_table=block_table)
    out, lse = attention_prefill(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                                 sm_scale=softmax_scale, return_lse=True, **keys, **rules)
    lse[lse == float("-inf")] = float("inf")
    return (out, lse, None) if return_attn_probs else out


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """Attention of equally long sequences: q, k and v [batch, tokens, heads, width]."""
    batch, queries, heads, _ = shape_of(q, "q", 4)
    keys = shape_of(k, "k", 4)[1]
    flat = [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (q, k, v)]
    results = flash_attn_varlen_func(
        *flat, [i * queries for i in range(batch + 1)], [i * keys for i in range(batch + 1)],
        queries, keys, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, True)
    out = results[0].reshape(batch, queries, heads, v.shape[3])
    if not return_attn_probs:
        return out
    return out, batched_lse(results[1], empty(q, (batch, heads, queries), "float32")), None


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
                            block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True,
                            alibi_slopes=None, num_splits=0, return_softmax_lse=False):
    """Decode over a cache, into which new keys and values go first.

    Args:
        q: [batch, seqlen, heads, width].
        k_cache, v_cache: [batch_cache, seqlen_cache, kv_heads, width], or with block_table
            [num_blocks, block_size, kv_heads, width].
        k, v: [batch, seqlen_new, kv_heads, width]: stored behind cache_seqlens, in place.
        cache_seqlens: int or [batch] int32: what is stored already; None: all of the cache.
        cache_batch_idx: [batch] int32: the row of the cache of each sequence.
        num_splits: fovea decides.

    Returns:
        out [batch, seqlen, heads, width]; with return_softmax_lse also lse [batch, heads, seqlen],
        +inf for rows without keys.
    """
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad,
            alibi_slopes=alibi_slopes)
    rules = _rules(causal, window_size, softcap)
    batch, queries, heads, width = shape_of(q, "q", 4)
    block_size = shape_of(k_cache, "k_cache", 4)[1]
    lengths = _integers(block_size if cache_seqlens is None else cache_seqlens, batch)
    table = _table(block_table, cache_batch_idx, batch)
    if k is not None:
        new = shape_of(k, "k", 4)[1]
        slots = [table[i][position // block_size] * block_size + position % block_size
                 for i, length in enumerate(lengths) for position in range(length, length + new)]
        gqa_append(k.reshape(batch * new, *k.shape[2:]), v.reshape(batch * new, *v.shape[2:]),
                   slots, (k_cache, v_cache))
        lengths = [length + new for length in lengths]
    out = empty(q, (batch, queries, heads, v_cache.shape[3]))
    _, flat = attention_decode(q.reshape(batch * queries, heads, width), (k_cache, v_cache), table,
                               lengths, sm_scale=softmax_scale,
                               out=out.reshape(batch * queries, heads, v_cache.shape[3]),
                               return_lse=True, **rules)
    if not return_softmax_lse:
        return out
    return out, batched_lse(flat, empty(q, (batch, heads, queries), "float32"))


def _integers(lengths, batch):
    return [lengths] * batch if isinstance(lengths, int) else [int(n) for n in lengths]


def _table(block_table, cache_batch_idx, batch):
    """Block ids; a cache without a table has one block for each of its sequences."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx and block_table are given; a table says which blocks "
                             "a sequence has")
        return block_table.tolist()
    return [[i] for i in (range(batch) if cache_batch_idx is None
                          else _integers(cache_batch_idx, batch))]
