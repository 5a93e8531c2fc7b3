// The addresses an arena lives in, in chunks of one huge page each, and the frames (chunks' worth of
// memory) that are behind some of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "arena/pages.hpp"
#include "arena/ranges.hpp"
#include "arena/sparse_table.hpp"
#include "arena/tails.hpp"

namespace penstock {

// Owns reserved addresses and knows, chunk by chunk, which have a frame (are writable and may be in
// memory) and which are live (overlapped by a block, in memory or out). A frame behind a chunk that is
// not live is free: it is used where it is, or moves to where one is needed. Offsets and sizes are
// bytes from base(). Not thread safe.
//
// A frame counts whole from the first use of its chunk: with huge pages its first byte brings in all.
//
// A block with addresses of its own starts at a chunk and has memory for whole grains: frames for its whole
// chunks, and a tail (see Tails) for what is left.
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
  std::size_t held_bytes() const {
    return frames_ * kChunkBytes - absent_pages_ * kPageBytes + tails_.held_bytes();
  }
  std::size_t free_bytes() const { return free_bytes_ + tails_.free_bytes(); }
  const Ranges& free() const { return free_; }  // runs of chunks whose frames are free

  bool framed(std::size_t chunk) const { return chunks_[chunk].framed; }
  bool live(std::size_t chunk) const { return chunks_[chunk].live_pages != 0; }

  // Bytes by which held_bytes() grows when [offset, offset + size) is occupied.
  std::size_t growth_bytes(std::size_t offset, std::size_t size_bytes) const;

  // Gives every chunk of the range a frame and counts the range as live. False if the system refuses.
  bool occupy(std::size_t offset, std::size_t size_bytes);
  // Counts the range as no longer live. Frames of chunks with nothing live become free.
  void vacate(std::size_t offset, std::size_t size_bytes);

  // The same for the memory of one block, of whole grains. With `roomy`, a frame may be cut for the tail
  // that the system has yet to give.
  std::size_t block_growth_bytes(std::size_t offset, std::size_t size_bytes) const;
  bool occupy_block(std::size_t offset, std::size_t size_bytes, bool roomy);
  void vacate_block(std::size_t offset, std::size_t size_bytes);
  // Of a block whose memory was withdrawn.
  void vacate_absent_block(std::size_t offset, std::size_t size_bytes);

  // For a block that is protected from any access: its memory becomes free, frames at `to`, where no chunk
  // is live or framed; without `to` they go back to the system, as does what it does not move.
  void withdraw_block(std::size_t offset, std::size_t size_bytes, std::optional<std::size_t> to);
  // Gives the block's memory back to the system; its chunks stay live.
  void discard_block(std::size_t offset, std::size_t size_bytes);
  // The same, but the block's addresses can still be read, as zeros.
  void empty_block(std::size_t offset, std::size_t size_bytes);
  // The memory of the block at `from` goes behind that at `to`, which has none. False if the system
  // refuses: then neither has any.
  bool transfer_block(std::size_t from, std::size_t to, std::size_t size_bytes);
  // For a block without memory: `scratch` (a mapping of its own) takes its place.
  bool adopt_block(std::size_t offset, std::size_t size_bytes, char* scratch);

  // For pages that are live, in chunks shared with others: their memory goes back to the system, or
  // `scratch` takes their place. False if the system refuses.
  bool drop_pages(std::size_t offset, std::size_t size_bytes);
  bool take_pages(std::size_t offset, std::size_t size_bytes, char* scratch);
  // The memory of these pages goes behind those at `to`, which have none. As transfer_block.
  bool transfer_pages(std::size_t from, std::size_t to, std::size_t size_bytes);
  // Pages that drop_pages took become writable, without memory until their first use.
  bool renew_pages(std::size_t offset, std::size_t size_bytes);

  // Gives free frames back to the system, until `wanted_bytes` are. Gives the bytes given back.
  std::size_t purge(std::size_t wanted_bytes);
  // The same of what no frame can be had of: single grains.
  std::size_t purge_grains(std::size_t wanted_bytes) { return tails_.purge(wanted_bytes, true); }

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
  void lose_block(std::size_t offset, std::size_t size_bytes);
  bool give_tail(char* tail, std::size_t size_bytes, bool roomy);
  bool cut_free_frame();
  bool cut_frame(std::size_t chunk);
  bool cut_new_frame();

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
  Tails tails_;
};

}  // namespace penstock
