// Turns samples into the bytes of a store's files, in one pass over the samples. docs/formats.md says which.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "samples/buffers.hpp"
#include "samples/layout.hpp"

namespace penstock::samples {

struct DataFileSize {
  std::uint64_t samples = 0, chunks = 0, size_bytes = 0;
};

// Bytes to append to the files of that name.
struct Pieces {
  struct Data {
    std::uint64_t data_file;
    std::shared_ptr<std::byte> bytes;
    std::size_t size_bytes;
  };
  std::vector<Data> data;  // in order
  std::uint64_t data_bytes = 0;
  std::vector<Entry> directory;
  std::vector<std::uint32_t> sums;
  std::vector<ChunkRecord> chunks;
  std::vector<char> names;
  std::vector<std::uint64_t> anchors;
  std::vector<Large> large;
  std::vector<std::int32_t> labels;

  std::uint64_t size_bytes() const;
  void clear();
};

// Samples side by side: ends[i] is where the i-th ends, and the next one begins, in its bytes.
struct Additions {
  std::string_view names;
  std::span<const std::int64_t> name_ends;
  std::string_view data;
  std::span<const std::int64_t> data_ends;
  std::span<const std::int32_t> labels;  // empty: -1 each
};

// Throws std::invalid_argument for what does not fit the format; then nothing was added.
class Builder {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{4} << 20, kKeptBytes = std::size_t{128} << 20;

  // `state`: of another builder, to go on where it was; empty: from the start.
  Builder(std::uint64_t chunk_bytes, std::uint64_t data_file_bytes, std::string_view state = {});

  void add(const Additions& added);
  // No more samples: closes the last chunk, and pads the last data file.
  void finish();
  // What was made since `forget`, and is whole.
  const Pieces& made() const;
  void forget() { made_.clear(); }
  // What another builder needs to go on. Throws std::logic_error where something is made and not forgotten.
  std::vector<std::uint64_t> state() const;

  std::uint64_t samples() const { return samples_; }
  std::vector<DataFileSize> data_files() const;  // the last one as if it ended here

 private:
  void check(const Additions& added) const;
  void load(std::string_view state);
  bool begins_data_file(std::uint64_t data_file_samples, std::uint64_t offset, std::uint64_t size_bytes) const;
  void append(std::string_view name, std::string_view data, std::int32_t label);
  DataFileSize open_data_file() const;
  void close_data_file();
  std::span<std::byte> space(std::uint64_t wanted_bytes);
  std::uint32_t copy_in(std::string_view data);
  void pad(std::uint64_t size_bytes);

  const std::uint64_t chunk_bytes_, data_file_bytes_;
  std::uint64_t samples_ = 0, names_bytes_ = 0;
  std::vector<DataFileSize> data_files_;
  // The data file under way, where it has samples, and its last chunk.
  std::uint64_t data_file_samples_ = 0, offset_ = 0, chunk_end_, first_ = 0;
  std::uint32_t body_crc_ = 0;
  bool finished_ = false, whole_ = true;  // not whole: memory ran out on the way
  Pieces made_;
  const std::shared_ptr<BatchPool> blocks_ = std::make_shared<BatchPool>(kKeptBytes);
  std::shared_ptr<std::byte> block_;
  std::size_t block_used_ = 0;
};

}  // namespace penstock::samples
