"""Paged caches with a pool of blocks, and the sequences in them."""

from fovea import _core
from fovea._arrays import slots_beside


class Sequence:
    """The cached tokens of one sequence. Gives its blocks back when it goes away or is closed."""

    def __init__(self, cache, table, length):
        self._cache, self._table, self._length = cache, table, length

    def __len__(self):
        """Tokens that are stored."""
        return self._length

    @property
    def blocks(self):
        """Block ids in order: a row of a block table."""
        return self._table.blocks

    def append(self, first, second, *, runtime=None):
        """Stores rows behind the last one: kv_c and k_pe, or keys and values.

        Args:
            first: kv_c [T, L] of a latent cache, k [T, Hk, D] of a cache of heads.
            second: k_pe [T, R], or v [T, Hk, Dv].

        Raises:
            ValueError: the pool lacks the blocks, or shapes or dtypes do not fit. Nothing changes.
        """
        end, capacity = self._length + len(first), self._table.capacity
        try:
            slots = slots_beside(first, self.reserve(end))
            if self._cache.is_latent:
                _core.kv_append(runtime, first, second, slots, self._cache.rows)
            else:
                _core.gqa_append(runtime, first, second, slots, self._cache.keys,
                                 self._cache.values)
        except Exception:
            self._table.shrink_to(capacity)
            raise
        self._length = end

    def reserve(self, length):
        """Makes room for `length` tokens, without storing any: slot ids of those that are new."""
        pool, capacity = self._cache.pool, self._table.capacity
        if not self._table.grow_to(length):
            raise ValueError(f"{length} tokens need more blocks than are free: {pool.num_free} of "
                             f"{pool.num_blocks}, of {pool.block_size} tokens each")
        if length > self._length:
            try:
                copy = self._table.make_writable(self._length)
            except Exception:
                self._table.shrink_to(capacity)
                raise
            if copy is not None:
                for rows in self._cache.parts:
                    rows.copy_block(*copy)
        return self._table.slots(self._length, length)

    def advance(self, length):
        """Says that the tokens up to `length`, which were reserved, are stored: by a layer."""
        if not self._length <= length <= self._table.capacity:
            raise ValueError(f"length is {length}; it must be in [{self._length}, "
                             f"{self._table.capacity}], what is reserved")
        self._length = length

    def truncate(self, length):
        """Forgets all tokens behind the first `length`."""
        if not 0 <= length <= self._length:
            raise ValueError(f"length is {length}; it must be in [0, {self._length}]")
        self._table.shrink_to(length)
        self._length = length

    def fork(self):
        """A second sequence with the same tokens; blocks are copied where one of both appends."""
        table = self._table.fork()
        table.shrink_to(self._length)  # Of room that was reserved each has its own.
        return Sequence(self._cache, table, self._length)

    def close(self):
        """Gives all blocks back."""
        self.truncate(0)


class PagedKvCache:
    """Blocks of stored tokens under one pool of block ids: latent rows, or keys and values.

    Attributes:
        parts: the KvCaches: (rows,) of a latent cache, (keys, values) of a cache of heads.
        pool: the BlockPool that sequences take blocks from.
    """

    def __init__(self, *parts, storages=(None, None)):
        """One KvCache of latent rows, or those of keys and of values with the same blocks.

        Args:
            storages: the tensors that they lie over, if any.
        """
        if len(parts) not in (1, 2):
            raise ValueError(f"{len(parts)} caches are given; it must be one or two")
        if len({(part.num_blocks, part.block_size) for part in parts}) != 1:
            raise ValueError("keys and values must have equally many blocks of equal size")
        self.parts = parts
        self._storages = storages
        self.pool = _core.BlockPool(parts[0].num_blocks, parts[0].block_size)

    @classmethod
    def latent(cls, kv_lora_rank, qk_rope_head_dim, *, num_blocks=None, block_size=16,
               format="bf16", scale=1.0, storage=None):
        """Rows [kv_c | k_pe] of MLA.

        Args:
            num_blocks, block_size: of own memory; of a storage they are its first dimensions.
            format: a name of kv_format_names().
            scale: of formats with one scale: multiplies the stored values.
            storage: a tensor [num_blocks, block_size, row], zero copy: of the format's dtype, or
                its bytes as uint8. A cache on a GPU needs one.
        """
        rows = _core.KvFormat.latent(format, kv_lora_rank, qk_rope_head_dim, scale=scale)
        return cls(_part(rows, num_blocks, block_size, storage), storages=(storage,))

    @classmethod
    def heads(cls, num_kv_heads, head_dim, v_head_dim=None, *, num_blocks=None, block_size=16,
              format="bf16", k_scale=1.0, v_scale=1.0, k_storage=None, v_storage=None):
        """Keys and values of grouped-query attention; arguments as in latent().

        Args:
            v_head_dim: None: head_dim.
            k_storage, v_storage: tensors [num_blocks, block_size, num_kv_heads, width].
        """
        widths = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        storages = (k_storage, v_storage)
        return cls(*(_part(_core.KvFormat.heads(format, num_kv_heads, width, scale=scale),
                           num_blocks, block_size, storage)
                     for width, scale, storage in zip(widths, (k_scale, v_scale), storages)),
                   storages=storages)

    @property
    def is_latent(self):
        return len(self.parts) == 1

    @property
    def rows(self):
        """The KvCache of a latent cache."""
        if not self.is_latent:
            raise ValueError("cache has keys and values; it must be of latent rows")
        return self.parts[0]

    @property
    def keys(self):
        """The KvCache of the keys."""
        return self._heads()[0]

    @property
    def values(self):
        """The KvCache of the values."""
        return self._heads()[1]

    def _heads(self):
        if self.is_latent:
            raise ValueError("cache has latent rows; it must be of keys and values")
        return self.parts

    @property
    def num_blocks(self):
        return self.pool.num_blocks

    @property
    def block_size(self):
        return self.pool.block_size

    @property
    def nbytes(self):
        return sum(part.nbytes for part in self.parts)

    def grow(self, *storages):
        """Goes on in larger tensors, to which the blocks are copied; sequences stay.

        Args:
            storages: one for each of `parts`, shaped like those that the cache was made over but
                for more blocks.

        Raises:
            ValueError: the cache has memory of its own, or a tensor does not fit.
        """
        if len(storages) != len(self.parts) or any(old is None for old in self._storages):
            raise ValueError("a cache grows from tensors that it was made over to as many larger "
                             "ones")
        parts = tuple(_core.KvCache.over(storage, part.format)
                      for storage, part in zip(storages, self.parts))
        if {(part.num_blocks, part.block_size) for part in parts} != {
                (parts[0].num_blocks, self.block_size)}:
            raise ValueError("all storages must have equally many blocks, of the old size")
        for storage, old in zip(storages, self._storages):
            if storage.dtype != old.dtype or storage.shape[1:] != old.shape[1:]:
                raise ValueError(f"a storage is {storage.dtype}{tuple(storage.shape)}; it must be "
                                 f"{old.dtype}{tuple(old.shape)} but for more blocks")
            storage[:len(old)] = old
        self.pool.grow(parts[0].num_blocks)
        self.parts, self._storages = parts, storages

    def new_sequence(self):
        """An empty Sequence."""
        return Sequence(self, _core.BlockTable(self.pool), 0)


def _part(format, num_blocks, block_size, storage):
    if storage is not None:
        if num_blocks is not None:
            raise ValueError("num_blocks and a storage are given; a storage's first dimension "
                             "says how many blocks there are")
        return _core.KvCache.over(storage, format)
    if num_blocks is None:
        raise ValueError("num_blocks must be given where there is no storage")
    return _core.KvCache.allocate(format, num_blocks, block_size)
