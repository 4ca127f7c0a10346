"""attn_implementation="fovea" for transformers: import this module, then load or configure a model.

Causal and bidirectional attention, sliding windows, sinks, grouped queries, soft caps and padding.
Models with latent attention that cache latents (DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3 and
others) keep them in a LatentLayer, in blocks, and decode absorbed, instead of expanding the whole
context each step. Inference only. NotImplementedError says what is refused: gradients, dropout,
masks of other shapes, weights as a result.
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
              output_attentions=False, indices=None, **_):
    """transformers' attention interface.

    Args:
        query: [batch, heads, queries, width]. key, value: [batch, kv_heads, keys, width]; of latent
            attention [batch, 1, keys, kv_lora_rank] and [batch, 1, keys, qk_rope_head_dim].
        attention_mask: what mask() gave.
        latent_layer: the LatentLayer that took key and value, or None: they are all keys.

    Returns:
        [batch, queries, heads, value width], and None for the weights, which are never formed.
    """
    if output_attentions:
        raise NotImplementedError("output_attentions is set: fovea never forms the weights")
    if indices is not None:
        raise NotImplementedError("indices are given: fovea has no sparse attention here")
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
    if type(module) in _latent_classes and _caches_latents(module):
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
    tokens, keys = zip(*(_tokens(attention_mask, row, queries, layer.num_positions())
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
        cache: the PagedKvCache, which doubles when it is full; None before the first tokens.
        sequences: its Sequences, one for each row of the batch. Beams share blocks.
    """

    _BLOCK_SIZE = 64

    def __init__(self, layer=None):
        """Takes over what a DynamicLayer holds."""
        super().__init__()
        self._held = None  # What was taken over: stored with the next call's, which knows padding.
        self.reset()
        if layer is not None and layer.is_initialized:
            self._held = layer.keys[:, 0], layer.values[:, 0]
            self._length = layer.get_seq_length()

    def reset(self):
        self.cache, self.sequences, self._storage, self._spans = None, [], None, []
        self._length = 0  # Positions, padding included.
        self._new = None
        self.keys = self.values = None
        self.is_initialized = False

    def update(self, key_states, value_states, *args, **kwargs):
        """Takes [batch, 1, tokens, L] and [batch, 1, tokens, R], and gives them back as they are.

        They are stored by the attention that comes next, which knows what is padding; an update
        that none followed counts for nothing.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._new = key_states[:, 0], value_states[:, 0]
        return key_states, value_states

    def num_positions(self):
        """Those of the update included."""
        return self._length + (self._new[0].shape[1] if self._new else 0)

    def store(self, positions):
        """Stores what update() took: of each sequence those of the positions in a slice.

        Raises:
            NotImplementedError: the slice's part that was stored before has another length.
        """
        parts = [part for part in (self._held, self._new) if part is not None]
        latent, k_pe = (torch.cat(tensors, dim=1) for tensors in zip(*parts))
        first = self.num_positions() - latent.shape[1]
        self._check(positions, first)
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
        self._length, self._spans = self.num_positions(), list(positions)
        self._held = self._new = None

    def _check(self, positions, first):
        if self.cache is None:
            return
        if len(positions) != len(self.sequences):
            raise ValueError(f"the batch has {len(positions)} sequences; the cache holds "
                             f"{len(self.sequences)}")
        for row, span in enumerate(positions):
            if len(self.sequences[row]) != max(min(span.stop, first) - span.start, 0):
                raise NotImplementedError(
                    f"attention_mask says of sequence {row} that tokens are padding which were "
                    "none when they were stored, or the other way round")

    def _make_room(self, latent, k_pe, counts):
        """For so many tokens more in each sequence, and a block each that forks may copy."""
        needed = sum(-(-count // self._BLOCK_SIZE) + 1 for count in counts)
        rank, width = latent.shape[2], latent.shape[2] + k_pe.shape[2]
        used = self.cache.pool.num_used if self.cache else 0
        if self.cache and used + needed <= self.cache.num_blocks:
            return
        self._storage = latent.new_empty(2 * used + needed, self._BLOCK_SIZE, width)
        if self.cache:
            self.cache.grow(self._storage)
        else:
            self.cache = PagedKvCache.latent(rank, width - rank, format=_FORMATS[latent.dtype],
                                             storage=self._storage)
            self.sequences = [self.cache.new_sequence() for _ in counts]
            self._rank = rank

    def latents(self, row):
        """[1, 1, keys, L] and [1, 1, keys, R] of a sequence, copied."""
        sequence = self.sequences[row]
        rows = self._storage.new_empty(len(sequence), self._storage.shape[2])
        kv_gather(self.cache, [sequence.blocks], [len(sequence)], rows)
        return rows[None, None, :, :self._rank], rows[None, None, :, self._rank:]

    def get_seq_length(self):
        """Positions, padding included."""
        return self._length

    def _select(self, rows):
        if self._held is not None:
            self._held = tuple(part[rows] for part in self._held)
        if self.sequences:
            self.sequences = [self.sequences[row].fork() for row in rows]
            self._spans = [self._spans[row] for row in rows]

    def _num_rows(self):
        return len(self.sequences) if self._held is None else self._held[0].shape[0]

    def reorder_cache(self, beam_idx):
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats):
        self._select([row for row in range(self._num_rows()) for _ in range(repeats)])

    def batch_select_indices(self, indices):
        self._select(torch.arange(self._num_rows())[indices.cpu()].tolist())

    def crop(self, tokens_to_remove):
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; it must be negative or 0")
        self._length = max(self._length + tokens_to_remove, 0)
        if self._held is not None:
            self._held = tuple(part[:, :self._length] for part in self._held)
        self._spans = [slice(min(span.start, self._length), min(span.stop, self._length))
                       for span in self._spans]
        for sequence, span in zip(self.sequences, self._spans):
            sequence.truncate(span.stop - span.start)

    def offload(self):
        raise NotImplementedError("offloading is asked for: fovea's latents stay where they are")

    prefetch = offload

    def __deepcopy__(self, memo):
        """A layer with blocks of its own."""
        copied = LatentLayer()
        copied._held, copied._length = self._held, self._length
        if self.sequences:
            rows = [self.latents(row) for row in range(len(self.sequences))]
            empty = rows[0][0][:, 0, :0], rows[0][1][:, 0, :0]
            copied._make_room(*empty, [len(sequence) for sequence in self.sequences])
            for sequence, (latent, k_pe) in zip(copied.sequences, rows):
                sequence.append(latent[0, 0], k_pe[0, 0])
            copied._spans = list(self._spans)
            copied.lazy_initialization(*rows[0])
        return copied


def _caches_latents(module):
    """Whether the weights of kv_b_proj are all that it does."""
    kv_b_proj = getattr(module, "kv_b_proj", None)
    return (hasattr(module, "expand_kv") and type(kv_b_proj) is torch.nn.Linear and
            kv_b_proj.bias is None and not kv_b_proj._forward_hooks and
            not kv_b_proj._forward_pre_hooks)


def _is_ours(module):
    return module.config._attn_implementation == "fovea" and _caches_latents(module)


def _keep_latents(kind):
    """Makes an attention class of transformers hand latents to attention(), where that is fovea's.

    Modules with another attn_implementation, or whose kv_b_proj is more than a product, are left
    as they are.
    """
    forward, expand = kind.forward, kind.expand_kv

    def keep_or_expand(self, kv_nope, k_rot):
        return (kv_nope, k_rot) if _is_ours(self) else expand(self, kv_nope, k_rot)

    def forward_with_latent_layer(self, *args, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        layers = getattr(cache, "layers", [])
        if self.layer_idx < len(layers):
            layer = layers[self.layer_idx]
            if _is_ours(self) and type(layer) is DynamicLayer:
                layer = layers[self.layer_idx] = LatentLayer(layer)
            if type(layer) is LatentLayer:
                if not _is_ours(self):
                    raise NotImplementedError(
                        "the cache was filled by attn_implementation=\"fovea\", and another, or a "
                        "kv_b_proj with hooks or adapters, would go on: start with a new cache")
                kwargs["latent_layer"] = layer
        return forward(self, *args, **kwargs)

    kind.forward, kind.expand_kv, kind.expand_latents = (forward_with_latent_layer, keep_or_expand,
                                                         expand)
    _latent_classes.add(kind)


AttentionInterface.register("fovea", attention)
AttentionMaskInterface.register("fovea", mask)
