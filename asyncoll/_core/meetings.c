/* Short meetings of all ranks of a communicator: one rendezvous at which each rank shows a short array.
 *
 * The counterpart of the coroutines of asyncoll/algorithms/dense/shared_call.py, on the cells that
 * asyncoll/algorithms/dense/meeting_cells.py declares. A meeting has three steps, each a method here: a rank arrives, the last
 * one publishes the result of all, and the others complete with it.
 *
 * A rank shows a copy of its array, in its memory for short arrays. From `shown_min` bytes on it writes the address of
 * what it shows into its part of the record: a registered array is then shown where it is. All ranks that are there then
 * claim chunks of the arrays, reduce them, and write the result to all that is shown. An array that is too long to be
 * copied is reduced here only if all ranks show registered ones, or all show private ones (private_meetings.c).
 */
#include "meetings.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A chunk is a fourth of the arrays, so that two ranks share them evenly even if one begins later; but at least so long
 * that its claim takes much less time than its reduction. */
enum { CHUNKS = 4, CHUNK_MIN = 1 << 15 };
enum { COPIED_UNDER_LOCK = 4096 }; /* bytes: to copy them takes less time than to acquire the lock again */

static Record record_of(const Meetings *self, int64_t number)
{
    /* A short meeting is the first rendezvous of its call, and has no second one. */
    int64_t turn = record_index(number, 0, self->calls);
    return (Record){self->block->cells + turn * self->stride, tag_of(number, 0), turn};
}

static bool is_free(const Meetings *self, Record record)
{
    return is_left(record.cells[TAG], record.tag, record.cells[LEFT], self->size);
}

/* Note whether the record of call `number` is free. The caller holds the lock. `is_clear` says that no earlier call is
 * under way at this rank: one may come back to the record. */
static void look_ahead(Meetings *self, int64_t number, bool is_clear)
{
    Record record = record_of(self, number);
    if (is_clear && is_free(self, record))
        self->known_free = record.tag;
}

/* The memory of `rank` for short arrays at record `turn`; NULL with an exception if there is none. The address is in
 * the cells since `rank` first arrived with a short array. */
static char *short_array(Meetings *self, int64_t rank, int64_t turn)
{
    /* The view of a rank is made once: it is the same memory in all meetings, and `view` is written in Python. */
    Py_buffer *area = &self->areas[rank];
    int64_t bytes = 2 * self->calls * self->short_bytes;
    if (!area->buf) {
        PyObject *memory = PyObject_CallFunction(
            self->view, "LL", (long long)self->block->cells[self->addresses + rank], (long long)bytes);
        int failed = memory ? PyObject_GetBuffer(memory, area, PyBUF_WRITABLE) : -1;
        Py_XDECREF(memory);
        if (failed)
            return NULL;
        if (area->len != bytes) {
            PyBuffer_Release(area);
            PyErr_Format(PyExc_ValueError, "rank %lld has no memory for short arrays", (long long)rank);
            return NULL;
        }
    }
    return (char *)area->buf + turn * self->short_bytes;
}

/* Enter the meeting. The first rank opens it: it clears the cells. The caller holds the lock. Returns false if another
 * rank has made another call with the same number. */
static bool open_or_join(const Meetings *self, Record record, int64_t fingerprint)
{
    /* The rank that comes first clears the cells. The last one to leave cannot: LEFT tells that the record is free. */
    if (record.cells[TAG] == record.tag)
        return record.cells[FINGERPRINT] == fingerprint;
    memset(record.cells, 0, RECORD_HEAD * sizeof(int64_t));
    for (int64_t rank = 0; rank < self->size; rank++) /* an earlier rendezvous may have counted something there */
        part_of(record, rank)[PART_BUSY] = 0;
    record.cells[TAG] = record.tag;
    record.cells[FINGERPRINT] = fingerprint;
    record.cells[FIRST] = self->rank;
    return true;
}

/* `array`, or no bytes for None, as a contiguous buffer. */
static int get_bytes(PyObject *array, Py_buffer *bytes, int flags)
{
    if (array == Py_None) {
        memset(bytes, 0, sizeof *bytes);
        return 0;
    }
    return PyObject_GetBuffer(array, bytes, flags);
}

static void free_bytes(Py_buffer *bytes)
{
    if (bytes->obj)
        PyBuffer_Release(bytes);
}

/* Whether the array is short enough, or shown where it is. Otherwise an exception is set. */
static bool check_length(const Meetings *self, const Py_buffer *bytes, bool is_in_place)
{
    if (bytes->len <= self->short_bytes || is_in_place)
        return true;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not short", bytes->len);
    return false;
}

static int64_t short_address(const Meetings *self, int64_t turn)
{
    return self->block->cells[self->addresses + self->rank] + turn * self->short_bytes;
}

/* Show `len` bytes: at `address`, which is the caller's own memory, and private if it is negative, or in the memory for
 * short arrays if it is 0. The caller holds the lock. */
static void show(Meetings *self, Record record, int64_t address, Py_ssize_t len)
{
    int64_t *part = part_of(record, self->rank);
    part[PART_ADDRESS] = address ? -address : short_address(self, record.turn);
    part[PART_BYTES] = len;
    part[PART_BUSY] = part[PART_BITS] = 0;
    record.cells[DIRECT] += address > 0;
    record.cells[PRIVATE] += address < 0;
}

/* The bytes that a rank reduces at a time, of arrays of `total` bytes. */
static int64_t chunk_of(const Meetings *self, int64_t total)
{
    /* Rounded up, so that no chunk ends within an element. */
    int64_t part = (total / CHUNKS + ALIGNED - 1) / ALIGNED * ALIGNED;
    return least(part > CHUNK_MIN ? part : CHUNK_MIN, self->chunk_max);
}

/* How many sleepers the last rank to arrive wakes to reduce with it: further ones would find no chunk or no core. */
static int64_t helpers_for(const Meetings *self, int64_t total)
{
    int64_t chunk = chunk_of(self, total);
    return least((total + chunk - 1) / chunk, self->cores) - 1;
}

/* Whether all ranks have arrived, with arrays that they reduce together here. The caller holds the lock. */
static bool is_shared(const Meetings *self, Record record, int64_t total)
{
    return total >= self->shown_min && record.cells[ARRIVED] == self->size &&
           (total <= self->short_bytes || record.cells[DIRECT] == self->size);
}

/* Count this rank. The caller holds the lock. Returns LAST or WAITING, or -1 if the ranks have made different calls. */
static int count_arrival(Meetings *self, Record record, int64_t number, int64_t fingerprint, int64_t address,
                         Py_ssize_t len)
{
    if (!open_or_join(self, record, fingerprint))
        return -1;
    pass_point(MEETING_OPENED);
    /* For reports only: a rank that waits too long asks which call the others have come to. */
    self->block->cells[self->newest + self->rank] = number;
    if (len && len >= self->shown_min)
        show(self, record, address, len);
    int64_t arrived = ++record.cells[ARRIVED];
    pass_point(MEETING_ARRIVED);
    if (arrived < self->size)
        return WAITING;
    if (len > self->short_bytes) /* there may be sleepers on a loop: `Rendezvous.all_arrived` */
        control_block_wake(self->block, is_shared(self, record, len) ? helpers_for(self, len) : INT64_MAX);
    if (record.cells[WITHDRAWN])
        return WAITING; /* for the failure of the communicator: a rank has taken its memory back */
    if (len > self->short_bytes && !is_shared(self, record, len) && record.cells[PRIVATE] != self->size)
        return WAITING; /* for another rendezvous, with slots */
    return LAST;
}

/* Wake at most `count` of the threads that sleep in a futex at the low half of `cell`. */
static void wake_some(const int64_t *cell, int64_t count)
{
    if (count > 0) /* the kernel would take 0 for 1 */
        syscall(SYS_futex, (const uint32_t *)cell, FUTEX_WAKE, (int)least(count, INT_MAX), NULL, NULL, 0);
}

int meetings_is_free(Meetings *self, int64_t number)
{
    Record record = record_of(self, number);
    if (self->known_free == record.tag)
        return 1;
    if (control_block_lock(self->block) < 0)
        return -1;
    bool free = is_free(self, record);
    control_block_unlock(self->block);
    return free;
}

/* Arrive at a meeting whose record is free. */
static int arrive_with(Meetings *self, int64_t number, int64_t fingerprint, int64_t address, const Py_buffer *bytes)
{
    Record record = record_of(self, number);
    if (bytes->len && !address) {
        char *mine = short_array(self, self->rank, record.turn);
        if (!mine)
            return -1;
        /* Before the lock, because the copy takes longer than the critical section. No rank reads the memory until
         * this one is counted: the record is free. */
        memcpy(mine, bytes->buf, bytes->len);
        pass_point(MEETING_COPIED);
    }
    if (control_block_lock(self->block) < 0)
        return -1;
    int state = count_arrival(self, record, number, fingerprint, address, bytes->len);
    int64_t first = record.cells[FIRST];
    bool is_private = address < 0, is_together = is_private || is_shared(self, record, bytes->len);
    bool is_sleeper_of_use = state == LAST && is_together && record.cells[SLEEPERS] > 0;
    control_block_unlock(self->block);
    self->private_calls[record.turn].tag = 0; /* of an earlier call, which Python has ended */
    /* After the release: the GIL guards what this rank alone knows of the meeting. */
    if (is_private && state >= 0)
        private_begin(self, record, bytes);
    if (state == LAST)
        pass_point(MEETING_CLAIMED);
    /* A thread that is about to sleep there misses this, and helps no rank; it wakes when the result is there. */
    if (is_sleeper_of_use)
        wake_some(&record.cells[DONE], is_private ? INT_MAX : helpers_for(self, bytes->len));
    if (state < 0) {
        PyObject *error = PyObject_CallFunction(self->differs, "L", (long long)first);
        if (error)
            PyErr_SetObject(self->differs, error);
        Py_XDECREF(error);
    }
    return state;
}

static int publish_result(Meetings *self, int64_t number, int64_t done, bool is_clear)
{
    Record record = record_of(self, number);
    if (control_block_lock(self->block) < 0)
        return -1;
    /* The last rank leaves with the same acquisition: it has the result, and reads nothing of the others any more. */
    record.cells[LEFT]++;
    record.cells[DONE] = done;
    part_of(record, self->rank)[PART_BUSY] = 0;
    pass_point(MEETING_PUBLISHED);
    bool is_futex_wanted = record.cells[SLEEPERS] > 0;
    control_block_wake(self->block, INT64_MAX);
    look_ahead(self, number + 1, is_clear);
    control_block_unlock(self->block);
    if (!is_futex_wanted)
        return 0;
    pass_point(MEETING_NOT_WOKEN);
    control_block_wake_futex(&record.cells[DONE]);
    return 0;
}

/* Reduce the short arrays of all ranks into that of rank 0, in their order, and copy the result into `bytes`. */
static int reduce_copies(Meetings *self, Record record, int kernel, int64_t divisor, const Py_buffer *bytes)
{
    for (int64_t rank = 0; rank < self->size; rank++) /* may call Python, and other threads may run meanwhile */
        if (!short_array(self, rank, record.turn))
            return -1;
    /* With the GIL one array of addresses serves all calls. Without it another thread may reduce at the same time,
     * so the call has its own. */
    bool is_long = bytes->len > LONG_BYTES / self->size;
    void **arrays = is_long ? PyMem_Calloc((size_t)self->size, sizeof(void *)) : self->arrays;
    if (!arrays) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t rank = 0; rank < self->size; rank++)
        arrays[rank] = short_array(self, rank, record.turn);
    PyThreadState *state = is_long ? PyEval_SaveThread() : NULL;
    size_t elements = (size_t)bytes->len / kernel_element_size(kernel);
    /* Into the memory of rank 0: all others look for the result there, so its place needs no cell. */
    kernel_at(kernel)(arrays[0], arrays, (int)self->size, elements, divisor);
    memcpy(bytes->buf, arrays[0], bytes->len);
    pass_point(MEETING_REDUCED);
    if (state) {
        PyEval_RestoreThread(state);
        PyMem_Free(arrays);
    }
    return 0;
}

/* What the ranks show at a meeting, held during the reduction. */
typedef struct {
    Py_buffer *views;
    void **starts; /* by rank */
    void **arrays; /* by rank: of a chunk */
} Shown;

static void release(const Meetings *self, Shown *shown)
{
    for (int64_t rank = 0; shown->views && rank < self->size; rank++)
        free_bytes(&shown->views[rank]);
    PyMem_Free(shown->views);
    PyMem_Free(shown->starts);
    PyMem_Free(shown->arrays);
}

/* The memory of `len` bytes at `address`, which `rank` shows, as a borrowed reference; NULL with an exception. */
static PyObject *memory_at(Meetings *self, int64_t rank, int64_t address, Py_ssize_t len)
{
    Known *known = &self->known[rank];
    if (known->memory && known->address == address && known->bytes == len)
        return known->memory;
    PyObject *memory = PyObject_CallFunction(self->view, "LL", (long long)address, (long long)len), *before;
    if (!memory)
        return NULL;
    before = known->memory; /* the call may have run another thread that has set it */
    *known = (Known){address, len, memory};
    Py_XDECREF(before);
    return memory;
}

/* Hold what `rank` shows, which must be `len` bytes. Returns 0, or -1 with an exception. */
static int hold(Meetings *self, Record record, Shown *shown, int64_t rank, Py_ssize_t len)
{
    const int64_t *part = part_of(record, rank);
    if (part[PART_ADDRESS] == INT64_MIN || part[PART_ADDRESS] == 0) {
        PyErr_Format(PyExc_ValueError, "rank %lld shows no memory", (long long)rank);
        return -1;
    }
    int64_t address = part[PART_ADDRESS] < 0 ? -part[PART_ADDRESS] : part[PART_ADDRESS];
    PyObject *memory = memory_at(self, rank, address, len);
    if (!memory || PyObject_GetBuffer(memory, &shown->views[rank], PyBUF_WRITABLE) < 0)
        return -1;
    shown->starts[rank] = shown->views[rank].buf;
    if (shown->views[rank].len == len && part[PART_BYTES] == len)
        return 0;
    PyErr_Format(PyExc_ValueError, "rank %lld shows memory that does not exist", (long long)rank);
    return -1;
}

/* Hold what all ranks show. Returns 0, or -1 with an exception; `release` is due in either case. */
static int hold_all(Meetings *self, Record record, Shown *shown, Py_ssize_t len)
{
    shown->views = PyMem_Calloc((size_t)self->size, sizeof(Py_buffer));
    shown->starts = PyMem_Calloc((size_t)self->size, sizeof(void *));
    shown->arrays = PyMem_Calloc((size_t)self->size, sizeof(void *));
    if (!shown->views || !shown->starts || !shown->arrays) {
        PyErr_NoMemory();
        return -1;
    }
    /* All at the beginning: without the GIL no view can be made, and one that is held keeps its memory mapped. */
    for (int64_t rank = 0; rank < self->size; rank++)
        if (hold(self, record, shown, rank, len) < 0)
            return -1;
    return 0;
}

void release_and_wake(Meetings *self, Record record, int cell, bool is_over)
{
    /* Read under the lock, because a sleeper counts itself under it. The system call comes after the release: the
     * sleeper needs the lock as soon as it wakes. */
    bool is_futex_wanted = is_over && record.cells[SLEEPERS] > 0;
    if (is_over)
        control_block_wake(self->block, INT64_MAX);
    control_block_unlock(self->block);
    if (is_futex_wanted)
        control_block_wake_futex(&record.cells[cell]);
}

/* As `Rendezvous.done` and then `Rendezvous.claim`, under one lock: `reduced` bytes are those of the chunk before, 0 for
 * the first. Returns the bytes of the new chunk, whose first byte is `first`; 0 if all are claimed, and -1 with an
 * exception. */
static int64_t claim_next(Meetings *self, Record record, int64_t total, int64_t reduced, int64_t *first)
{
    if (control_block_lock(self->block) < 0)
        return -1;
    int64_t *cells = record.cells, claimed = cells[CLAIMED], chunk = 0;
    /* The count of the last chunk and the claim of the next one share an acquisition of the lock. */
    cells[DONE] += reduced;
    if (reduced)
        pass_point(MEETING_COUNTED);
    if (is_shared(self, record, total) && is_chunk_left(claimed, total)) {
        chunk = chunk_of(self, total);
        cells[CLAIMED] = claimed + chunk;
        *first = claimed;
    }
    if (chunk || reduced)
        part_of(record, self->rank)[PART_BUSY] = chunk > 0;
    /* A withdrawal waits until no rank is busy. */
    bool is_over = reduced && (cells[DONE] == total || cells[WITHDRAWN]);
    release_and_wake(self, record, DONE, is_over);
    return chunk ? least(chunk, total - claimed) : 0;
}

/* Claim and reduce chunks of what all ranks show, until all are claimed. Returns 0, or -1 with an exception. */
static int reduce_together(Meetings *self, Record record, int64_t total, int kernel, int64_t divisor)
{
    Shown shown = {NULL, NULL, NULL};
    int64_t first = 0, chunk = hold_all(self, record, &shown, total);
    if (chunk == 0)
        chunk = claim_next(self, record, total, 0, &first);
    while (chunk > 0) {
        /* The other threads of this rank, such as its loop, run while a chunk is reduced. */
        PyThreadState *state = PyEval_SaveThread();
        for (int64_t rank = 0; rank < self->size; rank++)
            shown.arrays[rank] = (char *)shown.starts[rank] + first;
        reduce_to_all(kernel_at(kernel), kernel_element_size(kernel), shown.arrays, (int)self->size, chunk, divisor);
        pass_point(MEETING_SHOWN);
        PyEval_RestoreThread(state);
        chunk = claim_next(self, record, total, chunk, &first);
    }
    release(self, &shown);
    return (int)chunk;
}

/* What the last rank does. Returns WAITING if another rank still reduces a chunk, -1 with an exception, and else OVER. */
static int end_as_last(Meetings *self, int64_t number, int kernel, int64_t divisor, bool is_clear,
                       const Py_buffer *bytes)
{
    Record record = record_of(self, number);
    if (is_private(self, record))
        return private_reduce(self, record, kernel, divisor) < 0 ? -1 : WAITING; /* until it is awaited */
    if (bytes->len && bytes->len >= self->shown_min) {
        if (reduce_together(self, record, bytes->len, kernel, divisor) < 0)
            return -1;
        int is_over = meetings_complete(self, number, bytes->len, bytes, is_clear);
        return is_over < 0 ? -1 : is_over ? OVER : WAITING;
    }
    if (bytes->len && reduce_copies(self, record, kernel, divisor, bytes) < 0)
        return -1;
    return publish_result(self, number, bytes->len ? bytes->len : 1, is_clear) < 0 ? -1 : OVER;
}

/* The number of a call, as an argument; negative with an exception. */
static int64_t get_number(PyObject *argument)
{
    int64_t number = PyLong_AsLongLong(argument);
    if (number < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a call has no negative number");
    return number;
}

int meetings_arrive(Meetings *self, int64_t number, const Meeting *meeting, int64_t address, const Py_buffer *bytes,
                    bool is_clear)
{
    if (!check_length(self, bytes, address != 0))
        return -1;
    int state = arrive_with(self, number, meeting->fingerprint, address, bytes);
    if (state == LAST)
        state = end_as_last(self, number, meeting->kernel, meeting->divisor, is_clear, bytes);
    return state;
}

/* Whether the core knows how to reduce `bytes`. Otherwise an exception is set. */
static bool check_reduction(const Meeting *meeting, const Py_buffer *bytes)
{
    int64_t element = (int64_t)kernel_element_size(meeting->kernel);
    if (!bytes->len || (element && bytes->len % element == 0))
        return true;
    PyErr_Format(PyExc_ValueError, "no reduction of %zd bytes has the number %d", bytes->len, meeting->kernel);
    return false;
}

/* `arrive(number, fingerprint, array, address, kernel, divisor, is_clear)` -> WAITING, NOT_FREE or OVER */
static PyObject *arrive(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Meetings *self = (Meetings *)object;
    Py_buffer bytes;
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "arrive(number, fingerprint, array, address, kernel, divisor, is_clear)");
        return NULL;
    }
    int64_t number = get_number(arguments[0]), address = PyLong_AsLongLong(arguments[3]);
    Meeting meeting = {.fingerprint = PyLong_AsLongLong(arguments[1]),
                       .kernel = (int)PyLong_AsLong(arguments[4]),
                       .divisor = PyLong_AsLongLong(arguments[5])};
    if (!PyErr_Occurred() && (address == INT64_MIN || meeting.divisor < 1))
        PyErr_SetString(PyExc_ValueError, "there is no such address, or the divisor is not positive");
    if (PyErr_Occurred() || get_bytes(arguments[2], &bytes, PyBUF_WRITABLE) < 0)
        return NULL;
    if (address < 0 && bytes.len <= self->short_bytes)
        PyErr_SetString(PyExc_ValueError, "an array that is not long has no negative address");
    if (PyErr_Occurred() || !check_reduction(&meeting, &bytes)) {
        free_bytes(&bytes);
        return NULL;
    }
    if (bytes.len < self->shown_min)
        address = 0;
    int state = meetings_is_free(self, number);
    if (state == 0)
        state = NOT_FREE;
    else if (state > 0)
        state = meetings_arrive(self, number, &meeting, address, &bytes, arguments[6] == Py_True);
    free_bytes(&bytes);
    return state < 0 ? NULL : PyLong_FromLong(state);
}

int meetings_complete(Meetings *self, int64_t number, int64_t done, const Py_buffer *bytes, bool is_clear)
{
    Record record = record_of(self, number);
    if (is_private(self, record))
        return private_complete(self, record);
    bool is_shown = bytes->len && bytes->len >= self->shown_min;
    bool is_in_place = is_shown && part_of(record, self->rank)[PART_ADDRESS] < 0;
    if (!check_length(self, bytes, is_in_place) || control_block_lock(self->block) < 0)
        return -1;
    /* A rank that still reduces a chunk keeps DONE below `done`, and after a withdrawal it stays there. */
    if (record.cells[DONE] != done) {
        control_block_unlock(self->block);
        return 0;
    }
    /* The result of copies is in the memory of rank 0. Elsewhere it is where this rank has shown its array. */
    char *result = NULL;
    if (bytes->len && !is_in_place && !(result = short_array(self, is_shown ? self->rank : 0, record.turn))) {
        control_block_unlock(self->block);
        return -1;
    }
    /* Nothing changes the result before this rank has left, so a long one is copied without the lock. */
    if (result && bytes->len > COPIED_UNDER_LOCK) {
        control_block_unlock(self->block);
        memcpy(bytes->buf, result, bytes->len);
        if (control_block_lock(self->block) < 0)
            return -1;
    } else if (result) {
        memcpy(bytes->buf, result, bytes->len);
    }
    pass_point(MEETING_RECEIVED);
    if (++record.cells[LEFT] == self->size)
        control_block_wake(self->block, INT64_MAX);
    look_ahead(self, number + 1, is_clear);
    pass_point(MEETING_LEFT);
    control_block_unlock(self->block);
    return 1;
}

/* `complete(number, done, array, is_clear)`: copy the result into `array`, and leave. Returns False if it is not there. */
static PyObject *complete(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Meetings *self = (Meetings *)object;
    Py_buffer bytes;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "complete(number, done, array, is_clear)");
        return NULL;
    }
    int64_t number = get_number(arguments[0]), done = PyLong_AsLongLong(arguments[1]);
    if (PyErr_Occurred() || get_bytes(arguments[2], &bytes, PyBUF_WRITABLE) < 0)
        return NULL;
    int is_over = meetings_complete(self, number, done, &bytes, arguments[3] == Py_True);
    free_bytes(&bytes);
    return is_over < 0 ? NULL : PyBool_FromLong(is_over);
}

/* -- waiting ---------------------------------------------------------------------------------- */

/* A hint without the lock. `call` is that of this rank if its array is private, and else NULL. */
static Step next_step(const Meetings *self, Record record, const PrivateCall *call, int64_t done)
{
    if (call)
        return private_step(self, record, call);
    /* DONE first: it is the end of the meeting, whatever the other cells say. */
    if (peek(&record.cells[DONE]) == done)
        return RESULT;
    if (done < self->shown_min || peek(&record.cells[ARRIVED]) != self->size)
        return NOTHING;
    if (done > self->short_bytes && peek(&record.cells[DIRECT]) != self->size)
        return NO_USE;
    return is_chunk_left(peek(&record.cells[CLAIMED]), done) ? REDUCE : NOTHING;
}

static Step poll_meeting(const Meetings *self, Record record, const PrivateCall *call, int64_t done, int64_t polls)
{
    Step step = next_step(self, record, call, done);
    PyThreadState *state = step == NOTHING ? PyEval_SaveThread() : NULL;
    for (int64_t poll = 0; step == NOTHING && poll < polls; poll++) {
        /* With fewer cores than ranks the rank that this one waits for may need the core. */
        sched_yield();
        step = next_step(self, record, call, done);
    }
    if (state)
        PyEval_RestoreThread(state);
    return step;
}

/* Sleep for at most `left_ns` nanoseconds while the low half of `cell` is `before`. Returns false after a signal: Python
 * has to run its handler. */
static bool sleep_in_futex(const int64_t *cell, uint32_t before, int64_t left_ns)
{
    const struct timespec time = {left_ns / 1000000000, left_ns % 1000000000};
    PyThreadState *state = PyEval_SaveThread();
    long failed = syscall(SYS_futex, (const uint32_t *)cell, FUTEX_WAIT, before, &time, NULL, 0);
    bool is_interrupted = failed && errno == EINTR;
    PyEval_RestoreThread(state);
    return !is_interrupted;
}

/* Sleep until something changes or until `until_ns`. Returns 1 if the rank should look again, 0 if not, and -1 with an
 * exception. */
static int sleep_until(Meetings *self, Record record, const PrivateCall *call, int64_t done, int64_t until_ns)
{
    int64_t *cell = record.cells + (call && call->has_left ? LEFT : DONE), left_ns = until_ns - now_ns();
    if (left_ns <= 0)
        return 0;
    if (control_block_lock(self->block) < 0)
        return -1;
    /* Read under the lock: if the cell changes after that, the kernel finds another value and does not let the
     * thread sleep. */
    uint32_t before = (uint32_t)*cell;
    bool is_asleep = next_step(self, record, call, done) == NOTHING;
    /* Under the lock, so that the rank that publishes either finds this sleeper, or has published before. */
    record.cells[SLEEPERS] += is_asleep;
    control_block_unlock(self->block);
    if (!is_asleep)
        return 1;
    pass_point(MEETING_ASLEEP);
    return sleep_in_futex(cell, before, left_ns);
}

/* Returns 0, or -1 with an exception. */
static int perform(Meetings *self, Record record, const PrivateCall *call, const Meeting *meeting, Step step)
{
    if (call)
        return private_perform(self, record, meeting, step);
    return reduce_together(self, record, meeting->done, meeting->kernel, meeting->divisor);
}

int meetings_look(Meetings *self, int64_t number, const Meeting *meeting, int64_t polls, int64_t sleep_ns)
{
    Record record = record_of(self, number);
    const PrivateCall *call = is_private(self, record) ? &self->private_calls[record.turn] : NULL;
    int64_t done = meeting->done, until_ns = 0;
    for (;;) {
        /* Once all have come, the others work on private chunks, which takes less time than to sleep and to wake. */
        bool is_soon = call && peek(&record.cells[ARRIVED]) == self->size;
        Step step = poll_meeting(self, record, call, done, is_soon ? PATIENCE * polls : polls);
        if (step == RESULT || step == NO_USE)
            return step == RESULT;
        if (step != NOTHING) {
            if (perform(self, record, call, meeting, step) < 0)
                return -1;
            /* The others reduce the last chunks, which takes less time than a wake-up of this rank. */
            until_ns = now_ns() + WORK_NS;
            continue;
        }
        if (!until_ns && sleep_ns > 0)
            until_ns = now_ns() + sleep_ns;
        int again = sleep_until(self, record, call, done, until_ns);
        if (again <= 0)
            return again < 0 ? -1 : next_step(self, record, call, done) == RESULT;
    }
}

/* `look(number, done, polls, sleep_ns, kernel, divisor)`: block for a short time until the result is there; reduce
 * chunks of what all ranks show. Returns whether the result seems to be there: `complete` knows. */
static PyObject *look(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "look(number, done, polls, sleep_ns, kernel, divisor)");
        return NULL;
    }
    int64_t number = get_number(arguments[0]), polls = PyLong_AsLongLong(arguments[2]);
    int64_t sleep_ns = PyLong_AsLongLong(arguments[3]);
    Meeting meeting = {.done = PyLong_AsLongLong(arguments[1]),
                       .kernel = (int)PyLong_AsLong(arguments[4]),
                       .divisor = PyLong_AsLongLong(arguments[5])};
    if (!PyErr_Occurred() && meeting.divisor < 1)
        PyErr_SetString(PyExc_ValueError, "a divisor is positive");
    if (PyErr_Occurred())
        return NULL;
    Meetings *self = (Meetings *)object;
    bool needs_reduction = meeting.done >= self->shown_min || is_private(self, record_of(self, number));
    if (needs_reduction && !kernel_at(meeting.kernel))
        return PyErr_Format(PyExc_ValueError, "no reduction has the number %d", meeting.kernel);
    int is_there = meetings_look(self, number, &meeting, polls, sleep_ns);
    return is_there < 0 ? NULL : PyBool_FromLong(is_there);
}

/* -- the type --------------------------------------------------------------------------------- */

/* `Meetings(control_block, view, differs, size, rank, calls, short_bytes, shown_min, chunk_max, cores)` */
static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *block, *view, *differs;
    long long size, rank, calls, short_bytes, shown_min, chunk_max, cores;
    static char *names[] = {"control_block", "view",      "differs",   "size",  "rank", "calls",
                            "short_bytes",   "shown_min", "chunk_max", "cores", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOLLLLLLL:Meetings", names, &block, &view, &differs, &size,
                                     &rank, &calls, &short_bytes, &shown_min, &chunk_max, &cores))
        return NULL;
    if (!is_control_block(block) || size < 1 || rank < 0 || rank >= size || calls < 1 || short_bytes < 0 ||
        shown_min < 2 || chunk_max < ALIGNED || cores < 1) {
        PyErr_SetString(PyExc_ValueError, "these are no meetings");
        return NULL;
    }
    if (peers_at(size, calls) + PEER_CELLS * size > ((ControlBlock *)block)->cell_count) {
        PyErr_SetString(PyExc_ValueError, "the control block has too few cells");
        return NULL;
    }
    allocfunc allocate = PyType_GetSlot(type, Py_tp_alloc); /* sets all to zero */
    Meetings *self = (Meetings *)allocate(type, 0);
    if (!self)
        return NULL;
    self->block = (ControlBlock *)Py_NewRef(block);
    self->view = Py_NewRef(view);
    self->differs = Py_NewRef(differs);
    self->size = size;
    self->rank = rank;
    self->calls = calls;
    self->short_bytes = short_bytes;
    self->shown_min = shown_min;
    self->chunk_max = chunk_max / ALIGNED * ALIGNED;
    self->cores = cores;
    self->stride = record_cells(size);
    self->addresses = addresses_at(size, calls);
    self->newest = newest_at(size, calls);
    self->peers = peers_at(size, calls);
    self->areas = PyMem_Calloc((size_t)size, sizeof(Py_buffer));
    self->arrays = PyMem_Calloc((size_t)size, sizeof(void *));
    self->known = PyMem_Calloc((size_t)size, sizeof(Known));
    self->private_calls = PyMem_Calloc((size_t)(2 * calls), sizeof(PrivateCall));
    if (!self->areas || !self->arrays || !self->known || !self->private_calls) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Meetings *self = (Meetings *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->block);
    Py_VISIT(self->view);
    Py_VISIT(self->differs);
    return 0;
}

/* The control block stays until the end: a method that runs in a finalizer would use it. */
static int clear(PyObject *object)
{
    Meetings *self = (Meetings *)object;
    Py_CLEAR(self->view);
    Py_CLEAR(self->differs);
    return 0;
}

static void destroy(PyObject *object)
{
    Meetings *self = (Meetings *)object;
    PyObject_GC_UnTrack(object);
    clear(object);
    for (int64_t rank = 0; self->areas && rank < self->size; rank++)
        free_bytes(&self->areas[rank]);
    for (int64_t rank = 0; self->known && rank < self->size; rank++)
        Py_XDECREF(self->known[rank].memory);
    PyMem_Free(self->known);
    PyMem_Free(self->private_calls);
    PyMem_Free(self->scratch);
    PyMem_Free(self->areas);
    PyMem_Free(self->arrays);
    Py_XDECREF((PyObject *)self->block);
    free_object(object);
}

static PyMethodDef methods[] = {
    {"arrive", (PyCFunction)(void (*)(void))arrive, METH_FASTCALL, NULL},
    {"complete", (PyCFunction)(void (*)(void))complete, METH_FASTCALL, NULL},
    {"look", (PyCFunction)(void (*)(void))look, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, create},  {Py_tp_dealloc, destroy}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear}, {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec meetings_spec = {
    .name = "asyncoll._core.native.Meetings",
    .basicsize = sizeof(Meetings),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

bool is_meetings(PyObject *object)
{
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == create;
}

int64_t meetings_calls(const Meetings *self)
{
    return self->calls;
}

int64_t meetings_shown_min(const Meetings *self)
{
    return self->shown_min;
}

bool meetings_has_short_arrays(const Meetings *self)
{
    return self->block->cells[self->addresses + self->rank] != 0;
}

int64_t meetings_short_bytes(const Meetings *self)
{
    return self->short_bytes;
}

bool meetings_can_read(const Meetings *self)
{
    const int64_t *cells = self->block->cells + self->peers;
    for (int64_t rank = 0; rank < self->size; rank++)
        if (peek(&cells[PEER_CELLS * rank + PEER_CAN_READ]) != 1)
            return false;
    return true;
}
