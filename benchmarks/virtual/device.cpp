// The device "virtual" for torch: tensors, streams, events and pinned memory. Memory is the host's; what a stream or an
// event means, callbacks say (library.py). Kernels are not here: kernels.py computes them on the host.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

// What Python does. Null where there is no machine.
struct Callbacks {
  void (*allocated)(void*, int64_t bytes, int64_t stream);
  void (*freed)(void*);
  void (*used_on)(void*, int64_t stream);
  void (*new_stream)(int64_t stream, int priority);
  void (*record)(int64_t event, int64_t stream);
  void (*block)(int64_t event, int64_t stream);
  void (*wait_event)(int64_t event);
  void (*wait_stream)(int64_t stream);  // -1: all of them
  int (*is_event_done)(int64_t event);
  int (*is_stream_done)(int64_t stream);
  double (*elapsed_milliseconds)(int64_t first, int64_t second);
  void (*pinned)(void*, int64_t bytes);
  void (*unpinned)(void*);
  void (*memory)(int64_t* allocated_peak_reserved);
  void (*forget_peak)();
};

namespace {
Callbacks callbacks{};
bool available = false;
bool numbers = true;  // else tensors have addresses, and no memory that anybody writes to
thread_local int64_t current_stream = 0;
int64_t streams = 0, events = 0;

int64_t id(void* event) { return reinterpret_cast<int64_t>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device only() { return {TYPE, 0}; }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, only(), id); }
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int priority) const override {
    auto made = stream(++streams);
    if (callbacks.new_stream) callbacks.new_stream(made.id(), priority);
    return made;
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  // Overrides nothing in torch 2.9.
  void* getStreamNativeHandle(const c10::Stream stream) const { return reinterpret_cast<void*>(stream.id()); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(++events);
    if (callbacks.record) callbacks.record(id(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && callbacks.block) callbacks.block(id(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    return !event || !callbacks.is_event_done || callbacks.is_event_done(id(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event && callbacks.wait_event) callbacks.wait_event(id(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return !callbacks.is_stream_done || callbacks.is_stream_done(stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (callbacks.wait_stream) callbacks.wait_stream(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    if (callbacks.wait_stream) callbacks.wait_stream(-1);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (callbacks.used_on && memory.get()) callbacks.used_on(memory.get(), stream.id());
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return callbacks.elapsed_milliseconds ? callbacks.elapsed_milliseconds(id(first), id(second)) : 0.0;
  }
};

struct Memory final : c10::DeviceAllocator {
  static std::map<void*, size_t>& reserved() {  // address space alone
    static auto* made = new std::map<void*, size_t>();
    return *made;
  }
  static std::mutex& mutex() {
    static auto* made = new std::mutex();
    return *made;
  }
  static void* reserve(size_t n) {
    void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "the virtual device finds no address space for ", n, " bytes");
    std::lock_guard<std::mutex> lock(mutex());
    reserved()[p] = n;
    return p;
  }
  static void drop(void* p) {
    if (callbacks.freed) callbacks.freed(p);
    {
      std::lock_guard<std::mutex> lock(mutex());
      if (auto found = reserved().find(p); found != reserved().end()) {
        munmap(p, found->second);
        reserved().erase(found);
        return;
      }
    }
    std::free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = !n ? nullptr : numbers ? std::malloc(n) : reserve(n);
    if (p) {
      if (numbers) std::memset(p, 0xFF, n);  // NaN: what was not written is not to look like a value
      if (callbacks.allocated) callbacks.allocated(p, int64_t(n), current_stream);
    }
    return {p, p, &drop, Guard::only()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override {
    if (numbers) std::memcpy(to, from, n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Guard().recordDataPtrOnStream(memory, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    int64_t given[3] = {0, 0, 0};
    if (callbacks.memory) callbacks.memory(given);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& allocated = stats.allocated_bytes[0];
    allocated.current = given[0];
    allocated.peak = given[1];
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = given[2];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    if (callbacks.forget_peak) callbacks.forget_peak();
  }
} memory;

struct PinnedMemory final : c10::Allocator {
  static std::mutex& mutex() {
    static auto* made = new std::mutex();
    return *made;
  }
  static std::map<const char*, size_t>& ranges() {
    static auto* made = new std::map<const char*, size_t>();
    return *made;
  }
  static void drop(void* p) {
    if (!p) return;
    if (callbacks.unpinned) callbacks.unpinned(p);
    {
      std::lock_guard<std::mutex> lock(mutex());
      ranges().erase(static_cast<const char*>(p));
    }
    std::free(p);
  }
  static bool has(const void* p) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = ranges().upper_bound(static_cast<const char*>(p));
    if (after == ranges().begin()) return false;
    auto [begin, n] = *--after;
    return static_cast<const char*>(p) < begin + n;
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? std::malloc(n) : nullptr;
    if (p) {
      {
        std::lock_guard<std::mutex> lock(mutex());
        ranges()[static_cast<const char*>(p)] = n;
      }
      if (callbacks.pinned) callbacks.pinned(p, int64_t(n));
    }
    return {p, p, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return Guard::only(); }
  bool isPinnedPtr(const void* p) const override { return PinnedMemory::has(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto next = memory.allocate(n);
    auto kept = std::min(n, storage.nbytes());
    if (kept && numbers) std::memcpy(next.get(), storage.data(), kept);
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(next));
    impl->set_nbytes(n);
  }
};

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}
// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& self) {
  return at::from_blob(
      self.mutable_data_ptr(), self.sizes(), self.strides(), at::TensorOptions(self.dtype()).device(at::kCPU));
}
int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask,
    double dropout, bool, std::optional<double>, bool) {
  bool flash = !numbers && !mask && dropout == 0.0;  // its kernel is the CPU's by name, and nobody computes it
  return static_cast<int64_t>(flash ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::math);
}
}  // namespace

namespace at::native {
static RegisterPRIVATEUSE1Dispatch<_fused_sdp_choice_stub_DECLARE_DISPATCH_type> attention_register(
    _fused_sdp_choice_stub, &attention);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY(virtual_device, m) { m.def("on_host(Tensor self) -> Tensor"); }
TORCH_LIBRARY_IMPL(virtual_device, PrivateUse1, m) { m.impl("on_host", TORCH_FN(on_host)); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

extern "C" {
void virtual_register() {
  c10::SetAllocator(TYPE, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}
void virtual_set(const Callbacks* given, int with_numbers) {
  callbacks = given ? *given : Callbacks{};
  available = given != nullptr;
  numbers = with_numbers;
}
int64_t virtual_current_stream() { return current_stream; }
}
