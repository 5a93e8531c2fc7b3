// Singletons of a process, which a forked child does not share with its parent.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>

namespace penstock::nvme {

// Makes a new one in a forked child.
template <class T>
T& of_this_process() {
  static std::atomic<T*> current = nullptr;
  auto* found = current.load();
  while (found == nullptr || found->process != getpid()) {
    auto made = std::make_unique<T>();
    made->process = getpid();
    if (current.compare_exchange_strong(found, made.get())) found = made.release();  // never destroyed
  }
  return *found;
}

}  // namespace penstock::nvme
