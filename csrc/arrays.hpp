// Arrays between Python and C++.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock {

// A column of a numpy array, as it lies.
template <class T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline std::string_view view(const Column<std::uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

template <class T>
std::span<const T> span(const Column<T>& column) {
  return {column.data(), column.size()};
}

template <class T>
using Numpy = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

// An array of memory that `owner` keeps.
template <class T, class Owner>
Numpy<T> array(T* data, std::size_t size, Owner owner) {
  auto* kept = new Owner(std::move(owner));
  const nanobind::capsule capsule(kept, [](void* pointer) noexcept { delete static_cast<Owner*>(pointer); });
  return Numpy<T>(data, {size}, capsule);
}

template <class T>
Numpy<T> array(std::vector<T> values) {
  auto* data = values.data();
  const auto size = values.size();
  return array(data, size, std::move(values));
}

}  // namespace penstock
