// In which order samples come: a pure function of seed, epoch and how the epoch is divided.
// penstock.samples.order says the same in Python, number by number.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace penstock::samples {

// Samples of one chunk, in the order that seed, epoch and chunk give them: of its `count` samples,
// which begin with `first`, those from position `from` up to `until` of that order.
struct Item {
  std::uint64_t chunk, first, count, from, until;
};

inline constexpr std::uint64_t kNoItem = ~std::uint64_t{0};

struct Pick {
  std::uint64_t sample;  // its index
  std::uint64_t item;    // of items(), kNoItem in full order
  bool last;             // of its item: its memory may go
};

// What was taken while the epoch was divided into so many replicas; as in Python.
struct Segment {
  std::uint64_t replicas, slots;
  std::vector<std::uint64_t> taken;  // one number: of every replica
};

// One replica's share of an epoch. Not safe for threads.
class Order {
 public:
  virtual ~Order() = default;
  virtual std::size_t take(std::span<Pick> picks) = 0;  // how many: fewer only at the end
  // What has to be read, in this order: the first `slots` items are under way from the start, and each
  // `last` pick of an item lets the next one begin. Empty in full order.
  virtual std::span<const Item> items() const = 0;
  virtual std::uint64_t slots() const = 0;  // 0 in full order
  virtual std::uint64_t size() const = 0;   // samples in all
  virtual std::uint64_t taken() const = 0;  // samples so far
  // Of each item whether it has given all of its samples. Empty in full order.
  virtual std::vector<bool> used_up() const { return {}; }

  std::uint64_t skip(std::uint64_t samples);  // how many
};

struct Epoch {
  std::uint64_t seed, epoch, replicas, replica, slots;
  std::vector<Segment> after;
};

// The order that Python holds, until a feed takes it over.
class SampleOrder {
 public:
  explicit SampleOrder(std::unique_ptr<Order> order) : order_(std::move(order)) {}
  // Both throw std::invalid_argument after `hand_over`.
  Order& get() const {
    if (!order_) throw std::invalid_argument("this order was handed to a feed, which alone takes from it now");
    return *order_;
  }
  std::unique_ptr<Order> hand_over() {
    get();
    return std::move(order_);
  }

 private:
  std::unique_ptr<Order> order_;
};

// Both throw std::invalid_argument for what contradicts itself, such as more taken than there was.
std::unique_ptr<Order> full_order(std::uint64_t samples, const Epoch& epoch);

// firsts: [chunks + 1] the first sample of each chunk, then how many samples there are. Copied where needed.
std::unique_ptr<Order> chunk_order(std::span<const std::uint64_t> firsts, const Epoch& epoch);

// The same of some samples only: what `order` calls sample i is sample kept[i]. Throws std::invalid_argument
// where they do not ascend.
std::unique_ptr<Order> order_of(std::vector<std::uint64_t> kept, std::unique_ptr<Order> order);

}  // namespace penstock::samples
