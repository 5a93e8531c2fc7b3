// What a reader relies on: which items are under way when, and when an item's memory may go.
#include <set>

#include "check.hpp"
#include "samples/order.hpp"

using namespace penstock::samples;
using penstock::test::Random;

namespace {

// False at the end.
bool next(Order& order, Pick& pick) { return order.take({&pick, 1}) == 1; }

std::vector<std::uint64_t> random_layout(Random& random) {
  std::vector<std::uint64_t> firsts{0};
  const auto chunks = random(0, 40);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk)
    firsts.push_back(firsts.back() + (random(0, 3) == 0 ? 0 : random(1, 30)));
  return firsts;
}

Epoch random_epoch(Random& random) {
  Epoch epoch{random(0, 1000), random(0, 9), random(1, 4), 0, random(1, 12), {}};
  epoch.replica = random(0, epoch.replicas - 1);
  for (auto segments = random(0, 2); segments > 0; --segments)
    epoch.after.push_back({random(1, 4), random(1, 12), {random(0, 60)}});
  return epoch;
}

// Follows picks as a reader does: the first `slots` items at first, another for each that ends.
class Follower {
 public:
  explicit Follower(const Order& order) : items_(order.items()) {
    for (const auto& item : items_) left_.push_back(item.until - item.from);
    under_way_ = std::min<std::uint64_t>(order.slots(), items_.size());
  }

  void follow(const Pick& pick) {
    CHECK(pick.item < under_way_);
    const auto& item = items_[pick.item];
    CHECK(item.first <= pick.sample && pick.sample < item.first + item.count);
    CHECK(left_[pick.item] > 0);
    CHECK_EQUAL(pick.last, --left_[pick.item] == 0);
    CHECK(found_.insert(pick.sample).second);
    under_way_ = std::min<std::uint64_t>(under_way_ + pick.last, items_.size());
  }
  void check_used_up(const std::vector<bool>& used_up) const {
    CHECK_EQUAL(used_up.size(), left_.size());
    for (std::size_t item = 0; item < left_.size(); ++item) CHECK_EQUAL(used_up[item], left_[item] == 0);
  }
  void check_ended() const {
    for (const auto left : left_) CHECK_EQUAL(left, 0u);
  }

 private:
  std::span<const Item> items_;
  std::vector<std::uint64_t> left_;
  std::uint64_t under_way_;  // items that have begun
  std::set<std::uint64_t> found_;
};

}  // namespace

TEST(picks_keep_to_the_items_under_way) {
  Random random(1);
  for (int round = 0; round < 400; ++round) {
    const auto firsts = random_layout(random);
    const auto epoch = random_epoch(random);
    const auto order = chunk_order(firsts, epoch);
    CHECK_EQUAL(order->slots(), epoch.slots);
    Follower follower(*order);
    std::vector<Pick> picks(random(1, 50));
    std::uint64_t taken = 0;
    for (;;) {
      const auto count = order->take(picks);
      for (std::size_t i = 0; i < count; ++i) follower.follow(picks[i]);
      follower.check_used_up(order->used_up());
      CHECK_EQUAL(order->taken(), taken += count);
      if (count < picks.size()) break;
    }
    follower.check_ended();
    CHECK_EQUAL(taken, order->size());
  }
}

TEST(skipping_is_taking) {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    const auto firsts = random_layout(random);
    const auto epoch = random_epoch(random);
    for (const bool full : {false, true}) {
      const auto make = [&] { return full ? full_order(firsts.back(), epoch) : chunk_order(firsts, epoch); };
      const auto skipped = make(), taken = make();
      const auto samples = random(0, 400);
      Pick one, other;
      std::uint64_t count = 0;
      while (count < samples && next(*taken, one)) ++count;
      CHECK_EQUAL(skipped->skip(samples), count);
      CHECK(skipped->used_up() == taken->used_up());
      while (next(*taken, one)) {
        CHECK(next(*skipped, other));
        CHECK_EQUAL(one.sample, other.sample);
        CHECK_EQUAL(one.item, other.item);
        CHECK_EQUAL(one.last, other.last);
      }
      CHECK(!next(*skipped, other));
    }
  }
}

TEST(full_order_has_no_items) {
  const auto order = full_order(10, {1, 2, 1, 0, 5, {}});
  CHECK(order->items().empty() && order->used_up().empty());
  CHECK_EQUAL(order->slots(), 0u);
  Pick pick;
  CHECK(next(*order, pick));
  CHECK_EQUAL(pick.item, kNoItem);
  CHECK(!pick.last);
}
