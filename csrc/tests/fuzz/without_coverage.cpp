// For compilers without libFuzzer: every input of a corpus, and then random changes of them, always the same.
//
//   fuzz_TARGET CORPUS.txt [INPUTS]
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "input.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr std::size_t kMostBytes = 4096;

class Changes {
 public:
  Bytes operator()(const std::vector<Bytes>& corpus) {
    auto bytes = corpus[below(corpus.size())];
    for (auto left = 1 + below(8); left > 0; --left) change(bytes, corpus);
    bytes.resize(std::min(bytes.size(), kMostBytes));
    return bytes;
  }

 private:
  std::size_t below(std::size_t most) { return engine_() % most; }

  void change(Bytes& bytes, const std::vector<Bytes>& corpus) {
    const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size() + 1));
    const auto end = at + static_cast<std::ptrdiff_t>(below(static_cast<std::size_t>(bytes.end() - at) + 1));
    const auto& other = corpus[below(corpus.size())];
    switch (below(6)) {
      case 0:
        if (at != bytes.end()) *at ^= static_cast<std::uint8_t>(1U << below(8));
        break;
      case 1:
        if (at != bytes.end()) *at = kTelling[below(std::size(kTelling))];
        break;
      case 2:
        bytes.erase(at, end);
        break;
      case 3: {
        const Bytes again(at, end);
        bytes.insert(at, again.begin(), again.end());
        break;
      }
      case 4:
        bytes.insert(at, other.begin(), other.end());
        break;
      default:
        bytes.insert(at, 1 + below(8), static_cast<std::uint8_t>(engine_()));
    }
  }

  static constexpr std::uint8_t kTelling[] = {0, 1, 2, 0x7f, 0x80, 0xfe, 0xff};
  std::mt19937 engine_{1};
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s CORPUS.txt [INPUTS]\n", arguments[0]);
    return 2;
  }
  std::vector<Bytes> corpus{{}};
  std::ifstream lines(arguments[1]);
  for (std::string line; std::getline(lines, line);) {
    auto& bytes = corpus.emplace_back();
    for (std::size_t at = 0; at + 1 < line.size(); at += 2)
      bytes.push_back(static_cast<std::uint8_t>(std::stoul(line.substr(at, 2), nullptr, 16)));
  }
  REQUIRE(corpus.size() > 1);
  const auto inputs = count > 2 ? std::stoull(arguments[2]) : 100000;
  Changes changes;
  for (std::size_t number = 0; number < corpus.size() + inputs; ++number) {
    const auto bytes = number < corpus.size() ? corpus[number] : changes(corpus);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%zu inputs of the corpus, %zu changed ones\n", corpus.size(), static_cast<std::size_t>(inputs));
  return 0;
}
