"""How each signature is called with a problem."""

import numpy as np

import fovea


class Signature:
    """What a callable takes. run() gives out [T, N, Dv] and lse [N, T] or None, both float64."""

    is_latent = False
    uniform_queries = False
    takes_formats = False
    empty_lse = (-np.inf,)

    @property
    def name(self):
        return type(self).__name__

    def expresses(self, case):
        return True

    def widths(self, dims):
        """heads, key heads, width of queries and keys, width of values."""
        return dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.v_head_dim

    def sinks(self, problem):
        return None if problem.sinks is None else problem.arrays.floats(problem.sinks, "float32")


class Latent(Signature):
    is_latent = True

    def widths(self, dims):
        return dims.num_heads, 1, dims.latent_dim, dims.kv_lora_rank


def _cumulative(lengths):
    return np.cumsum([0, *lengths])


class _Fovea:
    """Rules and results of fovea's own functions."""

    def keywords(self, problem):
        return dict(problem.case.rules, sm_scale=problem.sm_scale, sinks=self.sinks(problem),
                    return_lse=True)

    def results(self, problem, results):
        return tuple(problem.arrays.read(result) for result in results)


class mla_decode(_Fovea, Latent):
    takes_formats = True

    def run(self, call, problem):
        case, arrays = problem.case, problem.arrays
        q = arrays.floats(np.concatenate(problem.q))
        cache = self._cache(problem)
        return self.results(problem, call(
            q[..., :problem.v_dim], q[..., problem.v_dim:], cache, arrays.integers(problem.table),
            arrays.integers(case.key_lens),
            query_start_loc=arrays.integers(_cumulative(case.query_lens)),
            **self.keywords(problem)))

    def _cache(self, problem):
        rows = problem.paged_keys()[:, :, 0]
        if problem.format in ("bf16", "f16", "f32"):
            return problem.arrays.floats(rows)
        def over(storage):
            return fovea.PagedKvCache.latent(problem.v_dim, problem.qk_dim - problem.v_dim,
                                             format=problem.format, storage=storage)

        row = fovea.KvFormat.latent(problem.format, problem.v_dim, problem.qk_dim - problem.v_dim)
        storage = problem.storage(row.row_bytes)
        cache = over(storage)
        for request, one in enumerate(problem._with_nan(problem.k)):
            kv_c, k_pe = np.split(one[:, 0].astype(np.float32), [problem.v_dim], axis=1)
            fovea.kv_append(kv_c, k_pe, problem.slots(request), cache)
        stored = [_gathered(cache.rows, problem, request) for request in range(len(problem.k))]
        problem.use_stored([np.nan_to_num(one) for one in stored],
                           [np.nan_to_num(one[..., :problem.v_dim]) for one in stored])
        return over(problem.arrays.bytes(storage))


class attention_decode(_Fovea, Signature):
    takes_formats = True

    def run(self, call, problem):
        case, arrays = problem.case, problem.arrays
        return self.results(problem, call(
            arrays.floats(np.concatenate(problem.q)), self._cache(problem),
            arrays.integers(problem.table), arrays.integers(case.key_lens),
            query_start_loc=arrays.integers(_cumulative(case.query_lens)),
            **self.keywords(problem)))

    def _cache(self, problem):
        if problem.format in ("bf16", "f16", "f32"):
            return (problem.arrays.floats(problem.paged_keys()),
                    problem.arrays.floats(problem.paged_values()))
        def over(keys, values):
            return fovea.PagedKvCache.heads(problem.kv_heads, problem.qk_dim, problem.v_dim,
                                            format=problem.format, k_storage=keys,
                                            v_storage=values)

        storages = [problem.storage(
            fovea.KvFormat.heads(problem.format, problem.kv_heads, width).row_bytes)
            for width in (problem.qk_dim, problem.v_dim)]
        cache = over(*storages)
        for request, rows in enumerate(zip(problem._with_nan(problem.k), problem.v)):
            fovea.gqa_append(*(one.astype(np.float32) for one in rows), problem.slots(request),
                             cache)
        problem.use_stored(*([np.nan_to_num(_gathered(part, problem, request))
                              for request in range(len(problem.k))] for part in cache.parts))
        return over(*map(problem.arrays.bytes, storages))


def _gathered(cache, problem, request):
    tokens = problem.case.key_lens[request]
    out = np.empty((tokens, cache.format.row_elements), np.float32)
    fovea.kv_gather(cache, [list(map(int, problem.table[request]))], [tokens], out)
    return out.astype(np.float64).reshape(tokens, problem.kv_heads,
                                          cache.format.row_elements // problem.kv_heads)


class attention_prefill(_Fovea, Signature):
    def expresses(self, case):
        return not case.shared and case.garbage == "nan"  # Nothing is in blocks.

    def run(self, call, problem):
        case, arrays = problem.case, problem.arrays
        operands = (np.concatenate(problem.q), *problem.ragged())
        return self.results(problem, call(
            *(arrays.floats(operand) for operand in operands),
            arrays.integers(_cumulative(case.query_lens)),
            arrays.integers(_cumulative(case.key_lens)), **self.keywords(problem)))


class flash_mla_with_kvcache(Latent):
    uniform_queries = True
    empty_lse = (np.inf, -np.inf)

    def expresses(self, case):
        return case.window_left < 0 and not case.attention_chunk and not case.soft_cap

    def run(self, call, problem):
        case, arrays = problem.case, problem.arrays
        lengths = arrays.integers(case.key_lens)
        metadata, num_splits = self._metadata(call, lengths, case, problem)
        sinks = {} if problem.sinks is None else {"attn_sink": self.sinks(problem)}
        out, lse = call(arrays.floats(np.stack(problem.q)), arrays.floats(problem.paged_keys()),
                        arrays.integers(problem.table), lengths, problem.v_dim, metadata,
                        num_splits, softmax_scale=problem.sm_scale, causal=case.causal, **sinks)
        return arrays.read(out).reshape(-1, problem.heads, problem.v_dim), _batched(arrays, lse)

    @staticmethod
    def _metadata(call, lengths, case, problem):
        """From get_mla_metadata beside the callable; a callable without it gets None."""
        import sys
        make = getattr(sys.modules.get(getattr(call, "__module__", ""), None), "get_mla_metadata",
                       None)
        if make is None:
            return None, None
        return make(lengths, case.query_lens[0] * problem.heads, 1)


def _batched(arrays, lse):
    """[batch, heads, queries] as [heads, tokens]."""
    lse = arrays.read(lse)
    return lse.transpose(1, 0, 2).reshape(lse.shape[1], -1)


def _window(case):
    return (case.window_left, 0 if case.causal and case.window_left >= 0 else -1)


class flash_attn_varlen_func(Signature):
    empty_lse = (np.inf, -np.inf)

    def expresses(self, case):
        return (not case.shared and case.garbage == "nan" and not case.attention_chunk
                and not case.sinks)

    def run(self, call, problem):
        case, arrays = problem.case, problem.arrays
        operands = (np.concatenate(problem.q), *problem.ragged())
        out, lse, *_ = call(*(arrays.floats(operand) for operand in operands),
                            arrays.integers(_cumulative(case.query_lens)),
                            arrays.integers(_cumulative(case.key_lens)), max(case.query_lens),
                            max(case.key_lens), softmax_scale=problem.sm_scale,
                            causal=case.causal, window_size=_window(case), softcap=case.soft_cap,
                            return_attn_probs=True)
        return arrays.read(out), arrays.read(lse)


class flash_attn_with_kvcache(Signature):
    uniform_queries = True
    empty_lse = (np.inf, -np.inf)

    def expresses(self, case):
        return not case.attention_chunk and not case.sinks

    def run(self, call, problem):
        case, arrays = problem.case, problem.arrays
        out, lse = call(arrays.floats(np.stack(problem.q)), arrays.floats(problem.paged_keys()),
                        arrays.floats(problem.paged_values()),
                        cache_seqlens=arrays.integers(case.key_lens),
                        block_table=arrays.integers(problem.table),
                        softmax_scale=problem.sm_scale, causal=case.causal,
                        window_size=_window(case), softcap=case.soft_cap, return_softmax_lse=True)
        return arrays.read(out).reshape(-1, problem.heads, problem.v_dim), _batched(arrays, lse)


_SIGNATURES = {kind.__name__: kind for kind in (
    mla_decode, attention_decode, attention_prefill, flash_mla_with_kvcache,
    flash_attn_varlen_func, flash_attn_with_kvcache)}


def signature_of(name, dims):
    kind = _SIGNATURES.get(name)
    if kind is None:
        raise ValueError(f"signature is {name!r}; it must be one of {', '.join(_SIGNATURES)}")
    wanted = fovea.MlaDims if issubclass(kind, Latent) else fovea.GqaDims
    if not isinstance(dims, wanted):
        raise TypeError(f"dims is a {type(dims).__name__}; {name} needs {wanted.__name__}")
    return kind()
