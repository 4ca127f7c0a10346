// Parts of vectors, for the ends of rows whose width is no multiple of the lanes.
// Included inside an instruction set's unit, after its primitives.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

/// The first n < kLanes elements, zeros beyond.
template <class T>
FOVEA_INLINE Vec load_partial(const T* p, std::int64_t n) {
  T elements[kLanes] = {};
  __builtin_memcpy(elements, p, static_cast<std::size_t>(n) * sizeof(T));
  return load(elements);
}

template <class T>
FOVEA_INLINE void store_partial(T* p, Vec v, std::int64_t n) {
  T elements[kLanes];
  store(elements, v);
  __builtin_memcpy(p, elements, static_cast<std::size_t>(n) * sizeof(T));
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
