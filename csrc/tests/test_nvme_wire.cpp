// PDUs and commands as bytes: offsets are those of the specifications, spelled out here once more.
#include "check.hpp"
#include "nvme/wire.hpp"

using namespace penstock;
using namespace penstock::nvme;

namespace {

using Page = std::array<std::byte, kIdentifyBytes>;

std::uint64_t at(const Entry& entry, std::size_t offset, std::size_t size_bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size_bytes; ++i)
    value |= std::to_integer<std::uint64_t>(entry[offset + i]) << (8 * i);
  return value;
}

void put(Page& page, std::size_t offset, std::uint64_t value, std::size_t size_bytes) {
  for (std::size_t i = 0; i < size_bytes; ++i) page[offset + i] = static_cast<std::byte>(value >> (8 * i));
}

}  // namespace

TEST(headers_come_back) {
  test::Random random(1);
  for (int turn = 0; turn < 200; ++turn) {
    std::array<std::byte, kDataHeaderBytes> pdu{};
    const Header header{static_cast<Pdu>(random(0, 255)), static_cast<std::uint8_t>(random(0, 255)),
                        static_cast<std::uint8_t>(random(0, 255)), static_cast<std::uint8_t>(random(0, 255)),
                        static_cast<std::uint32_t>(random(0, 0xffffffff))};
    const DataHeader data{
        static_cast<std::uint16_t>(random(0, 65535)), static_cast<std::uint16_t>(random(0, 65535)),
        static_cast<std::uint32_t>(random(0, 0xffffffff)), static_cast<std::uint32_t>(random(0, 0xffffffff))};
    store_header(pdu.data(), header);
    store_data_header(pdu.data(), data);
    const auto found = load_header(pdu.data());
    CHECK(found.type == header.type && found.flags == header.flags &&
          found.header_bytes == header.header_bytes);
    CHECK(found.data_begin == header.data_begin && found.pdu_bytes == header.pdu_bytes);
    const auto found_data = load_data_header(pdu.data());
    CHECK(found_data.command == data.command && found_data.transfer_tag == data.transfer_tag);
    CHECK(found_data.offset == data.offset && found_data.size_bytes == data.size_bytes);
  }
}

TEST(commands_are_where_the_specification_has_them) {
  auto entry = read_or_write(true, 7, 0x123456789abcULL, 65536);
  CHECK_EQUAL(at(entry, 0, 1), 1U);
  CHECK_EQUAL(at(entry, 1, 1), 0x40U);
  CHECK_EQUAL(at(entry, 4, 4), 7U);
  CHECK_EQUAL(at(entry, 40, 8), 0x123456789abcULL);
  CHECK_EQUAL(at(entry, 48, 2), 65535U);
  set_command_id(entry, 0xbeef);
  set_data_pointer(entry, 0x10000, true);
  CHECK_EQUAL(at(entry, 2, 2), 0xbeefU);
  CHECK_EQUAL(at(entry, 24, 8), 0U);
  CHECK_EQUAL(at(entry, 32, 4), 0x10000U);
  CHECK_EQUAL(at(entry, 39, 1), 0x01U);
  set_data_pointer(entry, 0x10000, false);
  CHECK_EQUAL(at(entry, 39, 1), 0x5aU);
  CHECK_EQUAL(at(flush(3), 0, 1), 0U);
  CHECK_EQUAL(at(identify(2, 9), 0, 1), 6U);
  CHECK_EQUAL(at(identify(2, 9), 40, 1), 2U);
  const auto log = get_log(0x70, 0x1122334455ULL, 4096);
  CHECK_EQUAL(at(log, 40, 4), 0x70U | 1023U << 16);
  CHECK_EQUAL(at(log, 48, 8), 0x1122334455ULL);
  CHECK_EQUAL(at(set_queues(64), 44, 4), 0x003f003fU);
  const auto queue = connect(5, 129, 15000, false);
  CHECK_EQUAL(at(queue, 0, 1), 0x7fU);
  CHECK_EQUAL(at(queue, 4, 1), 1U);
  CHECK_EQUAL(at(queue, 42, 2), 5U);
  CHECK_EQUAL(at(queue, 44, 2), 128U);
  CHECK_EQUAL(at(queue, 46, 1), 4U);
  CHECK_EQUAL(at(queue, 48, 4), 15000U);
  const auto property = get_property(0x1c, true);
  CHECK_EQUAL(at(property, 4, 1), 4U);
  CHECK_EQUAL(at(property, 40, 1), 1U);
  CHECK_EQUAL(at(property, 44, 4), 0x1cU);
  CHECK_EQUAL(at(set_property(0x14, 0x460001), 48, 8), 0x460001U);
}

TEST(controllers_and_namespaces) {
  Page page{};
  put(page, 77, 5, 1);
  put(page, 111, 1, 1);
  put(page, 514, 100, 2);
  put(page, 525, 1, 1);
  put(page, 536, 1, 4);
  put(page, 1792, 516, 4);
  put(page, 1796, 1, 4);
  put(page, 1800, 3, 2);
  const char model[] = "drive \x01\xff   ";
  std::memcpy(page.data() + 24, model, sizeof model - 1);
  const auto controller = load_controller(page);
  CHECK_EQUAL(controller.model, "drive ??");
  CHECK(controller.most_data == 5 && controller.type == 1 && controller.most_commands == 100);
  CHECK(controller.in_capsule_units == 516 && controller.in_capsule_offset == 3 &&
        controller.response_units == 1);
  CHECK(controller.volatile_write_cache && controller.data_by_pointer);

  page = {};
  put(page, 0, 1000, 8);
  put(page, 25, 20, 1);           // 21 formats
  put(page, 26, 0x20 | 0x02, 1);  // the 18th
  put(page, 128 + 4 * 18, 8 | 12U << 16, 4);
  put(page, 104, 0x55, 1);
  const auto found = load_namespace(page);
  CHECK(found.blocks == 1000 && found.block_shift == 12 && found.metadata_bytes == 8 && found.format_known);
  put(page, 25, 17, 1);
  CHECK(!load_namespace(page).format_known);
}

TEST(any_page_is_read_within_its_bounds) {
  test::Random random(2);
  for (int turn = 0; turn < 300; ++turn) {
    Page page;
    const auto bytes = random.bytes(page.size());
    std::memcpy(page.data(), bytes.data(), page.size());
    load_controller(page);
    load_namespace(page);
    Descriptors descriptors;
    load_descriptors(page, descriptors);
    load_log_entry(std::span<const std::byte, kLogEntryBytes>(page.data(), kLogEntryBytes));
    terminate_text(page.data(), random(0, kMostTerminateBytes));
  }
}

TEST(descriptors_that_overrun_are_refused) {
  Page page{};
  Descriptors found;
  CHECK(load_descriptors(page, found));
  put(page, 0, 3 | 16U << 8, 2);
  put(page, 4, 0x99, 1);
  put(page, 20, 4 | 1U << 8, 2);
  put(page, 24, 2, 1);
  CHECK(load_descriptors(page, found));
  CHECK(found.uuid[0] == std::byte{0x99} && found.command_set == 2);
  for (std::size_t begin = 0; begin + 4 < page.size(); begin += 260) put(page, begin, 9 | 255U << 8, 2);
  page[1] = std::byte{0};
  CHECK(!load_descriptors(page, found));
}
