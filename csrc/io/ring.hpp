// io_uring by the kernel's own interface.
#pragma once

#include <linux/io_uring.h>

#include <atomic>
#include <memory>

#include "io/io.hpp"

namespace penstock {

class Ring final : public Io {
 public:
  // At most `depth` operations at once. Throws std::system_error where the kernel refuses.
  explicit Ring(unsigned depth);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() override;

  bool register_memory(std::byte* address, std::size_t size_bytes) override;
  void prepare(const Operation& operation, std::uint64_t tag) override;
  void submit() override { enter(0); }
  void wait() override;
  bool next(Result& result) override;
  void wake() override;

 private:
  // A shared mapping of the ring's memory.
  class Mapping {
   public:
    Mapping() = default;
    Mapping(int ring, std::size_t size_bytes, std::uint64_t what);
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping();
    template <typename T>
    T* at(std::size_t offset) const {
      return reinterpret_cast<T*>(start_ + offset);
    }

   private:
    std::byte* start_ = nullptr;
    std::size_t size_bytes_ = 0;
  };
  // Closes with the object.
  class Descriptor {
   public:
    Descriptor() = default;
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor();
    void reset(int number);
    int get() const { return number_; }

   private:
    int number_ = -1;
  };

  void enter(unsigned wait_for);
  io_uring_sqe& next_entry(std::uint64_t tag);
  void await_wake();

  Descriptor ring_, event_;
  Mapping submissions_, completions_, entries_;
  unsigned *submission_tail_, *submission_mask_, *submission_array_;
  unsigned *completion_head_, *completion_tail_, *completion_mask_;
  io_uring_sqe* submission_entries_;
  io_uring_cqe* completion_entries_;
  unsigned prepared_ = 0;  // entries the kernel has not been told of
  std::uint64_t event_value_ = 0;
  std::atomic<bool> woken_ = false;
};

}  // namespace penstock
