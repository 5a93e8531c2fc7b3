// Pieces of a store against what docs/formats.md says of them; however samples arrive they are the same.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "check.hpp"
#include "checksum.hpp"
#include "samples/builder.hpp"
#include "samples/layout.hpp"

using namespace penstock::samples;
using penstock::crc32c;
using penstock::test::Random;

namespace {

constexpr std::uint64_t kChunk = 4096;

struct Sample {
  std::string name, data;
};

// The files that pieces make.
struct Files {
  std::map<std::uint64_t, std::string> data;
  std::string directory, sums, chunks, names, anchors, large, labels;

  void take(Builder& builder) {
    const auto& made = builder.made();
    for (const auto& piece : made.data)
      data[piece.data_file].append(reinterpret_cast<const char*>(piece.bytes.get()), piece.size_bytes);
    append(directory, made.directory);
    append(sums, made.sums);
    append(chunks, made.chunks);
    append(names, made.names);
    append(anchors, made.anchors);
    append(large, made.large);
    append(labels, made.labels);
    builder.forget();
  }
  bool operator==(const Files&) const = default;

 private:
  template <class T>
  static void append(std::string& to, const std::vector<T>& items) {
    to.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
  }
};

void add(Builder& builder, const std::vector<Sample>& samples, std::size_t begin, std::size_t end) {
  std::string names, data;
  std::vector<std::int64_t> name_ends, data_ends;
  for (auto i = begin; i < end; ++i) {
    names += samples[i].name;
    data += samples[i].data;
    name_ends.push_back(static_cast<std::int64_t>(names.size()));
    data_ends.push_back(static_cast<std::int64_t>(data.size()));
  }
  builder.add({names, name_ends, data, data_ends, {}});
}

template <class T>
T item(const std::string& file, std::size_t i) {
  T value;
  std::memcpy(&value, &file.at(i * sizeof(T)), sizeof(T));
  return value;
}

std::vector<Sample> make_samples(std::size_t count, std::size_t most_bytes, unsigned seed) {
  Random random(seed);
  std::vector<Sample> samples;
  for (std::size_t i = 0; i < count; ++i) {
    const auto size_bytes = random(0, 5) == 0 ? 0 : random(0, 1) ? random(0, most_bytes) : random(0, 40);
    const auto bytes = random.bytes(size_bytes);
    samples.push_back({"sample " + std::to_string(i), {bytes.begin(), bytes.end()}});
  }
  return samples;
}

Files whole(const std::vector<Sample>& samples, std::uint64_t data_file_bytes, std::vector<DataFileSize>& data_files) {
  Builder builder(kChunk, data_file_bytes);
  add(builder, samples, 0, samples.size());
  builder.finish();
  data_files = builder.data_files();
  Files files;
  files.take(builder);
  return files;
}

std::string bytes_of(const std::vector<std::uint64_t>& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(words[0])};
}

template <class Error>
void check_throws(const std::function<void()>& act, const std::string& part) {
  try {
    act();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return;
    throw std::runtime_error("wrong message: " + std::string(error.what()));
  }
  throw std::runtime_error("nothing was thrown: " + part);
}

// Every record of chunks.bin from the directory and the samples, chunk by chunk.
void check_chunks(const Files& files, const std::vector<Sample>& samples, const std::vector<DataFileSize>& data_files) {
  std::size_t record = 0;
  for (std::size_t data_file = 0, sample = 0; data_file < data_files.size(); ++data_file) {
    for (std::uint64_t chunk = 0; chunk < data_files[data_file].chunks; ++chunk, ++record) {
      const auto found = item<ChunkRecord>(files.chunks, record);
      CHECK_EQUAL(found.first, sample);
      std::uint32_t crc = 0;
      for (; sample < samples.size(); ++sample) {
        const auto entry = item<Entry>(files.directory, sample);
        const auto begins_in = std::min(entry.offset() / kChunk, data_files[data_file].chunks - 1);
        if (entry.data_file() != data_file || begins_in != chunk) break;
        const auto& data = samples[sample].data;
        const bool crosses = entry.offset() + data.size() > (chunk + 1) * kChunk;
        if (!crosses || data.size() < kChunk / 4) crc = crc32c(crc, data.data(), data.size());
      }
      CHECK_EQUAL(found.crc32c, crc);
    }
  }
  CHECK_EQUAL(record * sizeof(ChunkRecord), files.chunks.size());
}

}  // namespace

TEST(xxh64_of_the_specification) {
  CHECK_EQUAL(xxh64(""), 0xEF46DB3751D8E999u);
  CHECK_EQUAL(xxh64("a"), 0xD24EC4F1A98C6E5Bu);
  CHECK_EQUAL(xxh64("abc"), 0x44BC2CF5AD770999u);
  CHECK_EQUAL(key_of("abc"), 0x2CF5AD770999u);
}

TEST(every_file_says_where_samples_are) {
  const auto samples = make_samples(300, 9000, 1);
  std::vector<DataFileSize> data_files;
  const auto files = whole(samples, 100'000, data_files);
  CHECK(data_files.size() > 3);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto entry = item<Entry>(files.directory, i);
    CHECK_EQUAL(entry.key(), key_of(samples[i].name));
    CHECK_EQUAL(entry.length(), samples[i].data.size());
    CHECK(files.data.at(entry.data_file()).substr(entry.offset(), entry.length()) == samples[i].data);
    const auto& data = samples[i].data;
    CHECK_EQUAL(item<std::uint32_t>(files.sums, i), crc32c(0, data.data(), data.size()));
  }
  for (std::size_t data_file = 0; data_file < data_files.size(); ++data_file)
    CHECK_EQUAL(files.data.at(data_file).size(), data_files[data_file].chunks * kChunk);
  check_chunks(files, samples, data_files);
}

TEST(pieces_are_the_same_at_any_split_and_in_any_process) {
  Random random(2);
  const auto samples = make_samples(400, 5000, 3);
  for (const std::uint64_t data_file_bytes : {std::uint64_t{5000}, std::uint64_t{8192}, kDataFileBytes}) {
    std::vector<DataFileSize> data_files;
    const auto expected = whole(samples, data_file_bytes, data_files);
    auto builder = std::make_unique<Builder>(kChunk, data_file_bytes);
    Files files;
    for (std::size_t done = 0; done < samples.size();) {
      const auto until = std::min(samples.size(), done + random(0, 50));
      add(*builder, samples, done, until);
      done = until;
      files.take(*builder);
      builder = std::make_unique<Builder>(kChunk, data_file_bytes, bytes_of(builder->state()));
    }
    builder->finish();
    files.take(*builder);
    CHECK(files == expected);
    CHECK_EQUAL(builder->data_files().size(), data_files.size());
  }
}

TEST(large_samples_span_blocks_and_keep_their_length_apart) {
  std::vector<Sample> samples = {{"a", std::string(kLargeLength - 1, 'a')},
                                 {"b", std::string(3 * Builder::kPieceBytes + 5, 'b')},
                                 {"c", "c"}};
  std::vector<DataFileSize> data_files;
  const auto files = whole(samples, kDataFileBytes, data_files);
  CHECK_EQUAL(files.large.size(), sizeof(Large));
  CHECK_EQUAL(item<Large>(files.large, 0).index, 1u);
  CHECK_EQUAL(item<Large>(files.large, 0).size_bytes, samples[1].data.size());
  CHECK_EQUAL(item<Entry>(files.directory, 1).length(), kLargeLength);
  CHECK(files.data.at(0).find(samples[0].data + samples[1].data + "c") == 0);
  check_chunks(files, samples, data_files);
}

TEST(a_full_node_takes_no_sample_of_no_bytes_at_an_offset_that_does_not_fit) {
  Builder start(kChunk, kDataFileBytes);
  add(start, {{"first", "1"}}, 0, 1);
  start.forget();
  auto words = start.state();
  words[6] = kDataFileBytes;  // as if so many bytes had been added: the offset
  words.back() = crc32c(0, words.data(), (words.size() - 1) * sizeof(words[0]));
  Builder builder(kChunk, kDataFileBytes, bytes_of(words));
  add(builder, {{"empty", ""}}, 0, 1);
  const auto& entry = builder.made().directory.at(0);
  CHECK_EQUAL(entry.data_file(), 1u);
  CHECK_EQUAL(entry.offset(), 0u);
}

TEST(what_does_not_fit_is_refused_and_changes_nothing) {
  Builder builder(kChunk, 10);
  check_throws<std::invalid_argument>([&] { add(builder, {{"a", ""}, {"", ""}}, 0, 2); }, "empty name");
  check_throws<std::invalid_argument>([&] { add(builder, {{"a", std::string(11, 'a')}}, 0, 1); }, "11 bytes");
  const std::string long_name(65536, 'a');
  check_throws<std::invalid_argument>([&] { add(builder, {{long_name, ""}}, 0, 1); }, "65536 bytes");
  CHECK_EQUAL(builder.samples(), 0u);
  CHECK_EQUAL(builder.made().size_bytes(), 0u);
  check_throws<std::invalid_argument>([] { Builder(4095, 10); }, "chunk_bytes=4095");
  check_throws<std::invalid_argument>([] { Builder(kChunk, 0); }, "data_file_bytes=0");
}

TEST(damaged_states_are_refused) {
  Builder builder(kChunk, 5000);
  add(builder, make_samples(20, 3000, 4), 0, 20);
  check_throws<std::logic_error>([&] { builder.state(); }, "take them first");
  builder.forget();
  const auto state = bytes_of(builder.state());
  Builder(kChunk, 5000, state);
  for (std::size_t bit = 0; bit < 8 * state.size(); ++bit) {
    auto damaged = state;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    check_throws<std::invalid_argument>([&] { Builder(kChunk, 5000, damaged); }, "damaged");
  }
  for (std::size_t size_bytes = 1; size_bytes < state.size(); ++size_bytes)
    check_throws<std::invalid_argument>([&] { Builder(kChunk, 5000, state.substr(0, size_bytes)); },
                                        "damaged");
}

TEST(memory_outlives_its_builder_while_it_is_held) {
  std::vector<Pieces::Data> held;
  {
    Builder builder(kChunk, kDataFileBytes);
    for (int i = 0; i < 30; ++i) {
      const std::string content(700'000, static_cast<char>('a' + i % 26));
      add(builder, {{"sample " + std::to_string(i), content}}, 0, 1);
      const auto& data = builder.made().data;
      held.insert(held.end(), data.begin(), data.end());
      builder.forget();
    }
  }
  std::string all;
  for (const auto& piece : held)
    all.append(reinterpret_cast<const char*>(piece.bytes.get()), piece.size_bytes);
  for (std::size_t i = 0; i < 30; ++i)
    CHECK_EQUAL(all.find_first_not_of(static_cast<char>('a' + i % 26), i * 700'000),
                i == 29 ? std::string::npos : (i + 1) * 700'000);
}
