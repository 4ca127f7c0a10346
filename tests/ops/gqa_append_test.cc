// Storing keys and values of all heads, with and without turning the keys on the way.
#include "fovea/ops.h"
#include "ops/backend_test.h"

namespace fovea::test {
namespace {

/// Caches of keys and values in foreign memory, all of it poisoned, with gaps behind rows and
/// blocks.
struct PoisonedCaches {
  PoisonedCaches(DType dtype, std::int64_t blocks, std::int64_t block_size, std::int64_t k_width,
                 std::int64_t v_width)
      : k(make(k_memory, {dtype, k_width}, blocks, block_size)),
        v(make(v_memory, {dtype, v_width}, blocks, block_size)) {}

  static PagedKvCache make(Tensor& memory, const KvFormat& format, std::int64_t blocks,
                           std::int64_t block_size) {
    KvCacheLayout layout;
    layout.num_blocks = blocks;
    layout.block_size = block_size;
    layout.row_stride = format.row_bytes() + 16;
    layout.block_stride = block_size * layout.row_stride + 4096;
    layout.storage_offset = 128;
    memory = Tensor::empty(DType::u8, {PagedKvCache::required_bytes(format, layout)});
    poison(memory.view());
    return PagedKvCache::view(memory.view().data, format, layout);
  }
  static TensorView row(const PagedKvCache& cache, std::int64_t slot) {
    return TensorView::contiguous(cache.slot(slot), cache.format().dtype,
                                  {cache.format().row_elements});
  }
  void expect_untouched() const {
    EXPECT_TRUE(still_poisoned(k_memory.view().data, k_memory.nbytes()));
    EXPECT_TRUE(still_poisoned(v_memory.view().data, v_memory.nbytes()));
  }

  Tensor k_memory, v_memory;
  PagedKvCache k, v;
};

class GqaAppend : public BackendTest {
 protected:
  /// Cosines and sines that belong to no angle.
  static Tensor random_table(std::int64_t rope_dim) {
    Tensor table = Tensor::empty(DType::f32, {64, rope_dim});
    fill_uniform(table, 9, -1, 1);
    return table;
  }

  /// `rotated` keys stored by themselves and keys that turn on the way are the same bytes.
  void check_fused(const RopeAngles& angles, std::int64_t rope_dim, DType cache_dtype) {
    constexpr std::int64_t kTokens = 5, kHeads = 3, kDk = 24, kDv = 10;
    const PaddedTensor k(dtype(), {kTokens, kHeads, kDk}), v(dtype(), {kTokens, kHeads, kDv});
    fill_normal(k, 1);
    fill_normal(v, 2);
    const Tensor turned = Tensor::empty(dtype(), {kTokens, kHeads, kDk});
    const Tensor before = Tensor::empty(dtype(), {kTokens, kHeads, kDk});
    copy(k, turned);
    copy(k, before);
    rope(ctx(), {turned.view().slice(2, 0, rope_dim), angles});
    const std::vector<std::int64_t> slots{9, -1, 0, 31, 17};
    const TensorView slot_mapping = TensorView::of(slots.data(), {kTokens});
    const PoisonedCaches fused(cache_dtype, 2, 16, kHeads * kDk, kHeads * kDv);
    const PoisonedCaches separate(cache_dtype, 2, 16, kHeads * kDk, kHeads * kDv);
    gqa_append(ctx(), {k, v, slot_mapping, &fused.k, &fused.v, angles});
    gqa_append(ctx(), {turned, v, slot_mapping, &separate.k, &separate.v, {}});
    EXPECT_TRUE(bits_equal(separate.k_memory, fused.k_memory));
    EXPECT_TRUE(bits_equal(separate.v_memory, fused.v_memory));
    EXPECT_TRUE(bits_equal(before, k));
  }
};
FOVEA_FOR_EACH_BACKEND(GqaAppend);

TEST_P(GqaAppend, StoresRowsInTheirSlotsAndNothingElse) {  // B029, B071
  for (DType cache_dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (std::int64_t block_size : {1, 16, 100}) {
      for (DType slot_dtype : {DType::i32, DType::i64}) {
        SCOPED_TRACE(::testing::Message() << name_of(cache_dtype) << ", blocks of " << block_size);
        // q, k and v are slices of one fused projection of 2 + 1 + 1 heads.
        const PaddedTensor projection(dtype(), {6, 2 * 12 + 12 + 7});
        fill_normal(projection, 1);
        const TensorView k = projection.view().slice(1, 24, 36).split(1, 1, 12);
        const TensorView v = projection.view().slice(1, 36, 43).split(1, 1, 7);
        const PoisonedCaches caches(cache_dtype, 11, block_size, 12, 7);
        const std::int64_t last = caches.k.num_slots() - 1;
        const std::vector<std::int64_t> slots{0, -1, last, 3, -1, last / 2};
        const Tensor slot_mapping =
            tensor_from(slot_dtype, {6}, std::vector<double>(slots.begin(), slots.end()));
        gqa_append(ctx(), {k, v, slot_mapping, &caches.k, &caches.v, {}});
        for (std::size_t t = 0; t < slots.size(); ++t) {
          if (slots[t] < 0) continue;
          for (const auto& [cache, source] : {std::pair{&caches.k, k}, std::pair{&caches.v, v}}) {
            const Tensor expected = Tensor::empty(cache_dtype, {source.shape[2]});
            copy(source.select(0, static_cast<std::int64_t>(t)).select(0, 0), expected);
            EXPECT_TRUE(bits_equal(expected, PoisonedCaches::row(*cache, slots[t])));
            poison(PoisonedCaches::row(*cache, slots[t]));
          }
        }
        caches.expect_untouched();
      }
    }
  }
}

TEST_P(GqaAppend, HeadsLieOneAfterTheOther) {
  const Tensor head_major = Tensor::empty(dtype(), {3, 2, 5});  // [Hk, T, D]
  fill_normal(head_major, 1);
  const TensorView k = head_major.view().transpose(0, 1), v = k.slice(2, 0, 4);
  const PoisonedCaches caches(dtype(), 1, 4, 15, 12);
  const std::vector<std::int64_t> slots{2, 1};
  gqa_append(ctx(), {k, v, TensorView::of(slots.data(), {2}), &caches.k, &caches.v, {}});
  for (std::int64_t t = 0; t < 2; ++t) {
    const std::int64_t slot = slots[static_cast<std::size_t>(t)];
    EXPECT_TRUE(bits_equal(k.select(0, t), PoisonedCaches::row(caches.k, slot).split(0, 3, 5)));
    EXPECT_TRUE(bits_equal(v.select(0, t), PoisonedCaches::row(caches.v, slot).split(0, 3, 4)));
  }
}

TEST_P(GqaAppend, KeysTurnOnTheWayAsTheyTurnAlone) {  // B153, B155
  const std::vector<std::int32_t> positions{63, 0, 7, 7, 31};
  for (RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    for (std::int64_t rope_dim : {24, 10, 2}) {  // The whole key, or its first channels.
      for (DType cache_dtype : {DType::f32, DType::f16, DType::bf16}) {
        SCOPED_TRACE(::testing::Message() << rope_dim << " channels, " << name_of(cache_dtype));
        const Tensor table = random_table(rope_dim);
        check_fused({TensorView::of(positions.data(), {5}), table, pairing, {}}, rope_dim,
                    cache_dtype);
        check_fused({TensorView::of(positions.data(), {1, 5}), table, pairing, {}}, rope_dim,
                    cache_dtype);
      }
    }
  }
}

TEST_P(GqaAppend, KeysTurnByThreeAxes) {
  const std::vector<std::int64_t> positions{3, 4, 5, 6, 7, 9, 9, 60, 1, 0, 2, 33, 8, 8, 40};
  const Tensor table = random_table(24);
  for (bool interleaved : {false, true}) {
    check_fused({TensorView::of(positions.data(), {3, 5}),
                 table,
                 RopePairing::neox,
                 {.pairs = {6, 3, 3}, .interleaved = interleaved}},
                24, dtype());
  }
}

TEST_P(GqaAppend, KeysAndValuesMayBeColumnsOfOneCache) {
  Tensor memory;
  const PagedKvCache rows = PoisonedCaches::make(memory, {dtype(), 2 * 8 + 2 * 6}, 3, 4);
  const PagedKvCache k_cache = rows.columns(0, 16), v_cache = rows.columns(16, 12);
  const Tensor k = Tensor::empty(dtype(), {2, 2, 8}), v = Tensor::empty(dtype(), {2, 2, 6});
  fill_normal(k, 1);
  fill_normal(v, 2);
  const std::vector<std::int64_t> slots{11, 0};
  gqa_append(ctx(), {k, v, TensorView::of(slots.data(), {2}), &k_cache, &v_cache, {}});
  for (std::int64_t t = 0; t < 2; ++t) {
    const TensorView row = PoisonedCaches::row(rows, slots[static_cast<std::size_t>(t)]);
    EXPECT_TRUE(bits_equal(k.view().select(0, t), row.slice(0, 0, 16).split(0, 2, 8)));
    EXPECT_TRUE(bits_equal(v.view().select(0, t), row.slice(0, 16, 28).split(0, 2, 6)));
    poison(row);
  }
  EXPECT_TRUE(still_poisoned(memory.view().data, memory.nbytes()));
}

TEST_P(GqaAppend, ARowsBytesDoNotDependOnBatchMates) {  // B051
  const Tensor table = random_table(8);
  const Tensor k = Tensor::empty(dtype(), {9, 2, 20}), v = Tensor::empty(dtype(), {9, 2, 20});
  fill_normal(k, 1);
  fill_normal(v, 2);
  const std::vector<std::int64_t> positions{5, 3, 9, 12, 33, 0, 7, 63, 17};
  const std::vector<std::int64_t> slots{50, 3, 9, 12, 33, 0, 7, 63, 17};
  const PoisonedCaches alone(dtype(), 4, 16, 40, 40), among(dtype(), 4, 16, 40, 40);
  const auto append = [&](std::int64_t begin, std::int64_t end, const PoisonedCaches& caches) {
    const auto part = [&](const TensorView& view) { return view.slice(0, begin, end); };
    gqa_append(ctx(),
               {part(k),
                part(v),
                part(TensorView::of(slots.data(), {9})),
                &caches.k,
                &caches.v,
                {part(TensorView::of(positions.data(), {9})), table, RopePairing::neox, {}}});
  };
  append(4, 5, alone);
  append(0, 9, among);
  EXPECT_TRUE(bits_equal(PoisonedCaches::row(alone.k, 33), PoisonedCaches::row(among.k, 33)));
  EXPECT_TRUE(bits_equal(PoisonedCaches::row(alone.v, 33), PoisonedCaches::row(among.v, 33)));
}

TEST_P(GqaAppend, NoTokensWriteNothing) {
  const PoisonedCaches caches(dtype(), 1, 4, 8, 8);
  const Tensor none = Tensor::empty(dtype(), {0, 1, 8});
  gqa_append(ctx(), {none, none, Tensor::empty(DType::i64, {0}), &caches.k, &caches.v, {}});
  caches.expect_untouched();
}

}  // namespace
}  // namespace fovea::test
