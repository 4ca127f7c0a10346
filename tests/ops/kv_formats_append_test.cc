// What the append ops store in every format, byte for byte, and what gathers read.
#include <array>
#include <cmath>
#include <cstring>

#include "fovea/ops.h"
#include "ops/backend_test.h"
#include "ops/stored_rows.h"

namespace fovea::test {
namespace {

/// The stored row of token t: kv_c and k_pe side by side.
std::vector<std::byte> encoded_row(const KvFormat& format, const TensorView& kv_c,
                                   const TensorView& k_pe, std::int64_t t) {
  std::vector<float> values;
  for (const TensorView& part : {kv_c.select(0, t), k_pe.select(0, t)}) {
    for (double x : to_doubles(part)) values.push_back(static_cast<float>(x));
  }
  std::vector<std::byte> row(static_cast<std::size_t>(format.row_bytes()));
  encode_row(format, values, row);
  return row;
}

class KvFormatsAppend : public BackendTest {};
FOVEA_FOR_EACH_BACKEND(KvFormatsAppend);

TEST_P(KvFormatsAppend, AppendWritesWhatTheCodecSaysAndGatherReadsIt) {
  constexpr std::int64_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  const PaddedTensor kv_c(dtype(), {3, kLatent}), k_pe(dtype(), {3, kRope});
  fill_normal(kv_c, 5);
  fill_normal(k_pe, 6);
  std::vector<std::int64_t> slots{4, -1, 1};
  const std::vector<std::int32_t> block{0}, start{0}, len{5};
  for (const std::string_view name : kv_format_names()) {
    SCOPED_TRACE(name);
    const KvFormat format = latent_format(name, kLatent, kRope, {0.01f, 0.01f});
    const PagedKvCache cache = PagedKvCache::allocate(format, {.num_blocks = 1, .block_size = 5});
    poison_bytes(cache.slot(0), 5 * format.row_bytes());
    kv_append(ctx(), {kv_c, k_pe, TensorView::of(slots.data(), {3}), &cache});

    for (std::int64_t t : {0, 2}) {
      const std::vector<std::byte> expected = encoded_row(format, kv_c, k_pe, t);
      EXPECT_EQ(0, std::memcmp(cache.slot(slots[static_cast<std::size_t>(t)]), expected.data(),
                               expected.size()));
    }
    for (std::int64_t slot : {0, 2, 3}) {
      EXPECT_TRUE(still_poisoned(cache.slot(slot), format.row_bytes()));
    }

    const PaddedTensor gathered(dtype(), {5, kWidth}), raw(DType::u8, {5, format.row_bytes()});
    const BlockTableView table{block.data(), 1, 1, 1};
    kv_gather(ctx(), {&cache, table, start, len, gathered});
    kv_gather(ctx(), {&cache, table, start, len, raw});
    for (std::int64_t slot : {1, 4}) {
      const std::vector<double> values =
          oracle::decode_row(cache.slot(slot), kWidth, oracle_format(format));
      // One rounding of the product, one to the output.
      EXPECT_TRUE(values_close(values, gathered.view().select(0, slot), 1e-7,
                               unit_roundoff(dtype()) + 0x1p-24));
      EXPECT_EQ(0, std::memcmp(raw.view().select(0, slot).data, cache.slot(slot),
                               static_cast<std::size_t>(format.row_bytes())));
    }
  }
}

TEST_P(KvFormatsAppend, WideRowsAreStoredAsNarrowOnesAre) {
  for (const std::int64_t latent : {960, 1100, 1900}) {
    const PaddedTensor kv_c(dtype(), {2, latent}), k_pe(dtype(), {2, 64});
    fill_normal(kv_c, 5);
    fill_normal(k_pe, 6);
    std::vector<std::int64_t> slots{1, 0};
    for (const std::string_view name : {"bf16", "fp8_e4m3", "int8_per_token", "int4_per_token"}) {
      SCOPED_TRACE(::testing::Message() << name << ", " << latent << " channels");
      const KvFormat format = latent_format(name, latent, 64, {0.01f, 0.01f});
      const PagedKvCache cache = PagedKvCache::allocate(format, {.num_blocks = 1, .block_size = 2});
      poison_bytes(cache.slot(0), 2 * format.row_bytes());
      kv_append(ctx(), {kv_c, k_pe, TensorView::of(slots.data(), {2}), &cache});
      for (std::int64_t t : {0, 1}) {
        const std::vector<std::byte> expected = encoded_row(format, kv_c, k_pe, t);
        EXPECT_EQ(0, std::memcmp(cache.slot(1 - t), expected.data(), expected.size()));
      }
    }
  }
}

TEST_P(KvFormatsAppend, RowsNormedAndTurnedOnTheWayAreThoseOfTheOpsAlone) {
  constexpr std::int64_t kTokens = 4, kLatent = 512, kRope = 64;
  const PaddedTensor projection(dtype(), {kTokens, kLatent + kRope});
  fill_normal(projection, 5, 3);
  const TensorView kv_c = projection.view().slice(1, 0, kLatent);
  const TensorView k_pe = projection.view().slice(1, kLatent, kLatent + kRope);
  const PaddedTensor weight(dtype(), {kLatent});
  fill_normal(weight, 6);
  const Tensor cos_sin = Tensor::empty(DType::f32, {40, kRope});
  fill_uniform(cos_sin, 8, -1, 1);
  std::vector<std::int64_t> slots{5, -1, 0, 3}, positions{7, 39, 0, 21};
  const TensorView slot_mapping = TensorView::of(slots.data(), {kTokens});

  const PaddedTensor normed(dtype(), {kTokens, kLatent}), turned(dtype(), {kTokens, kRope});
  rms_norm(ctx(), {.x = kv_c, .weight = weight, .out = normed, .eps = 1e-5f});
  for (const RopePairing pairing : {RopePairing::neox, RopePairing::interleaved}) {
    const RopeAngles angles{TensorView::of(positions.data(), {1, kTokens}), cos_sin, pairing, {}};
    copy(k_pe, turned);
    rope(ctx(), {turned.view().split(1, 1, kRope), angles});
    for (const std::string_view name : kv_format_names()) {
      const KvFormat format = latent_format(name, kLatent, kRope, {0.0137f, 0.0137f});
      for (const bool norms : {false, true}) {
        for (const bool turns : {false, true}) {
          SCOPED_TRACE(::testing::Message() << name << ", norms " << norms << ", turns " << turns);
          const std::int64_t bytes = 6 * format.row_bytes();
          const KvCacheLayout layout{.num_blocks = 2, .block_size = 3};
          const PagedKvCache separate = PagedKvCache::allocate(format, layout);
          const PagedKvCache fused = PagedKvCache::allocate(format, layout);
          poison_bytes(separate.slot(0), bytes);
          poison_bytes(fused.slot(0), bytes);
          kv_append(ctx(), {norms ? normed : kv_c, turns ? turned : k_pe, slot_mapping, &separate});
          kv_append(ctx(), {.kv_c = kv_c,
                            .k_pe = k_pe,
                            .slot_mapping = slot_mapping,
                            .cache = &fused,
                            .norm_weight = norms ? weight.view() : TensorView{},
                            .norm_eps = 1e-5f,
                            .rope = turns ? angles : RopeAngles{}});
          EXPECT_EQ(0, std::memcmp(separate.slot(0), fused.slot(0),
                                   static_cast<std::size_t>(bytes)));
        }
      }
    }
  }
  EXPECT_TRUE(projection.padding_untouched());
}

TEST_P(KvFormatsAppend, ScalesMayBePowersOfTwo) {
  const PaddedTensor kv_c(dtype(), {1, 512}), k_pe(dtype(), {1, 64});
  fill_normal(kv_c, 5);
  fill_normal(k_pe, 6);
  std::vector<std::int64_t> slot{0};
  for (const bool power_of_two : {false, true}) {
    KvFormat format = latent_format("fp8_ds_mla", 512, 64);
    format.power_of_two_scales = power_of_two;
    const PagedKvCache cache = PagedKvCache::allocate(format, {.num_blocks = 1, .block_size = 1});
    kv_append(ctx(), {kv_c, k_pe, TensorView::of(slot.data(), {1}), &cache});
    std::array<float, 4> scales;
    std::memcpy(scales.data(), cache.slot(0) + 512, sizeof scales);
    for (std::int64_t g = 0; g < 4; ++g) {
      double amax = 0;
      for (const double x : to_doubles(kv_c.view().slice(1, 128 * g, 128 * (g + 1)))) {
        amax = std::max(amax, std::abs(x));
      }
      const double exact = amax / 448;
      const double expected = power_of_two ? std::exp2(std::ceil(std::log2(exact))) : exact;
      EXPECT_FLOAT_EQ(static_cast<float>(expected), scales[static_cast<std::size_t>(g)]);
    }
  }
}

TEST_P(KvFormatsAppend, SlotsBeyondTheCacheAreRefusedInEveryFormat) {  // B133
  const PaddedTensor kv_c(dtype(), {2, 512}), k_pe(dtype(), {2, 64});
  fill_normal(kv_c, 5);
  fill_normal(k_pe, 6);
  for (const std::string_view name : kv_format_names()) {
    const KvFormat format = latent_format(name, 512, 64, {0.0137f, 0.0137f});
    const PagedKvCache cache = PagedKvCache::allocate(format, {.num_blocks = 2, .block_size = 3});
    poison_bytes(cache.slot(0), 6 * format.row_bytes());
    for (const std::int64_t beyond : {std::int64_t{6}, std::int64_t{1} << 40, std::int64_t{-2}}) {
      std::vector<std::int64_t> slots{1, beyond};
      expect_error(ErrorCode::invalid_argument, {"slot_mapping"}, [&] {
        kv_append(ctx(), {kv_c, k_pe, TensorView::of(slots.data(), {2}), &cache});
      });
    }
    EXPECT_TRUE(still_poisoned(cache.slot(0), 6 * format.row_bytes())) << name;
  }
}

/// The bytes of a slot are those of encode_row.
void expect_encoded(const PagedKvCache& cache, std::int64_t slot, const TensorView& heads) {
  std::vector<float> values;
  for (double x : to_doubles(heads)) values.push_back(static_cast<float>(x));
  std::vector<std::byte> expected(static_cast<std::size_t>(cache.format().row_bytes()));
  encode_row(cache.format(), values, expected);
  EXPECT_EQ(0, std::memcmp(cache.slot(slot), expected.data(), expected.size()));
}

TEST_P(KvFormatsAppend, AppendedHeadsAreThoseOfTheCodec) {
  constexpr std::int64_t kHeads = 3;
  std::vector<std::int64_t> slots{1, 0}, positions{7, 9};
  const TensorView slot_mapping = TensorView::of(slots.data(), {2});
  const Tensor cos_sin = Tensor::empty(DType::f32, {10, 16});
  fill_normal(cos_sin, 8);
  const RopeAngles angles{TensorView::of(positions.data(), {2}), cos_sin, RopePairing::neox, {}};
  for (const auto& [qk, v_width] : {std::pair(24, 40), std::pair(320, 264)}) {
    const PaddedTensor k(dtype(), {2, kHeads, qk}), v(dtype(), {2, kHeads, v_width});
    fill_normal(k, 5);
    fill_normal(v, 6);
    const PaddedTensor turned(dtype(), {2, kHeads, qk});
    copy(k, turned);
    rope(ctx(), {turned.view().slice(2, 0, 16), angles});
    for (const std::string_view name : kv_format_names()) {
      if (name == "fp8_ds_mla") continue;
      SCOPED_TRACE(::testing::Message() << name << ", " << qk << " channels");
      const KvCacheLayout layout{.num_blocks = 1, .block_size = 2};
      const PagedKvCache k_cache =
          PagedKvCache::allocate(heads_format(name, kHeads, qk, 0.01f), layout);
      const PagedKvCache v_cache =
          PagedKvCache::allocate(heads_format(name, kHeads, v_width, 0.02f), layout);
      gqa_append(ctx(), {k, v, slot_mapping, &k_cache, &v_cache, angles});
      for (std::int64_t t = 0; t < 2; ++t) {
        const std::int64_t slot = slots[static_cast<std::size_t>(t)];
        expect_encoded(k_cache, slot, turned.view().select(0, t));
        expect_encoded(v_cache, slot, v.view().select(0, t));
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
