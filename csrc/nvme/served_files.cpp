#include "nvme/served_files.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace penstock::nvme::served {

Files::Files(std::vector<std::byte> head, std::vector<Extent> extents, std::uint64_t size_bytes)
    : head_(std::move(head)), extents_(std::move(extents)), size_bytes_(size_bytes) {
  if (size_bytes_ == 0 || size_bytes_ % kBlockBytes != 0)
    throw std::invalid_argument("a namespace has a whole number of blocks");
  std::uint64_t end = head_.size();
  for (const auto& extent : extents_) {
    if (extent.offset < end || extent.offset > size_bytes_ || extent.size_bytes > size_bytes_ - extent.offset)
      throw std::invalid_argument("extents lie in order, within the namespace");
    end = extent.offset + extent.size_bytes;
    Version version;
    if (!version_of(extent.descriptor, version)) throw std::system_error(errno, std::generic_category(), "fstat");
    versions_.push_back(version);
  }
  if (end > size_bytes_) throw std::invalid_argument("the head is larger than the namespace");
}

bool Files::version_of(int descriptor, Version& version) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) return false;
  version = {status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
  return true;
}

bool Files::read_extent(std::size_t number, std::uint64_t begin, std::span<std::byte> into) const {
  const auto& extent = extents_[number];
  while (!into.empty()) {
    const auto count = pread(extent.descriptor, into.data(), into.size(), static_cast<off_t>(begin));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    into = into.subspan(static_cast<std::size_t>(count));
    begin += static_cast<std::uint64_t>(count);
  }
  // After the bytes: what was written before they were read shows here.
  Version now;
  return version_of(extent.descriptor, now) && now == versions_[number];
}

bool Files::read(std::uint64_t offset, std::span<std::byte> into) const {
  if (offset < head_.size()) {
    const auto size = std::min<std::uint64_t>(into.size(), head_.size() - offset);
    std::memcpy(into.data(), head_.data() + offset, size);
    into = into.subspan(size);
    offset += size;
  }
  auto extent = std::upper_bound(extents_.begin(), extents_.end(), offset, [](std::uint64_t at, const Extent& each) {
    return at < each.offset + each.size_bytes;
  });
  while (!into.empty()) {
    const bool within = extent != extents_.end() && extent->offset <= offset;
    const auto end = extent == extents_.end() ? size_bytes_ : within ? extent->offset + extent->size_bytes : extent->offset;
    const auto part = into.first(static_cast<std::size_t>(std::min<std::uint64_t>(into.size(), end - offset)));
    if (!within) {
      std::fill(part.begin(), part.end(), std::byte{0});
    } else if (const auto number = extent - extents_.begin();
               !read_extent(static_cast<std::size_t>(number), offset - extent->offset, part)) {
      failed_ = static_cast<int>(number);
      return false;
    }
    into = into.subspan(part.size());
    offset += part.size();
    if (within) ++extent;
  }
  return true;
}

int Files::changed() const {
  if (const int failed = failed_; failed >= 0) return failed;
  for (std::size_t number = 0; number < extents_.size(); ++number) {
    Version now;
    if (!version_of(extents_[number].descriptor, now) || now != versions_[number]) return static_cast<int>(number);
  }
  return -1;
}

}  // namespace penstock::nvme::served
