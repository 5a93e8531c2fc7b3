// The addresses an arena lives in, in chunks of one huge page each, and the frames (chunks' worth of
// memory) that are behind some of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena/pages.hpp"
#include "arena/ranges.hpp"

namespace penstock {

// An array of zeros that costs memory only where it is used.
template <class T>
class SparseTable {
 public:
  explicit SparseTable(std::size_t count);
  ~SparseTable();
  SparseTable(const SparseTable&) = delete;
  SparseTable& operator=(const SparseTable&) = delete;
  bool usable() const { return entries_ != nullptr; }
  T& operator[](std::size_t i) { return entries_[i]; }
  const T& operator[](std::size_t i) const { return entries_[i]; }

 private:
  T* entries_ = nullptr;
  std::size_t size_bytes_ = 0;
};

// Owns reserved addresses and knows, chunk by chunk, which have a frame (are writable and may be in
// memory) and which are live (overlapped by a block, in memory or out). A frame behind a chunk that is
// not live is free: it is used where it is, or moves to where one is needed. Offsets and sizes are
// bytes from base(). Not thread safe.
//
// A frame counts whole from the first use of its chunk: with huge pages its first byte brings in all.
class Frames {
 public:
  // Reserves `size_bytes`, or half of it as often as the system refuses. base() is null if it refuses
  // all. With `frames_move` false, free frames are used only where they are.
  explicit Frames(std::size_t size_bytes, bool frames_move = true);
  ~Frames();
  Frames(const Frames&) = delete;
  Frames& operator=(const Frames&) = delete;

  char* base() const { return base_; }
  std::size_t size_bytes() const { return size_bytes_; }
  // Memory held: of all frames, less the pages that went away one by one.
  std::size_t held_bytes() const { return frames_ * kChunkBytes - absent_pages_ * kPageBytes; }
  std::size_t frame_bytes() const { return frames_ * kChunkBytes; }
  std::size_t free_bytes() const { return free_bytes_; }
  const Ranges& free() const { return free_; }  // runs of chunks whose frames are free

  bool framed(std::size_t chunk) const { return chunks_[chunk].framed; }
  bool live(std::size_t chunk) const { return chunks_[chunk].live_pages != 0; }

  // Bytes by which frame_bytes() grows when [offset, offset + size) is occupied.
  std::size_t growth_bytes(std::size_t offset, std::size_t size_bytes) const;

  // Gives every chunk of the range a frame and counts the range as live. False if the system refuses.
  bool occupy(std::size_t offset, std::size_t size_bytes);
  // Counts the range as no longer live. Frames of chunks with nothing live become free.
  void vacate(std::size_t offset, std::size_t size_bytes);

  // For whole chunks that are live and protected from any access: their frames become free frames at
  // `to`, where no chunk is live or framed. What the system does not move is given back to it.
  void withdraw(std::size_t offset, std::size_t size_bytes, std::size_t to);
  // For whole chunks: gives the frames back to the system; the chunks stay live.
  void discard(std::size_t offset, std::size_t size_bytes);
  // For whole chunks that are live: the frames of `from` go behind `to`, which has none. False if the
  // system refuses: then `to` has none, and `from` those that are left.
  bool transfer(std::size_t from, std::size_t to, std::size_t size_bytes);

  // For pages that are live, in chunks shared with others: their memory goes back to the system, or
  // `scratch` (a mapping of its own) takes their place. False if the system refuses.
  bool drop_pages(std::size_t offset, std::size_t size_bytes);
  bool take_pages(std::size_t offset, std::size_t size_bytes, char* scratch);
  // For whole chunks that are live and have no frame: `scratch` takes their place, and counts as frames.
  bool adopt(std::size_t offset, std::size_t size_bytes, char* scratch);
  // Pages that drop_pages took become writable, without memory until their first use.
  bool renew_pages(std::size_t offset, std::size_t size_bytes);

  // Gives free frames back to the system, until `wanted_bytes` are. Gives the bytes given back.
  std::size_t purge(std::size_t wanted_bytes);

 private:
  struct Chunk {
    std::uint16_t live_pages;
    std::uint16_t absent_pages;  // not in memory, of a chunk that has a frame
    bool framed;
    bool ragged;  // of several mappings: its frame cannot move as a whole
  };

  bool fill(std::size_t first, std::size_t last);
  void add_live(std::size_t offset, std::size_t size_bytes, int sign);
  void count_absent(std::size_t offset, std::size_t size_bytes, int sign);
  void give_free(std::size_t first, std::size_t last);
  void take_free(std::size_t first, std::size_t last);
  void set_framed(std::size_t first, std::size_t last, bool framed);
  void lose(std::size_t chunk);

  bool frames_move_;
  char* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  char* base_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t frames_ = 0;
  std::size_t absent_pages_ = 0;
  std::size_t free_bytes_ = 0;
  Ranges free_;
  SparseTable<Chunk> chunks_;
};

}  // namespace penstock

#include <sys/mman.h>

template <class T>
penstock::SparseTable<T>::SparseTable(std::size_t count) : size_bytes_(round_up(count * sizeof(T) + 1, kPageBytes)) {
  void* mapping =
      mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return;
  entries_ = static_cast<T*>(mapping);
  madvise(mapping, size_bytes_, MADV_NOHUGEPAGE);
}

template <class T>
penstock::SparseTable<T>::~SparseTable() {
  if (entries_ != nullptr) munmap(entries_, size_bytes_);
}
