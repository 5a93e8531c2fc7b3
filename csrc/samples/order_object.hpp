// The order that Python holds, until a feed takes it over.
#pragma once

#include <memory>
#include <stdexcept>
#include <utility>

#include "samples/order.hpp"

namespace penstock::samples {

class SampleOrder {
 public:
  explicit SampleOrder(std::unique_ptr<Order> order) : order_(std::move(order)) {}

  // Both throw std::invalid_argument after `hand_over`.
  Order& get() const {
    if (!order_) throw std::invalid_argument("this order was handed to a feed, which alone takes from it now");
    return *order_;
  }
  std::unique_ptr<Order> hand_over() {
    get();
    return std::move(order_);
  }

 private:
  std::unique_ptr<Order> order_;
};

}  // namespace penstock::samples
