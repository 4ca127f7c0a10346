// Rows that a test stores in a cache of any format, and what float64 makes of their bytes.
#pragma once

#include "fovea/ops.h"
#include "fovea/oracle.h"
#include "ops/paged_rows.h"
#include "support/oracle_format.h"

namespace fovea::test {

/// Normal values in every row of the requests, stored in the cache's format.
class StoredRows {
 public:
  StoredRows(const KvFormat& format, std::int64_t block_size, std::span<const OwnedKeys> requests,
             std::uint64_t seed)
      : format_(format),
        rows_({.format = format, .block_size = block_size, .seed = seed}, requests) {
    std::vector<float> values(static_cast<std::size_t>(format.row_elements));
    for (std::size_t r = 0; r < requests.size(); ++r) {
      for (std::int64_t key = requests[r].begin; key < requests[r].end; ++key) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          // An outlier channel, as latents have.
          const double size = i == 3 ? 20 : 1;
          values[i] = static_cast<float>(
              size * random_normal(seed + 100 * r + static_cast<std::uint64_t>(key), i));
        }
        encode_row(format_, values, bytes(static_cast<std::int64_t>(r), key));
      }
    }
  }

  const PagedKvCache& cache() const { return rows_.cache(); }
  BlockTableView table() const { return rows_.table(); }
  std::span<std::byte> bytes(std::int64_t request, std::int64_t key) const {
    return {cache().slot(rows_.slot(request, key)), static_cast<std::size_t>(format_.row_bytes())};
  }
  /// Appends the stored values of keys [begin, end) of a request.
  void append_values(std::int64_t request, std::int64_t begin, std::int64_t end,
                     std::vector<double>& values) const {
    for (std::int64_t key = begin; key < end; ++key) {
      const std::vector<double> row = oracle::decode_row(
          bytes(request, key).data(), format_.row_elements, oracle_format(format_));
      values.insert(values.end(), row.begin(), row.end());
    }
  }

 private:
  KvFormat format_;
  PagedRows rows_;
};

}  // namespace fovea::test
