// What goes wrong between here and a target.
#pragma once

#include <cstdio>
#include <exception>
#include <string>
#include <utility>

namespace penstock::nvme {

enum class Kind {
  refused,
  unreachable,
  timeout,
  not_found,
  not_supported,
  denied,
  protocol,
  name_space,
  closed,
  lost,
  unauthenticated
};

inline const char* kind_text(Kind kind) {
  constexpr const char* kTexts[] = {"refused", "unreachable", "timeout",   "not_found", "not_supported",
                                    "denied",  "protocol",    "namespace", "closed",    "lost",
                                    "unauthenticated"};
  return kTexts[static_cast<int>(kind)];
}

inline std::string seconds_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 1000 ? "%.3g" : "%.0f", value);
  return text;
}

class Error : public std::exception {
 public:
  Error(Kind kind, std::string text) : kind(kind), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
  const Kind kind;
  const std::string text;
};

}  // namespace penstock::nvme
