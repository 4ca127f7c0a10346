#include "model/safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "core/check.h"
#include "model/json_events.h"

namespace fovea {

namespace {

constexpr std::uint64_t kLengthBytes = 8;
/// The format's own limit on a header.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::string_view kMetadata = "__metadata__";

/// Bits of an element; 0 for a dtype that this reader does not know, whose size goes unchecked.
std::uint64_t bits_of_element(std::string_view dtype) {
  struct Size {
    std::string_view dtype;
    std::uint64_t bits;
  };
  static constexpr Size kSizes[] = {
      {"BOOL", 8}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
      {"F4", 4},   {"I16", 16}, {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},
      {"U32", 32}, {"F32", 32}, {"I64", 64}, {"U64", 64},    {"F64", 64},    {"C64", 64}};
  for (const Size& size : kSizes) {
    if (size.dtype == dtype) return size.bits;
  }
  return 0;
}

/// {"name": {"dtype": text, "shape": [n, ...], "data_offsets": [begin, end]}, ...,
///  "__metadata__": {text: text}}
class HeaderEvents : public JsonEvents {
 public:
  explicit HeaderEvents(const std::string& file_name) : file_name_(file_name) {}

  std::vector<SafetensorsEntry> take_entries() { return std::move(entries_); }

  void begin_object() override {
    if (level_ == Level::outside) {
      level_ = Level::root;
    } else if (level_ == Level::root) {
      level_ = in_metadata_ ? Level::metadata : Level::entry;
    } else {
      reject("an object");
    }
  }

  void end_object() override {
    if (level_ == Level::entry) finish_entry();
    level_ = level_ == Level::root ? Level::outside : Level::root;
  }

  void key(std::string& name) override {
    switch (level_) {
      case Level::root:
        begin_entry(name);
        break;
      case Level::entry:
        begin_field(name);
        break;
      default:
        break;
    }
  }

  void begin_array() override {
    if (level_ != Level::entry || field_ == Field::dtype) reject("an array");
    level_ = Level::array;
  }

  void end_array() override { level_ = Level::entry; }

  void text(std::string& value) override {
    if (level_ == Level::metadata) return;
    if (level_ != Level::entry || field_ != Field::dtype) reject("text");
    entry_.dtype = value;
  }

  void integer(std::uint64_t value) override {
    if (level_ != Level::array) reject("a number");
    if (field_ == Field::shape) {
      FOVEA_CHECK(value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()),
                  corrupt_file, "{}: tensor {}: shape has the extent {}", file_name_,
                  printable(entry_.name), value);
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      if (num_offsets_ == 2) reject("a third number");
      (num_offsets_++ == 0 ? entry_.begin : entry_.end) = value;
    }
  }

  void other(std::string_view what) override { reject(what); }

 private:
  enum class Level { outside, root, metadata, entry, array };
  enum class Field { dtype, shape, data_offsets };

  [[noreturn]] void reject(std::string_view what) const {
    static constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};
    FOVEA_CHECK(level_ != Level::outside, corrupt_file,
                "{}: the header is {}, but must be a JSON object", file_name_, what);
    FOVEA_CHECK(level_ != Level::metadata, corrupt_file,
                "{}: __metadata__ holds {}, but only text may be there", file_name_, what);
    FOVEA_CHECK(level_ != Level::root, corrupt_file,
                "{}: tensor {} is {}, but must be an object with dtype, shape and data_offsets",
                file_name_, printable(in_metadata_ ? kMetadata : entry_.name), what);
    fail(ErrorCode::corrupt_file,
         "{}: tensor {}: {} holds {}, but dtype must be text, shape a list of sizes and "
         "data_offsets a list of two",
         file_name_, printable(entry_.name), kFields[static_cast<int>(field_)], what);
  }

  void begin_entry(std::string& name) {
    in_metadata_ = name == kMetadata;
    if (in_metadata_) return;
    entry_ = SafetensorsEntry{};
    entry_.name = std::move(name);
    seen_[0] = seen_[1] = seen_[2] = false;
    num_offsets_ = 0;
  }

  void begin_field(const std::string& name) {
    if (name == "dtype") {
      field_ = Field::dtype;
    } else if (name == "shape") {
      field_ = Field::shape;
    } else if (name == "data_offsets") {
      field_ = Field::data_offsets;
    } else {
      fail(ErrorCode::corrupt_file, "{}: tensor {} has an unknown field {}", file_name_,
           printable(entry_.name), printable(name));
    }
    bool& seen = seen_[static_cast<int>(field_)];
    FOVEA_CHECK(!seen, corrupt_file, "{}: tensor {} has the field {} twice", file_name_,
                printable(entry_.name), name);
    seen = true;
  }

  void finish_entry() {
    FOVEA_CHECK(seen_[0], corrupt_file, "{}: tensor {} has no field dtype", file_name_,
                printable(entry_.name));
    FOVEA_CHECK(seen_[1], corrupt_file, "{}: tensor {} has no field shape", file_name_,
                printable(entry_.name));
    FOVEA_CHECK(num_offsets_ == 2, corrupt_file,
                "{}: tensor {} has {} data_offsets, but must have two", file_name_,
                printable(entry_.name), num_offsets_);
    entries_.push_back(std::move(entry_));
  }

  const std::string& file_name_;
  std::vector<SafetensorsEntry> entries_;
  SafetensorsEntry entry_;
  Level level_ = Level::outside;
  Field field_ = Field::dtype;
  bool in_metadata_ = false;
  bool seen_[3] = {};
  int num_offsets_ = 0;
};

/// Nothing when the shape's product or its bits overflow.
std::optional<std::uint64_t> bits_of_shape(const SafetensorsEntry& entry, std::uint64_t bits) {
  std::uint64_t total = bits;
  for (const std::int64_t extent : entry.shape) {
    if (__builtin_mul_overflow(total, static_cast<std::uint64_t>(extent), &total)) return {};
  }
  return total;
}

/// Offsets are still relative to the data.
void check_extent(const SafetensorsEntry& entry, std::uint64_t data_bytes,
                  const std::string& file_name) {
  FOVEA_CHECK(entry.begin <= entry.end, corrupt_file,
              "{}: tensor {}: data_offsets [{}, {}] run backwards", file_name,
              printable(entry.name), entry.begin, entry.end);
  FOVEA_CHECK(entry.end <= data_bytes, corrupt_file,
              "{}: tensor {}: data_offsets [{}, {}] reach beyond the {} bytes of data: the file is "
              "truncated or its header wrong",
              file_name, printable(entry.name), entry.begin, entry.end, data_bytes);
  const std::uint64_t element_bits = bits_of_element(entry.dtype);
  if (element_bits == 0) return;
  const std::optional<std::uint64_t> bits = bits_of_shape(entry, element_bits);
  FOVEA_CHECK(bits.has_value(), corrupt_file, "{}: tensor {}: the size of its shape overflows",
              file_name, printable(entry.name));
  FOVEA_CHECK(*bits % 8 == 0 && *bits / 8 == entry.end - entry.begin, corrupt_file,
              "{}: tensor {}: data_offsets [{}, {}] span {} bytes, but dtype {} and shape need {} "
              "bits",
              file_name, printable(entry.name), entry.begin, entry.end, entry.end - entry.begin,
              printable(entry.dtype), *bits);
}

void check_coverage(const std::vector<SafetensorsEntry>& entries, std::uint64_t data_bytes,
                    const std::string& file_name) {
  std::vector<const SafetensorsEntry*> in_order;
  in_order.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) in_order.push_back(&entry);
  std::sort(in_order.begin(), in_order.end(), [](const auto* a, const auto* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  std::uint64_t covered = 0;
  for (const SafetensorsEntry* entry : in_order) {
    FOVEA_CHECK(entry->begin == covered, corrupt_file,
                "{}: tensor {}: data_offsets begin at {}, but the tensor before ends at {}",
                file_name, printable(entry->name), entry->begin, covered);
    covered = entry->end;
  }
  FOVEA_CHECK(covered == data_bytes, corrupt_file,
              "{}: the tensors end after {} bytes of data, but the file has {}", file_name, covered,
              data_bytes);
}

}  // namespace

std::vector<SafetensorsEntry> read_safetensors_header(std::span<const std::byte> file,
                                                      const std::string& file_name) {
  FOVEA_CHECK(file.size() > kLengthBytes, corrupt_file,
              "{}: {} bytes are too few for a safetensors header", file_name, file.size());
  std::uint64_t header_bytes = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= static_cast<std::uint64_t>(file[i]) << (8 * i);
  }
  const std::uint64_t rest = file.size() - kLengthBytes;
  FOVEA_CHECK(header_bytes <= rest, corrupt_file,
              "{}: the header's length is {}, but only {} bytes follow", file_name, header_bytes,
              rest);
  FOVEA_CHECK(header_bytes <= kMaxHeaderBytes, corrupt_file,
              "{}: the header's length is {}, but may be at most {}", file_name, header_bytes,
              kMaxHeaderBytes);
  HeaderEvents events(file_name);
  parse_json({reinterpret_cast<const char*>(file.data()) + kLengthBytes, header_bytes}, file_name,
             events);
  std::vector<SafetensorsEntry> entries = events.take_entries();

  const std::uint64_t data_bytes = rest - header_bytes;
  for (const SafetensorsEntry& entry : entries) check_extent(entry, data_bytes, file_name);
  check_coverage(entries, data_bytes, file_name);
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(entries.begin(), entries.end(),
                                        [](auto& a, auto& b) { return a.name == b.name; });
  FOVEA_CHECK(twice == entries.end(), corrupt_file, "{}: tensor {} is there twice", file_name,
              printable(twice->name));
  for (SafetensorsEntry& entry : entries) {
    entry.begin += kLengthBytes + header_bytes;
    entry.end += kLengthBytes + header_bytes;
  }
  return entries;
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(path), entries_(read_safetensors_header(file_.bytes(), path)) {}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::lower_bound(
      entries_.begin(), entries_.end(), name,
      [](const SafetensorsEntry& entry, std::string_view key) { return entry.name < key; });
  return at != entries_.end() && at->name == name ? &*at : nullptr;
}

TensorView SafetensorsFile::view(const SafetensorsEntry& entry) const {
  DType dtype = DType::f32;
  if (entry.dtype == "F16") {
    dtype = DType::f16;
  } else if (entry.dtype == "BF16") {
    dtype = DType::bf16;
  } else if (entry.dtype == "F8_E4M3") {
    dtype = DType::f8e4m3fn;
  } else {
    FOVEA_CHECK(entry.dtype == "F32", unsupported,
                "{}: tensor {} has dtype {}, but must be F32, F16, BF16 or F8_E4M3", path(),
                printable(entry.name), printable(entry.dtype));
  }
  FOVEA_CHECK(entry.shape.size() <= static_cast<std::size_t>(kMaxRank), unsupported,
              "{}: tensor {} has {} dimensions, but may have at most {}", path(),
              printable(entry.name), entry.shape.size(), kMaxRank);
  // The mapping is read-only; TensorView has no const form, and whoever writes would fault.
  auto* data = const_cast<std::byte*>(file_.bytes().data() + entry.begin);
  return TensorView::contiguous(data, dtype, entry.shape);
}

}  // namespace fovea
