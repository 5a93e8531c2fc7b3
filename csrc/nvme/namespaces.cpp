#include "nvme/namespaces.hpp"

#include <unordered_map>

#include "nvme/process.hpp"
#include "sync.hpp"

namespace penstock::nvme {

namespace {

struct Namespaces {
  pid_t process;
  Mutex mutex;
  std::unordered_map<Handle, std::shared_ptr<Namespace>> by_handle;
};

}  // namespace

void Namespace::set_error(std::string text) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(text);
}

std::string Namespace::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

Handle add_namespace(std::shared_ptr<Namespace> name_space) {
  static std::atomic<Handle> next = kFirstNamespace;  // goes on in a forked child
  auto& all = of_this_process<Namespaces>();
  const auto handle = next++;
  const std::lock_guard lock(all.mutex);
  all.by_handle.emplace(handle, std::move(name_space));
  return handle;
}

std::shared_ptr<Namespace> find_namespace(Handle handle) {
  auto& all = of_this_process<Namespaces>();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  return found == all.by_handle.end() ? nullptr : found->second;
}

void remove_namespace(Handle handle) {
  auto& all = of_this_process<Namespaces>();
  std::shared_ptr<Namespace> removed;
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  if (found == all.by_handle.end()) return;
  removed = std::move(found->second);
  removed->set_usable(false);
  all.by_handle.erase(found);
}

}  // namespace penstock::nvme
