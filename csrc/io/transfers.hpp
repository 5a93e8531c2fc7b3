// Transfers carried out in the background by a pool of threads, which needs nobody's attention.
//
// What finishes while nothing else is under way, its thread hands out itself: it spares waking another.
// What finishes while more is under way waits for another thread, so that transfers never do.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "io/io.hpp"
#include "io/pieces.hpp"
#include "io/staging.hpp"
#include "sync.hpp"

namespace penstock {

struct Limits {
  unsigned depth = 32;                   // operations of a thread at once: on files, and on each namespace
  std::uint64_t piece_bytes = 4U << 20;  // largest operation
  std::uint64_t slot_bytes = 1U << 20;   // largest staged operation
  std::size_t slots = 8;                 // staging buffers
  unsigned threads = 1;                  // each with an Io of its own
  // With so many bytes in flight, only a demand begins: what the kernel has is not recalled, and a demand
  // waits for the disk behind it.
  std::uint64_t background_bytes = 16U << 20;
  std::uint64_t at_once_bytes = 0;  // largest buffered transfer that is carried out by who submits it
};

class Transfers {
 public:
  using MakeIo = std::function<std::unique_ptr<Io>()>;
  using Deliver = std::function<void(std::list<Transfer>&)>;

  // `make_io` is called on each thread; what it throws is thrown here. `deliver` is called on the threads, with
  // what finished last; without it all waits for `wait`, and so does what it throws for, which ends the thread.
  Transfers(MakeIo make_io, Limits limits, Deliver deliver = {});
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;
  ~Transfers();

  // Begins the transfers. False, and nothing begins, after close. So too where memory is short: then it throws
  // std::bad_alloc. What has begun needs no more memory to end. Into `at_once` go small ones that need no
  // wait for a device: copying takes less time than handing them over.
  bool submit(std::span<const Transfer> asked, std::list<Transfer>* at_once = nullptr);
  // Ends with ECANCELED those of which nothing has begun. Gives how many.
  std::size_t cancel(std::span<const std::uint64_t> tokens);
  // Makes demands of the transfers: of what waits, they begin first from now on.
  void raise_priority(std::span<const std::uint64_t> tokens);
  // What has finished and was not delivered: at least one, waiting for it; none after close.
  std::list<Transfer> wait();
  // An errno where a thread broke: nothing is carried out any more. 0: none did.
  int broken();
  // Waits for everything that was submitted. Idempotent, for any threads at once. False where the time was
  // too short: then the object must stay as long as the process. False also from a delivery, which what
  // was submitted may itself wait for.
  bool close(std::optional<std::chrono::duration<double>> timeout = {});

 private:
  struct Part;
  struct Worker;
  using Parts = std::list<Part>;
  // What waits for one target: a namespace, or (0) the files of this machine. A slow one holds up no other.
  struct Lane {
    Handle remote;
    std::vector<unsigned> in_flight;  // operations of each thread
    std::array<Parts, kPriorities> waiting{};
    std::uint64_t in_flight_bytes = 0;
  };
  struct Part {
    Transfer* transfer;
    Piece piece;
    Lane* lane = nullptr;
    Parts::iterator self{};
    std::uint64_t done_bytes = 0;  // from piece.begin on
    int retries = 0;
    bool may_land = false;
    std::byte* slot = nullptr;
    Worker* worker = nullptr;  // where it has begun
  };
  struct Worker {
    std::size_t number;
    Io* io = nullptr;  // while the thread serves
    Parts in_flight;
    bool idle = false;  // nothing in flight, and about to wait
    std::thread thread;
  };

  bool try_now(Transfer& transfer) const;
  void run(Worker& worker);
  void serve(Worker& worker, Io& io);
  void hand_out();
  Lane& lane_of(const Transfer& transfer);
  Part* waiting_part(std::uint64_t token);
  static Parts& queue_of(const Part& part);
  bool may_begin(const Worker& worker, const Lane& lane, std::size_t priority) const;
  bool anything_waits() const;
  void wake(std::size_t parts);
  Part* next_part(Worker& worker);
  void start(Io& io, Part& part);
  void issue(Io& io, const Part& part);
  bool advance(Worker& worker, Part& part, const Result& result);
  void finish_part(Worker& worker, Part& part, int error);
  void end_part(Parts& parts, Part& part, int error, bool abandoned);
  static void drop_waiting(Parts& queue, Transfer& transfer);
  void finish(Transfer& transfer);

  const MakeIo make_io_;
  const Limits limits_;
  const Deliver deliver_;
  Staging staging_;
  Mutex mutex_;
  Condition changed_;
  std::list<Transfer> transfers_;
  std::list<Lane> lanes_;  // the next to have its turn comes first
  std::list<Transfer> finished_;
  std::list<Worker> workers_;
  std::uint64_t in_flight_bytes_ = 0;
  unsigned started_ = 0, running_ = 0;
  int start_error_ = 0, broken_ = 0;
  bool registered_ = true, closed_ = false;
  const int process_;
  std::mutex joining_;
};

}  // namespace penstock
