#include "cases/operands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "fovea/engine.h"
#include "fovea/oracle.h"

namespace fovea::cases {
namespace {

constexpr int kPoison = 0xff;
// Longer operands repeat themselves: gigabytes of random values take minutes, and tell no more. So
// many rows of a cache, a prime: blocks and requests begin at different ones.
constexpr std::int64_t kDistinctValues = 1'000'000, kDistinctRows = 4093;
constexpr std::int32_t kGarbageId = std::numeric_limits<std::int32_t>::min();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

oracle::Format format_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return oracle::Format::f16;
    case DType::bf16:
      return oracle::Format::bf16;
    case DType::f8e4m3fn:
      return oracle::Format::f8e4m3fn;
    case DType::f8e5m2:
      return oracle::Format::f8e5m2;
    case DType::i8:
      return oracle::Format::i8;
    case DType::i4:
      return oracle::Format::i4;
    default:
      return oracle::Format::f32;
  }
}

oracle::RowScales scales_of(KvScales scales) {
  switch (scales) {
    case KvScales::none:
      break;
    case KvScales::per_tensor:
      return oracle::RowScales::per_tensor;
    case KvScales::per_token:
      return oracle::RowScales::per_token;
    case KvScales::ds_mla:
      return oracle::RowScales::ds_mla;
  }
  return oracle::RowScales::none;
}

oracle::RowFormat row_format(const KvFormat& format) {
  return {.format = format_of(format.dtype),
          .scales = scales_of(format.scales),
          .num_heads = format.num_heads,
          .first_group = format.first_group,
          .scale = static_cast<double>(format.scale)};
}

/// By all threads: the first touch of gigabytes takes one of them seconds.
void poison(const OpContext& ctx, void* data, std::int64_t bytes) {
  constexpr std::int64_t kPiece = std::int64_t{16} << 20;
  ctx.pool->run((bytes + kPiece - 1) / kPiece, [&](std::int64_t piece) {
    std::memset(static_cast<std::byte*>(data) + piece * kPiece, kPoison,
                static_cast<std::size_t>(std::min(kPiece, bytes - piece * kPiece)));
  });
}

}  // namespace

std::uint64_t Random::bits() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

std::int64_t Random::integer(std::int64_t min, std::int64_t max) {
  const auto count = static_cast<std::uint64_t>(max - min) + 1;
  return min + static_cast<std::int64_t>(bits() % count);
}

double Random::normal() {
  // Box-Muller; 1 - u keeps the logarithm's argument above zero.
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(6.283185307179586 * uniform());
}

std::vector<double> Array::values() const {
  std::vector<double> all =
      oracle::decode(storage.view().data, storage.view().numel(), format_of(view.dtype));
  const auto row = static_cast<std::size_t>(view.shape[static_cast<std::size_t>(view.ndim - 1)]);
  const auto stride =
      static_cast<std::size_t>(storage.view().shape[static_cast<std::size_t>(view.ndim - 1)]);
  if (stride == row) return all;
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(view.numel()));
  for (std::size_t begin = 0; begin < all.size(); begin += stride) {
    values.insert(values.end(), all.begin() + static_cast<std::ptrdiff_t>(begin),
                  all.begin() + static_cast<std::ptrdiff_t>(begin + row));
  }
  return values;
}

bool Array::pads_untouched() const {
  const std::int64_t row = view.shape[static_cast<std::size_t>(view.ndim - 1)];
  const std::int64_t stride = storage.view().shape[static_cast<std::size_t>(view.ndim - 1)];
  const std::int64_t element_bytes = bytes_of(view.dtype, 1);
  const auto* bytes = static_cast<const unsigned char*>(storage.view().data);
  for (std::int64_t at = 0; stride > row && at < storage.view().numel(); at += stride) {
    const unsigned char* pad = bytes + (at + row) * element_bytes;
    if (std::any_of(pad, pad + (stride - row) * element_bytes,
                    [](unsigned char byte) { return byte != kPoison; })) {
      return false;
    }
  }
  return true;
}

Array poisoned_array(const OpContext& ctx, const ArraySpec& spec) {
  std::vector<std::int64_t> padded = spec.shape;
  padded.back() += spec.pad;
  Array array;
  array.storage = Tensor::empty(spec.dtype, padded, ctx.host_memory);
  poison(ctx, array.storage.view().data, array.storage.nbytes());
  array.view =
      array.storage.view().slice(static_cast<int>(padded.size()) - 1, 0, spec.shape.back());
  return array;
}

Array normal_array(const OpContext& ctx, const ArraySpec& spec, Random& random,
                   double stddev) {
  Array array = poisoned_array(ctx, spec);
  if (array.view.numel() == 0) return array;
  const std::int64_t row = spec.shape.back();
  // Odd: then a head has other rows in the next tokens.
  const std::int64_t distinct = std::min(array.view.numel() / row, kDistinctValues / row | 1);
  const Tensor exact = Tensor::empty(DType::f32, {distinct, row});
  for (std::int64_t i = 0; i < distinct * row; ++i) {
    exact.ptr<float>()[i] = static_cast<float>(stddev * random.normal());
  }
  auto* bytes = static_cast<std::byte*>(array.storage.view().data);
  const TensorView first =
      TensorView::contiguous(bytes, spec.dtype, {distinct, row + spec.pad});
  copy(exact, first.slice(1, 0, row));
  const std::int64_t period = bytes_of(spec.dtype, first.numel());
  for (std::int64_t at = period; at < array.storage.nbytes(); at += period) {
    std::memcpy(bytes + at, bytes,
                static_cast<std::size_t>(std::min(period, array.storage.nbytes() - at)));
  }
  return array;
}

Tensor index_array(const OpContext& ctx, const std::vector<std::int64_t>& values) {
  Tensor array =
      Tensor::empty(DType::i64, {static_cast<std::int64_t>(values.size())}, ctx.host_memory);
  std::copy(values.begin(), values.end(), array.ptr<std::int64_t>());
  return array;
}

void reserve_poisoned(const OpContext& ctx, std::int64_t bytes) {
  ctx.workspace->reserve(bytes);
  WorkspaceScope scope(*ctx.workspace);
  const std::int64_t capacity = ctx.workspace->capacity();
  if (capacity == 0) return;
  const std::vector<std::byte> poison(static_cast<std::size_t>(capacity), std::byte{kPoison});
  copy_bytes(ctx.memory, scope.take_bytes(capacity), poison.data(), capacity, ctx.stream);
}

BlockTableView CachedSequences::table() const {
  return {.data = block_ids.data(),
          .requests = static_cast<std::int64_t>(lens.size()),
          .width = width,
          .stride = width};
}

std::int64_t CachedSequences::slot(std::size_t request, std::int64_t position) const {
  const std::size_t entry = request * static_cast<std::size_t>(width) +
                            static_cast<std::size_t>(position / cache.block_size());
  return std::int64_t{block_ids[entry]} * cache.block_size() + position % cache.block_size();
}

void CachedSequences::hide_before(std::size_t request, std::int64_t position) {
  hidden[request] = position;
  std::fill_n(block_ids.begin() + static_cast<std::ptrdiff_t>(request) * width,
              position / cache.block_size(), kGarbageId);
}

std::vector<double> CachedSequences::rows(std::size_t request, std::int64_t begin,
                                          std::int64_t end) const {
  std::vector<double> rows;
  for (std::int64_t position = begin; position < end; ++position) {
    if (position < hidden[request]) {
      rows.resize(rows.size() + static_cast<std::size_t>(cache.format().row_elements),
                  std::numeric_limits<double>::quiet_NaN());
      continue;
    }
    const std::vector<double> row =
        oracle::decode_row(cache.slot(slot(request, position)), cache.format().row_elements,
                           row_format(cache.format()));
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

void CachedSequences::fill(const OpContext& ctx, std::span<const std::int64_t> begins,
                           std::span<const std::int64_t> ends, Random& random) const {
  const KvFormat& format = cache.format();
  std::vector<std::int64_t> rows_before = {0};
  for (std::size_t i = 0; i < ends.size(); ++i) {
    rows_before.push_back(rows_before.back() + std::max<std::int64_t>(ends[i] - begins[i], 0));
  }
  const std::int64_t elements = format.row_elements, bytes = format.row_bytes();
  const std::int64_t distinct = std::min(rows_before.back(), kDistinctRows);
  std::vector<float> values(static_cast<std::size_t>(elements));
  std::vector<std::byte> rows(static_cast<std::size_t>(distinct * bytes));
  for (std::int64_t i = 0; i < distinct; ++i) {
    for (float& value : values) value = static_cast<float>(random.normal());
    encode_row(format, values, {rows.data() + i * bytes, static_cast<std::size_t>(bytes)});
  }
  ctx.pool->run(std::ssize(ends), [&](std::int64_t request) {
    const auto i = static_cast<std::size_t>(request);
    for (std::int64_t position = begins[i]; position < ends[i]; ++position) {
      const std::int64_t row = (rows_before[i] + position - begins[i]) % distinct;
      std::memcpy(cache.slot(slot(i, position)), rows.data() + row * bytes,
                  static_cast<std::size_t>(bytes));
    }
  });
}

namespace {

PagedKvCache poisoned_cache(const OpContext& ctx, const CacheSpec& spec,
                            std::int64_t num_blocks) {
  const std::int64_t row_stride =
      spec.format.row_bytes() + spec.pad * std::max<std::int64_t>(spec.format.alignment(), 1);
  PagedKvCache cache = PagedKvCache::allocate(
      spec.format,
      {.num_blocks = num_blocks, .block_size = spec.block_size, .row_stride = row_stride},
      ctx.host_memory);
  poison(ctx, cache.row(0, 0), PagedKvCache::required_bytes(spec.format, cache.layout()));
  return cache;
}

}  // namespace

CachedSequences CachedSequences::beside(const KvFormat& format, std::int64_t pad,
                                        const OpContext& ctx) const {
  const KvCacheLayout& layout = cache.layout();
  return {.cache = poisoned_cache(ctx, {format, layout.block_size, pad}, layout.num_blocks),
          .block_ids = block_ids,
          .width = width,
          .lens = lens,
          .hidden = hidden};
}

CachedSequences make_cached_sequences(const OpContext& ctx, const CacheSpec& spec,
                                      std::vector<std::int64_t> lens, Random& random) {
  CachedSequences sequences;
  const auto blocks_of = [&](std::int64_t len) {
    return (len + spec.block_size - 1) / spec.block_size;
  };
  std::int64_t used = 0;
  for (const std::int64_t len : lens) {
    used += blocks_of(len);
    sequences.width = std::max(sequences.width, blocks_of(len));
  }
  sequences.width += 1;  // A tail for garbage in every row.
  const std::int64_t num_blocks = used + 2;
  sequences.cache = poisoned_cache(ctx, spec, num_blocks);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks));
  std::iota(ids.begin(), ids.end(), 0);
  for (std::size_t i = ids.size() - 1; i > 0; --i) {
    std::swap(ids[i],
              ids[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i)))]);
  }
  sequences.block_ids.assign(lens.size() * static_cast<std::size_t>(sequences.width), kGarbageId);
  auto next = ids.begin();
  for (std::size_t request = 0; request < lens.size(); ++request) {
    const std::int64_t count = blocks_of(lens[request]);
    std::copy_n(
        next, count,
        sequences.block_ids.begin() + static_cast<std::ptrdiff_t>(request) * sequences.width);
    next += count;
  }
  sequences.hidden.assign(lens.size(), 0);
  sequences.lens = std::move(lens);
  return sequences;
}

void RowChecker::note(double error, std::string place) {
  if (std::isnan(error)) error = kInfinity;
  if (error > result_.worst_error) {
    result_.worst_error = error;
    result_.worst_place = std::move(place);
  }
}

void RowChecker::rows(const std::string& name, std::span<const double> got,
                      std::span<const double> expected, std::int64_t row_elements) {
  require(got.size() == expected.size(), name + " has the wrong size");
  const auto width = static_cast<std::size_t>(row_elements);
  for (std::size_t begin = 0; begin + width <= expected.size() && width > 0; begin += width) {
    double error = 0;
    double norm = 0;
    double worst = -1;
    std::size_t worst_at = begin;
    for (std::size_t i = begin; i < begin + width; ++i) {
      const double difference = std::abs(got[i] - expected[i]);
      error += difference * difference;
      norm += expected[i] * expected[i];
      if (!(difference <= worst)) {
        worst = difference;
        worst_at = i;
      }
    }
    if (error == 0) continue;
    norm = std::max(norm, small_ * small_ * static_cast<double>(width));
    note(norm > 0 ? std::sqrt(error / norm) : kInfinity,
         fmt::format("{} row {} element {}: got {}, expected {}", name, begin / width,
                     worst_at - begin, got[worst_at], expected[worst_at]));
  }
}

void RowChecker::lse(std::span<const double> got, std::span<const double> expected) {
  require(got.size() == expected.size(), "lse has the wrong size");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) continue;
    const double error = std::abs(got[i] - expected[i]) / std::max(1.0, std::abs(expected[i]));
    note(std::isinf(expected[i]) ? kInfinity : error,
         fmt::format("lse element {}: got {}, expected {}", i, got[i], expected[i]));
  }
}

void RowChecker::require(bool holds, const std::string& what) {
  if (!holds) note(kInfinity, what);
}

double rounding(DType dtype) {
  if (dtype == DType::f32) return 0x1p-24;
  return dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

double row_limit(DType dtype) {
  // Rows of some hundred elements: sums and roots in f32 stay within a few units in the last place.
  constexpr double kF32Arithmetic = 2e-6;
  return rounding(dtype) + kF32Arithmetic;
}

double attention_limit(DType dtype) { return Verifier::limit(dtype); }

std::vector<std::int32_t> to_int32(const std::vector<std::int64_t>& values) {
  return {values.begin(), values.end()};
}

std::vector<std::int32_t> running_sum(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int32_t> sums = {0};
  for (const std::int64_t length : lengths) {
    sums.push_back(sums.back() + static_cast<std::int32_t>(length));
  }
  return sums;
}

}  // namespace fovea::cases
