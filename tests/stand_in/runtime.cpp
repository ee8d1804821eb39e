// The functions of the CUDA runtime that `transport/staging/ipc.py` calls. A block is a file without a name, which
// other processes open by the number of its owner and of its descriptor. It vanishes with its owner.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace
{

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ALREADY_MAPPED = 208, INVALID_HANDLE = 400, REFUSED = 801 };

struct Block {
    int descriptor; // -1: of another process
    size_t nbytes;
};

struct Handle {
    pid_t owner;
    int descriptor;
    size_t nbytes;
    char rest[64 - sizeof(pid_t) - sizeof(int) - sizeof(size_t)];
};

std::map<void *, Block> blocks;
std::mutex lock;

int map(int descriptor, size_t nbytes, Block block, void **address)
{
    void *found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (found == MAP_FAILED)
        return OUT_OF_MEMORY;
    std::lock_guard<std::mutex> locked(lock);
    blocks[ *address = found] = block;
    return SUCCESS;
}

int unmap(void *address, bool is_own)
{
    std::lock_guard<std::mutex> locked(lock);
    auto found = blocks.find(address);
    if (found == blocks.end() || (found->second.descriptor >= 0) != is_own)
        return INVALID_VALUE;
    munmap(address, found->second.nbytes);
    if (is_own)
        close(found->second.descriptor);
    blocks.erase(found);
    return SUCCESS;
}

} // namespace

extern "C" {

int cudaMalloc(void **address, size_t nbytes)
{
    int descriptor = memfd_create("stand-in", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, nbytes)) {
        close(descriptor);
        return OUT_OF_MEMORY;
    }
    return map(descriptor, nbytes, {descriptor, nbytes}, address);
}

int cudaFree(void *address)
{
    return unmap(address, true);
}

int cudaIpcGetMemHandle(Handle *handle, void *address)
{
    const char *refused = std::getenv("STAND_IN_REFUSES");
    if (refused && std::strstr(refused, "ipc"))
        return REFUSED;
    std::lock_guard<std::mutex> locked(lock);
    auto found = blocks.find(address);
    if (found == blocks.end() || found->second.descriptor < 0)
        return INVALID_VALUE;
    *handle = {getpid(), found->second.descriptor, found->second.nbytes, {}};
    return SUCCESS;
}

int cudaIpcOpenMemHandle(void **address, Handle handle, unsigned)
{
    if (handle.owner == getpid())
        return INVALID_HANDLE; // CUDA opens no block in its own process
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.owner, handle.descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    struct stat found;
    if (descriptor < 0 || fstat(descriptor, &found) || found.st_size != static_cast<off_t>(handle.nbytes)) {
        close(descriptor);
        return INVALID_HANDLE;
    }
    int code = map(descriptor, handle.nbytes, {-1, handle.nbytes}, address);
    close(descriptor);
    return code;
}

int cudaIpcCloseMemHandle(void *address)
{
    return unmap(address, false);
}

int cudaThreadExchangeStreamCaptureMode(int *)
{
    return SUCCESS;
}

int cudaGetLastError()
{
    return SUCCESS;
}

const char *cudaGetErrorString(int code)
{
    switch (code) {
    case SUCCESS:
        return "no error";
    case OUT_OF_MEMORY:
        return "out of memory";
    case ALREADY_MAPPED:
        return "already mapped";
    case INVALID_HANDLE:
        return "invalid resource handle";
    case REFUSED:
        return "operation not supported";
    default:
        return "invalid argument";
    }
}
}
