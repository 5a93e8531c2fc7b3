// What a forked child must not share with its parent.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>

namespace penstock::nvme {

// One for each process: what a fork copied is the parent's.
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
