// Included inside an instruction set's unit, after its primitives.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// 2^x for x <= 0 within 1.5 units in the last place; exactly 1 at 0 and 0 below -126, -inf
/// included. NaN stays NaN.
FOVEA_INLINE Vec exp2_nonpositive(Vec x) {
  const Vec lowest =
      broadcast(-126.f);  // Below, results are subnormal: no weight worth their cost.
  const Vec clamped = max(lowest, x);
  const Vec n = round(clamped);
  const Vec f = sub(clamped, n);  // In [-0.5, 0.5].
  // The polynomial with constant term 1 whose largest relative error there, 9.2e-8, is smallest.
  Vec y = broadcast(0.00132647273f);
  y = fma(y, f, broadcast(0.00967151299f));
  y = fma(y, f, broadcast(0.0555073358f));
  y = fma(y, f, broadcast(0.240222424f));
  y = fma(y, f, broadcast(0.693147004f));
  y = fma(y, f, broadcast(1.f));
  return select(less(x, lowest), broadcast(0.f), scale_by_power(y, n));
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
