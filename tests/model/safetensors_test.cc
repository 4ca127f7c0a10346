#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <random>

#include "model/checkpoint_files.h"
#include "model/json_events.h"
#include "model/shard_index.h"

namespace fovea {
namespace {

using test::error_of;
using test::float_tensor;
using test::json;
using test::mentions;
using test::safetensors_bytes;

std::vector<SafetensorsEntry> read(const std::string& bytes) {
  return read_safetensors_header(std::as_bytes(std::span(bytes)), "x.safetensors");
}

std::string read_error(const std::string& bytes) {
  return error_of(ErrorCode::corrupt_file, [&] { read(bytes); });
}

/// Two tensors "a" [2, 3] and "b" [2], 32 bytes; `change` breaks the header.
template <class Change>
std::string broken(Change&& change) {
  auto [header, data] =
      test::safetensors_parts({{"a", float_tensor({2, 3})}, {"b", float_tensor({2})}});
  change(header);
  return safetensors_bytes(header.dump(), data);
}

TEST(Safetensors, EntriesSayWhereTensorsLie) {
  const std::string bytes =
      safetensors_bytes({{"b", float_tensor({2, 3}, 1)}, {"a", float_tensor({2}, 5)}});
  const auto entries = read(bytes);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].name, "a");
  EXPECT_EQ(entries[1].name, "b");
  EXPECT_EQ(entries[1].dtype, "F32");
  EXPECT_EQ(entries[1].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(entries[1].end, bytes.size());
  EXPECT_EQ(entries[1].begin, bytes.size() - 24);
  float first = 0;
  std::memcpy(&first, bytes.data() + entries[0].begin, sizeof first);
  EXPECT_EQ(first, 5.f);
}

TEST(Safetensors, ScalarsEmptyTensorsAndUnknownDtypesAreFine) {
  const auto entries = read(safetensors_bytes({{"e", {"F32", {0, 5}, ""}},
                                               {"n", {"F4", {2}, "x"}},
                                               {"s", {"BF16", {}, "xy"}},
                                               {"u", {"F6_E3M2", {4}, "abc"}}}));
  EXPECT_EQ(entries.size(), 4u);
}

TEST(Safetensors, FilesThatAreTooShortAreRefused) {
  EXPECT_TRUE(mentions(read_error(""), {"x.safetensors", "0 bytes"}));
  EXPECT_TRUE(mentions(read_error("1234567"), {"7 bytes"}));
  EXPECT_TRUE(mentions(read_error(std::string(8, '\0')), {"8 bytes"}));
}

TEST(Safetensors, HeaderLengthBeyondTheFileIsRefused) {
  std::string bytes = safetensors_bytes({{"a", float_tensor({2})}});
  bytes[3] = '\x7f';  // Two gigabytes.
  EXPECT_TRUE(mentions(read_error(bytes), {"header's length is 2130706", "follow"}));
  for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = '\xff';
  EXPECT_TRUE(mentions(read_error(bytes), {"18446744073709551615"}));
}

TEST(Safetensors, MalformedJsonIsRefusedWithItsPlace) {
  EXPECT_TRUE(mentions(read_error(safetensors_bytes("{\"a\":", "")), {"malformed at byte"}));
  EXPECT_TRUE(mentions(read_error(safetensors_bytes("{}x", "")), {"malformed"}));
  EXPECT_TRUE(mentions(read_error(safetensors_bytes("[]", "")), {"must be a JSON object"}));
  EXPECT_TRUE(mentions(read_error(safetensors_bytes("7", "")), {"must be a JSON object"}));
  EXPECT_TRUE(mentions(read_error(safetensors_bytes("null", "")), {"must be a JSON object"}));
  EXPECT_TRUE(
      mentions(read_error(safetensors_bytes("{\"\xff\xfe\":{}}", "")), {"malformed", "UTF-8"}));
  EXPECT_TRUE(mentions(read_error(safetensors_bytes(std::string(100000, '['), "")),
                       {"must be a JSON object"}));
}

TEST(Safetensors, EntriesOfTheWrongFormAreRefusedByName) {
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"] = 5; })), {"'a'", "a number"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"] = {1}; })), {"'a'", "an array"}));
  EXPECT_TRUE(
      mentions(read_error(broken([](json& h) { h["a"]["dtype"] = 5; })), {"'a'", "dtype holds"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"]["shape"] = "2,3"; })),
                       {"'a'", "shape holds text"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) {
                         h["a"]["shape"] = {2, -3};
                       })),
                       {"'a'", "shape holds a negative number"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"]["shape"] = {2.5}; })),
                       {"'a'", "shape holds not a 64-bit integer"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) {
                         h["a"]["shape"] = {{2}, 3};
                       })),
                       {"'a'", "shape holds an array"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) {
                         h["a"]["shape"] = {{"x", 1}};
                       })),
                       {"'a'", "shape holds an object"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"]["extra"] = 1; })),
                       {"'a'", "unknown field 'extra'"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"].erase("dtype"); })),
                       {"'a'", "no field dtype"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"].erase("shape"); })),
                       {"'a'", "no field shape"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"].erase("data_offsets"); })),
                       {"'a'", "0 data_offsets"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["a"]["data_offsets"] = {0}; })),
                       {"'a'", "1 data_offsets"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) {
                         h["a"]["data_offsets"] = {0, 24, 32};
                       })),
                       {"'a'", "a third number"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) {
                         h["__metadata__"] = {{"k", 1}};
                       })),
                       {"__metadata__ holds a number"}));
  EXPECT_TRUE(mentions(read_error(broken([](json& h) { h["__metadata__"] = "pt"; })),
                       {"__metadata__", "text"}));
}

TEST(Safetensors, DuplicateNamesAndFieldsAreRefused) {
  const std::string entry = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  const std::string next = R"({"dtype":"U8","shape":[1],"data_offsets":[1,2]})";
  EXPECT_TRUE(
      mentions(read_error(safetensors_bytes("{\"t\":" + entry + ",\"t\":" + next + "}", "12")),
               {"'t' is there twice"}));
  EXPECT_TRUE(
      mentions(read_error(safetensors_bytes(
                   R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "1")),
               {"'t'", "field dtype twice"}));
}

TEST(Safetensors, OffsetsThatDoNotFitAreRefused) {
  auto with_offsets = [](const char* name, std::uint64_t begin, std::uint64_t end) {
    return read_error(broken([&](json& h) { h[name]["data_offsets"] = {begin, end}; }));
  };
  EXPECT_TRUE(mentions(with_offsets("a", 24, 0), {"'a'", "run backwards"}));
  EXPECT_TRUE(mentions(with_offsets("b", 24, 33), {"'b'", "beyond the 32 bytes", "truncated"}));
  EXPECT_TRUE(mentions(with_offsets("b", 24, ~0ull), {"'b'", "beyond"}));
  EXPECT_TRUE(mentions(with_offsets("b", 24, 31), {"'b'", "span 7 bytes"}));
  // "b" over "a", then a gap before "b".
  EXPECT_TRUE(mentions(with_offsets("b", 20, 28), {"'b'", "begin at 20", "ends at 24"}));
  const auto [header, data] =
      test::safetensors_parts({{"a", float_tensor({2, 3})}, {"b", float_tensor({2})}});
  json gap = header;
  gap["b"]["data_offsets"] = {28, 36};
  EXPECT_TRUE(mentions(read_error(safetensors_bytes(gap.dump(), data + "1234")), {"begin at 28"}));
  EXPECT_TRUE(mentions(read_error(safetensors_bytes(header.dump(), data + "1")),
                       {"end after 32 bytes", "has 33"}));
  EXPECT_TRUE(mentions(read_error(safetensors_bytes(header.dump(), data.substr(0, 31))),
                       {"'b'", "truncated"}));
}

TEST(Safetensors, ShapesThatOverflowAreRefused) {
  const std::uint64_t half = 1ull << 32;
  EXPECT_TRUE(mentions(read_error(broken([&](json& h) {
                         h["a"]["shape"] = {half, half};
                       })),
                       {"'a'", "overflows"}));
  // 2^62 elements of 32 bits: the bits wrap to zero.
  EXPECT_TRUE(mentions(read_error(broken([&](json& h) {
                         h["a"]["shape"] = {half, half / 4};
                       })),
                       {"'a'", "overflows"}));
  EXPECT_TRUE(mentions(read_error(broken([&](json& h) { h["a"]["shape"] = {~0ull}; })),
                       {"'a'", "extent 18446744073709551615"}));
  EXPECT_TRUE(mentions(
      read_error(safetensors_bytes(
          R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})", "1")),
      {"'a'", "not a 64-bit integer"}));
}

TEST(Safetensors, NamesAreCutAndCleanedInMessages) {
  const std::string name = "\x1b[31m" + std::string(500, 'n');
  const std::string text = read_error(broken([&](json& h) { h[name] = 5; }));
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_LT(text.size(), 300u);
}

TEST(Safetensors, OnlyErrorsComeOutOfMutatedFiles) {
  const std::string good = safetensors_bytes(test::tiny_tensors());
  std::mt19937 random(1);
  auto below = [&](std::size_t n) { return random() % n; };
  static constexpr char kAlphabet[] =
      "{}[]\",:0123456789-.eE\\u \0\xff\x80"
      "FBIU_";
  const std::size_t header_end =
      good.find("}} ") == std::string::npos ? good.rfind("}}") + 2 : good.find("}} ") + 2;
  int accepted = 0, refused = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string bytes = good;
    for (std::size_t edits = 1 + below(4); edits > 0; --edits) {
      const std::size_t at = below(round % 8 == 0 ? std::size_t{16} : header_end);
      const char c = kAlphabet[below(sizeof kAlphabet - 1)];
      switch (below(5)) {
        case 0:
          bytes.erase(at, 1 + below(20));
          break;
        case 1:
          bytes.insert(at, 1, c);
          break;
        case 2:
          bytes.insert(at, bytes.substr(8 + below(header_end - 8), below(60)));
          break;
        case 3:
          bytes.resize(std::max(at + 1, bytes.size() - below(64)));
          break;
        default:
          bytes[at] = c;
      }
      bytes.resize(std::max<std::size_t>(bytes.size(), 16), ' ');
    }
    if (round % 2 == 0 && round % 8 != 0) {  // A length that lets the header itself be read.
      const std::uint64_t length = header_end - 8;
      for (int i = 0; i < 8; ++i) {
        bytes[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
      }
    }
    try {
      for (const SafetensorsEntry& entry : read(bytes)) {
        ASSERT_LE(entry.begin, entry.end);
        ASSERT_LE(entry.end, bytes.size());
      }
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::corrupt_file) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(accepted + refused, 3999);
}

TEST(ShardIndex, MapsTensorsToFiles) {
  const auto files = read_shard_index(
      R"({"metadata": {"total_size": 5, "x": [1, {"y": null}]}, "weight_map": {"b": "2", "a": "1"}})",
      "i.json");
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0], (std::pair<std::string, std::string>("a", "1")));
  EXPECT_EQ(files[1], (std::pair<std::string, std::string>("b", "2")));
}

TEST(ShardIndex, WrongFormsAndFilesElsewhereAreRefused) {
  auto refused = [](const std::string& text) {
    return error_of(ErrorCode::corrupt_file, [&] { read_shard_index(text, "i.json"); });
  };
  EXPECT_TRUE(mentions(refused("{}"), {"i.json", "no field weight_map"}));
  EXPECT_TRUE(mentions(refused("[1]"), {"must be a JSON object"}));
  EXPECT_TRUE(mentions(refused("\"text\""), {"must be a JSON object"}));
  EXPECT_TRUE(mentions(refused(R"({"weight_map": 5})"), {"weight_map is a number"}));
  EXPECT_TRUE(mentions(refused(R"({"weight_map": "x"})"), {"weight_map is text"}));
  EXPECT_TRUE(mentions(refused(R"({"weight_map": ["x"]})"), {"weight_map is a list"}));
  EXPECT_TRUE(mentions(refused(R"({"weight_map": {"a": null}})"), {"names null", "'a'"}));
  EXPECT_TRUE(mentions(refused(R"({"weight_map": {"a": {"b": "c"}}})"), {"an object", "'a'"}));
  EXPECT_TRUE(mentions(refused(R"({"weight_map": {"a": "1", "a": "2"}})"), {"'a'", "twice"}));
  EXPECT_TRUE(mentions(refused(R"({"weight_map": {}, "weight_map": {}})"), {"twice"}));
  for (const char* file : {"", ".", "..", "../x", "/etc/passwd", "a/b", "a\\\\b", "a\\u0000b"}) {
    EXPECT_TRUE(mentions(refused(std::string(R"({"weight_map": {"a": ")") + file + "\"}}"),
                         {"same directory", "'a'"}))
        << file;
  }
  EXPECT_TRUE(mentions(refused("{\"m\":" + std::string(1000, '[')), {"nests deeper"}));
  EXPECT_TRUE(mentions(refused("{\"weight_map\""), {"malformed"}));
}

}  // namespace
}  // namespace fovea
