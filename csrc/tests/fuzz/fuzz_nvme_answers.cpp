// Data structures that a controller answers with.
#include "input.hpp"
#include "nvme/wire.hpp"

using namespace penstock::nvme;
using penstock::test::Input;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  Input input(data, size_bytes);
  const auto terminate = input.take(input.below(kMostTerminateBytes + 1));
  if (terminate.size() >= kDataHeaderBytes) terminate_text(terminate.data(), terminate.size());
  std::array<std::byte, kIdentifyBytes> page{};
  Input::copy(input.take(page.size()), page.data());
  const auto controller = load_controller(page);
  REQUIRE(controller.serial.size() <= 20 && controller.model.size() <= 40 && controller.subsystem_nqn.size() <= 256);
  load_namespace(page);
  Descriptors found;
  load_descriptors(page, found);
  const auto entry = load_log_entry(std::span(page).first<kLogEntryBytes>());
  REQUIRE(entry.address.size() <= 256 && entry.service.size() <= 32 && entry.subsystem_nqn.size() <= 256);
  status_text(controller.controller);
  return 0;
}
