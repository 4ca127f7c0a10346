// What the instruction set can do at best, for comparison. Included inside an instruction set's
// unit.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

std::int64_t multiply_add_rounds(std::int64_t rounds, float* sink) {
  // As many independent chains as the kernels' own register tile has.
  constexpr int kChains = kQkTokens * kQkVectors;
  Vec sum[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) sum[i] = broadcast(static_cast<float>(i));
  const Vec factor = broadcast(*sink);  // Unknown here, so that nothing folds.
  for (std::int64_t n = 0; n < rounds; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sum[i] = fma(sum[i], factor, factor);
  }
  Vec total = sum[0];
#pragma GCC unroll 32
  for (int i = 1; i < kChains; ++i) total = add(total, sum[i]);
  *sink = reduce_add(total);
  return rounds * kChains * kLanes * 2;
}

float sum(const float* x, std::int64_t n) {
  Vec total[4] = {broadcast(0.f), broadcast(0.f), broadcast(0.f), broadcast(0.f)};
  for (std::int64_t i = 0; i < n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) total[j] = add(total[j], load(x + i + j * kLanes));
  }
  return reduce_add(add(add(total[0], total[1]), add(total[2], total[3])));
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
