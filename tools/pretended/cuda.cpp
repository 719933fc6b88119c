// A pretended CUDA device for a CPU build of torch: no kernels and no memory. Streams are numbers, and
// events are done at once. The registry finds the hooks by the name of their class, CUDAHooks.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <map>
#include <mutex>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

extern "C" {
std::atomic<int64_t> pretended_waits{0}; // of the host for an event, a stream or the device
}

namespace {
thread_local DeviceIndex current = 0;
thread_local c10::StreamId stream = 0; // 0 is the default one
std::atomic<c10::StreamId> next_stream{1};

DeviceIndex exchange(DeviceIndex device) {
  std::swap(current, device);
  return device;
}

// Memory of the host that is not pinned, but known as such.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto held = c10::GetCPUAllocator()->allocate(bytes);
    char* start = static_cast<char*>(held.get());
    std::lock_guard<std::mutex> guard(lock);
    ends[start] = start + bytes;
    auto release = [](void* start) {
      {
        std::lock_guard<std::mutex> guard(lock);
        ends.erase(static_cast<char*>(start));
      }
      c10::GetCPUAllocator()->raw_deallocate(start);
    };
    return {start, held.release_context(), release, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static bool holds(const void* place) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = ends.upper_bound(static_cast<const char*>(place));
    return after != ends.begin() && place < std::prev(after)->second;
  }

 private:
  static std::mutex lock;
  static std::map<const char*, const char*> ends; // by start
};
std::mutex Pinned::lock;
std::map<const char*, const char*> Pinned::ends;
Pinned pinned;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Device exchangeDevice(Device device) const override {
    return Device(DeviceType::CUDA, exchange(device.index()));
  }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, stream); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, device, next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream next) const override {
    Stream before(Stream::UNSAFE, next.device(), stream);
    stream = next.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = &pinned; // anything but null
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.; }
  void synchronizeStream(const Stream&) const override { pretended_waits++; }
  void synchronizeEvent(void*) const override { pretended_waits++; }
  void synchronizeDevice(const DeviceIndex) const override { pretended_waits++; }
};
} // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchange(device); }
  void deviceSynchronize(DeviceIndex) const override { pretended_waits++; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* place) const override { return Pinned::holds(place); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at
