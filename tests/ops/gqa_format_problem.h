// Grouped queries over keys and values stored in any format, and their float64 answer.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/oracle.h"
#include "ops/kv_formats.h"

namespace fovea::test {

enum class Path { decode, paged_prefill, new_tokens_beside };

struct HeadDims {
  std::int64_t heads, qk, v;
};
inline constexpr HeadDims kOddDims{6, 40, 24};
/// What kernels are written for; of 16 heads each key head meets 24 rows of a request.
inline constexpr HeadDims kUsualDims[] = {{6, 64, 64}, {16, 128, 128}, {4, 256, 256}};

/// Grouped queries over paged keys and values in `name`; with Path::new_tokens_beside the query
/// tokens' own come unquantised, and their stored rows are NaN.
class GqaFormatProblem {
 public:
  static constexpr std::int64_t kKvHeads = 2;

  GqaFormatProblem(std::string_view name, std::int64_t block_size, Path path, DType dtype,
                   const HeadDims& dims = kOddDims)
      : path_(path),
        dims_(dims),
        keys_(heads_format(name, kKvHeads, dims.qk, 0.5f), block_size, owned(path), 11),
        values_(heads_format(name, kKvHeads, dims.v, 0.25f), block_size, owned(path), 11),
        q_(dtype, {kTokens, dims.heads, dims.qk}, kGap, kGap),
        new_k_(dtype, {kTokens, kKvHeads, dims.qk}),
        new_v_(dtype, {kTokens, kKvHeads, dims.v}),
        out_(dtype, {kTokens, dims.heads, dims.v}, kGap, kGap) {
    fill_normal(q_, 1, 0.5);
    fill_normal(new_k_, 2);
    fill_normal(new_v_, 3);
  }

  PagedKv paged() const { return {&keys_.cache(), &values_.cache(), keys_.table(), kKvHeads}; }
  const PaddedTensor& q() const { return q_; }
  const PaddedTensor& out() const { return out_; }
  /// A key's value of head `head` as stored.
  std::span<std::byte> stored_value(std::int64_t request, std::int64_t key,
                                    std::int64_t head) const {
    const std::span<std::byte> row = values_.bytes(request, key);
    const std::size_t bytes = row.size() / kKvHeads;
    return row.subspan(static_cast<std::size_t>(head) * bytes, bytes);
  }
  TensorView new_k() const {
    return path_ == Path::new_tokens_beside ? new_k_.view() : TensorView();
  }
  TensorView new_v() const {
    return path_ == Path::new_tokens_beside ? new_v_.view() : TensorView();
  }

  /// Of the stored values; `magnitudes`: of their magnitudes.
  std::vector<double> expected(float sm_scale, bool magnitudes = false) const {
    std::vector<double> all;
    for (std::size_t r = 0; r < 2; ++r) {
      const bool beside = path_ == Path::new_tokens_beside;
      const std::int64_t stored = kSeqLens[r] - (beside ? kQueryLens[r] : 0);
      std::vector<double> k, v;
      keys_.append_values(static_cast<std::int64_t>(r), 0, stored, k);
      values_.append_values(static_cast<std::int64_t>(r), 0, stored, v);
      if (beside) {
        const auto own = [&](const PaddedTensor& rows) {
          return to_doubles(rows.view().slice(0, kQueryStart[r], kQueryStart[r + 1]));
        };
        const std::vector<double> own_k = own(new_k_), own_v = own(new_v_);
        k.insert(k.end(), own_k.begin(), own_k.end());
        v.insert(v.end(), own_v.begin(), own_v.end());
      }
      if (magnitudes) {
        for (double& x : v) x = std::abs(x);
      }
      const auto one = oracle::attention(
          {.num_queries = kQueryLens[r],
           .num_keys = kSeqLens[r],
           .num_heads = dims_.heads,
           .num_kv_heads = kKvHeads,
           .qk_dim = dims_.qk,
           .v_dim = dims_.v,
           .sm_scale = static_cast<double>(sm_scale),
           .q = to_doubles(q_.view().slice(0, kQueryStart[r], kQueryStart[r + 1])),
           .k = k,
           .v = v});
      all.insert(all.end(), one.out.begin(), one.out.end());
    }
    return all;
  }

  /// By how much elements may be off where weights meet int8 values in fixed point: in each tile of
  /// 64 keys, products of weight and scale are off by 2^-16 of the largest of them.
  std::vector<double> fixed_point_errors(float sm_scale) const {
    constexpr std::int64_t kTile = 64;
    std::vector<double> all;
    for (std::size_t r = 0; r < 2; ++r) {
      const std::int64_t keys = kSeqLens[r];
      std::vector<double> v;
      values_.append_values(static_cast<std::int64_t>(r), 0, keys, v);
      const std::vector<double> all_weights = weights(r, sm_scale);
      for (std::int64_t row = 0; row < kQueryLens[r] * dims_.heads; ++row) {
        const double* row_weights = &all_weights[static_cast<std::size_t>(row * keys)];
        const std::int64_t head = row % dims_.heads / (dims_.heads / kKvHeads);
        for (std::int64_t c = 0; c < dims_.v; ++c) {
          double error = 0, largest = 0, codes = 0;
          for (std::int64_t key = 0; key < keys; ++key) {
            if (key % kTile == 0) largest = 0, codes = 0;
            const double* value = &v[static_cast<std::size_t>((key * kKvHeads + head) * dims_.v)];
            error -= largest * codes;  // Of the tile, up to this key.
            largest = std::max(largest, row_weights[key] * int8_scale(value, c));
            codes += std::abs(value[c]) / int8_scale(value, c);
            error += largest * codes;
          }
          all.push_back(0x1p-16 * error);
        }
      }
    }
    return all;
  }

 private:
  static constexpr std::int64_t kGap = 8;  // Rows stay multiples of 16 bytes in 16-bit dtypes.

  /// [query][head][key] of a request.
  std::vector<double> weights(std::size_t r, float sm_scale) const {
    const std::int64_t keys = kSeqLens[r];
    std::vector<double> k, one_hot(static_cast<std::size_t>(keys * kKvHeads * keys));
    keys_.append_values(static_cast<std::int64_t>(r), 0, keys, k);
    for (std::int64_t i = 0; i < keys * kKvHeads; ++i) {
      one_hot[static_cast<std::size_t>(i * keys + i / kKvHeads)] = 1;
    }
    const TensorView q = q_.view().slice(0, kQueryStart[r], kQueryStart[r + 1]);
    return oracle::attention({.num_queries = kQueryLens[r],
                              .num_keys = keys,
                              .num_heads = dims_.heads,
                              .num_kv_heads = kKvHeads,
                              .qk_dim = dims_.qk,
                              .v_dim = keys,
                              .sm_scale = static_cast<double>(sm_scale),
                              .q = to_doubles(q),
                              .k = k,
                              .v = one_hot})
        .out;
  }
  /// Of channel c's half of a head, whose largest code is 127.
  double int8_scale(const double* value, std::int64_t c) const {
    double largest = 0;
    const std::int64_t half = dims_.v / 2, begin = c / half * half;
    for (std::int64_t i = begin; i < begin + half; ++i) {
      largest = std::max(largest, std::abs(value[i]));
    }
    return largest / 127;
  }
  static std::vector<OwnedKeys> owned(Path path) {
    std::vector<OwnedKeys> keys = kAllKeys;
    if (path != Path::new_tokens_beside) return keys;
    for (std::size_t r = 0; r < 2; ++r) keys[r].end -= kQueryLens[r];
    return keys;
  }

  Path path_;
  HeadDims dims_;
  StoredRows keys_, values_;
  PaddedTensor q_, new_k_, new_v_, out_;
};

}  // namespace fovea::test
