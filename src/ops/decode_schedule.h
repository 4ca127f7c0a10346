// What the decode ops check of their schedule.
#pragma once

#include "fovea/ops.h"
#include "ops/checks.h"

namespace fovea {

/// `schedule` is there, consistent, made for `variant`, and its query rows are rows of `rows`
/// [rows, ...], the argument of that name.
void check_decode_schedule(const char* op, const DecodeSchedule* schedule,
                           const AttentionVariant& variant, const Argument& rows_name,
                           std::int64_t rows);

/// The blocks that the schedule's visible keys lie in are blocks of `cache`.
/// The table is on the host, or where ctx computes.
void check_table_device(const OpContext& ctx, const char* op, const BlockTableView& table);

void check_decode_blocks(const char* op, const DecodeSchedule& schedule,
                         const AttentionVariant& variant, const BlockTableView& table,
                         const PagedKvCache& cache);

}  // namespace fovea
