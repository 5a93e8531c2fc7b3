#include "schema.h"

#include <memory>
#include <mutex>
#include <unordered_map>

namespace emu {
namespace {

Operator described(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  Operator made;
  made.name = c10::toString(op.operator_name());
  made.has_meta = op.hasKernelForDispatchKey(c10::DispatchKey::Meta);
  made.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  made.needs_values = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  made.takes_indices = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto* alias = arguments[i].alias_info();
    made.is_written.push_back(alias && alias->isWrite());
    made.is_out.push_back(arguments[i].is_out());
    std::string type = arguments[i].type()->str();
    if (type == "Generator?") made.generator = static_cast<int>(i);
    if (type == "Tensor?[]") made.takes_indices = true;
  }
  // Indexing says that its shapes depend on data, which they do by masks only.
  if (made.takes_indices) made.needs_values = false;
  made.is_view = false;
  made.makes_nothing = true;
  for (const auto& result : schema.returns()) {
    auto* alias = result.alias_info();
    int argument = -1;
    if (alias && alias->isWrite()) {
      for (size_t i = 0; i < arguments.size(); i++)
        if (auto* other = arguments[i].alias_info(); other && other->beforeSets() == alias->beforeSets())
          argument = static_cast<int>(i);
    } else if (alias) {
      made.is_view = true;
    }
    made.returned.push_back(argument);
    if (argument >= 0) continue;
    made.makes_nothing = false;
    std::string type = result.type()->str();
    if (type != "Tensor" && type != "Tensor[]") made.needs_values = true;
  }
  return made;
}

}  // namespace

const Operator& describe(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const void*, std::unique_ptr<Operator>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = (*known)[&op.schema()];
  if (!found) found = std::make_unique<Operator>(described(op));
  return *found;
}

}  // namespace emu
