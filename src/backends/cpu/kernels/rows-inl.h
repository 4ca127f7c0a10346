// Kernels over single rows. Included inside an instruction set's unit.

namespace fovea::cpu::FOVEA_CPU_ISA {
namespace {

template <class T>
void load_row(const void* src, std::int64_t n, float* dst) {
  const T* from = static_cast<const T*>(src);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load(from + i));
  if (i < n) store(dst + i, load_partial(from + i, n - i));
}

template <class T>
void load_codes(const void* src, std::int64_t n, float scale, float* dst) {
  const T* from = static_cast<const T*>(src);
  const Vec factor = broadcast(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, mul(load(from + i), factor));
  if (i < n) store(dst + i, mul(load_partial(from + i, n - i), factor));
}

void load_nibbles(const void* src, std::int64_t n, float scale, float* dst) {
  const std::uint8_t* from = static_cast<const std::uint8_t*>(src);
  const Vec factor = broadcast(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, mul(unpack_nibbles(from + i / 2), factor));
  if (i == n) return;
  std::uint8_t rest[kLanes / 2] = {};
  __builtin_memcpy(rest, from + i / 2, static_cast<std::size_t>((n - i) / 2));
  store(dst + i, mul(unpack_nibbles(rest), factor));
}

template <class T>
void store_row(const float* src, float scale, std::int64_t n, void* dst) {
  T* to = static_cast<T*>(dst);
  const Vec factor = broadcast(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, mul(load(src + i), factor));
  if (i < n) store_partial(to + i, mul(load_partial(src + i, n - i), factor), n - i);
}

template <class T>
float sum_squares(const void* x, std::int64_t n) {
  const T* p = static_cast<const T*>(x);
  Vec sum[4] = {broadcast(0.f), broadcast(0.f), broadcast(0.f), broadcast(0.f)};
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vec v = load(p + i + j * kLanes);
      sum[j] = fma(v, v, sum[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const Vec v = i + kLanes <= n ? load(p + i) : load_partial(p + i, n - i);
    sum[0] = fma(v, v, sum[0]);
  }
  return reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

template <class T>
void scale_by_weight(const void* x, float scale, const float* weight, std::int64_t n, void* out) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(out);
  const Vec factor = broadcast(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(to + i, mul(mul(load(from + i), factor), load(weight + i)));
  }
  if (i < n) {
    const Vec v = mul(load_partial(from + i, n - i), factor);
    store_partial(to + i, mul(v, load_partial(weight + i, n - i)), n - i);
  }
}

template <class T>
void rotate_halves(T* x, const float* cos, const float* sin, std::int64_t half) {
  for (std::int64_t i = 0; i < half; i += kLanes) {
    const std::int64_t left = half - i;
    const bool whole = left >= kLanes;
    const Vec a = whole ? load(x + i) : load_partial(x + i, left);
    const Vec b = whole ? load(x + half + i) : load_partial(x + half + i, left);
    const Vec c = whole ? load(cos + i) : load_partial(cos + i, left);
    const Vec s = whole ? load(sin + i) : load_partial(sin + i, left);
    const Vec turned_a = sub(mul(a, c), mul(b, s));
    const Vec turned_b = add(mul(b, c), mul(a, s));
    if (whole) {
      store(x + i, turned_a);
      store(x + half + i, turned_b);
    } else {
      store_partial(x + i, turned_a, left);
      store_partial(x + half + i, turned_b, left);
    }
  }
}

/// [kLanes] channel pairs at a time, turned in an array of floats.
template <class T>
void rotate_neighbours(T* x, const float* cos, const float* sin, std::int64_t half) {
  float pairs[2 * kLanes];
  for (std::int64_t i = 0; i < half; i += kLanes) {
    const std::int64_t count = half - i < kLanes ? half - i : kLanes;
    const std::int64_t channels = 2 * count;
    load_row<T>(x + 2 * i, channels, pairs);
    for (std::int64_t j = 0; j < count; ++j) {
      const float a = pairs[2 * j];
      const float b = pairs[2 * j + 1];
      pairs[2 * j] = a * cos[i + j] - b * sin[i + j];
      pairs[2 * j + 1] = b * cos[i + j] + a * sin[i + j];
    }
    store_row<T>(pairs, 1.f, channels, x + 2 * i);
  }
}

template <class T>
void rotate(void* x, const float* cos, const float* sin, std::int64_t half, bool interleaved) {
  if (interleaved) {
    rotate_neighbours(static_cast<T*>(x), cos, sin, half);
  } else {
    rotate_halves(static_cast<T*>(x), cos, sin, half);
  }
}

void add_weighted(const float* x, float weight, std::int64_t n, float* sum) {
  const Vec w = broadcast(weight);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(sum + i, fma(load(x + i), w, load(sum + i)));
  if (i < n) {
    const Vec v = fma(load_partial(x + i, n - i), w, load_partial(sum + i, n - i));
    store_partial(sum + i, v, n - i);
  }
}

}  // namespace
}  // namespace fovea::cpu::FOVEA_CPU_ISA
