#include "samples/builder.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "checksum.hpp"

namespace penstock::samples {

namespace {

constexpr std::uint64_t kMostDataFiles = std::uint64_t{1} << 16;
constexpr std::uint64_t kLongestName = (1U << 16) - 1;
constexpr std::uint64_t kStateMark = 0x31'44'4C'42'4B'54'53'50;  // "PSTKBLD1"
constexpr std::size_t kStateWords = 11;  // then three for each data file, and the checksum

// Joining two checksums costs as much as computing one of so many bytes that are in a near cache.
constexpr std::uint64_t kJoinBytes = std::uint64_t{32} << 10;

using std::to_string;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

std::uint32_t checksum_with(std::uint32_t before, std::string_view data, std::uint32_t sum) {
  return data.size() < kJoinBytes ? crc32c(before, data.data(), data.size())
                                  : crc32c_combine(before, sum, data.size());
}

// Gives the size of item i, which begins at `begin`.
std::uint64_t size_of(std::span<const std::int64_t> ends, std::size_t i, std::int64_t begin, std::size_t most,
                      const char* what) {
  if (ends[i] < begin || static_cast<std::uint64_t>(ends[i]) > most)
    refuse("the " + std::string(what) + " end of sample " + to_string(i) + " of the batch is " +
           to_string(ends[i]) + ": ends must ascend from " + to_string(begin) + " and stay within the " +
           to_string(most) + " bytes given");
  return static_cast<std::uint64_t>(ends[i] - begin);
}

}  // namespace

std::uint64_t Pieces::size_bytes() const {
  return data_bytes + directory.size() * sizeof(Entry) + sums.size() * sizeof(sums[0]) +
         chunks.size() * sizeof(ChunkRecord) + names.size() + anchors.size() * sizeof(anchors[0]) +
         large.size() * sizeof(Large) + labels.size() * sizeof(labels[0]);
}

void Pieces::clear() {
  data.clear();
  data_bytes = 0;
  directory.clear();
  sums.clear();
  chunks.clear();
  names.clear();
  anchors.clear();
  large.clear();
  labels.clear();
}

Builder::Builder(std::uint64_t chunk_bytes, std::uint64_t data_file_bytes, std::string_view state)
    : chunk_bytes_(chunk_bytes), data_file_bytes_(data_file_bytes), chunk_end_(chunk_bytes) {
  if (chunk_bytes == 0 || chunk_bytes % kBlockBytes != 0 || chunk_bytes > kLargestChunkBytes)
    refuse("chunk_bytes=" + to_string(chunk_bytes) + " must be a multiple of " + to_string(kBlockBytes) +
           ", at most " + to_string(kLargestChunkBytes));
  if (data_file_bytes == 0 || data_file_bytes > kDataFileBytes)
    refuse("data_file_bytes=" + to_string(data_file_bytes) + " must be from 1 to " + to_string(kDataFileBytes));
  if (!state.empty()) load(state);
}

void Builder::add(const Additions& added) {
  made();
  if (finished_) throw std::logic_error("the store is finished: it takes no more samples");
  check(added);
  whole_ = false;
  std::size_t name_begin = 0, data_begin = 0;
  for (std::size_t i = 0; i < added.name_ends.size(); ++i) {
    const auto name_end = static_cast<std::size_t>(added.name_ends[i]);
    const auto data_end = static_cast<std::size_t>(added.data_ends[i]);
    append(added.names.substr(name_begin, name_end - name_begin),
           added.data.substr(data_begin, data_end - data_begin), added.labels.empty() ? -1 : added.labels[i]);
    name_begin = name_end, data_begin = data_end;
  }
  whole_ = true;
}

// Everything is checked before anything is added.
void Builder::check(const Additions& added) const {
  const auto count = added.name_ends.size();
  if (added.data_ends.size() != count || (!added.labels.empty() && added.labels.size() != count))
    refuse(to_string(count) + " name ends, " + to_string(added.data_ends.size()) + " data ends and " +
           to_string(added.labels.size()) + " labels: there must be one each for every sample");
  auto data_files = data_files_.size(), data_file_samples = data_file_samples_, offset = offset_;
  std::int64_t name_begin = 0, data_begin = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto name_bytes = size_of(added.name_ends, i, name_begin, added.names.size(), "name");
    const auto size_bytes = size_of(added.data_ends, i, data_begin, added.data.size(), "data");
    if (name_bytes == 0) refuse("sample " + to_string(samples_ + i) + " has an empty name: give it one");
    if (name_bytes > kLongestName)
      refuse("the name of sample " + to_string(samples_ + i) + " has " + to_string(name_bytes) +
             " bytes: at most " + to_string(kLongestName) + " fit, give it a shorter one");
    if (size_bytes > data_file_bytes_)
      refuse("sample " + to_string(samples_ + i) + " has " + to_string(size_bytes) +
             " bytes: a data file takes at most " + to_string(data_file_bytes_) +
             ", and no sample lies in two. Give a larger data_file_bytes, or divide the sample");
    if (begins_data_file(data_file_samples, offset, size_bytes)) {
      ++data_files;
      data_file_samples = 0, offset = 0;
    }
    if (data_files >= kMostDataFiles)
      refuse("sample " + to_string(samples_ + i) + " would need data file " + to_string(data_files) + " of " +
             to_string(kMostDataFiles) + " (counted from 0). Give a larger data_file_bytes than " +
             to_string(data_file_bytes_));
    ++data_file_samples;
    offset += size_bytes;
    name_begin = added.name_ends[i], data_begin = added.data_ends[i];
  }
}

// The second condition: an offset of 2^40 does not fit, not even for a sample of no bytes.
bool Builder::begins_data_file(std::uint64_t data_file_samples, std::uint64_t offset,
                               std::uint64_t size_bytes) const {
  return data_file_samples > 0 && (offset + size_bytes > data_file_bytes_ || offset == kDataFileBytes);
}

void Builder::append(std::string_view name, std::string_view data, std::int32_t label) {
  if (begins_data_file(data_file_samples_, offset_, data.size())) close_data_file();
  if (samples_ % kAnchorNames == 0) made_.anchors.push_back(names_bytes_);
  const auto at = made_.names.size();
  made_.names.resize(at + 2 + name.size());
  const auto name_bytes = static_cast<std::uint16_t>(name.size());
  std::memcpy(&made_.names[at], &name_bytes, 2);
  std::memcpy(&made_.names[at + 2], name.data(), name.size());
  names_bytes_ += 2 + name.size();

  const auto sum = copy_in(data);
  made_.directory.push_back(Entry::of(data_files_.size(), key_of(name), offset_, data.size()));
  made_.sums.push_back(sum);
  made_.labels.push_back(label);
  if (data.size() >= kLargeLength) made_.large.push_back({samples_, data.size()});

  const auto end = offset_ + data.size();
  const bool long_edge = end > chunk_end_ && data.size() >= long_edge_bytes(chunk_bytes_);
  if (!long_edge) body_crc_ = checksum_with(body_crc_, data, sum);
  offset_ = end;
  ++samples_;
  ++data_file_samples_;
  // Samples of no bytes may still come here, at the file's end: a record does not change by them.
  for (; offset_ >= chunk_end_; chunk_end_ += chunk_bytes_) {
    made_.chunks.push_back({first_, body_crc_});
    first_ = samples_;
    body_crc_ = 0;
  }
}

void Builder::close_data_file() {
  const auto chunk_begin = chunk_end_ - chunk_bytes_;
  if (offset_ > chunk_begin || offset_ == 0) {
    made_.chunks.push_back({first_, body_crc_});
    pad(chunk_end_ - offset_);
  }
  data_files_.push_back(open_data_file());
  data_file_samples_ = 0, offset_ = 0, chunk_end_ = chunk_bytes_, first_ = samples_, body_crc_ = 0;
}

DataFileSize Builder::open_data_file() const {
  return {data_file_samples_, std::max<std::uint64_t>(1, (offset_ + chunk_bytes_ - 1) / chunk_bytes_), offset_};
}

std::vector<DataFileSize> Builder::data_files() const {
  auto data_files = data_files_;
  if (data_file_samples_ > 0) data_files.push_back(open_data_file());
  return data_files;
}

// Room for at least one byte at the end of the data, which is part of it from now on.
std::span<std::byte> Builder::space(std::uint64_t wanted_bytes) {
  if (!block_ || block_used_ == kPieceBytes) {
    block_ = blocks_->take(kPieceBytes).data;
    block_used_ = 0;
  }
  auto* const address = block_.get() + block_used_;
  auto& data = made_.data;
  if (data.empty() || data.back().data_file != data_files_.size() ||
      data.back().bytes.get() + data.back().size_bytes != address)
    data.push_back({data_files_.size(), std::shared_ptr<std::byte>(block_, address), 0});
  const auto size_bytes =
      static_cast<std::size_t>(std::min<std::uint64_t>(wanted_bytes, kPieceBytes - block_used_));
  data.back().size_bytes += size_bytes;
  made_.data_bytes += size_bytes;
  block_used_ += size_bytes;
  return {address, size_bytes};
}

std::uint32_t Builder::copy_in(std::string_view data) {
  std::uint32_t crc = 0;
  while (!data.empty()) {
    const auto to = space(data.size());
    crc = copy_crc32c(to.data(), data.data(), to.size(), crc);
    data.remove_prefix(to.size());
  }
  return crc;
}

void Builder::pad(std::uint64_t size_bytes) {
  while (size_bytes > 0) {
    const auto to = space(size_bytes);
    std::memset(to.data(), 0, to.size());
    size_bytes -= to.size();
  }
}

void Builder::finish() {
  made();
  if (finished_) return;
  whole_ = false;
  if (data_file_samples_ > 0) close_data_file();
  finished_ = true;
  whole_ = true;
}

const Pieces& Builder::made() const {
  if (!whole_) throw std::logic_error("memory ran out while samples were added: go on from the last state");
  return made_;
}

std::vector<std::uint64_t> Builder::state() const {
  if (made().size_bytes() > 0) {
    throw std::logic_error("there are pieces that were not taken: take them first");
  }
  std::vector<std::uint64_t> words = {kStateMark,    chunk_bytes_, data_file_bytes_, samples_,
                                      names_bytes_,  data_file_samples_, offset_,    first_,
                                      body_crc_,     finished_,    data_files_.size()};
  for (const auto& file : data_files_)
    words.insert(words.end(), {file.samples, file.chunks, file.size_bytes});
  words.push_back(crc32c(0, words.data(), words.size() * sizeof(words[0])));
  return words;
}

void Builder::load(std::string_view state) {
  const auto damaged = [] {
    refuse("this is no state of a builder, or it is damaged: pack from the start");
  };
  std::vector<std::uint64_t> words(state.size() / sizeof(words[0]));
  if (state.size() % sizeof(words[0]) != 0 || words.size() < kStateWords + 1) damaged();
  std::memcpy(words.data(), state.data(), state.size());
  if (words[0] != kStateMark) damaged();
  if (crc32c(0, words.data(), (words.size() - 1) * sizeof(words[0])) != words.back()) damaged();
  const auto data_files = words[10];
  if (data_files > kMostDataFiles || words.size() != kStateWords + 3 * data_files + 1) damaged();
  if (words[1] != chunk_bytes_ || words[2] != data_file_bytes_)
    refuse("the state is of chunk_bytes=" + to_string(words[1]) + " and data_file_bytes=" + to_string(words[2]) +
           ", not " + to_string(chunk_bytes_) + " and " + to_string(data_file_bytes_) + ": give the same");
  samples_ = words[3], names_bytes_ = words[4], data_file_samples_ = words[5], offset_ = words[6], first_ = words[7];
  body_crc_ = static_cast<std::uint32_t>(words[8]);
  finished_ = words[9] != 0;
  if (offset_ > data_file_bytes_ || data_file_samples_ > samples_ || first_ > samples_ ||
      (data_file_samples_ > 0 && data_files == kMostDataFiles))
    damaged();
  chunk_end_ = (offset_ / chunk_bytes_ + 1) * chunk_bytes_;
  for (auto at = words.begin() + kStateWords; at + 1 != words.end(); at += 3)
    data_files_.push_back({at[0], at[1], at[2]});
}

}  // namespace penstock::samples
