// Small cases for `fovea check`: odd sizes, empty requests, borders of blocks and tiles.
#include <array>

#include "cases/operands.h"

namespace fovea::cases {
namespace {

/// Mostly small, sometimes on a power of two or one off: where tiles and blocks end.
std::int64_t length(Random& random, std::int64_t min, std::int64_t max) {
  if (random.chance(0.3)) {
    const std::int64_t near = (std::int64_t{1} << random.integer(0, 9)) + random.integer(-1, 1);
    if (near >= min && near <= max) return near;
  }
  return random.integer(min, random.chance(0.5) ? max : min + (max - min) / 8);
}

std::vector<std::int64_t> lengths(Random& random, std::size_t count, std::int64_t min,
                                  std::int64_t max) {
  std::vector<std::int64_t> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(length(random, min, max));
  return values;
}

std::int64_t block_size(Random& random) {
  constexpr std::array<std::int64_t, 7> kSizes = {1, 3, 16, 32, 64, 100, 128};
  return kSizes[static_cast<std::size_t>(random.integer(0, 6))];
}

std::string dtype_word(Random& random) {
  constexpr std::array<const char*, 3> kNames = {"f32", "f16", "bf16"};
  return kNames[static_cast<std::size_t>(random.integer(0, 2))];
}

void set_pad(CaseLine& line, Random& random) {
  if (random.chance(0.5)) line.set("pad", random.integer(1, 9));
}

void fill_row_op(CaseLine& line, Random& random) {
  line.set("tokens", length(random, 0, 70));
  if (line.op() == "rms_norm") {
    line.set("dim", length(random, 1, 600));
  } else if (line.op() == "rope") {
    line.set("heads", random.integer(1, 9)).set("dim", 2 * random.integer(1, 64));
    line.set("pairing", std::string(random.chance(0.5) ? "neox" : "interleaved"));
  } else {
    constexpr std::array<const char*, 3> kAliases = {"none", "prefix", "suffix"};
    line.set("heads", random.integer(1, 9)).set("dim", length(random, 1, 300));
    line.set("empty", random.integer(0, 60)).set("sinks", random.integer(0, 1));
    line.set("alias", std::string(kAliases[static_cast<std::size_t>(random.integer(0, 2))]));
  }
}

void fill_cache_op(CaseLine& line, Random& random) {
  line.set("block_size", block_size(random));
  if (random.chance(0.3)) line.set("cache", dtype_word(random));
  if (line.op() == "kv_append") {
    line.set("tokens", length(random, 0, 200)).set("skip", random.integer(0, 30));
    line.set("kv_lora_rank", length(random, 1, 520)).set("rope", 2 * random.integer(1, 32));
    if (random.chance(0.5)) line.set("fused", 1);
  } else {
    const auto requests = static_cast<std::size_t>(random.integer(1, 5));
    line.set("lens", lengths(random, requests, 0, 200));
    line.set("starts", lengths(random, requests, 0, 200)).set("row", length(random, 1, 600));
  }
}

/// A KV format that rows of every width have or, last, of even ones.
std::string format_word(Random& random, bool is_even) {
  constexpr std::array<const char*, 8> kFormats = {
      "f32",      "f16",           "bf16",          "fp8_e4m3",
      "fp8_e5m2", "int8_per_token", "fp8_per_token", "int4_per_token"};
  return kFormats[static_cast<std::size_t>(random.integer(0, is_even ? 7 : 6))];
}

/// Some of the rules; a chunk needs a causal mask.
void set_rules(CaseLine& line, Random& random, bool is_causal) {
  if (random.chance(0.3)) line.set("window", random.integer(0, 90));
  if (is_causal && random.chance(0.2)) line.set("attention_chunk", random.integer(1, 90));
  if (random.chance(0.2)) line.set("soft_cap", random.integer(1, 30));
  if (random.chance(0.3)) line.set("sinks", 1);
}

/// Draft trees, whose tokens are all keys.
void set_tree(CaseLine& line, Random& random, std::size_t requests) {
  line.set("kv", lengths(random, requests, 20, 300)).set("q", lengths(random, requests, 0, 20));
  line.set("tree", std::string(random.chance(0.5) ? "chain" : "fork"));
}

/// Whether they are even.
bool set_head_dims(CaseLine& line, Random& random) {
  constexpr std::array<std::int64_t, 8> kDims = {64, 80, 96, 128, 256, 1, 30, 100};
  const std::int64_t kv_heads = random.integer(1, 4);
  line.set("heads", kv_heads * random.integer(1, 12)).set("kv_heads", kv_heads);
  const std::int64_t qk = kDims[static_cast<std::size_t>(random.integer(0, 7))];
  line.set("qk", qk);
  std::int64_t v = qk;
  if (random.chance(0.3)) {
    v = length(random, 1, 200);
    line.set("v", v);
  }
  return qk % 2 == 0 && v % 2 == 0;
}

void fill_attention_decode(CaseLine& line, Random& random) {
  const auto requests = static_cast<std::size_t>(random.integer(1, 6));
  const bool is_even = set_head_dims(line, random);
  if (random.chance(0.25)) {
    set_tree(line, random, requests);
    set_rules(line, random, true);
  } else {
    const bool is_causal = random.chance(0.8);
    line.set("kv", lengths(random, requests, 0, 400));
    line.set("q", lengths(random, requests, 0, random.chance(0.5) ? 1 : 9));
    line.set("causal", is_causal ? 1 : 0);
    set_rules(line, random, is_causal);
  }
  line.set("block_size", block_size(random));
  if (random.chance(0.3)) line.set("cache", format_word(random, is_even));
  if (random.chance(0.3)) line.set("out", std::string("f32"));
  if (random.chance(0.5)) line.set("padding", random.integer(1, 4));
}

void fill_gqa_append(CaseLine& line, Random& random) {
  constexpr std::array<std::int64_t, 5> kDims = {64, 80, 128, 6, 30};
  const std::int64_t qk = kDims[static_cast<std::size_t>(random.integer(0, 4))];
  line.set("tokens", length(random, 0, 200)).set("skip", random.integer(0, 30));
  line.set("kv_heads", random.integer(1, 9)).set("qk", qk).set("v", length(random, 1, 130));
  line.set("block_size", block_size(random));
  if (random.chance(0.3)) line.set("cache", dtype_word(random));
  if (random.chance(0.4)) return;
  line.set("rope", random.chance(0.5) ? qk : 2 * random.integer(1, qk / 2));
  line.set("pairing", std::string(random.chance(0.5) ? "neox" : "interleaved"));
}

void fill_mla_decode(CaseLine& line, Random& random) {
  const auto requests = static_cast<std::size_t>(random.integer(1, 6));
  const bool has_real_dims = random.chance(0.5);
  line.set("heads", random.chance(0.5) ? 16 : random.integer(1, 33));
  const bool is_causal = random.chance(0.8);
  if (is_causal && random.chance(0.2)) {
    set_tree(line, random, requests);
  } else {
    line.set("kv", lengths(random, requests, 0, has_real_dims ? 300 : 700));
    line.set("q", lengths(random, requests, 0, random.chance(0.5) ? 1 : 5));
  }
  line.set("kv_lora_rank", has_real_dims ? 512 : 8 * random.integer(1, 40));
  line.set("rope", has_real_dims ? 64 : 2 * random.integer(1, 32));
  line.set("block_size", block_size(random)).set("causal", is_causal ? 1 : 0);
  set_rules(line, random, is_causal);
  if (has_real_dims && random.chance(0.2)) {
    line.set("cache", std::string("fp8_ds_mla"));
  } else if (random.chance(0.4)) {
    line.set("cache", format_word(random, true));
  }
  if (random.chance(0.3)) line.set("out", std::string("f32"));
  if (random.chance(0.5)) line.set("padding", random.integer(1, 4));
}

void fill_attention_prefill(CaseLine& line, Random& random) {
  const auto requests = static_cast<std::size_t>(random.integer(1, 4));
  const bool has_real_dims = random.chance(0.5);
  const bool is_paged = random.chance(0.4);
  const bool is_causal = random.chance(0.6);
  line.set("tokens", lengths(random, requests, 0, 150));
  if (random.chance(0.5)) line.set("keys", lengths(random, requests, 0, 200));
  if (is_paged) {
    const bool is_even = set_head_dims(line, random);
    line.set("block_size", block_size(random));
    if (random.chance(0.3)) line.set("cache", format_word(random, is_even));
  } else {
    const std::int64_t kv_heads = random.integer(1, 4);
    line.set("heads", kv_heads * random.integer(1, 4)).set("kv_heads", kv_heads);
    const std::int64_t rope = random.chance(0.5) ? 2 * random.integer(1, 16) : 0;
    line.set("qk", has_real_dims ? 192 : rope + length(random, 1, 150));
    line.set("rope", has_real_dims && rope > 0 ? 64 : rope);
    line.set("v", has_real_dims ? 128 : length(random, 1, 200));
  }
  line.set("causal", is_causal ? 1 : 0);
  set_rules(line, random, is_causal);
  if (random.chance(0.3)) line.set("out", std::string("f32"));
  if (random.chance(0.5)) line.set("padding", random.integer(1, 4));
}

void fill_linear(CaseLine& line, Random& random) {
  line.set("tokens", length(random, 0, 70)).set("bias", random.integer(0, 1));
  if (random.chance(0.5)) {
    line.set("in", length(random, 1, 600)).set("out", length(random, 1, 300));
    return;
  }
  constexpr std::array<std::int64_t, 5> kGroups = {0, 1, 48, 64, 128};
  const auto group = [&] { return kGroups[static_cast<std::size_t>(random.integer(0, 4))]; };
  line.set("in", random.chance(0.5) ? 64 * random.integer(1, 20) : length(random, 1, 600));
  line.set("out", length(random, 1, 300)).set("weight", std::string("fp8"));
  line.set("group_out", group()).set("group_in", group());
}

void fill_mla_layer(CaseLine& line, Random& random) {
  const auto requests = static_cast<std::size_t>(random.integer(1, 4));
  line.set("hidden", 16 * random.integer(1, 12)).set("heads", random.integer(1, 8));
  line.set("q_lora_rank", random.chance(0.5) ? 8 * random.integer(1, 12) : 0);
  line.set("kv_lora_rank", 8 * random.integer(1, 16)).set("nope", 4 * random.integer(1, 16));
  line.set("rope", 2 * random.integer(1, 16)).set("v", 4 * random.integer(1, 16));
  line.set("q", lengths(random, requests, 1, random.chance(0.4) ? 1 : 40));
  line.set("context", lengths(random, requests, 0, 150)).set("block_size", block_size(random));
  // At least a block for each request, which the equal plan needs.
  line.set("workspace_rows", random.integer(512, 1024));
  line.set("context_plan", std::string(random.chance(0.5) ? "packed" : "equal"));
  line.set("absorption", std::string(random.chance(0.3) ? "full" : "two_step"));
  line.set("pairing", std::string(random.chance(0.5) ? "neox" : "interleaved"));
}

}  // namespace

CaseLine random_case(const std::string& op, DType dtype, std::uint64_t seed) {
  CaseLine line(op, dtype);
  Random random(seed);
  if (op == "mla_decode") {
    fill_mla_decode(line, random);
  } else if (op == "attention_decode") {
    fill_attention_decode(line, random);
  } else if (op == "gqa_append") {
    fill_gqa_append(line, random);
  } else if (op == "attention_prefill") {
    fill_attention_prefill(line, random);
  } else if (op == "mla_layer") {
    fill_mla_layer(line, random);
  } else if (op == "linear") {
    fill_linear(line, random);
  } else if (op == "kv_append" || op == "kv_gather") {
    fill_cache_op(line, random);
  } else {
    fill_row_op(line, random);
  }
  if (op == "mla_layer" ? random.chance(0.3) : true) set_pad(line, random);
  // Below 2^24, what a case line takes.
  line.set("seed", static_cast<std::int64_t>(random.bits() >> 41));
  return line;
}

}  // namespace fovea::cases
