// A device of type xpu for a torch that has none, to trace for: tensors have sizes and zeros, and no kernels.
// Built and loaded by fake_xpu.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>

// One device with one stream, on which nothing ever waits.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XPU> {
  static c10::Device only() { return {c10::DeviceType::XPU, 0}; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, only()); }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(XPU, Guard)

// What torch.accelerator asks whether there is one.
namespace at {
struct XPUHooks final : XPUHooksInterface {
  template <class... Args> explicit XPUHooks(Args&&...) {}
  void init() const override {}
  bool hasXPU() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_XPU_HOOKS(XPUHooks);
}  // namespace at

namespace {
struct Host final : c10::Allocator {
  static void drop(void* p) { std::free(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? std::calloc(n, 1) : nullptr;
    return {p, p, &drop, c10::Device(c10::DeviceType::XPU, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} host;
constexpr c10::DispatchKeySet keys(c10::DispatchKey::XPU);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &host, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &host, keys, c10::dtype_or_default(dtype));
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
// Inductor computes constants when it folds them: in memory of the host.
at::Tensor on_host(const at::Tensor& self) {
  return at::from_blob(self.data_ptr(), self.sizes(), self.strides(), self.options().device(at::kCPU));
}
at::Tensor& zero_(at::Tensor& self) {
  on_host(self).zero_();
  return self;
}
at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  on_host(self).fill_(value);
  return self;
}
at::Scalar item(const at::Tensor& self) { return on_host(self).item(); }
}  // namespace

TORCH_LIBRARY_IMPL(aten, XPU, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(view));
  m.impl("zero_", TORCH_FN(zero_));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("fill_.Scalar", TORCH_FN(fill_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}
