// Appending to and gathering from a paged cache.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fovea/ops.h"
#include "ops/backend_test.h"

namespace fovea::test {
namespace {

constexpr std::int64_t kLatent = 32, kRope = 8, kRow = kLatent + kRope;
constexpr std::int64_t kBlockSizes[] = {1, 16, 48, 64, 100};

/// A cache in foreign memory, all of it poisoned, with a gap behind each row and block.
struct PoisonedCache {
  PoisonedCache(DType dtype, std::int64_t blocks, std::int64_t block_size) {
    const KvFormat format{dtype, kRow};
    KvCacheLayout layout;
    layout.num_blocks = blocks;
    layout.block_size = block_size;
    layout.row_stride = format.row_bytes() + 16;
    layout.block_stride = block_size * layout.row_stride + 4096;
    layout.storage_offset = 128;
    bytes = PagedKvCache::required_bytes(format, layout);
    memory = Tensor::empty(DType::u8, {bytes});
    poison_bytes(memory.view().data, bytes);
    cache = PagedKvCache::view(memory.view().data, format, layout);
  }
  TensorView row(std::int64_t slot) const {
    return TensorView::contiguous(cache.slot(slot), cache.format().dtype, {kRow});
  }
  std::vector<std::byte> snapshot() const {
    const auto* begin = static_cast<const std::byte*>(memory.view().data);
    return {begin, begin + bytes};
  }
  std::int64_t bytes = 0;
  Tensor memory;
  PagedKvCache cache;
};

class KvAppend : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(KvAppend);

TEST_P(KvAppend, StoresRowsInTheirSlotsAndNothingElse) {  // F006, F148, B029, B071
  for (DType cache_dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (std::int64_t block_size : kBlockSizes) {
      for (DType slot_dtype : {DType::i32, DType::i64}) {
        SCOPED_TRACE(::testing::Message() << name_of(cache_dtype) << ", blocks of " << block_size);
        const PoisonedCache cache(cache_dtype, 11, block_size);
        // kv_c and k_pe are slices of one projection; a third of the tokens is skipped.
        const PaddedTensor projection(dtype(), {6, kRow});
        fill_normal(projection, 1);
        const TensorView kv_c = projection.view().slice(1, 0, kLatent);
        const TensorView k_pe = projection.view().slice(1, kLatent, kRow);
        const std::int64_t last = cache.cache.num_slots() - 1;
        const std::vector<std::int64_t> slots{0, -1, last, 3, -1, last / 2};
        const Tensor slot_mapping =
            tensor_from(slot_dtype, {6}, std::vector<double>(slots.begin(), slots.end()));
        kv_append(ctx(), {kv_c, k_pe, slot_mapping, &cache.cache});

        // Undoing what was to be written leaves the poison that was there before.
        for (std::size_t t = 0; t < slots.size(); ++t) {
          if (slots[t] < 0) continue;
          const Tensor expected = Tensor::empty(cache_dtype, {kRow});
          copy(projection.view().select(0, static_cast<std::int64_t>(t)), expected);
          EXPECT_TRUE(bits_equal(expected, cache.row(slots[t])));
          poison(cache.row(slots[t]));
        }
        EXPECT_TRUE(still_poisoned(cache.memory.view().data, cache.bytes));
      }
    }
  }
}

TEST_P(KvAppend, ReadsAnyStrides) {
  const PoisonedCache cache(dtype(), 2, 16);
  const Tensor memory = Tensor::empty(dtype(), {kRow, 3});
  const TensorView rows = memory.view().transpose(0, 1);
  fill_normal(rows, 1);
  const std::vector<std::int64_t> slots{9, 4, 31};
  kv_append(ctx(), {rows.slice(1, 0, kLatent), rows.slice(1, kLatent, kRow),
                    TensorView::of(slots.data(), {3}), &cache.cache});
  for (std::int64_t t = 0; t < 3; ++t) {
    EXPECT_TRUE(bits_equal(rows.select(0, t), cache.row(slots[static_cast<std::size_t>(t)])));
  }
}

TEST_P(KvAppend, ARowsBytesDoNotDependOnWhatWasThereOrOnBatchMates) {  // B051
  const PoisonedCache alone(dtype(), 1, 16), among(dtype(), 4, 16);
  std::memset(alone.memory.view().data, 0x35, static_cast<std::size_t>(alone.bytes));
  const Tensor rows = Tensor::empty(dtype(), {9, kRow});
  fill_normal(rows, 1);
  const auto append = [&](const TensorView& part, std::vector<std::int64_t> slots,
                          const PagedKvCache& cache) {
    kv_append(ctx(),
              {part.slice(1, 0, kLatent), part.slice(1, kLatent, kRow),
               TensorView::of(slots.data(), {static_cast<std::int64_t>(slots.size())}), &cache});
  };
  append(rows.view().slice(0, 4, 5), {2}, alone.cache);
  append(rows, {50, 3, 9, 12, 33, 0, 7, 63, 17}, among.cache);
  EXPECT_TRUE(bits_equal(alone.row(2), among.row(33)));
}

TEST_P(KvAppend, LayersOfOneBufferAreApart) {  // B030
  const KvFormat format{dtype(), kRow};
  const Tensor buffer = Tensor::empty(DType::u8, {3 * 2 * 16 * format.row_bytes()});
  poison(buffer.view());
  KvCacheLayout layout;
  layout.num_blocks = 3;
  layout.block_size = 16;
  layout.block_stride = 2 * 16 * format.row_bytes();
  const PagedKvCache first = PagedKvCache::view(buffer.view().data, format, layout);
  layout.storage_offset = 16 * format.row_bytes();
  const PagedKvCache second = PagedKvCache::view(buffer.view().data, format, layout);
  const Tensor rows = Tensor::empty(dtype(), {48, kRow});
  fill_normal(rows, 1);
  std::vector<std::int32_t> slots(48);
  std::iota(slots.begin(), slots.end(), 0);
  kv_append(ctx(), {rows.view().slice(1, 0, kLatent), rows.view().slice(1, kLatent, kRow),
                    TensorView::of(slots.data(), {48}), &second});
  for (std::int64_t s = 0; s < 48; ++s) {
    EXPECT_TRUE(still_poisoned(first.slot(s), format.row_bytes()));
  }
}

class KvGather : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(KvGather);

TEST_P(KvGather, ReadsAnyRangeOfAnyRequest) {  // F108, F112, F149
  for (DType cache_dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (std::int64_t block_size : kBlockSizes) {
      SCOPED_TRACE(::testing::Message() << name_of(cache_dtype) << ", blocks of " << block_size);
      const PoisonedCache cache(cache_dtype, 120, block_size);
      // Two columns that hold garbage, and a stride beyond the width.
      const std::int64_t width = 80 / block_size + 4, stride = width + 3;
      std::vector<std::int32_t> table(static_cast<std::size_t>(4 * stride), -12345);
      const std::vector<std::int32_t> starts{0, 17, 5, 63}, lens{80, 1, 0, 17};
      std::int32_t next = 119;
      std::vector<double> expected;
      for (std::int64_t r = 0; r < 4; ++r) {
        const std::int64_t begin = starts[static_cast<std::size_t>(r)];
        const std::int64_t end = begin + lens[static_cast<std::size_t>(r)];
        for (std::int64_t p = begin; p < end; ++p) {
          std::int32_t& block = table[static_cast<std::size_t>(r * stride + p / block_size)];
          if (block < 0) block = --next % 120;
          const TensorView row = cache.row(block * block_size + p % block_size);
          fill_normal(row, static_cast<std::uint64_t>(1000 * r + p));
          const std::vector<double> values = to_doubles(row);
          expected.insert(expected.end(), values.begin(), values.end());
        }
      }
      const PaddedTensor out(dtype(), {98, kRow});
      const KvGatherParams params{
          &cache.cache, {table.data(), 4, width, stride}, starts, lens, out};
      kv_gather(ctx(), params);
      const double roundoff = cache_dtype == dtype() ? 0 : unit_roundoff(dtype());
      EXPECT_TRUE(values_close(expected, out, 1e-7, roundoff));
      EXPECT_TRUE(out.padding_untouched());
    }
  }
}

TEST_P(KvGather, EqualDTypesKeepEveryBit) {
  const PoisonedCache cache(dtype(), 4, 16);  // The poison is a NaN with a payload.
  const std::vector<std::int32_t> table{2}, starts{3}, lens{5};
  const Tensor out = Tensor::zeros(dtype(), {5, kRow});
  kv_gather(ctx(), {&cache.cache, {table.data(), 1, 1, 1}, starts, lens, out});
  EXPECT_TRUE(still_poisoned(out.view().data, out.nbytes()));
}

TEST_P(KvGather, AppendedRowsComeBack) {
  const PoisonedCache cache(dtype(), 8, 16);
  const Tensor rows = Tensor::empty(dtype(), {40, kRow}), out = Tensor::empty(dtype(), {40, kRow});
  fill_normal(rows, 1);
  const std::vector<std::int32_t> table{6, 1, 3}, starts{0}, lens{40};
  std::vector<std::int32_t> slots;
  for (std::int32_t p = 0; p < 40; ++p) {
    slots.push_back(table[static_cast<std::size_t>(p / 16)] * 16 + p % 16);
  }
  kv_append(ctx(), {rows.view().slice(1, 0, kLatent), rows.view().slice(1, kLatent, kRow),
                    TensorView::of(slots.data(), {40}), &cache.cache});
  kv_gather(ctx(), {&cache.cache, {table.data(), 1, 3, 3}, starts, lens, out});
  EXPECT_TRUE(bits_equal(rows, out));
}

/// Address space of `bytes` without memory behind it until it is touched.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    for (void* lent : lent_) device_hooks.take_back(lent);
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  void* data() const { return data_ == MAP_FAILED ? nullptr : data_; }
  /// Ops will read and write these `bytes` from offsets on, multiples of a page.
  void use(std::initializer_list<std::int64_t> offsets, std::int64_t bytes) {
    for (std::int64_t offset : offsets) {
      lent_.push_back(static_cast<std::byte*>(data_) + offset);
      device_hooks.lend(lent_.back(), bytes);
    }
  }

 private:
  std::vector<void*> lent_;
  std::size_t bytes_;
  void* data_;
};

class LargeCache : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(LargeCache);

TEST_P(LargeCache, OffsetsPassThirtyTwoBits) {  // B035, B036, B037
  // Blocks 2^21 bytes apart: block 1024 starts at 2^31 bytes, block 2048 at 2^32.
  const KvFormat format{dtype(), kRow};
  const KvCacheLayout layout{.num_blocks = 2500, .block_size = 16, .block_stride = 1 << 21};
  SparseMemory memory(static_cast<std::size_t>(PagedKvCache::required_bytes(format, layout)));
  if (!memory.data()) GTEST_SKIP() << "no 5 GiB of address space";
  memory.use({0, 1023ll << 21, 2049ll << 21, 2499ll << 21}, 16 * format.row_bytes());
  const PagedKvCache cache = PagedKvCache::view(memory.data(), format, layout);

  const std::vector<std::int32_t> table{2499, 1023, 2049};
  std::vector<std::int64_t> slots;
  for (std::int64_t p = 0; p < 40; ++p) {
    slots.push_back(std::int64_t{table[static_cast<std::size_t>(p / 16)]} * 16 + p % 16);
  }
  const Tensor rows = Tensor::empty(dtype(), {40, kRow}), back = Tensor::empty(dtype(), {40, kRow});
  fill_normal(rows, 1);
  const TensorView kv_c = rows.view().slice(1, 0, kLatent);
  kv_append(ctx(), {kv_c, rows.view().slice(1, kLatent, kRow), TensorView::of(slots.data(), {40}),
                    &cache});
  for (std::int64_t p = 0; p < 40; ++p) {
    const auto* expected = static_cast<const std::byte*>(memory.data()) +
                           (std::int64_t{table[static_cast<std::size_t>(p / 16)]} << 21) +
                           p % 16 * format.row_bytes();
    EXPECT_EQ(std::memcmp(expected, rows.view().select(0, p).data,
                          static_cast<std::size_t>(format.row_bytes())),
              0)
        << "row " << p;
  }
  const std::vector<std::int32_t> starts{0}, lens{40}, query_start_loc{0, 1};
  const BlockTableView blocks{table.data(), 1, 3, 3};
  kv_gather(ctx(), {&cache, blocks, starts, lens, back});
  EXPECT_TRUE(bits_equal(rows, back));

  // A query of zeros sees every key alike: the mean of the latents, and the logarithm of 40.
  const Tensor q_latent = Tensor::zeros(dtype(), {1, 1, kLatent});
  const Tensor q_pe = Tensor::zeros(dtype(), {1, 1, kRope});
  const Tensor out = Tensor::empty(DType::f32, {1, 1, kLatent});
  const Tensor lse = Tensor::empty(DType::f32, {1, 1});
  mla_decode_once(ctx(), {q_latent, q_pe, &cache, blocks, out, lse, nullptr, {}, 1.f, {}},
                  query_start_loc, lens);
  const std::vector<double> latents = to_doubles(kv_c);
  std::vector<double> mean(static_cast<std::size_t>(kLatent), 0.0);
  for (std::size_t i = 0; i < latents.size(); ++i) mean[i % mean.size()] += latents[i] / 40;
  EXPECT_TRUE(values_close(mean, out, 1e-6));
  EXPECT_TRUE(values_close(std::vector<double>{std::log(40.0)}, lse, 1e-6));
}

TEST_P(LargeCache, KeysAndValuesOfHeadsPassThirtyTwoBitsToo) {
  constexpr std::int64_t kHeads = 2, kWidth = kRow / kHeads;
  const KvFormat format{dtype(), kRow};
  const KvCacheLayout layout{.num_blocks = 2500, .block_size = 16, .block_stride = 1 << 21};
  const auto bytes = static_cast<std::size_t>(PagedKvCache::required_bytes(format, layout));
  SparseMemory k_memory(bytes), v_memory(bytes);
  if (!k_memory.data() || !v_memory.data()) GTEST_SKIP() << "no 10 GiB of address space";
  for (SparseMemory* memory : {&k_memory, &v_memory}) {
    memory->use({0, 1023ll << 21, 2049ll << 21, 2499ll << 21}, 16 * format.row_bytes());
  }
  const PagedKvCache k_cache = PagedKvCache::view(k_memory.data(), format, layout);
  const PagedKvCache v_cache = PagedKvCache::view(v_memory.data(), format, layout);
  const std::vector<std::int32_t> table{2499, 1023, 2049};
  std::vector<std::int64_t> slots;
  for (std::int64_t p = 0; p < 40; ++p) {
    slots.push_back(std::int64_t{table[static_cast<std::size_t>(p / 16)]} * 16 + p % 16);
  }
  const Tensor k = Tensor::empty(dtype(), {40, kHeads, kWidth});
  const Tensor v = Tensor::empty(dtype(), {40, kHeads, kWidth});
  fill_normal(k, 1);
  fill_normal(v, 2);
  gqa_append(ctx(), {k, v, TensorView::of(slots.data(), {40}), &k_cache, &v_cache, {}});

  // Zero queries of two heads per key head: means of the values, and the logarithm of 40.
  const Tensor q = Tensor::zeros(dtype(), {1, 4, kWidth});
  const Tensor out = Tensor::empty(DType::f32, {1, 4, kWidth});
  const Tensor lse = Tensor::empty(DType::f32, {4, 1});
  const PagedKv paged{&k_cache, &v_cache, {table.data(), 1, 3, 3}, kHeads};
  const std::vector<double> values = to_doubles(v);
  std::vector<double> mean(4 * kWidth, 0.0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t head = i / kWidth % kHeads, d = i % kWidth;
    mean[2 * head * kWidth + d] += values[i] / 40;
    mean[(2 * head + 1) * kWidth + d] += values[i] / 40;
  }
  AttentionDecodeParams decode;
  decode.q = q;
  decode.kv = paged;
  decode.out = out;
  decode.lse = lse;
  decode.sm_scale = 1;
  AttentionPrefillParams prefill;
  prefill.q = q;
  prefill.paged = paged;
  prefill.out = out;
  prefill.lse = lse;
  prefill.sm_scale = 1;
  for (bool decodes : {true, false}) {
    poison(out);
    if (decodes) {
      attention_decode_once(ctx(), decode, std::vector<std::int32_t>{0, 1},
                            std::vector<std::int32_t>{40});
    } else {
      attention_prefill_once(ctx(), prefill, std::vector<std::int32_t>{0, 1},
                             std::vector<std::int32_t>{0, 40});
    }
    EXPECT_TRUE(values_close(mean, out, 1e-6));
    EXPECT_TRUE(values_close(std::vector<double>(4, std::log(40.0)), lse, 1e-6));
  }
}

}  // namespace
}  // namespace fovea::test
