#include "costs.h"

#include "twins.h"

#include <ATen/Context.h>

#include <set>
#include <unordered_map>

namespace emu {
namespace {

using torch::jit::Stack;

template <typename See>
void each(const c10::IValue& value, See see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) see(t);
  } else if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorVector())
      if (t.has_value()) see(*t);
  }
}

// The argument that is the left matrix of a product; the right one is the next.
int left_matrix(const std::string& name) {
  static const std::unordered_map<std::string, int> products = {
      {"aten::mm", 0},        {"aten::bmm", 0},    {"aten::mv", 0},     {"aten::dot", 0},
      {"aten::addmm", 1},     {"aten::addmm_", 1}, {"aten::baddbmm", 1}, {"aten::baddbmm_", 1},
      {"aten::addbmm", 1},    {"aten::addmv", 1},  {"aten::_addmm_activation", 1}};
  auto found = products.find(name);
  return found == products.end() ? -1 : found->second;
}

// Of a convolution of `input` to `output`, there or back. weight: [to or from, the other in its group, ...].
double operations_of(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& output, bool transposed) {
  const at::Tensor& each = transposed ? input : output;
  return 2.0 * each.numel() * weight.numel() / std::max<int64_t>(weight.size(0), 1);
}

Precision precision_of(const at::Tensor& tensor, bool convolves) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
    case at::kBFloat16:
      return Half;
    case at::kDouble:
    case at::kComplexDouble:
      return Double;
    default:  // as torch's settings for CUDA say
      return (convolves ? at::globalContext().allowTF32CuDNN(at::Float32Op::CONV)
                        : at::globalContext().float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST)
                 ? Tensor32
                 : Single;
  }
}

void add_operations(Cost& cost, const std::string& name, const Stack& arguments, const Stack& made) {
  if (int left = left_matrix(name); left >= 0) {
    const at::Tensor &a = arguments[left].toTensor(), &b = arguments[left + 1].toTensor();
    cost.operations = 2.0 * a.numel() * (b.dim() > 1 ? b.size(-1) : 1);
    cost.precision = precision_of(a, false);
  } else if (name == "aten::convolution" && !made.empty()) {
    const at::Tensor& input = arguments[0].toTensor();
    const at::Tensor& output = (made[0].isTensor() ? made[0] : arguments.back()).toTensor();  // given, or made
    cost.operations = operations_of(input, arguments[1].toTensor(), output, arguments[6].toBool());
    cost.precision = precision_of(input, true);
  } else if (name == "aten::convolution_backward") {
    const at::Tensor& input = arguments[1].toTensor();
    auto wanted = arguments[10].toBoolList();  // of input, weight and bias
    cost.operations = (int(wanted[0]) + int(wanted[1])) *
                      operations_of(input, arguments[2].toTensor(), arguments[0].toTensor(), arguments[7].toBool());
    cost.precision = precision_of(input, true);
  }
}

// Operators that read rows of their first tensor, as many as they make.
bool reads_a_part(const std::string& name) {
  static const std::set<std::string> parts = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"};
  return parts.count(name) > 0;
}

bool only_writes(const std::string& name) {
  static const std::set<std::string> fills = {"aten::zero_",   "aten::fill_",    "aten::uniform_",    "aten::normal_",
                                              "aten::random_", "aten::bernoulli_", "aten::exponential_"};
  return fills.count(name) > 0;
}

}  // namespace

double bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  return std::min(double(tensor.numel()) * tensor.itemsize(), double(tensor.storage().nbytes()));  // if expanded
}

Cost cost_of(const Operator& what, const Stack& arguments, const Stack& made) {
  if (!has_machine()) return {};
  Cost cost{Cost::Kernel};
  const std::string name = what.name.substr(0, what.name.find('.'));
  const bool fills = only_writes(name);
  double made_bytes = 0;
  for (const auto& value : made) each(value, [&](const at::Tensor& t) { made_bytes += bytes_of(t); });
  std::set<const void*> seen;
  for (size_t i = 0; i < arguments.size(); i++)
    each(arguments[i], [&](const at::Tensor& t) {
      if (!is_ours(t)) return;
      double whole_bytes = bytes_of(t);
      if (!what.is_out[i] && !(fills && what.is_written[i]) && seen.insert(t.unsafeGetTensorImpl()).second)
        cost.bytes += i == 0 && reads_a_part(name) ? std::min(whole_bytes, made_bytes) : whole_bytes;
      if (what.is_written[i]) cost.bytes += whole_bytes;
    });
  cost.bytes += made_bytes;
  add_operations(cost, name, arguments, made);
  return cost;
}

}  // namespace emu
