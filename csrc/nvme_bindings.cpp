// What Python sees of remote drives.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nvme/controller.hpp"
#include "nvme/server.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using namespace nvme;

PyObject* error_type = nullptr;

template <std::size_t size>
nb::bytes bytes_of(const std::array<std::byte, size>& array) {
  return nb::bytes(array.data(), array.size());
}

constexpr std::size_t kMostNqnBytes = 223;

// The number of the hash that binds it to a name, and the key; empty: none.
Key key_of(const nb::bytes& given) {
  const auto* octets = static_cast<const std::byte*>(given.data());
  if (given.size() == 0) return {};
  const auto hash = std::to_integer<std::uint8_t>(octets[0]);
  if (hash > kLastHash || given.size() < 2) throw nb::value_error("a key is the number of a hash, and its bytes");
  return {static_cast<Hash>(hash), Octets(octets + 1, octets + given.size())};
}

Options options_of(const std::string& host, int port, const std::string& subsystem_nqn, const std::string& host_nqn,
                   const nb::bytes& host_id, const nb::bytes& host_key, const nb::bytes& controller_key) {
  if (port < 1 || port > 65535) throw nb::value_error("port must be 1 to 65535");
  if (host.empty() || host.find('\0') != std::string::npos) throw nb::value_error("host must not be empty");
  for (const auto& nqn : {subsystem_nqn, host_nqn})
    if (nqn.empty() || nqn.size() > kMostNqnBytes || nqn.find('\0') != std::string::npos)
      throw nb::value_error("an NQN has 1 to 223 bytes");
  Options options;
  if (host_id.size() != options.host_id.size()) throw nb::value_error("host_id must be 16 bytes");
  options.host = host;
  options.port = static_cast<std::uint16_t>(port);
  options.subsystem_nqn = subsystem_nqn;
  options.host_nqn = host_nqn;
  std::memcpy(options.host_id.data(), host_id.data(), options.host_id.size());
  options.keys = {key_of(host_key), key_of(controller_key)};
  return options;
}

// Threads and sockets of the parent are not a forked child's: there everything is left as it is, for ever.
class PyController {
 public:
  explicit PyController(std::shared_ptr<Controller> controller) : controller_(std::move(controller)) {}
  PyController(const PyController&) = delete;
  PyController& operator=(const PyController&) = delete;
  ~PyController() {
    if (process_ != getpid()) {
      new std::shared_ptr<Controller>(controller_);
    } else {
      close(kLastWaitS);
    }
  }

  Controller& get() const {
    if (process_ != getpid())
      throw Error(Kind::closed, controller_->options().url() +
                                    ": it was opened by another process; open it anew after a fork");
    if (closed_) throw Error(Kind::closed, controller_->options().url() + ": it is closed");
    return *controller_;
  }
  // For what can be asked for after the close.
  Controller& past() const { return *controller_; }
  // To be closed with this.
  void keep(Handle handle) { handles_.push_back(handle); }
  void close(double timeout_s) {
    if (process_ != getpid() || std::exchange(closed_, true)) return;
    const auto handles = std::exchange(handles_, {});
    const nb::gil_scoped_release release;
    for (const auto handle : handles) controller_->close_namespace(handle);
    controller_->close(timeout_s);
  }

 private:
  static constexpr double kLastWaitS = 5;
  const std::shared_ptr<Controller> controller_;
  std::vector<Handle> handles_;
  bool closed_ = false;
  const int process_ = getpid();
};

void construct(PyController* self, const std::string& host, int port, const std::string& subsystem_nqn,
               const std::string& host_nqn, const nb::bytes& host_id, const nb::bytes& host_key,
               const nb::bytes& controller_key, unsigned queues, unsigned depth, bool header_digest, bool data_digest, bool io_uring, double connect_timeout_s,
               double command_timeout_s, double keep_alive_s, double reconnect_timeout_s) {
  auto options = options_of(host, port, subsystem_nqn, host_nqn, host_id, host_key, controller_key);
  if (queues < 1 || queues > 64) throw nb::value_error("queues must be 1 to 64");
  if (depth < 1 || depth >= Connection::kMostEntries) throw nb::value_error("depth must be 1 to 1023");
  for (const auto limit_s : {connect_timeout_s, command_timeout_s, reconnect_timeout_s})
    if (!(limit_s > 0)) throw nb::value_error("time limits must be above zero");
  if (!(keep_alive_s >= 0)) throw nb::value_error("keep_alive_s must not be negative");
  options.queues = queues;
  options.depth = depth;
  options.header_digest = header_digest;
  options.data_digest = data_digest;
  options.io_uring = io_uring;
  options.connect_timeout_s = connect_timeout_s;
  options.command_timeout_s = command_timeout_s;
  options.keep_alive_s = keep_alive_s;
  options.reconnect_timeout_s = reconnect_timeout_s;
  std::shared_ptr<Controller> controller;
  {
    const nb::gil_scoped_release release;
    controller = Controller::open(options);
  }
  new (self) PyController(std::move(controller));
}

nb::dict facts_of(PyController& self) {
  const auto facts = self.get().facts();
  nb::dict result;
  result["serial"] = facts.data.serial;
  result["model"] = facts.data.model;
  result["firmware"] = facts.data.firmware;
  result["version"] = facts.version;
  result["controller_id"] = facts.controller;
  result["mdts_bytes"] = facts.most_data_bytes;
  result["io_capsule_bytes"] = facts.in_capsule_bytes;
  result["max_queues"] = facts.queues;
  result["queue_entries"] = facts.most_entries;
  result["quiesce_s"] = facts.quiesce_s;
  result["volatile_write_cache"] = facts.data.volatile_write_cache;
  result["header_digest"] = facts.header_digest;
  result["data_digest"] = facts.data_digest;
  return result;
}

nb::dict open_namespace(PyController& self, std::uint32_t nsid, std::int64_t encrypted_from) {
  Handle handle;
  auto& controller = self.get();
  {
    const nb::gil_scoped_release release;
    handle = controller.open_namespace(
        nsid, encrypted_from < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(encrypted_from)));
  }
  self.keep(handle);
  const auto name_space = find_namespace(handle);
  if (!name_space) throw Error(Kind::closed, self.past().options().url() + ": it is closed");
  const auto& [data, descriptors] = name_space->identity;
  nb::dict result;
  result["handle"] = handle;
  result["block_bytes"] = name_space->block_bytes();
  result["blocks"] = data.blocks;
  result["nguid"] = bytes_of(data.nguid);
  result["eui64"] = bytes_of(data.eui64);
  result["uuid"] = bytes_of(descriptors.uuid);
  return result;
}

nb::dict counters(PyController& self) {
  const auto& counters = self.past().counters;
  nb::dict result;
  result["reads"] = counters.reads.load();
  result["writes"] = counters.writes.load();
  result["read_bytes"] = counters.read_bytes.load();
  result["write_bytes"] = counters.write_bytes.load();
  result["reconnects"] = counters.reconnects.load();
  result["retries"] = counters.retries.load();
  result["timeouts"] = counters.timeouts.load();
  result["violations"] = counters.violations.load();
  result["uses_io_uring"] = counters.uses_io_uring.load();
  return result;
}

// As above: a forked child leaves it as it is.
class PyServer {
 public:
  explicit PyServer(std::unique_ptr<served::Server> server) : server_(std::move(server)) {}
  PyServer(const PyServer&) = delete;
  PyServer& operator=(const PyServer&) = delete;
  ~PyServer() { close(); }

  const served::Server& get() const {
    if (server_ == nullptr || process_ != getpid()) throw Error(Kind::closed, "the server is closed");
    return *server_;
  }
  void close() {
    if (process_ != getpid()) {
      (void)server_.release();
      return;
    }
    auto server = std::exchange(server_, nullptr);
    const nb::gil_scoped_release release;
    server.reset();
  }

 private:
  std::unique_ptr<served::Server> server_;
  const int process_ = getpid();
};

void construct_server(PyServer* self, int listener, const std::string& subsystem_nqn, const nb::bytes& id,
                      const nb::bytes& head,
                      const std::vector<std::tuple<std::uint64_t, std::uint64_t, int>>& extents,
                      std::uint64_t size_bytes, const nb::bytes& host_key, const nb::bytes& controller_key) {
  served::Offer offer;
  offer.keys = {key_of(host_key), key_of(controller_key)};
  if (subsystem_nqn.empty() || subsystem_nqn.size() > kMostNqnBytes)
    throw nb::value_error("an NQN has 1 to 223 bytes");
  if (id.size() != offer.id.size()) throw nb::value_error("id must be 16 bytes");
  offer.subsystem_nqn = subsystem_nqn;
  std::memcpy(offer.id.data(), id.data(), offer.id.size());
  offer.blocks = size_bytes / served::kBlockBytes;
  const auto* first = static_cast<const std::byte*>(head.data());
  std::vector<served::Extent> held;
  held.reserve(extents.size());
  for (const auto& [offset, extent_bytes, descriptor] : extents) held.push_back({offset, extent_bytes, descriptor});
  auto files = std::make_unique<const served::Files>(std::vector<std::byte>(first, first + head.size()),
                                                     std::move(held), size_bytes);
  new (self) PyServer(std::make_unique<served::Server>(listener, std::move(offer), std::move(files)));
}

nb::dict totals_of(PyServer& self) {
  const auto totals = self.get().totals();
  nb::dict result;
  result["connections"] = totals.connections;
  result["turned_away"] = totals.turned_away;
  result["reads"] = totals.reads;
  result["read_bytes"] = totals.read_bytes;
  result["refused_writes"] = totals.refused_writes;
  result["violations"] = totals.violations;
  result["denied"] = totals.denied;
  return result;
}

nb::list subsystems_of(const std::string& host, int port, const std::string& host_nqn, const nb::bytes& host_id,
                       const nb::bytes& host_key, const nb::bytes& controller_key, double timeout_s) {
  const auto options = options_of(host, port, "nqn.2014-08.org.nvmexpress.discovery", host_nqn, host_id, host_key,
                                  controller_key);
  if (!(timeout_s > 0)) throw nb::value_error("time limits must be above zero");
  std::vector<LogEntry> entries;
  {
    const nb::gil_scoped_release release;
    entries = nvme::discover(options, timeout_s);
  }
  const auto named = [](std::uint8_t number, std::initializer_list<const char*> names) {
    return number < names.size() ? std::string(names.begin()[number]) : std::to_string(number);
  };
  nb::list result;
  for (const auto& entry : entries) {
    nb::dict one;
    one["transport"] = named(entry.transport, {"0", "rdma", "fc", "tcp"});
    one["address_family"] = named(entry.address_family, {"0", "ipv4", "ipv6", "ib", "fc"});
    one["address"] = entry.address;
    one["service"] = entry.service;
    one["subsystem_nqn"] = entry.subsystem_nqn;
    one["subsystem_type"] = named(entry.subsystem_type, {"0", "referral", "nvme", "discovery"});
    one["port_id"] = entry.port;
    one["controller_id"] = entry.controller;
    // The kind of secure channel of TCP; where it is optional, this host uses none.
    one["secure_channel"] = entry.secure_channel == 1 ? (entry.security == 0 ? "required" : "tls") : "";
    result.append(one);
  }
  return result;
}

}  // namespace

void bind_nvme(nb::module_& module) {
  error_type = add_exception(module, "NvmeError", "kind (as in nvme/error.hpp), text.");
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const auto arguments = nb::make_tuple(kind_text(error.kind), error.text);
      PyErr_SetObject(error_type, arguments.ptr());
    }
  });
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<PyController>(module, "NvmeController", "An association with an NVMe controller over TCP.")
      .def("__init__", &construct, nb::arg("host"), nb::arg("port"), nb::arg("subsystem_nqn"), nb::kw_only(),
           nb::arg("host_nqn"), nb::arg("host_id"), nb::arg("host_key") = nb::bytes("", 0),
           nb::arg("controller_key") = nb::bytes("", 0), nb::arg("queues") = 1, nb::arg("depth") = 128,
           nb::arg("header_digest") = false, nb::arg("data_digest") = false, nb::arg("io_uring") = true,
           nb::arg("connect_timeout_s") = 10.0, nb::arg("command_timeout_s") = 30.0,
           nb::arg("keep_alive_s") = 15.0, nb::arg("reconnect_timeout_s") = 60.0)
      .def(
          "namespaces", [](PyController& self) { return self.get().namespaces(); }, released)
      .def("identify", &facts_of)
      .def("open_namespace", &open_namespace, nb::arg("nsid"), nb::arg("encrypted_from") = -1)
      .def(
          "flush", [](PyController& self, std::uint32_t nsid) { nvme::flush(self.get(), nsid); }, nb::arg("nsid"),
          released)
      .def("counters", &counters)
      .def("last_loss", [](PyController& self) { return self.past().last_loss(); })
      .def("late_s", [](PyController& self) { return self.get().late_s(); })
      .def("close", &PyController::close, nb::arg("timeout_s") = 5.0);
  nb::class_<PyServer>(module, "NvmeServer", "A target of NVMe/TCP that gives files to read, as one namespace.")
      .def("__init__", &construct_server, nb::arg("listener"), nb::kw_only(), nb::arg("subsystem_nqn"),
           nb::arg("id"), nb::arg("head"), nb::arg("extents"), nb::arg("size_bytes"),
           nb::arg("host_key") = nb::bytes("", 0), nb::arg("controller_key") = nb::bytes("", 0))
      .def("totals", &totals_of)
      .def(
          "changed", [](PyServer& self) { return self.get().files().changed(); }, released)
      .def("close", &PyServer::close);
  module.def("nvme_discover", &subsystems_of, nb::arg("host"), nb::arg("port"), nb::kw_only(), nb::arg("host_nqn"),
             nb::arg("host_id"), nb::arg("host_key") = nb::bytes("", 0),
             nb::arg("controller_key") = nb::bytes("", 0), nb::arg("timeout_s"));
  module.def(
      "nvme_error_of",
      [](Handle handle) {
        const auto found = find_namespace(handle);
        return found ? found->error()
                     : std::string("the namespace is closed, or was opened by another process");
      },
      nb::arg("handle"));
}

}  // namespace penstock
