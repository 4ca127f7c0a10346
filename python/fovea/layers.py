"""Attention layers of models: projections, norms, rotation, attention and o_proj."""

from fovea import _core
from fovea._arrays import empty, result_of, shape_of
from fovea.cache import PagedKvCache
from fovea.ops import _heads_of


class MlaLayer(_core.MlaLayer):
    """A layer with latent attention: expanded prefill with context chunks, absorbed decode.

    Args:
        dims: MlaDims.
        weights: tensors by name, [out, in], copied: q_a_proj [Lq, H], q_a_layernorm [Lq] and
            q_b_proj [N (P + R), Lq], or q_b_proj [N (P + R), H] alone; kv_a_proj [L + R, H],
            kv_a_layernorm [L], kv_b_proj [N (P + V), L], o_proj [H, N V]; optional q_a_bias,
            kv_a_bias, o_bias and sinks [N].
        rotary: RotaryEmbedding; None: nothing turns.
        absorption: "two_step", or "full": decode multiplies with products made once.
        rms_norm_eps: of q_a_layernorm and kv_a_layernorm.
        kv_b_order: columns of kv_b_proj: "per_head" or "grouped".

    Raises:
        ValueError: names the weight or option that does not fit.
    """

    def __call__(self, hidden, cache, plan, block_table, slot_mapping=None, positions=None, *,
                 out=None, runtime=None):
        """out [T, H] of hidden [T, H]: stores the new rows, then attends.

        Args:
            hidden: [T, H] dtype of the layer, after input_layernorm; decodes first.
            cache: a PagedKvCache of latent rows, or a tensor [num_blocks, block_size, L + R].
            plan: BatchPlan of the step, context_plan "packed" or "equal".
            block_table: [requests, width] int32, or a list of lists.
            slot_mapping: [T]; None: nothing is stored.
            positions: [T] int32 or int64; may be None where nothing turns.
        """
        shape_of(hidden, "hidden", 2)
        result = empty(hidden, tuple(hidden.shape)) if out is None else out
        rows = cache.rows if isinstance(cache, PagedKvCache) else cache
        _core.run_mla_layer(self, runtime, hidden, result, plan, rows, block_table, slot_mapping,
                            positions)
        return result_of(hidden, result) if out is None else out


class AttentionLayer(_core.AttentionLayer):
    """A layer with grouped-query attention, read from the blocks of the cache.

    Args:
        dims: GqaDims.
        weights: tensors by name, [out, in], copied: qkv_proj, or q_proj, k_proj and v_proj; o_proj;
            optional qkv_bias, q_bias, k_bias, v_bias, o_bias, q_norm, k_norm and sinks [N].
        rotary: RotaryEmbedding; None: nothing turns.
        qk_norm: "none", "pre_rope" or "post_rope".
        rms_norm_eps: of q_norm and k_norm.

    Raises:
        ValueError: names the weight or option that does not fit.
    """

    def __call__(self, hidden, cache, plan, block_table, slot_mapping=None, positions=None, *,
                 out=None, runtime=None):
        """As MlaLayer's, with a PagedKvCache of heads or a pair of tensors [num_blocks, block_size,
        Hk, width], and a plan with context_plan "paged"."""
        shape_of(hidden, "hidden", 2)
        result = empty(hidden, tuple(hidden.shape)) if out is None else out
        keys, values = _heads_of(cache)
        _core.run_attention_layer(self, runtime, hidden, result, plan, keys, values, block_table,
                                  slot_mapping, positions)
        return result_of(hidden, result) if out is None else out
