// Bits of a row with batch_invariant: alone, beside other tokens of its sequence, beside other
// requests in any order, on any number of workers.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "ops/backend_test.h"
#include "ops/paged_rows.h"

namespace fovea::test {
namespace {

/// Query tokens at positions [first, first + count) of a sequence, the last keys of a request.
struct Piece {
  std::int32_t sequence;
  std::int32_t first;
  std::int32_t count;
};

/// Of a query token: the bytes of its output rows and lse.
using Bits = std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::byte>>;

enum class OpUnderTest { mla_decode, attention_decode, attention_prefill };

// One split and several, window borders within and at splits; no multiple of any tile.
constexpr std::int32_t kLens[] = {7, 33, 1023, 1027, 2100};
constexpr std::int32_t kTail = 4;  ///< Query tokens at the end of each sequence.
constexpr std::int64_t kBlockSize = 16, kDim = 40;

class BatchInvariance : public BackendTest {
 protected:
  void SetUp() override {
    // What the kernels of compute capability 9.0 take, for the negative control.
    if (backend() == "cuda") latent_width_ = 512, rope_width_ = 64;
    for (std::int32_t len : kLens) owned_.push_back({0, len});
    latent_ = make_cache(latent_width_ + rope_width_, 1);
    keys_ = make_cache(kKvHeads * kDim, 2);
    values_ = make_cache(kKvHeads * kDim, 2);
  }

  std::unique_ptr<PagedRows> make_cache(std::int64_t width, std::uint64_t seed) {
    auto rows = std::make_unique<PagedRows>(
        PagedRows::Options{.format = {dtype(), width}, .block_size = kBlockSize, .seed = seed},
        owned_);
    for (std::size_t s = 0; s < owned_.size(); ++s) {
      for (std::int64_t j = 0; j < owned_[s].end; ++j) {
        fill_normal(rows->row(static_cast<std::int64_t>(s), j),
                    1000 * (seed + static_cast<std::uint64_t>(width)) + 77 * s +
                        static_cast<std::uint64_t>(j));
      }
    }
    return rows;
  }

  /// All pieces in one call.
  Bits run(OpUnderTest op, const OpContext& ctx, const std::vector<Piece>& pieces,
           const AttentionVariant& variant) const {
    std::vector<std::int32_t> query_lens, seq_lens;
    for (const Piece& piece : pieces) {
      query_lens.push_back(piece.count);
      seq_lens.push_back(piece.first + piece.count);
    }
    const std::vector<std::int32_t> starts = offsets_of(query_lens);
    const std::int64_t tokens = starts.back();
    const bool is_mla = op == OpUnderTest::mla_decode;
    const std::int64_t width = is_mla ? latent_width_ : kDim;
    const std::int64_t q_width = is_mla ? latent_width_ + rope_width_ : kDim;
    const Tensor q = Tensor::empty(dtype(), {tokens, kHeads, q_width});
    const Tensor out = Tensor::empty(dtype(), {tokens, kHeads, width});
    const Tensor lse = Tensor::empty(DType::f32, {kHeads, tokens});
    const Tensor sinks = Tensor::empty(DType::f32, {kHeads});
    fill_normal(sinks, 5, 2);
    for (std::size_t r = 0; r < pieces.size(); ++r) {
      for (std::int32_t i = 0; i < pieces[r].count; ++i) {
        fill_normal(q.view().slice(0, starts[r] + i, starts[r] + i + 1),
                    static_cast<std::uint64_t>(100'000 * pieces[r].sequence + pieces[r].first + i),
                    3);
      }
    }
    // A table of the pieces' sequences, in their order.
    const BlockTableView all = latent_->table();
    std::vector<std::int32_t> ids;
    for (const Piece& piece : pieces) {
      const std::int32_t* row = all.data + piece.sequence * all.stride;
      ids.insert(ids.end(), row, row + all.width);
    }
    const BlockTableView table{ids.data(), std::ssize(pieces), all.width, all.width};
    const PagedKv kv{&keys_->cache(), &values_->cache(), table, kKvHeads};
    const auto fill = [&](auto params) {
      params.out = out;
      params.lse = lse;
      params.variant = variant;
      params.sm_scale = 0.16f;
      params.sinks = sinks;
      return params;
    };
    switch (op) {
      case OpUnderTest::mla_decode: {
        auto params = fill(MlaDecodeParams{});
        params.q_latent = q.view().slice(2, 0, latent_width_);
        params.q_pe = q.view().slice(2, latent_width_, q_width);
        params.cache = &latent_->cache();
        params.block_table = table;
        mla_decode_once(ctx, params, starts, seq_lens);
        break;
      }
      case OpUnderTest::attention_decode: {
        auto params = fill(AttentionDecodeParams{});
        params.q = q;
        params.kv = kv;
        attention_decode_once(ctx, params, starts, seq_lens);
        break;
      }
      case OpUnderTest::attention_prefill: {
        auto params = fill(AttentionPrefillParams{});
        params.q = q;
        params.paged = kv;
        attention_prefill_once(ctx, params, starts, offsets_of(seq_lens));
        break;
      }
    }
    Bits bits;
    for (std::size_t r = 0; r < pieces.size(); ++r) {
      for (std::int32_t i = 0; i < pieces[r].count; ++i) {
        const std::int64_t t = starts[r] + i;
        const auto row_bytes = static_cast<std::size_t>(bytes_of(dtype(), kHeads * width));
        std::vector<std::byte> row(row_bytes + kHeads * sizeof(float));
        std::memcpy(row.data(), out.view().slice(0, t, t + 1).data, row_bytes);
        for (std::int64_t n = 0; n < kHeads; ++n) {
          std::memcpy(row.data() + row_bytes + static_cast<std::size_t>(n) * sizeof(float),
                      lse.view().ptr<float>({n, t}), sizeof(float));
        }
        bits[{pieces[r].sequence, pieces[r].first + i}] = std::move(row);
      }
    }
    return bits;
  }

  /// Each query token in a call of its own.
  Bits alone(OpUnderTest op, const OpContext& ctx, const AttentionVariant& variant) const {
    Bits bits;
    for (std::int32_t s = 0; s < std::ssize(kLens); ++s) {
      for (std::int32_t p = kLens[s] - kTail; p < kLens[s]; ++p) {
        bits.merge(run(op, ctx, {{s, p, 1}}, variant));
      }
    }
    return bits;
  }

  /// The tails of the sequences in that order, or their last tokens each as a request.
  static std::vector<Piece> tails(const std::vector<std::int32_t>& order, bool together) {
    std::vector<Piece> pieces;
    for (std::int32_t s : order) {
      if (together) {
        pieces.push_back({s, kLens[s] - kTail, kTail});
        continue;
      }
      for (std::int32_t i = 0; i < kTail; ++i) pieces.push_back({s, kLens[s] - 1 - i, 1});
    }
    return pieces;
  }

  RuntimeOptions options(int num_threads, bool batch_invariant) const {
    RuntimeOptions options = options_of(backend(), num_threads);
    options.batch_invariant = batch_invariant;
    return options;
  }

  static constexpr std::int64_t kHeads = 6, kKvHeads = 3;
  std::int64_t latent_width_ = 32, rope_width_ = 8;
  std::vector<OwnedKeys> owned_;
  std::unique_ptr<PagedRows> latent_, keys_, values_;
};
FOVEA_FOR_EACH_BACKEND(BatchInvariance);

constexpr OpUnderTest kOps[] = {OpUnderTest::mla_decode, OpUnderTest::attention_decode,
                                OpUnderTest::attention_prefill};

TEST_P(BatchInvariance, BitsOfARowDependOnItsOwnInputsAlone) {
  const Runtime one(options(1, true)), two(options(2, true)), five(options(5, true));
  for (const AttentionVariant& variant :
       {AttentionVariant{}, AttentionVariant{.window_left = 1023},
        AttentionVariant{.window_left = 18, .attention_chunk = 64, .soft_cap = 5.f}}) {
    for (OpUnderTest op : kOps) {
      const Bits expected = alone(op, one, variant);
      for (const Runtime* runtime : {&two, &five}) {
        for (bool together : {true, false}) {
          for (const auto& order : {std::vector<std::int32_t>{0, 1, 2, 3, 4}, {4, 2, 0, 3}}) {
            for (const auto& [token, bits] : run(op, *runtime, tails(order, together), variant)) {
              EXPECT_TRUE(expected.at(token) == bits)
                  << "op " << static_cast<int>(op) << ", window " << variant.window_left
                  << ", sequence " << token.first << ", position " << token.second << ", "
                  << runtime->num_threads() << " threads, " << order.size() << " sequences"
                  << (together ? ", together" : "");
            }
          }
        }
      }
    }
  }
}

TEST_P(BatchInvariance, WithoutItSplitsFollowTheBatch) {
  // The negative control: a test that compares nothing would pass here as well.
  const bool rounds = backend() != "reference" && backend() != "cuda_plain" &&
                      !(backend() == "cuda" && dtype() == DType::f32);
  if (!rounds) GTEST_SKIP() << "sums in double round to the same f32 here";
  const Runtime plain(options(5, false));
  const Bits expected = alone(OpUnderTest::mla_decode, plain, {});
  // The sequences eight times: a GPU's blocks take several tiles of keys each.
  std::vector<std::int32_t> order;
  for (std::int32_t i = 0; i < 8 * std::ssize(kLens); ++i) order.push_back(i % std::ssize(kLens));
  const Bits got = run(OpUnderTest::mla_decode, plain, tails(order, true), {});
  EXPECT_FALSE(expected == got);
}

}  // namespace
}  // namespace fovea::test
