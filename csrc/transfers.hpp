// Requests carried out in the background on one thread, which needs nobody's attention.
//
// What finishes while nothing else is under way, that thread hands out itself: it spares waking another.
// What finishes while more is under way waits for another thread, so that transfers never do.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "io.hpp"
#include "pieces.hpp"
#include "staging.hpp"

namespace penstock {

struct Limits {
  unsigned depth = 32;                   // operations at once
  std::uint64_t piece_bytes = 4U << 20;  // largest operation
  std::uint64_t slot_bytes = 1U << 20;   // largest staged operation
  std::size_t slots = 8;                 // staging buffers
  // With so many bytes in flight, only a demand begins: what the kernel has is not recalled, and a demand
  // waits for the disk behind it.
  std::uint64_t background_bytes = 16U << 20;
};

struct Finished {
  std::uint64_t token;
  int error;                     // 0, or an errno
  double started_s, finished_s;  // on the monotonic clock
  bool abandoned;                // the ring broke: the memory may still be read or written, for ever
};

class Transfers {
 public:
  using Deliver = std::function<void(const std::vector<Finished>&)>;

  // `make_io` is called on the thread that will use it; what it throws is thrown here. So is `deliver`,
  // with what finished last; without it all waits for `wait`.
  Transfers(const std::function<std::unique_ptr<Io>()>& make_io, Limits limits, Deliver deliver = {});
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;
  ~Transfers();

  // Begins the requests. False, and nothing begins, after close.
  bool submit(std::span<const Request> requests);
  // Ends with ECANCELED those of which nothing has begun. Gives how many.
  std::size_t cancel(std::span<const std::uint64_t> tokens);
  // Makes demands of the requests: of those that wait, they begin first from now on.
  void hurry(std::span<const std::uint64_t> tokens);
  // What has finished and was not delivered: at least one, waiting for it; none after close.
  std::vector<Finished> wait();
  // Waits for everything that was submitted. Idempotent, for any threads at once. False where the time was
  // too short: then the object must stay as long as the process. False also from a delivery, which what
  // was submitted may itself wait for.
  bool close(std::optional<std::chrono::duration<double>> timeout = {});
  bool registered() const { return registered_; }

 private:
  struct Part;
  using Queue = std::deque<std::unique_ptr<Part>>;
  struct Transfer {
    Request request;
    std::size_t pieces_left;
    std::size_t pieces_begun = 0;
    int error = 0;
    double started_s = 0;
  };
  struct Part {
    Transfer* transfer;
    Piece piece;
    std::uint64_t done_bytes = 0;  // from piece.begin on
    int retries = 0;
    std::byte* slot = nullptr;
  };

  void run(const std::function<std::unique_ptr<Io>()>& make_io);
  void serve(Io& io);
  void hand_out();
  Queue& queue_of(const Transfer& transfer);
  bool anything_waits() const;
  bool next_part(std::unique_ptr<Part>& part);
  void start(Io& io, std::unique_ptr<Part> part);
  void issue(Io& io, std::unique_ptr<Part> part);
  std::unique_ptr<Part> take_back(std::uint64_t tag);
  std::unique_ptr<Part> advance(std::unique_ptr<Part> part, int moved);
  void finish_part(std::unique_ptr<Part> part, int error);
  void finish_locked(Transfer& transfer, int error, bool abandoned = false);

  const Limits limits_;
  const Deliver deliver_;
  Staging staging_;
  bool registered_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Transfer>> transfers_;
  std::array<Queue, kPriorities> waiting_;
  std::vector<Finished> finished_;
  std::unordered_map<Part*, std::unique_ptr<Part>> in_flight_;  // the thread's own
  std::uint64_t in_flight_bytes_ = 0;                           // also the thread's own
  Io* io_ = nullptr;                                            // while the thread serves
  int start_error_ = 0;
  bool started_ = false, closed_ = false, ended_ = false;
  const int process_;
  std::mutex joining_;
  std::thread thread_;
};

}  // namespace penstock
