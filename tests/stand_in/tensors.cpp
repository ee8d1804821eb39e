// Tensors that torch says are on "cuda:0", in a build of torch without CUDA. Their elements are in memory of the host,
// where the kernels of the CPU work on them at once. So streams and events have names here, and never wait.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <malloc.h>
#include <map>
#include <mutex>
#include <unordered_map>

namespace
{

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using std::optional;

constexpr auto CUDA = c10::DeviceType::CUDA;

DeviceIndex device_count()
{
    const char *given = std::getenv("STAND_IN_DEVICES");
    return given ? std::atoi(given) : 1;
}

// -- devices and streams ------------------------------------------------------------------------------------

thread_local DeviceIndex current = 0;
thread_local std::unordered_map<DeviceIndex, c10::StreamId> current_streams;
std::atomic<c10::StreamId> next_stream{1}; // 0 is the default stream

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override
    {
        return CUDA;
    }
    Device getDevice() const override
    {
        return {CUDA, current};
    }
    void setDevice(Device device) const override
    {
        current = device.has_index() ? device.index() : current;
    }
    void uncheckedSetDevice(Device device) const noexcept override
    {
        setDevice(device);
    }
    Device exchangeDevice(Device device) const override
    {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    DeviceIndex deviceCount() const noexcept override
    {
        return device_count();
    }
    Stream getStream(Device device) const override
    {
        auto place = device.has_index() ? device : getDevice();
        return Stream(Stream::UNSAFE, place, current_streams[place.index()]);
    }
    Stream getDefaultStream(Device device) const override
    {
        return Stream(Stream::DEFAULT, device);
    }
    Stream getNewStream(Device device, int) const override
    {
        return Stream(Stream::UNSAFE, device.has_index() ? device : getDevice(), next_stream++);
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override
    {
        return getNewStream(device, 0);
    }
    Stream exchangeStream(Stream stream) const override
    {
        auto before = getStream(stream.device());
        current_streams[stream.device_index()] = stream.id();
        return before;
    }
    void record(void **event, const Stream &, const DeviceIndex, const c10::EventFlag) const override
    {
        static char an_event;
        *event = &an_event;
    }
    void block(void *, const Stream &) const override {}
    bool queryEvent(void *) const override
    {
        return true;
    }
    void destroyEvent(void *, const DeviceIndex) const noexcept override {}
    bool queryStream(const Stream &) const override
    {
        return true;
    }
    void synchronizeStream(const Stream &) const override {}
    void synchronizeEvent(void *) const override {}
    void synchronizeDevice(const DeviceIndex) const override {}
    void recordDataPtrOnStream(const c10::DataPtr &, const Stream &) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// -- memory -------------------------------------------------------------------------------------------------

using Tell = void (*)(int64_t address, int is_allocated);
std::atomic<Tell> tell{nullptr}; // torch's sanitizer of streams

constexpr size_t MEMORY = size_t{1} << 32; // bytes of a device, for each process
std::atomic<size_t> used{0};

void release(void *memory)
{
    used -= malloc_usable_size(memory);
    if (auto told = tell.load())
        told(reinterpret_cast<int64_t>(memory), 0);
    std::free(memory);
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override
    {
        Device device(CUDA, current);
        void *memory = nullptr;
        if (nbytes == 0)
            return {nullptr, nullptr, &std::free, device};
        const bool has_room = nbytes <= MEMORY && used <= MEMORY - nbytes;
        TORCH_CHECK_WITH(OutOfMemoryError, has_room && !posix_memalign(&memory, 64, nbytes), "CUDA out of memory");
        used += malloc_usable_size(memory);
        if (auto told = tell.load())
            told(reinterpret_cast<int64_t>(memory), 1);
        return {memory, memory, &release, device};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return &release;
    }
    void copy_data(void *to, const void *from, size_t nbytes) const override
    {
        default_copy_data(to, from, nbytes);
    }
};
Allocator allocator;

// Memory of the host that torch takes for pinned.
std::map<const char *, size_t> pinned; // bytes, by address
std::mutex pinned_lock;

void release_pinned(void *memory)
{
    std::lock_guard<std::mutex> locked(pinned_lock);
    pinned.erase(static_cast<const char *>(memory));
    std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override
    {
        void *memory = nullptr;
        TORCH_CHECK_WITH(OutOfMemoryError, !posix_memalign(&memory, 64, std::max<size_t>(nbytes, 1)), "out of memory");
        std::lock_guard<std::mutex> locked(pinned_lock);
        pinned[static_cast<const char *>(memory)] = nbytes;
        return {memory, memory, &release_pinned, Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return &release_pinned;
    }
    void copy_data(void *to, const void *from, size_t nbytes) const override
    {
        default_copy_data(to, from, nbytes);
    }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return true;
    }
    bool hasCUDA() const override
    {
        return true;
    }
    bool hasPrimaryContext(DeviceIndex) const override
    {
        return true;
    }
    DeviceIndex deviceCount() const override
    {
        return device_count();
    }
    int getNumGPUs() const override
    {
        return device_count();
    }
    DeviceIndex current_device() const override
    {
        return current;
    }
    DeviceIndex getCurrentDevice() const override
    {
        return current;
    }
    void setCurrentDevice(DeviceIndex device) const override
    {
        current = device;
    }
    DeviceIndex exchangeDevice(DeviceIndex device) const override
    {
        return std::exchange(current, device);
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override
    {
        return exchangeDevice(device);
    }
    Device getDeviceFromPtr(void *) const override
    {
        return {CUDA, current};
    }
    c10::Allocator *getPinnedMemoryAllocator() const override
    {
        return &pinned_allocator;
    }
    bool isPinnedPtr(const void *memory) const override
    {
        std::lock_guard<std::mutex> locked(pinned_lock);
        auto after = pinned.upper_bound(static_cast<const char *>(memory));
        return after != pinned.begin() && memory < std::prev(after)->first + std::prev(after)->second;
    }
    c10::Allocator *getCUDADeviceAllocator() const override
    {
        return &allocator;
    }
    void deviceSynchronize(DeviceIndex) const override {}
    const at::Generator &getDefaultGenerator(DeviceIndex) const override
    {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Generator getNewGenerator(DeviceIndex) const override
    {
        return at::detail::createCPUGenerator();
    }
};

// DDP times its steps.
struct StepTimer final : c10d::Timer {
    explicit StepTimer(Device) {}
    optional<int64_t> measureDifference(Event start, Event end) override
    {
        auto first = getTimestamp(start), last = getTimestamp(end);
        return first && last ? optional<int64_t>(*last - *first) : std::nullopt;
    }
};

// -- operations ---------------------------------------------------------------------------------------------

// The same elements, as a tensor of the host, which lives no longer than `x`.
Tensor host_of(const Tensor &x)
{
    if (!x.defined() || !x.is_cuda())
        return x;
    at::DataPtr memory(x.storage().mutable_data(), Device(c10::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), x.storage().nbytes(), std::move(memory),
                         c10::GetCPUAllocator(), true);
    auto host = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         x.dtype());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    host._set_conj(x.is_conj());
    host._set_neg(x.is_neg());
    return host;
}

Device place_of(optional<Device> device)
{
    return device && device->has_index() ? *device : Device(CUDA, current);
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

Tensor empty(at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
             optional<bool>, optional<at::MemoryFormat> format)
{
    c10::DeviceGuard guard(place_of(device));
    return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<Device> device, optional<bool>)
{
    c10::DeviceGuard guard(place_of(device));
    return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

Tensor &copy_(Tensor &self, const Tensor &source, bool)
{
    host_of(self).copy_(host_of(source));
    return self;
}

at::Scalar item(const Tensor &self)
{
    return host_of(self).item();
}

const Tensor &resize_(const Tensor &self, at::IntArrayRef size, optional<at::MemoryFormat> format)
{
    const auto nbytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
    auto *storage = self.storage().unsafeGetStorageImpl();
    if (storage->nbytes() < nbytes) {
        auto larger = allocator.allocate(nbytes);
        std::copy_n(static_cast<const char *>(storage->data()), storage->nbytes(), static_cast<char *>(larger.get()));
        storage->set_data_ptr_noswap(std::move(larger));
        storage->set_nbytes(nbytes);
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (format && *format != at::MemoryFormat::Contiguous)
        self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    return self;
}

Tensor &set_storage(Tensor &self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride)
{
    auto *tensor = self.unsafeGetTensorImpl();
    tensor->set_storage_keep_dtype(std::move(storage));
    tensor->set_storage_offset(offset);
    if (stride.size() == size.size())
        tensor->set_sizes_and_strides(size, stride, offset);
    else
        tensor->set_sizes_contiguous(size);
    return self;
}

Tensor &set_tensor(Tensor &self, const Tensor &source)
{
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor as_strided(const Tensor &self, at::IntArrayRef size, at::IntArrayRef stride, optional<int64_t> offset)
{
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor &self, at::IntArrayRef size)
{
    return at::native::view(self, size);
}

Tensor reshape_alias(const Tensor &self, at::IntArrayRef size, at::IntArrayRef stride)
{
    return at::native::_reshape_alias(self, size, stride);
}

Tensor unfold(const Tensor &self, int64_t dimension, int64_t size, int64_t step)
{
    return at::native::unfold(self, dimension, size, step);
}

// An operation that the kernel of the host carries out in the same memory.
class OnHost
{
  public:
    c10::IValue argument(const c10::IValue &value)
    {
        if (value.isTensor())
            return host(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor &x : value.toTensorVector())
                list.push_back(host(x));
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<optional<Tensor>> list;
            for (const auto &x : value.toOptionalTensorVector())
                list.push_back(x ? optional<Tensor>(host(*x)) : std::nullopt);
            return list;
        }
        if (value.isDevice() && value.toDevice().type() == CUDA) {
            device_ = value.toDevice();
            return Device(c10::kCPU);
        }
        return value;
    }

    c10::IValue result(const c10::IValue &value) const
    {
        if (value.isTensor())
            return ours(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor &x : value.toTensorVector())
                list.push_back(ours(x));
            return list;
        }
        return value;
    }

  private:
    Tensor host(const Tensor &x)
    {
        if (!x.defined() || !x.is_cuda())
            return x;
        device_ = x.device();
        ours_.push_back(x);
        hosts_.push_back(host_of(x));
        return hosts_.back();
    }

    Tensor ours(const Tensor &x) const
    {
        if (!x.defined() || !x.is_cpu())
            return x;
        for (size_t each = 0; each < hosts_.size(); ++each)
            if (hosts_[each].is_same(x))
                return given(ours_[each], x);
        for (size_t each = 0; each < hosts_.size(); ++each)
            if (x.numel() && x.storage().data() == hosts_[each].storage().data())
                return view_of(ours_[each], x);
        auto moved = empty_strided(x.sizes(), x.strides(), x.scalar_type(), std::nullopt, device_, std::nullopt);
        host_of(moved).copy_(x);
        return moved;
    }

    static Tensor given(const Tensor &ours, const Tensor &x)
    {
        if (ours.sizes() != x.sizes()) { // the kernel has resized it
            ours.resize_(x.sizes());
            host_of(ours).copy_(x);
        }
        return ours;
    }

    // As `x`, which may be of another dtype.
    static Tensor view_of(const Tensor &ours, const Tensor &x)
    {
        auto storage = ours.storage();
        auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), ours.key_set(),
                                                             x.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
        return view;
    }

    Device device_{CUDA, current};
    std::vector<Tensor> ours_, hosts_;
};

void on_host(const c10::OperatorHandle &operation, torch::jit::Stack *stack)
{
    OnHost here;
    for (size_t each = stack->size() - operation.schema().arguments().size(); each < stack->size(); ++each)
        (*stack)[each] = here.argument((*stack)[each]);
    operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (size_t each = stack->size() - operation.schema().returns().size(); each < stack->size(); ++each)
        (*stack)[each] = here.result((*stack)[each]);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library)
{
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("copy_", copy_);
    library.impl("_local_scalar_dense", item);
    library.impl("resize_", resize_);
    library.impl("set_.source_Storage_storage_offset", set_storage);
    library.impl("set_.source_Tensor", set_tensor);
    library.impl("as_strided", as_strided);
    library.impl("view", view);
    library.impl("_reshape_alias", reshape_alias);
    library.impl("unfold", unfold);
}

TORCH_LIBRARY_IMPL(_, CUDA, library)
{
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// -- for cuda.py --------------------------------------------------------------------------------------------

int64_t current_device()
{
    return current;
}

void set_device(int64_t device)
{
    current = device;
}

int64_t current_stream(int64_t device)
{
    return current_streams[device];
}

void set_stream(int64_t device, int64_t stream)
{
    current_streams[device] = stream;
}

int64_t new_stream()
{
    return next_stream++;
}

// As `x.untyped_storage().resize_(nbytes)`, which a build of torch without CUDA lacks.
void resize_storage(const Tensor &x, int64_t nbytes)
{
    c10::DeviceGuard guard(x.device());
    auto *storage = x.storage().unsafeGetStorageImpl();
    auto resized = allocator.allocate(nbytes);
    std::copy_n(static_cast<const char *>(storage->data()), std::min<size_t>(storage->nbytes(), nbytes),
                static_cast<char *>(resized.get()));
    storage->set_data_ptr_noswap(std::move(resized));
    storage->set_nbytes(nbytes);
}

TORCH_LIBRARY(stand_in, library)
{
    library.def("resize_storage(Tensor x, int nbytes) -> ()", resize_storage);
    library.def("current_device() -> int", current_device);
    library.def("set_device(int device) -> ()", set_device);
    library.def("current_stream(int device) -> int", current_stream);
    library.def("set_stream(int device, int stream) -> ()", set_stream);
    library.def("new_stream() -> int", new_stream);
}

const bool is_registered = (c10::SetAllocator(CUDA, &allocator), true);

} // namespace

extern "C" void stand_in_trace(Tell told)
{
    tell = told;
}

namespace c10d
{
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, StepTimer)
}

namespace at
{
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}
