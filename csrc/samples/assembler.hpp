// Makes the batches of an order, one after the other, on one thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "copiers.hpp"
#include "order.hpp"
#include "reader.hpp"

namespace penstock::samples {

class Assembler {
 public:
  // `ahead`: chunks that are read before they are picked from, besides the order's slots.
  Assembler(Reader& reader, std::shared_ptr<Order> order, std::size_t ahead, const std::atomic<bool>& stop,
            std::shared_ptr<Signal> signal);
  Assembler(const Assembler&) = delete;
  Assembler& operator=(const Assembler&) = delete;
  ~Assembler();

  // Of the next so many samples; fewer at the end, and null after it, or where `stop` came first. The batch
  // may still be under way.
  std::shared_ptr<SampleBatch> next(std::size_t samples);
  // Gives back the chunks, and the room for them. No more `next`. Idempotent.
  void close();
  // The chunk that `next` waits for, from any thread; of no bytes where it waits for none.
  Extent waits_for();

 private:
  // Where samples come from: chunks in the order's own sequence; any chunk, as all can be held; or each
  // from where it lies.
  enum class From { items, chunks, samples };
  struct Source {
    Body body{};
    bool known = false, usable = false;  // what the body is; whether it is read as a whole
    Chunk* chunk = nullptr;              // in use
    const std::byte* memory = nullptr;   // of the body's first byte
    bool whole = false;                  // all of it is there, and right
  };
  // Sources side by side, made when the first of them is needed, and kept until all are used up: an epoch
  // can have a hundred million, of which a cache holds a thousand.
  static constexpr std::size_t kTogether = 64;
  struct Sources {
    std::array<Source, kTogether> each;
    std::size_t left;  // that are not used up
  };
  struct Planned {
    Extent extent;
    Source* source;      // null: it has none
    bool last;           // of its source
    bool alone = false;  // does not come from it
  };

  bool plan(std::size_t samples);
  void check_empty(std::size_t position, bool found, Extent& extent);
  void draw(std::size_t samples);
  Source& source_of(std::uint64_t number);
  void use_up(std::uint64_t number);
  const Body& body_of(Source& source, std::uint64_t chunk);
  void load(Source& source, std::uint64_t chunk);
  void load_ahead();
  void hasten();
  void read_alone(SampleBatch& batch);
  bool copy(SampleBatch& batch);
  bool await(SampleBatch& batch, std::size_t position);
  void copy_until(SampleBatch& batch, std::size_t end);
  void copy_range(const SampleBatch& batch, std::size_t begin, std::size_t end) const;
  static void fetch(const Planned& planned);
  void set_waits_for(const Extent& extent);
  void let_go(Source& source);

  Reader& reader_;
  const std::shared_ptr<Order> order_;
  const std::atomic<bool>& stop_;
  const std::shared_ptr<Signal> signal_;
  std::uint64_t left_;  // samples of the order
  From from_;
  std::size_t room_;        // sources that may be loaded at once
  std::size_t loaded_ = 0;  // that are, and not yet used up
  std::size_t at_once_ = 1; // that are begun to be loaded together
  std::size_t next_load_ = 0;
  std::vector<std::unique_ptr<Sources>> sources_;  // one for each item, or chunk
  std::vector<bool> used_up_;    // items that the order skipped
  std::vector<Pick> picks_;
  std::vector<Planned> planned_;
  std::vector<SampleBatch::Bad> bad_;  // known before anything is read
  std::uint64_t planned_bytes_ = 0, alone_ = 0;
  std::size_t copied_ = 0;      // of what is planned
  std::vector<std::uint64_t> over_;  // used up, but for copies that are to be made
  Copiers copiers_;
  std::mutex mutex_;
  Extent waits_for_;
};

}  // namespace penstock::samples
