"""The ops. T tokens, N heads, Hk key heads, L kv_lora_rank, R qk_rope_head_dim, D and Dv widths.

Which keys a query sees: `causal`: up to its own position, query tokens standing at the end of
their sequence; `window_left` w: its own and w before it, negative: all; `attention_chunk` c: from
the last multiple of c on, 0: all; scaled scores become soft_cap * tanh(score / soft_cap), 0: as
they are. `sinks` [N] float32 are raw logits that join the denominator of the output, not lse. lse
is [N, T] float32, the natural logarithm; a query without keys has output 0 and lse -inf.

With a `plan` (BatchPlan) the lengths and all of these rules are the plan's. `runtime` None is one
of the device of the operands. `out` and `lse` are written where given, and made in the library of
the operands otherwise; each function returns out, or (out, lse) where lse is given or return_lse
is True.

On a GPU a function returns when its work is queued: on the current stream of the operands' library,
or on the runtime's. Lengths and block tables are needed on the host: arrays of a GPU are copied,
which waits for them.
"""

from fovea import _core
from fovea._arrays import empty, result_of, shape_of, slots_beside
from fovea.cache import PagedKvCache


def _rows_of(cache):
    return cache.rows if isinstance(cache, PagedKvCache) else cache


def _heads_of(cache):
    """Keys and values of a PagedKvCache of heads, or of a pair of tensors or KvCaches."""
    if isinstance(cache, PagedKvCache):
        return cache.keys, cache.values
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        return cache
    raise TypeError(f"cache is a {type(cache).__name__}; it must be a PagedKvCache of heads or a "
                    "pair of keys and values")


def _value_width(values):
    if isinstance(values, _core.KvCache):
        return values.format.row_elements // values.format.num_heads
    return shape_of(values, "the values of cache", 4)[3]


def _attention_results(like, out, lse, return_lse, shape, dtype=None):
    if out is None:
        out = empty(like, shape, dtype)
    if lse is None and return_lse:
        lse = empty(like, (shape[1], shape[0]), "float32")
    return out, lse


def _returned(like, result, result_lse, out, lse):
    """What was given as it is, what was made in the library of `like`."""
    first = result_of(like, result) if out is None else out
    if result_lse is None:
        return first
    return first, result_of(like, result_lse) if lse is None else lse


def mla_decode(q_latent, q_pe, cache, block_table, seq_lens=None, *, sm_scale,
               query_start_loc=None, plan=None, causal=True, window_left=-1, attention_chunk=0,
               soft_cap=0.0, sinks=None, q_scale=0.0, out=None, lse=None, return_lse=False,
               runtime=None):
    """Absorbed MLA decode: all heads of a request attend to the same latent rows [kv_c | k_pe].

    Args:
        q_latent: [T, N, L] float32, float16 or bfloat16, q_nope through W_UK; or float8_e4m3fn.
        q_pe: [T, N, R] dtype of q_latent, rotated. Both may be slices of one tensor.
        cache: a PagedKvCache of latent rows, or a tensor [num_blocks, block_size, L + R].
        block_table: [requests, width] int32, or a list of lists. Entries behind a request's length
            are never read.
        seq_lens: [requests] keys of each request, its query tokens' own included.
        sm_scale: the softmax scale, from the width before absorption: MlaDims.sm_scale.
        query_start_loc: [requests + 1] int32; None: every request has T / requests query tokens.
        q_scale: of float8_e4m3fn queries: multiplies the stored values.
        out: [T, N, L] dtype of q_latent or float32; with float8_e4m3fn queries bfloat16 is made.
    """
    tokens, heads, width = shape_of(q_latent, "q_latent", 3)
    dtype = "bfloat16" if q_scale else None
    result, result_lse = _attention_results(q_latent, out, lse, return_lse,
                                            (tokens, heads, width), dtype)
    _core.mla_decode(runtime, q_latent, q_pe, _rows_of(cache), block_table, query_start_loc,
                     seq_lens, plan, causal, window_left, attention_chunk, soft_cap, sm_scale,
                     sinks, q_scale, result, result_lse)
    return _returned(q_latent, result, result_lse, out, lse)


def attention_decode(q, cache, block_table, seq_lens=None, *, sm_scale=None, query_start_loc=None,
                     plan=None, causal=True, window_left=-1, attention_chunk=0, soft_cap=0.0,
                     sinks=None, out=None, lse=None, return_lse=False, runtime=None):
    """Attention of a few query tokens per request over paged keys and values, split over keys.

    Args:
        q: [T, N, D] float32, float16 or bfloat16. Head n reads key head n / (N / Hk).
        cache: a PagedKvCache of heads, or a pair of tensors [num_blocks, block_size, Hk, D] and
            [num_blocks, block_size, Hk, Dv].
        block_table, seq_lens, query_start_loc: as in mla_decode.
        sm_scale: None takes D ** -0.5.
        out: [T, N, Dv] dtype of q or float32.
    """
    keys, values = _heads_of(cache)
    tokens, heads, _ = shape_of(q, "q", 3)
    result, result_lse = _attention_results(q, out, lse, return_lse,
                                            (tokens, heads, _value_width(values)))
    _core.attention_decode(runtime, q, keys, values, block_table, query_start_loc, seq_lens, plan,
                           causal, window_left, attention_chunk, soft_cap, sm_scale, sinks, result,
                           result_lse)
    return _returned(q, result, result_lse, out, lse)


def attention_prefill(q, k=None, v=None, cu_seqlens_q=None, cu_seqlens_k=None, *, k_pe=None,
                      cache=None, block_table=None, sm_scale=None, plan=None, causal=True,
                      window_left=-1, attention_chunk=0, soft_cap=0.0, sinks=None, out=None,
                      lse=None, return_lse=False, runtime=None):
    """Attention of whole prompts, or of chunks of them, one request after the other.

    Keys and values are k and v, or those of `cache`, or both: then k and v are those of the query
    tokens, and what comes before them is in the cache.

    Args:
        q: [Tq, N, D] float32, float16 or bfloat16.
        k: [Tk, Hk, D], or [Tk, Hk, D - R] with k_pe.
        v: [Tk, Hk, Dv].
        cu_seqlens_q: [requests + 1] int32 from 0; None: one request.
        cu_seqlens_k: [requests + 1] int32 from 0: keys of each request, those in the cache
            included; None: as cu_seqlens_q, or all of k where that is None too.
        k_pe: [Tk, R]: the last R channels of every key head.
        cache, block_table: as in attention_decode.
        sm_scale: None takes D ** -0.5.
        out: [Tq, N, Dv] dtype of q or float32.
    """
    tokens, heads, _ = shape_of(q, "q", 3)
    keys, values = (None, None) if cache is None else _heads_of(cache)
    if v is None and values is None:
        raise ValueError("k and v are None; keys and values must come from them or from cache")
    width = _value_width(values) if v is None else shape_of(v, "v", 3)[2]
    if cu_seqlens_k is None and plan is None:
        if cache is not None:
            raise ValueError("cu_seqlens_k is None; with a cache it must say each request's keys")
        cu_seqlens_k = [0, v.shape[0]] if cu_seqlens_q is None and v is not None else cu_seqlens_q
    if cu_seqlens_q is None:
        cu_seqlens_q = [0, tokens]
    result, result_lse = _attention_results(q, out, lse, return_lse, (tokens, heads, width))
    _core.attention_prefill(runtime, q, k, k_pe, v, keys, values, block_table, cu_seqlens_q,
                            cu_seqlens_k, plan, causal, window_left, attention_chunk, soft_cap,
                            sm_scale, sinks, result, result_lse)
    return _returned(q, result, result_lse, out, lse)


def merge_state(prefix_out, prefix_lse, suffix_out, suffix_lse, *, sinks=None, out=None, lse=None,
                runtime=None):
    """Attention over both parts' keys from the attention over each: (out, lse).

    An empty part (lse -inf or +inf) has no weight, whatever its out holds.

    Args:
        prefix_out, suffix_out: [T, N, D] float32, float16 or bfloat16.
        prefix_lse, suffix_lse: [N, T] float32, natural logarithms.
        sinks: [N] float32, at the last merge only.
        out, lse: may be those of either part.
    """
    tokens, heads, width = shape_of(prefix_out, "prefix_out", 3)
    result, result_lse = _attention_results(prefix_out, out, lse, True, (tokens, heads, width))
    _core.merge_state(runtime, prefix_out, prefix_lse, suffix_out, suffix_lse, sinks, result,
                      result_lse)
    return _returned(prefix_out, result, result_lse, out, lse)


def kv_append(kv_c, k_pe, slot_mapping, cache, *, runtime=None):
    """Stores the row [kv_c[t] | k_pe[t]] in slot slot_mapping[t] of a cache of latent rows.

    Args:
        kv_c: [T, L] float32, float16 or bfloat16.
        k_pe: [T, R] dtype of kv_c, rotated.
        slot_mapping: [T] int32 or int64, block * block_size + row; -1 skips a token.
        cache: a PagedKvCache of latent rows, or a tensor [num_blocks, block_size, L + R].
    """
    _core.kv_append(runtime, kv_c, k_pe, slots_beside(kv_c, slot_mapping), _rows_of(cache))


def gqa_append(k, v, slot_mapping, cache, *, runtime=None):
    """Stores keys k[t] and values v[t] of all heads in slot slot_mapping[t].

    Args:
        k: [T, Hk, D] float32, float16 or bfloat16, rotated.
        v: [T, Hk, Dv] dtype of k.
        slot_mapping: [T] int32 or int64; -1 skips a token.
        cache: a PagedKvCache of heads, or a pair of tensors as in attention_decode.
    """
    keys, values = _heads_of(cache)
    _core.gqa_append(runtime, k, v, slots_beside(k, slot_mapping), keys, values)


def kv_gather(cache, block_table, seq_lens, out, *, starts=None, runtime=None):
    """Copies seq_lens[i] rows of request i from position starts[i] on, one request after the other.

    Args:
        cache: a PagedKvCache of latent rows, a KvCache or a tensor [num_blocks, block_size, row].
        block_table: [requests, width] int32, or a list of lists.
        seq_lens: [requests] rows of each request.
        out: [sum(seq_lens), row] float32, float16 or bfloat16; or its bytes as uint8.
        starts: [requests]; None: 0.
    """
    if starts is None:
        starts = [0] * len(seq_lens)
    _core.kv_gather(runtime, _rows_of(cache), block_table, starts, seq_lens, out)
    return out
