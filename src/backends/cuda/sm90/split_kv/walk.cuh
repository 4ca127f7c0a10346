// How a group of blocks walks its range of the schedule.
#pragma once

#include "backends/cuda/sm90/split_kv/schedule.cuh"

namespace fovea::cuda::split_kv {

/// What a group does of one job.
struct JobShare {
  std::int32_t request, job;  ///< Job among its request's.
  std::int32_t seq_len, query_begin, query_len;
  std::int32_t first_tile, tiles;      ///< Key tiles of the share; a job without keys has one.
  std::int32_t first_unit, num_units;  ///< Of the whole job.
  bool whole;                          ///< The share is all of it.
  bool last;                           ///< The group has no further job.
  std::int32_t slot;                   ///< Of the partial result, otherwise.
};

class RangeWalk {
 public:
  __device__ RangeWalk(const ScheduleShape& shape, const GroupRange* ranges, std::int32_t group,
                       const std::int32_t* query_start_loc, const std::int32_t* seq_lens)
      : shape_(shape), query_start_loc_(query_start_loc), seq_lens_(seq_lens), group_(group) {
    const int4* words = reinterpret_cast<const int4*>(ranges + group);
    const int4 a = __ldcg(words), b = __ldcg(words + 1), c = __ldcg(words + 2);
    request_ = a.x, job_ = a.y, tile_ = a.z, units_left_ = a.w;
    first_unit_ = b.x, total_units_ = b.y, seq_len_ = b.z, query_begin_ = b.w;
    query_len_ = c.x, groups_ = c.y, first_slot_ = c.z, num_pieces_ = c.w;
  }

  __device__ bool next(JobShare& share) {
    if (units_left_ == 0) return false;
    if (!first_) advance();
    const std::int32_t units = shape_.units(seq_len_, query_len_);
    const std::int32_t take = min(units - tile_, units_left_);
    share.request = request_;
    share.job = job_;
    share.seq_len = seq_len_;
    share.query_begin = query_begin_;
    share.query_len = query_len_;
    share.first_tile = shape_.first_tile(seq_len_, query_len_) + tile_;
    share.tiles = take;
    share.first_unit = first_unit_;
    share.num_units = units;
    share.whole = take == units;
    share.slot = 2 * group_ + (first_ ? 0 : 1);
    units_left_ -= take;
    share.last = units_left_ == 0;
    first_ = false;
    return true;
  }

  /// Of a job that is not whole. Those of the first one are known: it may be in a hurry.
  __device__ JobPieces pieces(std::int32_t slot, std::int32_t first_unit,
                              std::int32_t num_units) const {
    if (slot == 2 * group_) return JobPieces(first_slot_, num_pieces_);
    return JobPieces(first_unit, num_units, total_units_, groups_);
  }

 private:
  __device__ void advance() {
    first_unit_ += shape_.units(seq_len_, query_len_);
    tile_ = 0;
    if (++job_ < shape_.jobs(query_len_)) return;
    job_ = 0;
    do {
      ++request_;
      query_begin_ = __ldg(query_start_loc_ + request_);
      query_len_ = __ldg(query_start_loc_ + request_ + 1) - query_begin_;
    } while (query_len_ == 0);
    seq_len_ = __ldg(seq_lens_ + request_);
  }

  const ScheduleShape& shape_;
  const std::int32_t *query_start_loc_, *seq_lens_;
  std::int32_t group_;
  std::int32_t request_, job_, tile_, units_left_, first_unit_, total_units_, groups_;
  std::int32_t first_slot_, num_pieces_;
  std::int32_t seq_len_, query_begin_, query_len_;
  bool first_ = true;
};

}  // namespace fovea::cuda::split_kv
