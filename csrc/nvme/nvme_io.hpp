// Reads and writes of namespaces, beside those of files: the Io for remote drives.
//
// Its thread drives the sockets of all its targets together. Each target has queues and a limit of its own, and
// all completions come to one place: a slow target holds up nothing but its own operations. Reads take any
// offset and size, and go straight to the caller's memory; writes are whole blocks.
#pragma once

#include <memory>

#include "io/io.hpp"

namespace penstock::nvme {

// `depth`: operations on files at once. By io_uring, unless `ring` is false, or it is refused.
std::unique_ptr<Io> make_nvme_io(unsigned depth, bool ring = true);

}  // namespace penstock::nvme
