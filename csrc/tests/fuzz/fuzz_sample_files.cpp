// A store's small files, of any bytes: what a catalog gives out lies in its data file, names in names.bin.
#include <stdexcept>
#include <vector>

#include "input.hpp"
#include "samples/catalog.hpp"
#include "samples/names.hpp"

using namespace penstock;
using namespace penstock::samples;
using penstock::test::Input;

namespace {

template <class T>
std::vector<T> rows(Input& input, std::size_t count) {
  std::vector<T> found(count);
  Input::copy(input.take(count * sizeof(T)), found.data());
  return found;
}

// Small numbers: those of a store that could be one.
std::vector<Entry> entries(Input& input, std::size_t count, std::uint32_t files) {
  std::vector<Entry> found;
  for (std::size_t i = 0; i < count; ++i)
    found.push_back(Entry::of(input.below(files + 1), input.below(64), input.below(9000), input.below(5000)));
  return found;
}

void catalog(Input& input) {
  const auto samples = input.below(20), chunks = input.below(8), large = input.below(3), files = 1 + input.below(3);
  const bool any = input.flag();
  const auto directory = any ? rows<Entry>(input, samples) : entries(input, samples, files);
  const auto sums = rows<std::uint32_t>(input, samples);
  auto records = rows<ChunkRecord>(input, chunks);
  if (!any)
    for (auto& record : records) record.first %= samples + 2;
  const auto larges = rows<Large>(input, large);
  Partition partition{directory, sums, records, larges, std::uint64_t{kBlockBytes} << input.below(3), {}};
  for (std::uint32_t i = 0; i < files; ++i)
    partition.data_files.push_back(
        {input.below(samples + 1), input.below(chunks + 1), input.below(20000), -1, -1, 512});
  const auto sizes = partition.data_files;
  try {
    const Catalog catalog({partition});
    const auto inside = [&](const Extent& extent) {
      return extent.data_file < sizes.size() && extent.offset <= sizes[extent.data_file].size_bytes &&
             extent.size_bytes <= sizes[extent.data_file].size_bytes - extent.offset;
    };
    for (std::uint64_t sample = 0; sample < catalog.samples(); ++sample) {
      Extent extent;
      if (!catalog.find(sample, extent)) continue;
      REQUIRE(inside(extent));
      REQUIRE(catalog.chunk_of(extent) <= catalog.chunks());
    }
    for (std::uint64_t chunk = 0; chunk < catalog.chunks(); ++chunk) {
      Body body;
      if (!catalog.body(chunk, body) || body.count == 0) continue;
      REQUIRE(inside(body.extent) && body.first + body.count <= catalog.samples());
      REQUIRE(body.extent.size_bytes <= buffer_bytes(partition.chunk_bytes));
      catalog.contiguous(body);
    }
  } catch (const std::invalid_argument&) {
  }
}

void names(Input& input) {
  const auto samples = input.below(40);
  const auto right = (samples + kAnchorNames - 1) / kAnchorNames;
  const auto anchors = rows<std::uint64_t>(input, input.flag() ? right : input.below(5));
  const LookupShape shape(samples);
  auto lookup = rows<char>(input, input.below(8) == 7 ? input.below(100) : shape.size_bytes);
  const auto asked = rows<char>(input, input.below(20));
  const auto text = rows<char>(input, input.size());
  try {
    const NameTable table(samples, {text.data(), text.size()}, anchors);
    const auto inside = [&](std::string_view name) {
      return name.data() >= text.data() && name.data() + name.size() <= text.data() + text.size();
    };
    for (std::uint64_t index = 0; index < samples; ++index) {
      try {
        REQUIRE(inside(table.name(index)));
      } catch (const std::invalid_argument&) {
      }
    }
    const Names found(table, {lookup.data(), lookup.size()});
    REQUIRE(found.find({asked.data(), asked.size()}) < static_cast<std::int64_t>(samples));
    for (std::uint64_t index = 0; index < samples; ++index)
      REQUIRE(found.find(table.name(index)) < static_cast<std::int64_t>(samples));
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  Input input(data, size_bytes);
  if (input.flag())
    catalog(input);
  else
    names(input);
  return 0;
}
