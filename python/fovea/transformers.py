"""attn_implementation="fovea" for transformers: import this module, then load or configure a model.

Causal and bidirectional attention, sliding windows, sinks, grouped queries, soft caps and padding.
Models with latent attention that cache latents (DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3 and
others) keep them in a LatentLayer and decode absorbed, instead of expanding the whole context each
step. Inference only, on the CPU. NotImplementedError says what is refused: gradients, dropout,
masks of other shapes.
"""

import inspect

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer

from fovea.ops import attention_prefill, mla_decode

__all__ = ["LatentLayer", "attention", "mask"]

# Query tokens per sequence up to which latents are read as they are: the absorbed form multiplies
# (L + R + L) / (P + R + V) times as much per score, about 3.4, and expands nothing.
_MAX_ABSORBED_QUERIES = 16
# Masks whose rules reach attention() by other arguments.
_KNOWN_MASKS = {"causal_mask_function", "bidirectional_mask_function",
                "sliding_window_overlay.<locals>.inner_mask"}
_latent_classes = set()


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None,
         attention_mask=None, **_):
    """What attention() needs of a mask: [batch, keys] bool, True where a key is a token, or None.

    Causality and windows are arguments of attention(). Keys behind the mask's last one are slots
    of a static cache that nothing was written to yet.
    """
    for part in _parts(mask_function):
        if part.__qualname__ not in _KNOWN_MASKS:
            raise NotImplementedError(f"the mask {part.__qualname__} is given: fovea takes causal "
                                      "and bidirectional masks, sliding windows and padding")
    used = int(q_offset) + q_length - int(kv_offset)
    if attention_mask is None:
        return None if used == kv_length else torch.ones(batch_size, used, dtype=torch.bool)
    attention_mask = attention_mask[:, int(kv_offset):int(kv_offset) + min(used, kv_length)]
    return None if attention_mask.shape[1] == kv_length and attention_mask.all() else attention_mask


def _parts(mask_function):
    """The functions that transformers' and_masks put together."""
    if mask_function is None:
        return []
    if mask_function.__qualname__ != "and_masks.<locals>.and_mask":
        return [mask_function]
    joined = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    return [part for function in joined for part in _parts(function)]


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
              sliding_window=None, softcap=None, s_aux=None, is_causal=None, **_):
    """transformers' attention interface.

    Args:
        query: [batch, heads, queries, width]. key, value: [batch, kv_heads, keys, width]; of latent
            attention [batch, 1, keys, kv_lora_rank] and [batch, 1, keys, qk_rope_head_dim].
        attention_mask: what mask() gave.

    Returns:
        [batch, queries, heads, value width], and None for the weights, which are never formed.
    """
    if dropout:
        raise NotImplementedError(f"dropout is {dropout}: fovea is for inference; call "
                                  "model.eval()")
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("gradients are asked for: fovea is for inference; use "
                                  "torch.no_grad() or torch.inference_mode()")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(f"attention_mask has shape {tuple(attention_mask.shape)}; fovea "
                                  "takes [batch, keys]")
    rules = dict(causal=module.is_causal if is_causal is None else is_causal,
                 window_left=sliding_window - 1 if sliding_window else -1, sm_scale=scaling,
                 soft_cap=softcap or 0.0,
                 sinks=None if s_aux is None else s_aux.detach().float())
    if type(module) in _latent_classes:
        if query.shape[2] <= _MAX_ABSORBED_QUERIES:
            return _absorbed(module, query, key, value, attention_mask, rules), None
        key, value = module.expand_latents(key, value)
    elif _caches_latents(module):
        _keep_latents(type(module))  # From the next layer on.
    batch, heads, queries, _ = query.shape
    out = query.new_zeros(batch, queries, heads, value.shape[3])
    for row in range(batch):
        tokens, keys = _tokens(attention_mask, row, queries, key.shape[2])
        attention_prefill(query[row, :, tokens].transpose(0, 1), key[row, :, keys].transpose(0, 1),
                          value[row, :, keys].transpose(0, 1), out=out[row, tokens], **rules)
    return out, None


def _tokens(attention_mask, row, queries, num_keys):
    """Slices of the query tokens and of the keys of a sequence that are no padding."""
    if attention_mask is None:
        return slice(0, queries), slice(0, num_keys)
    real = attention_mask[row].nonzero()[:, 0]
    if len(real) == 0:
        return slice(0, 0), slice(0, 0)
    begin, end = int(real[0]), int(real[-1]) + 1
    if end - begin != len(real):
        raise NotImplementedError(f"attention_mask has gaps in sequence {row}: fovea takes padding "
                                  "before and behind the tokens")
    first = attention_mask.shape[1] - queries  # The key of the first query token.
    return slice(max(begin - first, 0), max(end - first, 0)), slice(begin, end)


def _absorbed(module, query, latent, k_pe, attention_mask, rules):
    """Attention over latents, with kv_b_proj applied to queries and outputs."""
    batch, heads, queries, _ = query.shape
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    w_uk, w_uv = module.kv_b_proj.weight.view(heads, -1, rank).split([nope, module.v_head_dim], 1)
    rows = _rows(latent, k_pe)
    q_latent = (query[..., :nope] @ w_uk).transpose(1, 2)
    q_pe = query[..., nope:].transpose(1, 2)
    out = query.new_zeros(batch, queries, heads, rank)
    for row in range(batch):
        tokens, keys = _tokens(attention_mask, row, queries, rows.shape[1])
        # The sequence's rows are one block.
        mla_decode(q_latent[row, tokens], q_pe[row, tokens], rows[row:row + 1, keys], [[0]],
                   [keys.stop - keys.start], out=out[row, tokens], **rules)
    return (out.transpose(1, 2) @ w_uv.transpose(1, 2)).transpose(1, 2)


def _rows(latent, k_pe):
    """[batch, keys, L + R] of both, without a copy where they are columns of a LatentLayer's."""
    batch, _, keys, rank = latent.shape
    width = rank + k_pe.shape[3]
    strides = latent.stride()
    beside = latent.data_ptr() + rank * latent.element_size() == k_pe.data_ptr()
    if beside and strides == k_pe.stride() and strides[2] >= width and strides[3] == 1:
        return latent.as_strided((batch, keys, width), (strides[0], strides[2], 1))
    return torch.cat([latent, k_pe], dim=3)[:, 0]


class LatentLayer(DynamicLayer):
    """The latents [kv_c | k_pe] of a layer in one tensor that grows by doubling."""

    def __init__(self, layer):
        """Takes over what a DynamicLayer holds."""
        super().__init__()
        self.storage = torch.empty(0)
        if layer.is_initialized:
            self.update(layer.keys, layer.values)

    def update(self, key_states, value_states, *args, **kwargs):
        """Stores [batch, 1, tokens, L] and [batch, 1, tokens, R] behind what is there."""
        old = self.get_seq_length()
        new = old + key_states.shape[2]
        rank = key_states.shape[3]
        if not self._holds(key_states.shape[0], new):
            self._grow(key_states, value_states, old, new)
        self.storage[:, old:new, :rank] = key_states[:, 0]
        self.storage[:, old:new, rank:] = value_states[:, 0]
        self.keys = self.storage[:, None, :new, :rank]
        self.values = self.storage[:, None, :new, rank:]
        return self.keys, self.values

    def _holds(self, batch, tokens):
        """Not so after the sequences were reordered or repeated: their tensors are new then."""
        return (self.is_initialized and self.keys is not None and batch == self.storage.shape[0]
                and tokens <= self.storage.shape[1]
                and self.keys.data_ptr() == self.storage.data_ptr())

    def _grow(self, key_states, value_states, old, new):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rank = key_states.shape[3]
        storage = key_states.new_empty(key_states.shape[0], max(2 * new, 256),
                                       rank + value_states.shape[3])
        if old:
            storage[:, :old, :rank] = self.keys[:, 0]
            storage[:, :old, rank:] = self.values[:, 0]
        self.storage = storage


def _caches_latents(module):
    kv_b_proj = getattr(module, "kv_b_proj", None)
    return hasattr(module, "expand_kv") and type(kv_b_proj) is torch.nn.Linear


def _keep_latents(kind):
    """Makes an attention class of transformers hand latents to attention(), where that is fovea's.

    Models with another attn_implementation are left as they are.
    """
    forward, expand = kind.forward, kind.expand_kv

    def is_ours(self):
        return self.config._attn_implementation == "fovea"

    def keep_or_expand(self, kv_nope, k_rot):
        return (kv_nope, k_rot) if is_ours(self) else expand(self, kv_nope, k_rot)

    def forward_with_latent_layer(self, *args, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        layers = getattr(cache, "layers", [])
        if is_ours(self) and self.layer_idx < len(layers):
            if type(layers[self.layer_idx]) is DynamicLayer:
                layers[self.layer_idx] = LatentLayer(layers[self.layer_idx])
        return forward(self, *args, **kwargs)

    kind.forward, kind.expand_kv, kind.expand_latents = (forward_with_latent_layer, keep_or_expand,
                                                         expand)
    _latent_classes.add(kind)


AttentionInterface.register("fovea", attention)
AttentionMaskInterface.register("fovea", mask)
