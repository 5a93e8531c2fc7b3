// What Python sees of the sample store's reader.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "checksum.hpp"
#include "samples/feed.hpp"
#include "samples/fetches.hpp"
#include "samples/order.hpp"
#include "samples/reader.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using namespace samples;

template <class T, std::size_t kDimensions>
using Array = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

PyObject* failure_type = nullptr;

constexpr auto kSlice = std::chrono::milliseconds(100);  // between two looks for signals
constexpr double kLongestS = 1e8;

Clock::time_point after(double timeout_s) {
  const auto seconds = std::isnan(timeout_s) ? 0 : std::clamp(timeout_s, 0.0, kLongestS);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

[[noreturn]] void raise(const Failure& failure) {
  constexpr const char* kKinds[] = {"read", "checksum", "timeout", "directory", "closed"};
  const auto& [fault, extent, sample, error] = failure;
  const auto arguments = nb::make_tuple(kKinds[static_cast<int>(fault)], extent.partition, extent.data_file,
                                        extent.offset, extent.size_bytes, sample, error);
  PyErr_SetObject(failure_type, arguments.ptr());
  throw nb::python_error();
}

// Calls `wait` with the moment until which it may wait, again and again: signals are seen to in between.
template <class Wait>
bool wait_in_slices(double timeout_s, const Wait& wait) {
  const auto deadline = after(timeout_s);
  while (true) {
    {
      const nb::gil_scoped_release release;
      if (wait(std::min(deadline, Clock::now() + kSlice))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (Clock::now() >= deadline) return false;
  }
}

// What owns memory of a batch. In a forked child its home may be locked by a thread that is not there.
struct Held {
  std::shared_ptr<SampleBatch> batch;
  int process = getpid();
};

// Indices, data and offsets of a batch.
using BatchArrays = std::tuple<Numpy<std::int64_t>, Numpy<std::uint8_t>, Numpy<std::int64_t>>;

BatchArrays arrays_of(const std::shared_ptr<SampleBatch>& batch) {
  const std::shared_ptr<Held> owner(new Held{batch}, [](Held* held) {
    if (held->process == getpid()) delete held;
  });
  return {array(batch->indices(), batch->size(), owner),
          array(reinterpret_cast<std::uint8_t*>(batch->data()), batch->data_bytes(), owner),
          array(batch->offsets(), batch->size() + 1, owner)};
}

// -- the reader ----------------------------------------------------------------------------------

// Threads of the parent are not in a forked child: there everything is left as it is, for ever.
class PyReader {
 public:
  PyReader(std::shared_ptr<Reader> reader, nb::list partitions)
      : reader_(std::move(reader)), partitions_(std::move(partitions)) {}
  PyReader(const PyReader&) = delete;
  PyReader& operator=(const PyReader&) = delete;
  ~PyReader() {
    const bool forked = process_ != getpid();
    if (!forked && close(kLastWaitS)) return;
    new std::shared_ptr<Reader>(reader_);  // for ever
    partitions_.release();
  }

  Reader& get() const {
    if (process_ != getpid() || reader_->closed()) raise({});
    return *reader_;
  }
  std::shared_ptr<Reader> share() const { return reader_; }
  int process() const { return process_; }

  bool close(double timeout_s) {
    if (process_ != getpid()) return true;
    const nb::gil_scoped_release release;
    return reader_->close(after(timeout_s));
  }

 private:
  static constexpr double kLastWaitS = 5;
  std::shared_ptr<Reader> reader_;
  nb::list partitions_;  // whose arrays it reads
  const int process_ = getpid();
};

template <class T>
std::span<const T> view(const void* data, std::size_t count) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0)
    throw nb::value_error("the arrays of a store must be aligned");
  return {static_cast<const T*>(data), count};
}

using DataFileOf = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, Handle, Handle, std::uint32_t, std::uint64_t>;
using Arrays = std::tuple<Array<std::uint64_t, 2>, Array<std::uint32_t, 1>, Array<std::uint8_t, 2>,
                          Array<std::uint64_t, 2>, std::uint64_t, std::vector<DataFileOf>>;

Partition partition_of(nb::handle object) {
  const auto [directory, sums, chunks, large, chunk_bytes, data_files] = nb::cast<Arrays>(object);
  if ((directory.shape(0) > 0 && directory.shape(1) != 2) || (large.shape(0) > 0 && large.shape(1) != 2) ||
      (chunks.shape(0) > 0 && chunks.shape(1) != sizeof(ChunkRecord)))
    throw nb::value_error("the arrays of a store must be [n, 2], [n], [chunks, 16] and [large, 2]");
  Partition partition{view<Entry>(directory.data(), directory.shape(0)),
                view<std::uint32_t>(sums.data(), sums.shape(0)),
                view<ChunkRecord>(chunks.data(), chunks.shape(0)),
                view<Large>(large.data(), large.shape(0)),
                chunk_bytes,
                {}};
  for (const auto& file : data_files)
    partition.data_files.push_back(std::apply([](auto... values) { return DataFile{values...}; }, file));
  return partition;
}

using FetchedFile = std::tuple<std::size_t, std::size_t, Column<std::uint8_t>, int>;

void construct(PyReader* self, const nb::list& partitions, std::size_t buffers, bool direct, bool verify,
               unsigned copy_threads, unsigned depth, bool ring, const nb::list& fetched) {
  if (depth == 0) throw nb::value_error("depth must be above zero");
  std::vector<Partition> parsed;
  nb::list kept;
  for (const auto partition : partitions) {
    parsed.push_back(partition_of(partition));
    kept.append(partition);
  }
  for (const auto each : fetched) {
    auto [partition, number, held, held_file] = nb::cast<FetchedFile>(each);
    auto& file = parsed.at(partition).data_files.at(number);
    file.fetched = true;
    file.held = {held.data(), held.shape(0)};
    file.held_file = held_file;
    kept.append(each);
  }
  const ReaderOptions options{buffers, direct, verify, ring, copy_threads, depth};
  new (self) PyReader(std::make_shared<Reader>(std::move(parsed), options), std::move(kept));
}

void check_index(const Reader& reader, std::int64_t index) {
  if (index < 0 || static_cast<std::uint64_t>(index) >= reader.catalog().samples())
    throw nb::index_error("there is no sample of this index");
}

std::shared_ptr<SampleBatch> gather_batch(Reader& reader, std::span<const std::int64_t> indices,
                                          double timeout_s) {
  const auto signal = std::make_shared<Signal>();
  std::shared_ptr<SampleBatch> batch;
  const bool whole = wait_in_slices(timeout_s, [&](Clock::time_point until) {
    if (!batch) batch = reader.begin(indices, signal);
    return Reader::wait(*batch, *signal, until);
  });
  if (!whole) raise({Fault::timeout, batch->waits_for(), -1, 0});
  if (!batch->bad().empty()) raise(batch->bad().front().failure);
  reader.delivered += batch->size();
  return batch;
}

nb::bytes read(PyReader& self, std::int64_t index, double timeout_s) {
  auto& reader = self.get();
  check_index(reader, index);
  const auto sample = static_cast<std::uint64_t>(index);
  const auto extent = reader.find(sample);
  // Only what is whole is allocated as large as an entry says.
  if (extent.size_bytes <= Reader::kReadHereBytes) {
    auto bytes = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(extent.size_bytes)));
    if (!bytes.is_valid()) throw nb::python_error();
    auto* to = reinterpret_cast<std::byte*>(PyBytes_AsString(bytes.ptr()));
    bool there, right = true;
    {
      const nb::gil_scoped_release release;
      there = extent.size_bytes == 0 || reader.read_now(extent, to);
      if (there && reader.verify()) right = crc32c(0, to, extent.size_bytes) == reader.catalog().sum(sample);
    }
    if (!right) raise({Fault::checksum, extent, index, 0});
    if (there) {
      ++reader.delivered;
      return bytes;
    }
  }
  const auto batch = gather_batch(reader, {&index, 1}, timeout_s);
  return nb::bytes(batch->data(), batch->data_bytes());
}

BatchArrays gather(PyReader& self, const Array<std::int64_t, 1>& indices, double timeout_s) {
  auto& reader = self.get();
  // A copy: another thread may write to the array once the GIL is released.
  const std::vector<std::int64_t> wanted(indices.data(), indices.data() + indices.shape(0));
  for (const auto index : wanted) check_index(reader, index);
  return arrays_of(gather_batch(reader, wanted, timeout_s));
}

nb::dict counters(PyReader& self) {
  const auto reader = self.share();
  nb::dict result;
  result["bytes_read"] = reader->reads().bytes();
  result["chunk_reads"] = reader->reads().count(Traffic::chunks);
  result["sample_reads"] = reader->reads().count(Traffic::samples);
  result["samples"] = reader->delivered.load();
  result["waits"] = reader->waits.load();
  result["io_uring"] = reader->reads().uses_ring();
  return result;
}

// -- what is to be fetched -----------------------------------------------------------------------

Fetches& fetches_of(const PyReader& self) {
  auto* fetches = self.share()->reads().fetches();
  if (fetches == nullptr) throw nb::value_error("nothing of this reader is fetched");
  return *fetches;
}

// Ticket, partition, data file, chunk of that file, bit that says it is here; bytes of the file from where to where, and
// those that are wanted.
using FetchFields = std::tuple<std::uint64_t, std::size_t, std::size_t, std::uint64_t, int, std::uint64_t,
                               std::uint64_t, std::uint64_t, std::uint64_t>;

// None once it is closed. Not by a reference of Python's: the thread that waits here does not keep the reader open.
std::optional<std::vector<FetchFields>> take_fetches(PyReader& self, std::size_t most, double timeout_s) {
  const auto reader = self.share();
  fetches_of(self);
  std::vector<Fetch> taken;
  bool open;
  {
    const nb::gil_scoped_release release;
    open = reader->reads().take(most, after(timeout_s), taken);
  }
  if (!open && taken.empty()) return std::nullopt;
  std::vector<FetchFields> result;
  for (const auto& [ticket, piece] : taken) {
    const auto& [partition, data_file, begin, size_bytes] = piece.extent;
    result.emplace_back(ticket, partition, data_file, piece.chunk, piece.bit, begin, begin + size_bytes,
                        piece.wanted.offset, piece.wanted.offset + piece.wanted.size_bytes);
  }
  return result;
}

std::uint64_t give_fetch(PyReader& self, std::uint64_t ticket, std::uint64_t begin, const Array<std::uint8_t, 1>& data,
                         int direct_file) {
  const auto reader = self.share();
  auto& fetches = fetches_of(self);
  const std::span bytes(reinterpret_cast<const std::byte*>(data.data()), data.shape(0));
  const nb::gil_scoped_release release;
  return fetches.give(ticket, begin, bytes, direct_file);
}

void fail_fetch(PyReader& self, std::uint64_t ticket, int error) {
  const auto reader = self.share();
  auto& fetches = fetches_of(self);
  const nb::gil_scoped_release release;
  fetches.fail(ticket, error);
}

// -- a feed --------------------------------------------------------------------------------------

class PyFeed {
 public:
  PyFeed(std::shared_ptr<Feed> feed, int process) : feed_(std::move(feed)), process_(process) {}
  PyFeed(const PyFeed&) = delete;
  PyFeed& operator=(const PyFeed&) = delete;
  ~PyFeed() {
    if (process_ != getpid()) {
      new std::shared_ptr<Feed>(feed_);
      return;
    }
    const nb::gil_scoped_release release;
    feed_->close();
    feed_.reset();
  }
  Feed& get() const {
    if (process_ != getpid()) raise({});
    return *feed_;
  }

 private:
  std::shared_ptr<Feed> feed_;
  const int process_;
};

PyFeed* make_feed(PyReader& self, SampleOrder& order, std::size_t ahead, std::uint64_t prefetch_bytes,
                  bool skip_damaged) {
  self.get();
  auto reader = self.share();
  std::shared_ptr<Order> handed(order.hand_over());
  std::shared_ptr<Feed> feed;
  try {
    const nb::gil_scoped_release release;
    feed = std::make_shared<Feed>(reader, std::move(handed), FeedOptions{ahead, prefetch_bytes, skip_damaged});
    reader->add(feed);
  } catch (const std::system_error& error) {  // no thread
    raise({Fault::read, {}, -1, error.code().value()});
  }
  return new PyFeed(std::move(feed), self.process());
}

std::optional<BatchArrays> bread(PyFeed& self, std::int64_t samples, double timeout_s) {
  if (samples < 1) throw nb::value_error("a batch has at least one sample");
  auto& feed = self.get();
  std::shared_ptr<SampleBatch> batch;
  auto outcome = Feed::Outcome::late;
  const bool there = wait_in_slices(timeout_s, [&](Clock::time_point until) {
    outcome = feed.take(static_cast<std::size_t>(samples), until, batch);
    return outcome != Feed::Outcome::late;
  });
  if (!there) raise(feed.late());
  if (outcome == Feed::Outcome::end) return std::nullopt;
  return arrays_of(batch);
}

}  // namespace

void bind_sample_reader(nb::module_& module) {
  failure_type = add_exception(module, "SampleFailure",
                               "kind, partition, data_file, offset, size_bytes, sample (-1: several), errno.");
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Failed& failed) {
      try {
        raise(failed.failure);
      } catch (nb::python_error& error) {
        error.restore();
      }
    }
  });

  nb::class_<PyFeed>(module, "SampleFeed", "The batches of one replica of one epoch.")
      .def("bread", &bread, nb::arg("samples"), nb::arg("timeout_s"))
      .def_prop_ro("taken", [](PyFeed& self) { return self.get().taken(); })
      .def("skipped", [](PyFeed& self) { return self.get().skipped(); })
      .def("close", [](PyFeed& self) {
        auto& feed = self.get();
        const nb::gil_scoped_release release;
        feed.close();
      });
  nb::class_<PyReader>(module, "SampleReader", "Reads the samples of mounted stores.")
      .def("__init__", &construct, nb::arg("partitions"), nb::kw_only(), nb::arg("buffers"), nb::arg("direct"),
           nb::arg("verify"), nb::arg("copy_threads"), nb::arg("depth"), nb::arg("ring") = true,
           nb::arg("fetched") = nb::list())
      .def("read", &read, nb::arg("index"), nb::arg("timeout_s"))
      .def("gather", &gather, nb::arg("indices"), nb::arg("timeout_s"))
      .def("feed", &make_feed, nb::arg("order"), nb::arg("ahead"), nb::arg("prefetch_bytes"),
           nb::arg("skip_damaged"), nb::keep_alive<0, 1>())
      .def("counters", &counters)
      .def("take_fetches", &take_fetches, nb::arg("most"), nb::arg("timeout_s"))
      .def("give_fetch", &give_fetch, nb::arg("ticket"), nb::arg("begin"), nb::arg("data"),
           nb::arg("direct_file"))
      .def("fail_fetch", &fail_fetch, nb::arg("ticket"), nb::arg("errno"))
      .def("close", &PyReader::close, nb::arg("timeout_s"));
}

}  // namespace penstock
