// Namespaces by the handles that operations name them by.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "io/io.hpp"
#include "nvme/sealing.hpp"
#include "nvme/wire.hpp"
#include "sync.hpp"

namespace penstock::nvme {

class Controller;

struct Identity {
  NamespaceData data;
  Descriptors descriptors;
};

// A namespace that was opened, by its handle.
class Namespace {
 public:
  Namespace(std::shared_ptr<Controller> controller, std::uint32_t nsid, const Identity& identity,
            std::unique_ptr<Sealing> sealing = nullptr)
      : controller(std::move(controller)), nsid(nsid), identity(identity), sealing(std::move(sealing)) {}
  std::uint32_t block_bytes() const { return 1U << identity.data.block_shift; }
  std::uint64_t size_bytes() const { return identity.data.blocks << identity.data.block_shift; }
  // Whether it is still the one that was opened, as far as is known.
  bool usable() const { return usable_; }
  void set_usable(bool usable) { usable_ = usable; }
  void set_error(std::string text);
  std::string error() const;

  const std::shared_ptr<Controller> controller;
  const std::uint32_t nsid;
  const Identity identity;
  const std::unique_ptr<Sealing> sealing;  // null: nothing is encrypted

 private:
  std::atomic<bool> usable_ = true;
  mutable Mutex mutex_;
  std::string error_;
};

// Namespaces of this process by handle, which names none other ever after. After a fork, the child's are its
// own.
Handle add_namespace(std::shared_ptr<Namespace> name_space);
std::shared_ptr<Namespace> find_namespace(Handle handle);  // null: none
void remove_namespace(Handle handle);

}  // namespace penstock::nvme
