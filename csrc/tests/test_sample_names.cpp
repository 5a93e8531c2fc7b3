// Look-up by name: every sample is found, and damaged arrays are refused without a look beside them.
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "samples/layout.hpp"
#include "samples/names.hpp"

using namespace penstock::samples;
using penstock::test::Random;

TEST(xxh64_of_the_specification) {
  CHECK_EQUAL(xxh64(""), 0xEF46DB3751D8E999u);
  CHECK_EQUAL(xxh64("a"), 0xD24EC4F1A98C6E5Bu);
  CHECK_EQUAL(xxh64("abc"), 0x44BC2CF5AD770999u);
  CHECK_EQUAL(key_of("abc"), 0x2CF5AD770999u);
}

namespace {

// A store's arrays. Memory ends where each of them does: a sanitizer sees every look beside.
struct Arrays {
  std::vector<Entry> directory;
  std::vector<char> names;
  std::vector<std::uint64_t> anchors;
  std::vector<std::byte> lookup;

  explicit Arrays(const std::vector<std::string>& all) {
    for (const auto& name : all) {
      if (directory.size() % kAnchorNames == 0) anchors.push_back(names.size());
      directory.push_back(Entry::of(0, key_of(name), 0, 0));
      const auto length = static_cast<std::uint16_t>(name.size());
      names.insert(names.end(), {static_cast<char>(length & 0xFF), static_cast<char>(length >> 8)});
      names.insert(names.end(), name.begin(), name.end());
    }
    names.shrink_to_fit();
    look_up();
  }
  void look_up() {
    lookup.assign(LookupShape(directory.size()).size_bytes, {});
    write_lookup(directory, lookup.data());
  }
  NameTable table() const { return {directory.size(), {names.data(), names.size()}, anchors}; }
  Names opened() const {
    return {table(), {reinterpret_cast<const char*>(lookup.data()), lookup.size()}};
  }
};

std::vector<std::string> numbered(std::size_t count, const std::string& before = "") {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) names.push_back(before + std::to_string(i));
  return names;
}

std::vector<std::int64_t> find_all(const Names& names, const std::vector<std::string>& wanted) {
  std::string bytes;
  std::vector<std::int64_t> ends, found(wanted.size());
  for (const auto& name : wanted) {
    bytes += name;
    ends.push_back(static_cast<std::int64_t>(bytes.size()));
  }
  names.find_many(bytes, ends, found.data());
  return found;
}

}  // namespace

TEST(each_name_is_found_at_every_size_of_a_store) {
  for (const std::size_t count : {0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000, 5000}) {
    const auto names = numbered(count), absent = numbered(100, "absent ");
    const Arrays arrays(names);
    const auto opened = arrays.opened();
    const auto found = find_all(opened, names);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK_EQUAL(found[i], static_cast<std::int64_t>(i));
      CHECK_EQUAL(opened.find(names[i]), static_cast<std::int64_t>(i));
      CHECK(opened.table().name(i) == names[i]);
    }
    for (const auto index : find_all(opened, absent)) CHECK_EQUAL(index, -1);
  }
}

TEST(names_of_one_length_and_of_many_are_found) {
  Random random(1);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < 2000; ++i) {
    const auto size_bytes = i / 100 % 2 ? 20 : random(20, 300);
    auto name = std::to_string(i);
    name.resize(size_bytes, 'x');
    names.push_back(name);
  }
  const auto found = find_all(Arrays(names).opened(), names);
  for (std::size_t i = 0; i < names.size(); ++i) CHECK_EQUAL(found[i], static_cast<std::int64_t>(i));
}

TEST(names_of_one_key_are_told_apart) {
  const auto names = numbered(200);
  Arrays arrays(names);
  for (const std::size_t i : {0, 10, 99, 101, 199}) arrays.directory[i].place = key_of("100");
  arrays.look_up();
  CHECK_EQUAL(arrays.opened().find("100"), 100);
  CHECK_EQUAL(find_all(arrays.opened(), {"100", "5"})[0], 100);
}

TEST(damaged_bytes_are_refused_or_harmless) {
  Random random(2);
  const auto names = numbered(100, "name ");
  const Arrays intact(names);
  for (int round = 0; round < 3000; ++round) {
    auto arrays = intact;
    for (auto left = random(1, 4); left > 0; --left) {
      const auto value = static_cast<char>(random(0, 255));
      const auto which = random(0, 2);
      if (which == 0) arrays.names[random(0, arrays.names.size() - 1)] = value;
      if (which == 1) arrays.lookup[random(0, arrays.lookup.size() - 1)] = static_cast<std::byte>(value);
      if (which == 2) arrays.anchors[random(0, arrays.anchors.size() - 1)] ^= std::uint64_t{1} << random(0, 63);
    }
    const auto attempt = [](const auto& act) {
      try {
        act();
      } catch (const std::invalid_argument&) {
      }
    };
    const auto opened = arrays.opened();
    attempt([&] { find_all(opened, names); });
    for (std::size_t i = 0; i < names.size(); ++i) {
      attempt([&] { opened.find(names[i]); });
      attempt([&] { opened.table().name(i); });
    }
  }
}

TEST(arrays_of_other_sizes_are_refused) {
  const Arrays arrays(numbered(40));
  const auto refused = [](const auto& act) {
    try {
      act();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refused([&] { NameTable(100, {}, arrays.anchors); }));
  for (const std::size_t less : {1, 8, 300})
    CHECK(refused([&] {
      Names(arrays.table(), {reinterpret_cast<const char*>(arrays.lookup.data()), arrays.lookup.size() - less});
    }));
}
