// What PyTorch asks of a device before it runs an operator there: one device, one stream, and nothing to do.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using namespace c10;

const Device kDevice(DeviceType::CUDA, 0);
const Stream kStream(Stream::DEFAULT, kDevice);

struct Simulated final : public impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return kStream; }
  Stream getDefaultStream(Device) const override { return kStream; }
  Stream getNewStream(Device, int) const override { return kStream; }
  Stream exchangeStream(Stream) const noexcept override { return kStream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Simulated);
}

namespace at {

// What autograd asks of the accelerator.
struct CUDAHooks final : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
