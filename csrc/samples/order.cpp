#include "samples/order.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "random.hpp"

namespace penstock::samples {

namespace {

// What a number is drawn for. As in Python.
enum Purpose : std::uint64_t { kFull = 1, kItems = 2, kPicks = 3, kRest = 4, kInside = 5 };

constexpr std::uint64_t kLargestStride = std::uint64_t{1} << 20;  // so that position times stride fits
constexpr std::size_t kBlock = 256;
constexpr std::uint64_t kMostReplicas = std::uint64_t{1} << 20;  // memory is taken for each

[[noreturn]] void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

std::uint64_t share_begin(std::uint64_t total, std::uint64_t replicas, std::uint64_t replica) {
  return replica * (total / replicas) + std::min(replica, total % replicas);
}

std::uint64_t share_size(std::uint64_t total, std::uint64_t replicas, std::uint64_t replica) {
  return total / replicas + (replica < total % replicas);
}

void check(const Epoch& epoch, std::uint64_t least_slots) {
  const auto divided = [&](std::uint64_t replicas, std::uint64_t slots) {
    if (replicas == 0) refuse("an epoch is divided into at least one replica");
    if (replicas > kMostReplicas || slots >> 32)
      refuse("more than 2^20 replicas, or 2^32 slots, are too many");
    if (slots < least_slots) refuse("chunk order needs at least one slot");
  };
  divided(epoch.replicas, epoch.slots);
  if (epoch.replica >= epoch.replicas)
    refuse("there is no replica " + std::to_string(epoch.replica) + " of " + std::to_string(epoch.replicas));
  for (const auto& segment : epoch.after) {
    divided(segment.replicas, segment.slots);
    if (segment.taken.size() != 1 && segment.taken.size() != segment.replicas)
      refuse("a segment of " + std::to_string(segment.replicas) + " replicas says of " +
             std::to_string(segment.taken.size()) + " how many samples they gave");
  }
}

// What a replica of `size` samples has given in a segment.
std::uint64_t taken_of(const Segment& segment, std::uint64_t replica, std::uint64_t size) {
  if (segment.taken.size() == 1) return std::min(segment.taken[0], size);
  const auto taken = segment.taken[replica];
  if (taken > size)
    refuse("replica " + std::to_string(replica) + " of " + std::to_string(segment.replicas) + " cannot have given " +
           std::to_string(taken) + " samples: its share was " + std::to_string(size));
  return taken;
}

// Positions of the permutation that nobody has taken.
struct Positions {
  std::vector<std::uint64_t> holes;
  std::uint64_t from, until;  // after the holes

  std::uint64_t size() const { return holes.size() + (until - from); }
  std::uint64_t operator[](std::uint64_t i) const { return i < holes.size() ? holes[i] : from + (i - holes.size()); }

  Positions after(const Segment& segment) const {
    std::vector<std::uint64_t> taken(segment.replicas);
    for (std::uint64_t replica = 0; replica < segment.replicas; ++replica)
      taken[replica] = taken_of(segment, replica, share_size(size(), segment.replicas, replica));
    const auto rows = *std::max_element(taken.begin(), taken.end());
    // The last row may be short: there rows * replicas may even overflow.
    const auto reached = rows > size() / segment.replicas ? size() : rows * segment.replicas;
    Positions left{{}, from + (std::max<std::uint64_t>(reached, holes.size()) - holes.size()), until};
    std::uint64_t position = 0;
    for (std::uint64_t row = 0; position < reached; ++row)
      for (std::uint64_t replica = 0; replica < segment.replicas && position < reached; ++replica, ++position)
        if (row >= taken[replica]) left.holes.push_back((*this)[position]);
    for (; position < holes.size(); ++position) left.holes.push_back(holes[position]);
    return left;
  }
};

class FullOrder final : public Order {
 public:
  FullOrder(std::uint64_t samples, Positions positions, const Epoch& epoch)
      : permutation_(samples, key_of({epoch.seed, epoch.epoch, kFull})),
        positions_(std::move(positions)),
        replica_(epoch.replica),
        replicas_(epoch.replicas),
        size_(share_size(positions_.size(), epoch.replicas, epoch.replica)) {}

  std::size_t take(std::span<Pick> picks) override {
    std::array<std::uint64_t, kBlock> block;
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(picks.size(), size_ - taken_));
    for (std::size_t done = 0; done < count; done += kBlock) {
      const std::span samples(block.data(), std::min(kBlock, count - done));
      for (auto& sample : samples) sample = positions_[replica_ + replicas_ * taken_++];
      permutation_.apply(samples);
      for (std::size_t i = 0; i < samples.size(); ++i) picks[done + i] = {samples[i], kNoItem, false};
    }
    return count;
  }
  std::span<const Item> items() const override { return {}; }
  std::uint64_t slots() const override { return 0; }
  std::uint64_t size() const override { return size_; }
  std::uint64_t taken() const override { return taken_; }

 private:
  Permutation permutation_;
  Positions positions_;
  std::uint64_t replica_, replicas_, size_, taken_ = 0;
};

// Numbers that depend on the seed, the epoch and how often it was divided before.
struct Keys {
  std::uint64_t items, inside, picks, rest;

  Keys(const Epoch& epoch, std::uint64_t generation)
      : items(key_of({epoch.seed, epoch.epoch, kItems, generation})),
        inside(key_of({epoch.seed, epoch.epoch, kInside})),
        picks(key_of({epoch.seed, epoch.epoch, kPicks, generation})),
        rest(key_of({epoch.seed, epoch.epoch, kRest, generation})) {}
};

class ChunkOrder final : public Order {
 public:
  ChunkOrder(std::vector<Item> items, std::uint64_t slots, const Keys& keys, std::uint64_t replica)
      : items_(std::move(items)),
        most_slots_(slots),
        inside_(keys.inside),
        picks_(key_of(keys.picks, replica)),
        rest_(0, key_of(keys.rest, replica)),
        rest_key_(key_of(keys.rest, replica)) {
    for (const auto& item : items_) size_ += item.until - item.from;
    slots_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(slots, items_.size())));
    picked_.resize(slots_.size());
    for (auto& slot : slots_) {
      begin(slot);
      spread_ += slot.left;
    }
    if (begun_ == items_.size()) begin_rest();
  }

  std::size_t take(std::span<Pick> picks) override {
    std::size_t done = 0;
    while (done < picks.size() && !resting_) picks[done++] = mixed();
    const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(picks.size() - done, size_ - taken_));
    for (std::size_t i = 0; i < count; ++i) picks[done++] = rested();
    return done;
  }
  std::span<const Item> items() const override { return items_; }
  std::uint64_t slots() const override { return most_slots_; }
  std::uint64_t size() const override { return size_; }
  std::uint64_t taken() const override { return taken_; }
  std::vector<bool> used_up() const override {
    std::vector<bool> ended(items_.size());
    std::fill_n(ended.begin(), begun_, true);
    for (const auto& slot : slots_) ended[slot.item] = slot.left == 0;
    return ended;
  }

  // Appends what was not taken.
  void leave(std::vector<Item>& left) && {
    for (std::size_t item = 0; item < begun_; ++item) items_[item].from = items_[item].until;
    for (const auto& slot : slots_) items_[slot.item].from = items_[slot.item].until - slot.left;
    std::copy_if(items_.begin(), items_.end(), std::back_inserter(left),
                 [](const Item& item) { return item.from < item.until; });
  }

 private:
  // An item under way: `at` is where in its chunk the next sample is.
  struct Slot {
    std::uint64_t first = 0, at = 0, stride = 0, count = 0, left = 0, item = 0;
  };

  void begin(Slot& slot) {
    const auto& item = items_[begun_];
    const auto key = key_of(inside_, item.chunk);
    const auto strides = std::clamp<std::uint64_t>(item.count - 1, 1, kLargestStride);
    auto stride = 1 + draw(key, 1) % strides;
    while (std::gcd(stride, item.count) != 1) ++stride;  // count - 1 has no divisor in common with count
    const auto at = (draw(key, 0) % item.count + item.from * stride) % item.count;
    slot = {item.first, at, stride, item.count, item.until - item.from, begun_++};
  }

  Pick pick(Slot& slot) {
    const Pick pick{slot.first + slot.at, slot.item, --slot.left == 0};
    slot.at += slot.stride;
    if (slot.at >= slot.count) slot.at -= slot.count;
    return pick;
  }

  Pick mixed() {
    const auto bits = draw(picks_, taken_);
    auto chosen = scaled(bits >> 32, slots_.size());
    const auto other = scaled(bits & 0xFFFFFFFF, slots_.size());
    if (taken_ < spread_) {
      // All slots begin at once. Were they all equally likely, they would end at about the same time, and
      // their successors, too. Instead they are 1/2 to 3/2 as likely for about one life of an item, after
      // which their ages differ evenly.
      if (bits & 1) chosen = std::max(chosen, other);
    } else {
      // Of two, that which was picked from longer ago: a batch draws from more chunks than by one alone.
      // No branch: it would be mispredicted every other time.
      const auto swap = std::uint64_t{0} - (picked_[other] < picked_[chosen]);
      chosen ^= (chosen ^ other) & swap;
    }
    picked_[chosen] = taken_++;
    auto& slot = slots_[chosen];
    const auto found = pick(slot);
    if (found.last) {
      begin(slot);
      if (begun_ == items_.size()) begin_rest();
    }
    return found;
  }

  // Nothing is left to begin: from here on a slot is as likely as it has samples left, or mixing would
  // fade while one slot after the other falls empty.
  void begin_rest() {
    resting_ = true;
    ends_.resize(slots_.size());
    std::transform_inclusive_scan(slots_.begin(), slots_.end(), ends_.begin(), std::plus<>{},
                                  [](const Slot& slot) { return slot.left; });
    const auto samples = size_ - taken_;
    rest_ = Permutation(samples, rest_key_);
    // guide_[r] is the slot that rank r << shift_ falls to: where the search for the ranks from there on begins.
    while (samples >> shift_ > 2 * slots_.size()) ++shift_;
    guide_.resize(static_cast<std::size_t>((samples >> shift_) + 2), static_cast<std::uint32_t>(slots_.size()));
    std::uint64_t rank = 0;
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot)
      for (; rank << shift_ < ends_[slot]; ++rank) guide_[rank] = slot;
  }

  Pick rested() {
    if (rank_ == ranks_.size()) draw_ranks();
    const auto rank = ranks_[rank_++];
    const auto* guide = &guide_[rank >> shift_];
    const auto end = std::upper_bound(ends_.begin() + guide[0], ends_.begin() + guide[1], rank);
    ++taken_;
    return pick(slots_[static_cast<std::size_t>(end - ends_.begin())]);
  }

  void draw_ranks() {
    const auto count = std::min<std::uint64_t>(kBlock, ends_.back() - ranked_);
    ranks_.resize(static_cast<std::size_t>(count));
    std::iota(ranks_.begin(), ranks_.end(), ranked_);
    rest_.apply(ranks_);
    ranked_ += count;
    rank_ = 0;
  }

  std::vector<Item> items_;
  std::uint64_t most_slots_, inside_, picks_, size_ = 0, taken_ = 0;
  std::uint64_t spread_ = 0;  // samples of the items that begin at once
  std::size_t begun_ = 0;     // items
  std::vector<Slot> slots_;
  std::vector<std::uint64_t> picked_;  // when each slot was last picked from

  bool resting_ = false;
  Permutation rest_;
  std::uint64_t rest_key_;
  std::vector<std::uint64_t> ends_, ranks_;
  std::vector<std::uint32_t> guide_;
  unsigned shift_ = 0;
  std::uint64_t ranked_ = 0;
  std::size_t rank_ = 0;
};

class KeptOrder final : public Order {
 public:
  KeptOrder(std::vector<std::uint64_t> kept, std::unique_ptr<Order> order)
      : kept_(std::move(kept)), order_(std::move(order)) {}

  std::size_t take(std::span<Pick> picks) override {
    const auto count = order_->take(picks);
    for (auto& pick : picks.first(count)) pick.sample = kept_[pick.sample];
    return count;
  }
  std::span<const Item> items() const override { return order_->items(); }
  std::uint64_t slots() const override { return order_->slots(); }
  std::uint64_t size() const override { return order_->size(); }
  std::uint64_t taken() const override { return order_->taken(); }
  std::vector<bool> used_up() const override { return order_->used_up(); }

 private:
  std::vector<std::uint64_t> kept_;
  std::unique_ptr<Order> order_;
};

// What an epoch is divided from: all chunks with samples, or what earlier segments left of them.
class Pool {
 public:
  explicit Pool(std::span<const std::uint64_t> firsts) : firsts_(firsts) {
    if (firsts.empty() || firsts.front() != 0) refuse("the first sample of the first chunk is not sample 0");
    if (!std::is_sorted(firsts.begin(), firsts.end()))
      refuse("the first samples of the chunks do not ascend");
    samples_ = firsts.back();
    if (std::adjacent_find(firsts.begin(), firsts.end()) == firsts.end()) return;
    all_ = false;
    for (std::size_t chunk = 0; chunk + 1 < firsts.size(); ++chunk)
      if (const auto item = whole(chunk); item.count > 0) items_.push_back(item);
  }
  explicit Pool(std::vector<Item> items) : all_(false), items_(std::move(items)) {
    for (const auto& item : items_) samples_ += item.until - item.from;
  }

  std::uint64_t samples() const { return samples_; }
  std::size_t size() const { return all_ ? firsts_.size() - 1 : items_.size(); }
  Item operator[](std::size_t i) const { return all_ ? whole(i) : items_[i]; }
  void prefetch(std::size_t i) const {
    __builtin_prefetch(all_ ? static_cast<const void*>(&firsts_[i]) : static_cast<const void*>(&items_[i]));
  }

 private:
  Item whole(std::size_t chunk) const {
    const auto count = firsts_[chunk + 1] - firsts_[chunk];
    return {chunk, firsts_[chunk], count, 0, count};
  }

  std::span<const std::uint64_t> firsts_;
  std::uint64_t samples_ = 0;
  bool all_ = true;  // no chunk is without samples, and nothing was taken: there may be very many
  std::vector<Item> items_;
};

// The items in random order, cut into equal shares: replicas, which are asked for in ascending order.
class Division {
 public:
  Division(const Pool& pool, std::uint64_t key, std::uint64_t replicas)
      : pool_(pool), permutation_(pool.size(), key), replicas_(replicas) {}

  std::vector<Item> share(std::uint64_t replica) {
    std::vector<Item> items;
    items.reserve(static_cast<std::size_t>(pool_.size() / replicas_ + 2));
    const auto begin = share_begin(pool_.samples(), replicas_, replica);
    const auto end = share_begin(pool_.samples(), replicas_, replica + 1);
    while (passed_ < end) {
      if (item_.from == item_.until) item_ = pool_[next()];
      const auto before = begin - std::min(begin, passed_);
      const auto length = std::min(item_.until - item_.from, end - passed_);
      if (before < length)
        items.push_back({item_.chunk, item_.first, item_.count, item_.from + before, item_.from + length});
      item_.from += length;
      passed_ += length;
    }
    return items;
  }

 private:
  std::uint64_t next() {
    if (at_ == block_.size()) {
      block_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(kBlock, pool_.size() - drawn_)));
      std::iota(block_.begin(), block_.end(), drawn_);
      permutation_.apply(block_);
      drawn_ += block_.size();
      at_ = 0;
      for (std::size_t i = 0; i < std::min(kFetched, block_.size()); ++i) pool_.prefetch(block_[i]);
    }
    if (at_ + kFetched < block_.size()) pool_.prefetch(block_[at_ + kFetched]);
    return block_[at_++];
  }

  static constexpr std::size_t kFetched = 16;
  const Pool& pool_;
  Permutation permutation_;
  std::uint64_t replicas_, passed_ = 0, drawn_ = 0;  // passed: samples; drawn: items
  Item item_{};                                     // the part of it that is not passed
  std::vector<std::uint64_t> block_;
  std::size_t at_ = 0;
};

}  // namespace

std::uint64_t Order::skip(std::uint64_t samples) {
  std::array<Pick, kBlock> picks;
  const auto before = taken();
  for (;;) {
    const auto wanted = std::min<std::uint64_t>(kBlock, samples - (taken() - before));
    if (wanted == 0 || take({picks.data(), static_cast<std::size_t>(wanted)}) < wanted) return taken() - before;
  }
}

std::unique_ptr<Order> full_order(std::uint64_t samples, const Epoch& epoch) {
  check(epoch, 0);
  Positions positions{{}, 0, samples};
  for (const auto& segment : epoch.after) positions = positions.after(segment);
  return std::make_unique<FullOrder>(samples, std::move(positions), epoch);
}

std::unique_ptr<Order> chunk_order(std::span<const std::uint64_t> firsts, const Epoch& epoch) {
  check(epoch, 1);
  Pool pool(firsts);
  for (std::size_t generation = 0; generation < epoch.after.size(); ++generation) {
    const auto& segment = epoch.after[generation];
    const Keys keys(epoch, generation);
    Division division(pool, keys.items, segment.replicas);
    std::vector<Item> left;
    for (std::uint64_t replica = 0; replica < segment.replicas; ++replica) {
      ChunkOrder order(division.share(replica), segment.slots, keys, replica);
      order.skip(taken_of(segment, replica, order.size()));
      std::move(order).leave(left);
    }
    pool = Pool(std::move(left));
  }
  const Keys keys(epoch, epoch.after.size());
  Division division(pool, keys.items, epoch.replicas);
  return std::make_unique<ChunkOrder>(division.share(epoch.replica), epoch.slots, keys, epoch.replica);
}

std::unique_ptr<Order> order_of(std::vector<std::uint64_t> kept, std::unique_ptr<Order> order) {
  if (std::adjacent_find(kept.begin(), kept.end(), std::greater_equal<>{}) != kept.end())
    refuse("the samples that are kept do not ascend");
  return std::make_unique<KeptOrder>(std::move(kept), std::move(order));
}

}  // namespace penstock::samples
