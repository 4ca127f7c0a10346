// The schedule of decode kernels: which keys of which request each group of blocks reads. It is
// computed on the device from the lengths, and its size depends on the number of groups alone, so
// that a CUDA graph can be replayed with other lengths.
//
// A job is what one group does at a time: rows of a request that share keys, over all of these, in
// units of kKeyTile keys; a job without keys is one unit, which writes zeros. The units of all
// jobs, in order of requests, are cut into equal ranges, one per group; of a batch with fewer units
// than groups, fewer groups take part. Only a group's first and last job can be shared with other
// groups, so two partial results per group are enough. Where one job per group leaves no group with
// much more than an equal share, nothing is cut and nothing to be merged. Units are counted in 32
// bits, which are enough for 2^37 keys, counted once for each job that reads them.
#pragma once

#include <cstdint>

namespace fovea::cuda::split_kv {

constexpr int kKeyTile = 64;

/// One group's range. 48 bytes, read as three 16-byte words.
struct alignas(16) GroupRange {
  std::int32_t request;         ///< Of the first job.
  std::int32_t job;             ///< First job among its request's.
  std::int32_t tile;            ///< First key tile of the first job, among those it sees.
  std::int32_t units;           ///< Units of the range.
  std::int32_t job_first_unit;  ///< Unit number of the first job's start.
  std::int32_t total_units;     ///< Of the whole batch.
  std::int32_t seq_len;         ///< Of the first job's request, as the three below.
  std::int32_t query_begin;
  std::int32_t query_len;
  std::int32_t active_groups;  ///< Groups that have units: the first ones.
  std::int32_t first_slot;     ///< Of the first job's partial results: see JobPieces.
  std::int32_t num_pieces;     ///< As many groups share the first job.
};

struct ScheduleShape {
  std::int32_t num_groups;
  std::int32_t heads;         ///< Query heads that share a key head.
  std::int32_t rows_per_job;  ///< Rows are query tokens x heads.
  std::int32_t window_left;      ///< Negative: none.
  std::int32_t attention_chunk;  ///< 0: none.

  /// Jobs of a request.
  __host__ __device__ std::int32_t jobs(std::int32_t query_len) const {
    return (query_len * heads + rows_per_job - 1) / rows_per_job;
  }
  /// The first key that some query token of the request sees, if there are keys.
  __host__ __device__ std::int32_t first_key(std::int32_t seq_len, std::int32_t query_len) const {
    const std::int32_t position = seq_len - query_len;
    std::int32_t key = window_left < 0 ? 0 : position - window_left;
    if (attention_chunk > 0) {
      const std::int32_t chunk = position / attention_chunk * attention_chunk;
      key = key > chunk ? key : chunk;
    }
    return key > 0 ? key : 0;
  }
  __host__ __device__ std::int32_t first_tile(std::int32_t seq_len, std::int32_t query_len) const {
    return first_key(seq_len, query_len) / kKeyTile;
  }
  /// Key tiles of a job.
  __host__ __device__ std::int32_t units(std::int32_t seq_len, std::int32_t query_len) const {
    if (seq_len <= 0) return 1;
    return (seq_len + kKeyTile - 1) / kKeyTile - first_tile(seq_len, query_len);
  }
};

/// First unit of group `g`: g * total / groups.
__host__ __device__ inline std::int32_t range_begin(std::int32_t g, std::int32_t total,
                                                    std::int32_t groups) {
  return static_cast<std::int32_t>(static_cast<std::int64_t>(g) * total / groups);
}

/// The group whose range holds `unit`, given no more groups than units.
__host__ __device__ inline std::int32_t group_of(std::int32_t unit, std::int32_t total,
                                                 std::int32_t groups) {
  return static_cast<std::int32_t>((static_cast<std::int64_t>(unit + 1) * groups - 1) / total);
}

/// The partial results of a job that several groups share. A group has two slots: for the job that
/// it begins with and for its last one.
struct JobPieces {
  std::int32_t first_group, first_slot, count;

  JobPieces() = default;
  __host__ __device__ JobPieces(std::int32_t first_slot, std::int32_t count)
      : first_group(first_slot / 2), first_slot(first_slot), count(count) {}
  /// Of the job that begins at unit `first` of `total`.
  __host__ __device__ JobPieces(std::int32_t first, std::int32_t units, std::int32_t total,
                                std::int32_t groups) {
    first_group = group_of(first, total, groups);
    count = group_of(first + units - 1, total, groups) - first_group + 1;
    // The first group may have begun with another job; the others begin inside this one.
    first_slot = 2 * first_group + (range_begin(first_group, total, groups) < first);
  }
  __host__ __device__ std::int32_t slot(int piece) const {
    return piece == 0 ? first_slot : 2 * (first_group + piece);
  }
};

}  // namespace fovea::cuda::split_kv
