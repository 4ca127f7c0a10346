#include "fovea/oracle.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace fovea::python {
namespace {

namespace nb = nanobind;

using Array = nb::ndarray<const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::numpy, double>;

Result owned(std::vector<double> values, std::initializer_list<std::size_t> shape) {
  auto* memory = new std::vector<double>(std::move(values));
  const nb::capsule owner(memory, [](void* p) noexcept {
    delete static_cast<std::vector<double>*>(p);
  });
  return Result(memory->data(), shape, owner);
}

nb::tuple attention(const Array& q, const Array& k, const Array& v, double sm_scale, bool causal,
                    std::int64_t window_left, std::int64_t attention_chunk, double soft_cap,
                    const std::vector<double>& sinks) {
  oracle::Attention problem;
  problem.num_queries = static_cast<std::int64_t>(q.shape(0));
  problem.num_heads = static_cast<std::int64_t>(q.shape(1));
  problem.num_keys = static_cast<std::int64_t>(k.shape(0));
  problem.num_kv_heads = static_cast<std::int64_t>(k.shape(1));
  problem.qk_dim = static_cast<std::int64_t>(q.shape(2));
  problem.v_dim = static_cast<std::int64_t>(v.shape(2));
  problem.sm_scale = sm_scale;
  problem.causal = causal;
  problem.window_left = window_left;
  problem.attention_chunk = attention_chunk;
  problem.soft_cap = soft_cap;
  problem.sinks = sinks;
  problem.q = {q.data(), q.size()};
  problem.k = {k.data(), k.size()};
  problem.v = {v.data(), v.size()};
  oracle::AttentionResult result;
  {
    const nb::gil_scoped_release release;
    result = oracle::attention(problem);
  }
  return nb::make_tuple(
      owned(std::move(result.out), {q.shape(0), q.shape(1), v.shape(2)}),
      owned(std::move(result.lse), {q.shape(1), q.shape(0)}));
}

}  // namespace

void bind_oracle(nb::module_& m) {
  m.def("oracle_attention", &attention, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::kw_only(),
        nb::arg("sm_scale"), nb::arg("causal") = true, nb::arg("window_left") = -1,
        nb::arg("attention_chunk") = 0, nb::arg("soft_cap") = 0.0,
        nb::arg("sinks") = std::vector<double>{},
        R"(Dense attention of one sequence in float64, from the formulas.

Args:
    q: [queries, heads, qk_dim] float64; the last query stands at the last key.
    k: [keys, kv_heads, qk_dim] float64.
    v: [keys, kv_heads, v_dim] float64.

Returns:
    out [queries, heads, v_dim] and lse [heads, queries], float64 arrays of NumPy.)");
}

}  // namespace fovea::python
