"""attn_implementation="fovea" for transformers: import this module, then load or configure a model.

Causal and bidirectional attention, sliding windows, sinks, grouped queries, soft caps and padding.
Models with latent attention that cache latents (DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3 and
others) keep them in a LatentLayer, in blocks, and decode absorbed, instead of expanding the whole
context each step. Inference only. NotImplementedError says what is refused: gradients, dropout,
masks of other shapes.
"""

import inspect
import itertools

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer

from fovea.cache import PagedKvCache
from fovea.ops import attention_prefill, kv_append, kv_gather, mla_decode

__all__ = ["LatentLayer", "attention", "mask"]

# Query tokens per sequence up to which latents are read as they are: the absorbed form multiplies
# (L + R + L) / (P + R + V) times as much per score, about 3.4, and expands nothing.
_MAX_ABSORBED_QUERIES = 16
# Masks whose rules reach attention() by other arguments.
_KNOWN_MASKS = {"causal_mask_function", "bidirectional_mask_function",
                "sliding_window_overlay.<locals>.inner_mask"}
_FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
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
              sliding_window=None, softcap=None, s_aux=None, is_causal=None, latent_layer=None,
              **_):
    """transformers' attention interface.

    Args:
        query: [batch, heads, queries, width]. key, value: [batch, kv_heads, keys, width]; of latent
            attention [batch, 1, keys, kv_lora_rank] and [batch, 1, keys, qk_rope_head_dim].
        attention_mask: what mask() gave.
        latent_layer: the LatentLayer that took key and value, or None: they are all keys.

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
        return _latent(module, query, key, value, attention_mask, latent_layer, rules), None
    if _caches_latents(module):
        _keep_latents(type(module))  # From the next layer on.
    batch, heads, queries, _ = query.shape
    out = query.new_zeros(batch, queries, heads, value.shape[3])
    for row in range(batch):
        tokens, keys = _tokens(attention_mask, row, queries, key.shape[2])
        _prefill(query[row, :, tokens], key[row, :, keys], value[row, :, keys], out[row, tokens],
                 rules)
    return out, None


def _prefill(query, key, value, out, rules):
    """One sequence: query, key and value [heads, tokens, width], out [tokens, heads, width]."""
    attention_prefill(*(part.transpose(0, 1) for part in (query, key, value)), out=out, **rules)


def _latent(module, query, latent, k_pe, attention_mask, layer, rules):
    """Attention over what a LatentLayer holds after this call: absorbed, or expanded once."""
    if layer is None:
        layer = LatentLayer()
        layer.update(latent, k_pe)
    batch, heads, queries, _ = query.shape
    tokens, keys = zip(*(_tokens(attention_mask, row, queries, layer.get_seq_length())
                         for row in range(batch)))
    layer.store(keys)
    if queries <= _MAX_ABSORBED_QUERIES:
        return _absorbed(module, query, layer, tokens, rules)
    out = query.new_zeros(batch, queries, heads, module.v_head_dim)
    for row, span in enumerate(tokens):
        key, value = module.expand_latents(*layer.latents(row))
        _prefill(query[row, :, span], key[0], value[0], out[row, span], rules)
    return out


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


def _absorbed(module, query, layer, tokens, rules):
    """Attention over the blocks of a LatentLayer, kv_b_proj applied to queries and outputs.

    tokens: of each sequence the slice of its query tokens that are no padding.
    """
    batch, heads, queries, _ = query.shape
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    w_uk, w_uv = module.kv_b_proj.weight.view(heads, -1, rank).split([nope, module.v_head_dim], 1)
    q_latent = (query[..., :nope] @ w_uk).transpose(1, 2)
    q_pe = query[..., nope:].transpose(1, 2)
    counts = [span.stop - span.start for span in tokens]
    starts = list(itertools.accumulate(counts, initial=0))
    out = query.new_zeros(batch, queries, heads, rank)
    real = [(row, span) for row, span in enumerate(tokens) if span.stop > span.start]
    if real:
        attended = mla_decode(_packed(q_latent, real), _packed(q_pe, real), layer.cache,
                              [sequence.blocks for sequence in layer.sequences],
                              [len(sequence) for sequence in layer.sequences],
                              query_start_loc=starts, **rules)
        for row, span in real:
            out[row, span] = attended[starts[row]:starts[row + 1]]
    return (out.transpose(1, 2) @ w_uv.transpose(1, 2)).transpose(1, 2)


def _packed(rows, spans):
    """The tokens of rows [batch, tokens, ...] that (row, slice) pairs name, one after the other."""
    return torch.cat([rows[row, span] for row, span in spans])


class LatentLayer(DynamicLayer):
    """The latents [kv_c | k_pe] of a layer in blocks of a PagedKvCache, without the padding.

    Attributes:
        cache: the PagedKvCache, whose pool doubles when it is full; None before the first tokens.
        sequences: its Sequences, one for each row of the batch. Beams share blocks.
    """

    _BLOCK_SIZE = 64

    def __init__(self, layer=None):
        """Takes over what a DynamicLayer holds."""
        super().__init__()
        self.cache, self.sequences = None, []
        self._length = 0
        self._pending = []  # What store() has not seen.
        if layer is not None and layer.is_initialized:
            self.update(layer.keys, layer.values)

    def update(self, key_states, value_states, *args, **kwargs):
        """Takes [batch, 1, tokens, L] and [batch, 1, tokens, R], and gives them back as they are.

        They are stored by the attention that comes next, which knows what is padding.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._pending.append((key_states[:, 0], value_states[:, 0]))
        self._length += key_states.shape[2]
        return key_states, value_states

    def store(self, positions):
        """Stores what update() took: of each sequence those of the positions in a slice."""
        if not self._pending:
            return
        latent, k_pe = (torch.cat(parts, dim=1) for parts in zip(*self._pending))
        first = self._length - latent.shape[1]
        new = [(row, slice(max(span.start - first, 0), max(span.stop - first, 0)))
               for row, span in enumerate(positions)]
        self._make_room(latent, k_pe, [span.stop - span.start for _, span in new])
        slots = []
        for row, span in new:
            sequence = self.sequences[row]
            slots += sequence.reserve(len(sequence) + span.stop - span.start)
        if slots:
            kv_append(_packed(latent, new), _packed(k_pe, new), slots, self.cache)
        for row, span in new:
            self.sequences[row].advance(len(self.sequences[row]) + span.stop - span.start)
        self._pending = []

    def latents(self, row):
        """[1, 1, keys, L] and [1, 1, keys, R] of a sequence, copied."""
        sequence, (width, rank) = self.sequences[row], self._widths
        rows = self.keys.new_empty(len(sequence), width)
        kv_gather(self.cache, [sequence.blocks], [len(sequence)], rows)
        return rows[None, None, :, :rank], rows[None, None, :, rank:]

    def _make_room(self, latent, k_pe, counts):
        """For so many tokens more in each sequence, and a block each that forks may copy."""
        self._widths = latent.shape[2] + k_pe.shape[2], latent.shape[2]
        needed = sum((len(sequence) + count) // self._BLOCK_SIZE + 2 for sequence, count in
                     zip(self.sequences or [()] * len(counts), counts))
        if self.cache is None:
            self.cache = PagedKvCache.latent(
                self._widths[1], k_pe.shape[2], format=_FORMATS[latent.dtype],
                storage=latent.new_empty(2 * needed, self._BLOCK_SIZE, self._widths[0]))
            self.sequences = [self.cache.new_sequence() for _ in counts]
        elif needed > self.cache.num_blocks:
            self.cache.grow(latent.new_empty(2 * needed, self._BLOCK_SIZE, self._widths[0]))

    def get_seq_length(self):
        """Positions, padding included."""
        return self._length

    def reorder_cache(self, beam_idx):
        self.sequences = [self.sequences[row].fork() for row in beam_idx.tolist()]

    def batch_repeat_interleave(self, repeats):
        self.sequences = [sequence.fork() for sequence in self.sequences for _ in range(repeats)]

    def batch_select_indices(self, indices):
        rows = torch.arange(len(self.sequences))[indices.cpu()].tolist()
        self.sequences = [self.sequences[row].fork() for row in rows]

    def crop(self, tokens_to_remove):
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; it must be negative or 0")
        for sequence in self.sequences:
            sequence.truncate(max(len(sequence) + tokens_to_remove, 0))
        self._length += tokens_to_remove

    def reset(self):
        self.cache, self.sequences, self._length, self._pending = None, [], 0, []


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
            if type(layers[self.layer_idx]) is LatentLayer:
                kwargs["latent_layer"] = layers[self.layer_idx]
        return forward(self, *args, **kwargs)

    kind.forward, kind.expand_kv, kind.expand_latents = (forward_with_latent_layer, keep_or_expand,
                                                         expand)
    _latent_classes.add(kind)


AttentionInterface.register("fovea", attention)
AttentionMaskInterface.register("fovea", mask)
