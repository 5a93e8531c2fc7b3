#include "generator.h"

#include "allocator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>

namespace emu {
namespace {

struct State {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t drawn = 0;
};

struct Generator final : c10::GeneratorImpl {
  Generator() : c10::GeneratorImpl(c10::Device(kType, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { state = {seed, 0}; }
  void set_offset(uint64_t offset) override { state.drawn = offset; }
  uint64_t get_offset() const override { return state.drawn; }
  uint64_t current_seed() const override { return state.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state.seed;
  }
  void set_state(const c10::TensorImpl& given) override {
    TORCH_CHECK(given.numel() == sizeof state && given.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "emu: a generator's state has ", sizeof state, " bytes");
    memcpy(&state, given.data(), sizeof state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor made = at::detail::empty_cpu({sizeof state}, at::kByte);
    memcpy(made.mutable_data_ptr(), &state, sizeof state);
    return made.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator;
    made->state = state;
    return made;
  }

  State state;
};

}  // namespace

at::Generator& default_generator() {
  static auto* instance = new at::Generator(new_generator());
  return *instance;
}

at::Generator new_generator() { return at::Generator(c10::make_intrusive<Generator>()); }

uint64_t draw_seed(const at::Generator& generator) {
  auto* impl = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(impl->mutex_);
  // SplitMix64 of the seed and a counter.
  uint64_t value = impl->state.seed + 0x9E3779B97F4A7C15ull * ++impl->state.drawn;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

}  // namespace emu
