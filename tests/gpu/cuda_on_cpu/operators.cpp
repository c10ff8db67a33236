// What stands in for PyTorch's CUDA kernels, without a GPU?
//
// Each operator becomes a host function of the current stream: when its turn comes, the CPU's operator computes on the
// very memory that PyTorch's CUDA allocator gave. Allocation, copies, streams, events and graphs stay PyTorch's own.
#include <ATen/ATen.h>
#include <ATen/ops/copy_native.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/library.h>

#include <cstdio>
#include <set>
#include <string>

extern "C" void cuda_on_cpu_assert();

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

struct View {
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

View view_of(const at::Tensor& t) { return {t.data_ptr(), t.sizes().vec(), t.strides().vec(), t.scalar_type()}; }
at::Tensor host_of(const View& v) {
  return at::from_blob(v.data, v.sizes, v.strides, at::TensorOptions().dtype(v.dtype));
}

template <class F>
IValue mapped(const IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return IValue(out);
  }
  if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensor()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const IValue& one : value.toListRef())
      out.push_back(one.isTensor() ? std::optional<at::Tensor>(f(one.toTensor())) : std::nullopt);
    return IValue(out);
  }
  return value;
}

IValue on(const IValue& value, c10::Device device) { return value.isDevice() ? IValue(device) : value; }

std::vector<at::Tensor> tensors(const IValue& value) {
  std::vector<at::Tensor> out;
  mapped(value, [&](const at::Tensor& t) { out.push_back(t); return t; });
  return out;
}

struct Call {
  OperatorHandle op;
  std::vector<IValue> arguments;  // tensors as CPU views
  std::vector<std::vector<View>> outputs;  // where results go; empty for what was written in place
};

void compute(void* data) {
  auto* call = static_cast<Call*>(data);
  c10::InferenceMode guard;
  try {
    Stack stack(call->arguments.begin(), call->arguments.end());
    const auto& name = call->op.schema().name();
    if ((name == "aten::_softmax" || name == "aten::_log_softmax") && stack[2].toBool()) {
      stack[0] = stack[0].toTensor().to(at::kFloat);  // half_to_float is CUDA's alone
      stack[2] = false;
    }
    call->op.callBoxed(stack);
    for (size_t i = 0; i < call->outputs.size() && i < stack.size(); ++i) {
      auto results = tensors(stack[i]);
      for (size_t j = 0; j < call->outputs[i].size() && j < results.size(); ++j)
        host_of(call->outputs[i][j]).copy_(results[j]);
    }
  } catch (const std::exception& error) {
    std::string said = error.what();
    std::fprintf(
        stderr, "cuda-on-cpu: %s: %s\n", call->op.schema().name().c_str(), said.substr(0, said.find('\n')).c_str());
    cuda_on_cpu_assert();
  }
}

void check(cudaError_t code) { C10_CUDA_CHECK(code); }

void boxed(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  std::vector<IValue> given(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());

  auto* call = new Call{op, {}, {}};
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) for (auto& t : tensors(given[i])) written.push_back(t);
    call->arguments.push_back(on(mapped(given[i], [](const at::Tensor& t) {
      return t.is_cuda() ? host_of(view_of(t)) : t.clone();
    }), c10::kCPU));
  }
  std::vector<IValue> results;
  if (!written.empty() || schema.returns().empty()) {
    for (size_t i = 0; i < schema.returns().size(); ++i) results.push_back(IValue(written.at(i)));
  } else {
    Stack meta;
    for (auto& one : given) meta.push_back(on(mapped(one, [](const at::Tensor& t) {
      // a scalar from the host stays what it is
      return t.is_cuda() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta)) : t;
    }), c10::kMeta));
    try {
      op.callBoxed(meta);
    } catch (const std::exception&) {  // no meta kernel: the CPU's, with whatever numbers, tells the shapes
      meta.clear();
      for (auto& one : given) meta.push_back(on(mapped(one, [](const at::Tensor& t) {
        return t.is_cuda() ? at::zeros(t.sizes(), t.options().device(c10::kCPU)) : t;
      }), c10::kCPU));
      op.callBoxed(meta);
    }
    for (auto& one : meta) {
      call->outputs.emplace_back();
      results.push_back(mapped(one, [&](const at::Tensor& t) {
        auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::Device(c10::kCUDA, 0)));
        call->outputs.back().push_back(view_of(made));
        return made;
      }));
    }
  }
  check(cudaLaunchHostFunc(at::cuda::getCurrentCUDAStream(), compute, call));
  for (auto& one : results) stack->push_back(std::move(one));
}

bool plain(const at::Tensor& t) { return t.is_non_overlapping_and_dense(); }

// PyTorch's own copies where those are copies of memory; else a host function, or a detour.
at::Tensor& copied(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.is_cuda() && from.is_cuda()) {
    auto source = from.sizes() == self.sizes() ? from : from.expand(self.sizes());
    auto* call = new Call{c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""), {}, {}};
    call->arguments = {host_of(view_of(self)), host_of(view_of(source)), false};
    check(cudaLaunchHostFunc(at::cuda::getCurrentCUDAStream(), compute, call));
    return self;
  }
  bool memory = self.scalar_type() == from.scalar_type() && self.sizes() == from.sizes() &&
                self.strides() == from.strides() && plain(self) && plain(from);
  if (memory) return const_cast<at::Tensor&>(at::native::copy_(self, from, non_blocking));
  if (self.is_cuda()) {
    auto there = at::empty_like(from, from.options().device(self.device()), at::MemoryFormat::Contiguous);
    auto source = from.contiguous();
    at::native::copy_(there, source, non_blocking && from.is_contiguous());
    return copied(self, there, true);
  }
  auto here = at::empty_strided(self.sizes(), self.strides(), self.options().device(from.device()));
  if (plain(self)) {
    copied(here, from, true);
    at::native::copy_(self, here, non_blocking);
  } else {
    auto all = at::empty(self.sizes(), from.options().dtype(self.scalar_type()));
    copied(all, from, true);
    self.copy_(all.cpu());
  }
  return self;
}

int64_t math_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& one : schema.returns())
    if (one.alias_info() && !one.alias_info()->isWrite()) return true;
  return false;
}

const std::set<std::string> KEPT = {
    "aten::empty", "aten::empty_strided", "aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::set_",
    "aten::resize_",
    "aten::record_stream", "aten::is_pinned", "aten::pin_memory", "aten::_pin_memory", "aten::_local_scalar_dense",
    "aten::item", "aten::_fused_sdp_choice", "aten::_has_compatible_shallow_copy_type", "aten::empty_like",
    "aten::new_empty", "aten::new_empty_strided", "aten::clone", "aten::contiguous", "aten::to", "aten::_lazy_clone",
    "aten::equal", "aten::is_set_to", "aten::_assert_tensor_metadata", "aten::_resize_output_", "aten::lift",
    "aten::lift_fresh"};

std::vector<std::unique_ptr<torch::Library>> g_libraries;

struct AtLoad {
  AtLoad() {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto library = std::make_unique<torch::Library>(
        torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    size_t count = 0;
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0 || KEPT.count(name.name)) continue;
      auto handle = dispatcher.findOp(name);
      if (!handle || !handle->hasSchema() || is_view(handle->schema())) continue;
      if (!handle->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
      if (handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
      std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
      ++count;
    }
    library->impl("copy_", torch::CppFunction::makeFromUnboxedFunction(&copied));
    library->impl("_fused_sdp_choice", torch::CppFunction::makeFromUnboxedFunction(&math_attention));
    torch::jit::setTensorExprFuserEnabled(false);  // it compiles kernels
    // Fused attention is asked for below the dispatcher.
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
    g_libraries.push_back(std::move(library));
    std::fprintf(stderr, "cuda-on-cpu: %zu operators are computed on the CPU\n", count);
  }
} at_load;

}  // namespace
