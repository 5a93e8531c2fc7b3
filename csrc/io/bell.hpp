// An eventfd, to wake a thread that polls it.
#pragma once

namespace penstock {

class Bell {
 public:
  Bell();  // throws std::system_error
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  ~Bell();
  int number() const { return number_; }
  void ring() const;
  void clear() const;  // throws std::system_error where the program has closed its descriptor

 private:
  const int number_;
};

}  // namespace penstock
