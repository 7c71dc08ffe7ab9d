// A device guard of CUDA's that does nothing, for a torch that is built without CUDA: views and copies of fake tensors
// ask for one. torch makes it itself where it is built with CUDA and finds no device.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
