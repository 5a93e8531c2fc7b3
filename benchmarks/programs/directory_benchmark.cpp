// Look-up by name in the store's directory, and in what could take its place. Prints one JSON object.
//
//   directory_benchmark SAMPLES LOOKUPS ROUNDS
//
// The trees are those of DLFS (section III-B): AVL, of 16-byte entries by key. Names have 16 bytes, and are
// looked for in random order. "one": each search waits for the one before; "many": all are given at once.
// Only the store's own search compares names; the others take the key's word for it.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "samples/layout.hpp"
#include "samples/layout.hpp"
#include "samples/names.hpp"

using namespace penstock::samples;

namespace {

constexpr std::size_t kNameBytes = 16, kGroup = 32;
constexpr std::int64_t kAbsent = -1;

// Of the same samples in each run: letters, as if they were hexadecimal digits.
std::string make_names(std::size_t samples) {
  std::string names(samples * kNameBytes, ' ');
  for (std::size_t i = 0; i < samples; ++i) {
    auto mixed = i * 0x9E3779B97F4A7C15;
    for (std::size_t k = 0; k < kNameBytes; ++k, mixed >>= 4)
      names[i * kNameBytes + k] = static_cast<char>('a' + mixed % 16);
  }
  return names;
}

// Offsets stand for the place of a sample: what a search must find.
std::int64_t place_of(const Entry& entry) { return static_cast<std::int64_t>(entry.offset()); }

// The nodes lie in one array with links of 32 bits, which is kinder to the tree than a pointer and an
// allocation each.
class AvlTree {
 public:
  explicit AvlTree(std::span<const Entry> entries) {
    nodes_.reserve(entries.size() + 1);
    nodes_.push_back({});  // link 0: none
    for (const auto& entry : entries) root_ = insert(root_, entry);
  }

  std::int64_t find(std::uint64_t key) const {
    for (auto at = root_; at != 0;) {
      const auto& node = nodes_[at];
      const auto here = node.entry.key();
      if (here == key) return place_of(node.entry);
      at = node.child[here < key];
    }
    return kAbsent;
  }
  std::size_t size_bytes() const { return nodes_.size() * sizeof(Node); }

 private:
  using Link = std::uint32_t;
  struct Node {
    Entry entry;
    Link child[2] = {0, 0};
    int height = 0;
  };

  int height(Link at) const { return nodes_[at].height; }
  void measure(Link at) {
    auto& node = nodes_[at];
    node.height = 1 + std::max(height(node.child[0]), height(node.child[1]));
  }
  // Moves the root's child on one side up to the root.
  Link rotate(Link at, int side) {
    const auto up = nodes_[at].child[side];
    nodes_[at].child[side] = nodes_[up].child[!side];
    nodes_[up].child[!side] = at;
    measure(at);
    measure(up);
    return up;
  }
  Link insert(Link at, const Entry& entry) {
    if (at == 0) {
      nodes_.push_back({entry, {0, 0}, 1});
      return static_cast<Link>(nodes_.size() - 1);
    }
    const int side = nodes_[at].entry.key() < entry.key();
    nodes_[at].child[side] = insert(nodes_[at].child[side], entry);
    measure(at);
    const auto tall = nodes_[at].child[side];
    if (height(tall) - height(nodes_[at].child[!side]) < 2) return at;
    if (height(nodes_[tall].child[!side]) > height(nodes_[tall].child[side]))
      nodes_[at].child[side] = rotate(tall, !side);
    return rotate(at, side);
  }

  std::vector<Node> nodes_;
  Link root_ = 0;
};

class SortedArray {
 public:
  explicit SortedArray(std::span<const Entry> entries) : entries_(entries.begin(), entries.end()) {
    std::ranges::sort(entries_, {}, &Entry::key);
  }

  std::int64_t find(std::uint64_t key) const {
    const auto at = std::ranges::lower_bound(entries_, key, {}, &Entry::key);
    return at != entries_.end() && at->key() == key ? place_of(*at) : kAbsent;
  }
  // One step of all searches, then the next step.
  void find_many(std::span<const std::uint64_t> keys, std::int64_t* found) const {
    std::size_t begins[kGroup] = {};
    for (auto left = entries_.size(); left > 1; left -= left / 2) {
      const auto half = left / 2, quarter = (left - half) / 2;
      for (std::size_t i = 0; i < keys.size(); ++i) {
        begins[i] += entries_[begins[i] + half - 1].key() < keys[i] ? half : 0;
        if (quarter > 0) prefetch(&entries_[begins[i] + quarter - 1]);
      }
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto& entry = entries_[begins[i]];
      found[i] = entry.key() == keys[i] ? place_of(entry) : kAbsent;
    }
  }
  std::size_t size_bytes() const { return entries_.size() * sizeof(Entry); }

 private:
  std::vector<Entry> entries_;
};

class Measurement {
 public:
  Measurement(std::size_t samples, std::size_t lookups, int rounds)
      : rounds_(rounds), names_(make_names(samples)), wanted_(lookups) {
    for (std::size_t i = 0; i < samples; ++i) {
      if (i % kAnchorNames == 0) anchors_.push_back(table_bytes_.size());
      const auto name = this->name(i);
      table_bytes_ += std::string{static_cast<char>(kNameBytes), 0};
      table_bytes_ += name;
      directory_.push_back(Entry::of(0, key_of(name), i, 1));
    }
    std::mt19937_64 random(1);
    for (auto& index : wanted_) index = random() % samples;
    for (std::size_t i = 0; i < lookups; ++i) {
      wanted_names_ += name(wanted_[i]);
      ends_.push_back(static_cast<std::int64_t>(wanted_names_.size()));
    }
  }

  void run() {
    std::printf("{\"samples\": %zu, \"lookups\": %zu, \"rows\": [", directory_.size(), wanted_.size());
    measure_tree();
    measure_array();
    measure_store();
    std::printf("]}\n");
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::string_view name(std::size_t i) const {
    return std::string_view(names_).substr(i * kNameBytes, kNameBytes);
  }
  std::string_view wanted_name(std::size_t i) const {
    return std::string_view(wanted_names_).substr(i * kNameBytes, kNameBytes);
  }

  static double seconds(const std::function<void()>& act) {
    const auto begin = Clock::now();
    act();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void row(const char* name, const char* how, double build_s, std::size_t size_bytes,
           const std::function<void(std::vector<std::int64_t>&)>& find_all) {
    std::vector<std::int64_t> found(wanted_.size());
    std::printf("%s\n{\"name\": \"%s\", \"how\": \"%s\", \"build_s\": %.4f, ", first_ ? "" : ",", name, how,
                build_s);
    std::printf("\"bytes_per_sample\": %.2f, \"lookup_s\": [",
                static_cast<double>(size_bytes) / static_cast<double>(directory_.size()));
    first_ = false;
    for (int round = 0; round < rounds_; ++round) {
      std::ranges::fill(found, kAbsent);
      const auto taken_s = seconds([&] { find_all(found); });
      for (std::size_t i = 0; i < wanted_.size(); ++i)
        if (found[i] != static_cast<std::int64_t>(wanted_[i])) std::abort();
      std::printf("%s%.4g", round ? ", " : "", taken_s / static_cast<double>(wanted_.size()));
    }
    std::printf("]}");
  }

  // Where to look for the next name depends on what was found: otherwise the processor overlaps searches.
  template <class Find>
  auto one_at_a_time(const Find& find) {
    return [this, &find](std::vector<std::int64_t>& found) {
      std::size_t waited = 0;
      for (std::size_t i = 0; i < found.size(); ++i) {
        found[i] = find(wanted_name(i + waited));
        waited = found[i] == kAbsent;
      }
    };
  }

  void measure_tree() {
    std::unique_ptr<AvlTree> tree;
    const auto build_s = seconds([&] { tree = std::make_unique<AvlTree>(directory_); });
    const auto find = [&](std::string_view name) { return tree->find(key_of(name)); };
    row("AVL tree", "one", build_s, tree->size_bytes(), one_at_a_time(find));
  }

  void measure_array() {
    std::unique_ptr<SortedArray> array;
    const auto build_s = seconds([&] { array = std::make_unique<SortedArray>(directory_); });
    const auto find = [&](std::string_view name) { return array->find(key_of(name)); };
    row("sorted array", "one", build_s, array->size_bytes(), one_at_a_time(find));
    row("sorted array", "many", build_s, array->size_bytes(), [&](std::vector<std::int64_t>& found) {
      std::uint64_t keys[kGroup];
      for (std::size_t done = 0; done < found.size(); done += kGroup) {
        const auto count = std::min(kGroup, found.size() - done);
        for (std::size_t i = 0; i < count; ++i) keys[i] = key_of(wanted_name(done + i));
        array->find_many({keys, count}, &found[done]);
      }
    });
  }

  void measure_store() {
    const NameTable table(directory_.size(), table_bytes_, anchors_);
    const LookupShape shape(directory_.size());
    std::vector<std::uint64_t> lookup;
    const auto build_s = seconds([&] {
      lookup.resize((shape.size_bytes + 7) / 8);
      write_lookup(directory_, reinterpret_cast<std::byte*>(lookup.data()));
    });
    const Names names(table, {reinterpret_cast<const char*>(lookup.data()), shape.size_bytes});
    // The names are there in any case; the lookup, the anchors and the directory are not.
    const auto size_bytes = shape.size_bytes + 8 * anchors_.size() + sizeof(Entry) * directory_.size();
    const auto find = [&](std::string_view name) { return names.find(name); };
    row("penstock", "one", build_s, size_bytes, one_at_a_time(find));
    row("penstock", "many", build_s, size_bytes, [&](std::vector<std::int64_t>& found) {
      names.find_many(wanted_names_, ends_, found.data());
    });
  }

  const int rounds_;
  const std::string names_;
  std::vector<std::size_t> wanted_;
  std::string wanted_names_, table_bytes_;
  std::vector<std::int64_t> ends_;
  std::vector<std::uint64_t> anchors_;
  std::vector<Entry> directory_;
  bool first_ = true;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s SAMPLES LOOKUPS ROUNDS\n", arguments[0]);
    return 2;
  }
  const auto number = [&](int i) { return std::strtoull(arguments[i], nullptr, 10); };
  Measurement(number(1), number(2), static_cast<int>(number(3))).run();
}
