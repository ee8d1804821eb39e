/* Reductions of arrays in the private memory of other processes, which the kernel copies (process_vm_readv).
 *
 * This process only reads the memory of others. So a mistake in the protocol, or a rank that is stopped and goes on
 * later, can spoil its own array, and never the memory of a rank that has withdrawn from the call. Which rank reads what,
 * and when, is decided in private_meetings.c, and in Python in asyncoll/algorithms/dense/peers.py.
 */
#define _GNU_SOURCE /* process_vm_readv */
#include "native.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

enum { STRIP = 1 << 13 }; /* bytes; a multiple of each element */

int copy_from_peer(Place from, char *into, size_t bytes)
{
    if (from.pid < 1 || from.pid > INT32_MAX)
        return ESRCH;
    while (bytes) {
        const struct iovec here = {into, bytes}, there = {(void *)(intptr_t)from.address, bytes};
        ssize_t copied = process_vm_readv((pid_t)from.pid, &here, 1, &there, 1, 0);
        if (copied <= 0)
            return copied < 0 ? errno : EFAULT;
        into += copied;
        from.address += copied;
        bytes -= (size_t)copied;
    }
    return 0;
}

static PyObject *os_error(int number)
{
    errno = number;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* `read_memory(pid, address, into)` */
PyObject *read_memory(PyObject *module, PyObject *arguments)
{
    (void)module;
    long long pid, address;
    PyObject *object;
    Py_buffer into;
    if (!PyArg_ParseTuple(arguments, "LLO:read_memory", &pid, &address, &object) ||
        PyObject_GetBuffer(object, &into, PyBUF_WRITABLE) < 0)
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    int error = copy_from_peer((Place){pid, address}, into.buf, (size_t)into.len);
    PyEval_RestoreThread(state);
    PyBuffer_Release(&into);
    return error ? os_error(error) : Py_NewRef(Py_None);
}

/* Reduce the first `bytes` bytes of all operands into those of `own`, the operand of this rank. A kernel has its result
 * in the first operand; a strip of that is copied while it is in the L1 cache. Afterwards operands point to the ends. */
static void reduce_strips(const PeerJob *job, char *own, size_t bytes)
{
    while (bytes) {
        size_t length = (size_t)least(STRIP, (int64_t)bytes);
        job->kernel(job->operands[0], job->operands, job->size, length / job->element, job->divisor);
        if (job->rank != 0)
            memcpy(own, job->operands[0], length);
        for (int rank = 0; rank < job->size; rank++)
            job->operands[rank] = (char *)job->operands[rank] + length;
        own += length;
        bytes -= length;
    }
}

/* Block by block: a block of each array stays in the cache until it is reduced. */
int reduce_peers(const PeerJob *job)
{
    for (size_t at = 0; at < job->bytes; at += job->block) {
        size_t length = (size_t)least((int64_t)job->block, (int64_t)(job->bytes - at));
        char *room = job->scratch;
        for (int rank = 0; rank < job->size; rank++) {
            job->operands[rank] = rank == job->rank ? job->own + at : room;
            if (rank == job->rank)
                continue;
            Place from = {job->places[rank].pid, job->places[rank].address + (int64_t)at};
            int error = copy_from_peer(from, room, length);
            if (error)
                return error;
            pass_point(PEER_READ);
            room += job->block;
        }
        reduce_strips(job, job->own + at, length);
        pass_point(PEERS_REDUCED);
    }
    return 0;
}

/* The pids and addresses of all ranks. Returns 0, or -1 with an exception. */
static int get_places(PeerJob *job, PyObject *pids, PyObject *addresses, int64_t first)
{
    job->places = PyMem_Calloc((size_t)job->size, sizeof(Place));
    job->operands = PyMem_Calloc((size_t)job->size, sizeof(void *));
    if (!job->places || !job->operands) {
        PyErr_NoMemory();
        return -1;
    }
    for (int rank = 0; rank < job->size; rank++) {
        long long pid = PyLong_AsLongLong(PyTuple_GetItem(pids, rank));
        long long address = PyLong_AsLongLong(PyTuple_GetItem(addresses, rank));
        if (PyErr_Occurred())
            return -1;
        if (pid < 1 || pid > INT32_MAX) {
            os_error(ESRCH);
            return -1;
        }
        job->places[rank] = (Place){pid, address + first};
    }
    return 0;
}

static bool is_consistent(PeerJob *job, const Py_buffer *own, const Py_buffer *scratch, int64_t first, int64_t last)
{
    job->block = job->size > 1 ? (size_t)scratch->len / (size_t)(job->size - 1) / PAGE * PAGE : PAGE;
    return job->kernel && job->divisor >= 1 && job->size >= 1 && job->rank >= 0 && job->rank < job->size &&
           first >= 0 && first <= last && last <= own->len && first % (int64_t)job->element == 0 &&
           last % (int64_t)job->element == 0 && job->block;
}

/* `reduce_from_peers(kernel, pids, addresses, rank, own, first, last, scratch, divisor)` */
PyObject *reduce_from_peers(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *pids, *addresses, *own_object, *scratch_object, *result = NULL;
    long long first, last, divisor;
    int kernel, rank, error = 0;
    if (!PyArg_ParseTuple(arguments, "iO!O!iOLLOL:reduce_from_peers", &kernel, &PyTuple_Type, &pids, &PyTuple_Type,
                          &addresses, &rank, &own_object, &first, &last, &scratch_object, &divisor))
        return NULL;
    Py_buffer own, scratch;
    if (PyObject_GetBuffer(own_object, &own, PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(scratch_object, &scratch, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&own);
        return NULL;
    }
    PeerJob job = {
        .kernel = kernel_at(kernel), .element = kernel_element_size(kernel), .divisor = divisor, .rank = rank};
    job.size = (int)PyTuple_Size(pids);
    job.scratch = scratch.buf;
    if (PyTuple_Size(addresses) != job.size || !is_consistent(&job, &own, &scratch, first, last)) {
        PyErr_SetString(PyExc_ValueError, "this is no reduction of peers");
    } else if (get_places(&job, pids, addresses, first) == 0) {
        job.own = (char *)own.buf + first;
        job.bytes = (size_t)(last - first);
        PyThreadState *state = PyEval_SaveThread();
        error = reduce_peers(&job);
        PyEval_RestoreThread(state);
        result = error ? os_error(error) : Py_NewRef(Py_None);
    }
    PyMem_Free(job.places);
    PyMem_Free(job.operands);
    PyBuffer_Release(&own);
    PyBuffer_Release(&scratch);
    return result;
}
