/* Sums of parts for the sparse allreduces; asyncoll/algorithms/sparse/parts.py has the same in Python, with the same bits.
 *
 * Indices come from other ranks. None is used before it is known to lie in its block.
 */
#include "native.h"

#include <string.h>

enum {
    BLOCK = 1 << 14, /* elements: their sums stay in the L2 cache while the parts stream by */
    WORD = 64,       /* bits of a word of the map of elements that have a sum */
};

/* -- arrays ----------------------------------------------------------------------------------- */

/* Whether the code of the format, which numpy puts behind the byte order if it gives one, is among `codes`. */
static bool is_one_of(const Py_buffer *view, const char *codes)
{
    size_t length = view->format ? strlen(view->format) : 0;
    return length && strchr(codes, view->format[length - 1]);
}

bool has_integers(const Py_buffer *view)
{
    return is_one_of(view, "ilq") && (view->itemsize == 4 || view->itemsize == 8);
}

bool has_floats(const Py_buffer *view)
{
    return is_one_of(view, "fd") && (view->itemsize == 4 || view->itemsize == 8);
}

size_t elements_of(const Py_buffer *view)
{
    return (size_t)(view->len / view->itemsize);
}

bool hold_views(PyObject **objects, Py_buffer *views, int count, int readable)
{
    for (int held = 0; held < count; held++)
        if (PyObject_GetBuffer(objects[held], &views[held],
                               PyBUF_FORMAT | PyBUF_ND | (held < readable ? 0 : PyBUF_WRITABLE))) {
            release_views(views, held);
            return false;
        }
    return true;
}

void release_views(Py_buffer *views, int count)
{
    while (count)
        PyBuffer_Release(&views[--count]);
}

/* -- sums ------------------------------------------------------------------------------------- */

/* Some elements of a vector, as far as they are not added up yet. */
typedef struct {
    const char *indices, *values;
    size_t left;
} Rest;

/* The sums of one block: elements `first` to below `end`. */
typedef struct {
    int64_t first, end;
    void *sums;    /* of BLOCK elements, 0 outside of `touched` */
    uint64_t *map; /* a bit for each element that has a sum */
} Block;

/* Defines ADD, which adds the elements of `rest` that lie in the block, and returns whether all indices are in order; and
 * TAKE, which moves the sums that are not 0 into `indices` and `values`, and returns their number. */
#define DEFINE_SUMS(ADD, TAKE, INDEX, VALUE)                                                                           \
    static bool ADD(Rest *rest, const Block *block)                                                                    \
    {                                                                                                                  \
        const INDEX *indices = (const INDEX *)rest->indices;                                                           \
        const VALUE *values = (const VALUE *)rest->values;                                                             \
        VALUE *sums = block->sums;                                                                                     \
        size_t count = 0;                                                                                              \
        for (; count < rest->left && indices[count] < block->end; count++) {                                           \
            int64_t place = indices[count] - block->first;                                                             \
            if (place < 0)                                                                                             \
                return false;                                                                                          \
            sums[place] += values[count];                                                                              \
            block->map[place / WORD] |= UINT64_C(1) << place % WORD;                                                   \
        }                                                                                                              \
        rest->indices += count * sizeof(INDEX);                                                                        \
        rest->values += count * sizeof(VALUE);                                                                         \
        rest->left -= count;                                                                                           \
        return true;                                                                                                   \
    }                                                                                                                  \
                                                                                                                       \
    static size_t TAKE(const Block *block, char *into_indices, char *into_values)                                      \
    {                                                                                                                  \
        INDEX *indices = (INDEX *)into_indices;                                                                        \
        VALUE *values = (VALUE *)into_values, *sums = block->sums;                                                     \
        size_t count = 0;                                                                                              \
        for (int word = 0; word < BLOCK / WORD; word++) {                                                              \
            for (uint64_t left = block->map[word]; left; left &= left - 1) {                                           \
                int place = word * WORD + __builtin_ctzll(left);                                                       \
                if (sums[place] != 0) {                                                                                \
                    indices[count] = (INDEX)(block->first + place);                                                    \
                    values[count++] = sums[place];                                                                     \
                }                                                                                                      \
                sums[place] = 0;                                                                                       \
            }                                                                                                          \
            block->map[word] = 0;                                                                                      \
        }                                                                                                              \
        return count;                                                                                                  \
    }

DEFINE_SUMS(add_32_32, take_32_32, int32_t, float)
DEFINE_SUMS(add_32_64, take_32_64, int32_t, double)
DEFINE_SUMS(add_64_32, take_64_32, int64_t, float)
DEFINE_SUMS(add_64_64, take_64_64, int64_t, double)

typedef struct {
    bool (*add)(Rest *rest, const Block *block);
    size_t (*take)(const Block *block, char *indices, char *values);
    size_t index, value; /* bytes */
} Kind;

static const Kind kinds[] = {
    {add_32_32, take_32_32, 4, 4},
    {add_32_64, take_32_64, 4, 8},
    {add_64_32, take_64_32, 8, 4},
    {add_64_64, take_64_64, 8, 8},
};

/* The first index of those that are left, or INT64_MAX if none is. */
static int64_t lowest_index(const Kind *kind, const Rest *rests, size_t count)
{
    int64_t lowest = INT64_MAX;
    for (size_t i = 0; i < count; i++)
        if (rests[i].left) {
            int64_t index = kind->index == 4 ? *(const int32_t *)rests[i].indices : *(const int64_t *)rests[i].indices;
            lowest = index < lowest ? index : lowest;
        }
    return lowest;
}

/* Returns the number of sums, or -1 if an index is out of order, or not from `first` to below `end`. */
static Py_ssize_t sum_rests(const Kind *kind, Rest *rests, size_t count, int64_t first, int64_t end, Block *block,
                            char *indices, char *values)
{
    Py_ssize_t found = 0;
    block->end = first;
    /* A block begins at the next index that any part has: blocks without an element are never looked at. */
    while ((block->first = lowest_index(kind, rests, count)) != INT64_MAX) {
        if (block->first < block->end || block->first >= end)
            return -1;
        block->end = end - block->first > BLOCK ? block->first + BLOCK : end;
        for (size_t i = 0; i < count; i++)
            if (!kind->add(&rests[i], block))
                return -1;
        found += (Py_ssize_t)kind->take(block, indices + found * kind->index, values + found * kind->value);
    }
    return found;
}

/* The kind of parts whose indices and values are of these dtypes, or NULL. */
static const Kind *kind_of(const Py_buffer *indices, const Py_buffer *values)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (has_integers(indices) && indices->itemsize == (Py_ssize_t)kinds[i].index && has_floats(values) &&
            values->itemsize == (Py_ssize_t)kinds[i].value)
            return &kinds[i];
    return NULL;
}

/* Hold the arrays of the parts: `views` has the indices of the first, its values, the indices of the second, and so on.
 * Returns the number of arrays that are held, all unless an exception is set. */
static int hold_parts(PyObject *const lists[2], int parts, Py_buffer *views)
{
    int held = 0;
    for (; held < 2 * parts; held++) {
        PyObject *array = PySequence_GetItem(lists[held % 2], held / 2);
        int failed = array ? PyObject_GetBuffer(array, &views[held], PyBUF_FORMAT | PyBUF_ND) : -1;
        Py_XDECREF(array);
        if (failed)
            break;
    }
    return held;
}

/* Sums of `parts` parts, whose arrays are held, as `views` after those of the result. */
static PyObject *sum_held(const Py_buffer *views, int parts, int64_t first, int64_t end)
{
    const Kind *kind = kind_of(&views[0], &views[1]);
    Rest *rests = PyMem_Calloc((size_t)parts + 1, sizeof *rests);
    Block block = {.sums = PyMem_Calloc(BLOCK, sizeof(double)), .map = PyMem_Calloc(BLOCK / WORD, sizeof *block.map)};
    PyObject *result = NULL;
    size_t total = 0;
    bool are_sound = kind && first >= 0;
    for (int i = 0; rests && i < parts; i++) {
        const Py_buffer *indices = &views[2 + 2 * i], *values = indices + 1;
        are_sound = are_sound && kind_of(indices, values) == kind && elements_of(indices) == elements_of(values);
        rests[i] = (Rest){indices->buf, values->buf, elements_of(indices)};
        total += rests[i].left;
    }
    if (!rests || !block.sums || !block.map) {
        PyErr_NoMemory();
    } else if (!are_sound || elements_of(&views[0]) < total || elements_of(&views[1]) < total) {
        PyErr_SetString(PyExc_ValueError, "the arrays do not belong together");
    } else {
        PyThreadState *state = total > LONG_ELEMENTS ? PyEval_SaveThread() : NULL;
        Py_ssize_t found = sum_rests(kind, rests, (size_t)parts, first, end, &block, views[0].buf, views[1].buf);
        if (state)
            PyEval_RestoreThread(state);
        if (found < 0)
            PyErr_SetString(PyExc_ValueError, "a part has an index that is out of order, or in another region");
        else
            result = PyLong_FromSsize_t(found);
    }
    PyMem_Free(rests);
    PyMem_Free(block.sums);
    PyMem_Free(block.map);
    return result;
}

PyObject *sum_parts_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *lists[2], *into[2], *result = NULL;
    long long first, end;
    if (!PyArg_ParseTuple(arguments, "OOLLOO:sum_parts", &lists[0], &lists[1], &first, &end, &into[0], &into[1]))
        return NULL;
    Py_ssize_t parts = PySequence_Size(lists[0]), others = PySequence_Size(lists[1]);
    if (parts < 0 || others < 0)
        return NULL;
    if (parts != others || parts > INT16_MAX)
        return PyErr_Format(PyExc_ValueError, "there are indices of %zd parts, and values of %zd", parts, others);
    Py_buffer *views = PyMem_Calloc(2 + 2 * (size_t)parts, sizeof *views);
    if (!views)
        return PyErr_NoMemory();
    if (hold_views(into, views, 2, 0)) {
        int held = hold_parts(lists, (int)parts, views + 2);
        if (held == 2 * parts)
            result = sum_held(views, (int)parts, first, end);
        release_views(views, 2 + held);
    }
    PyMem_Free(views);
    return result;
}

/* -- indices ---------------------------------------------------------------------------------- */

/* Defines COMMON, which writes the indices that both arrays have, ascending as they are, and returns their number.
 *
 * Block by block, with a map of those of `other`: in a merge each step waits for the one before, which takes twice as long.
 */
#define DEFINE_COMMON(COMMON, INDEX)                                                                                   \
    static size_t COMMON(const INDEX *one, size_t ones, const INDEX *other, size_t others, INDEX *found)               \
    {                                                                                                                  \
        uint64_t map[BLOCK / WORD] = {0}, place;                                                                       \
        size_t count = 0, i = 0, j = 0;                                                                                \
        while (i < ones) {                                                                                             \
            int64_t first = one[i];                                                                                    \
            while (j < others && other[j] < first)                                                                     \
                j++;                                                                                                   \
            size_t begin = j;                                                                                          \
            for (; j < others && (place = (uint64_t)(other[j] - first)) < BLOCK; j++)                                  \
                map[place / WORD] |= UINT64_C(1) << place % WORD;                                                      \
            for (; i < ones && (place = (uint64_t)(one[i] - first)) < BLOCK; i++) {                                    \
                found[count] = one[i];                                                                                 \
                count += map[place / WORD] >> place % WORD & 1;                                                        \
            }                                                                                                          \
            for (; begin < j; begin++)                                                                                 \
                map[(other[begin] - first) / WORD] = 0;                                                                \
        }                                                                                                              \
        return count;                                                                                                  \
    }

DEFINE_COMMON(common_32, int32_t)
DEFINE_COMMON(common_64, int64_t)

static PyObject *common_held(const Py_buffer *one, const Py_buffer *other, const Py_buffer *found)
{
    size_t ones = elements_of(one), others = elements_of(other), count;
    if (!has_integers(one) || !has_integers(other) || !has_integers(found) || other->itemsize != one->itemsize ||
        found->itemsize != one->itemsize || elements_of(found) < ones) {
        PyErr_SetString(PyExc_ValueError, "the indices have different widths, or there is no room for all");
        return NULL;
    }
    PyThreadState *state = ones + others > LONG_ELEMENTS ? PyEval_SaveThread() : NULL;
    if (one->itemsize == 4)
        count = common_32(one->buf, ones, other->buf, others, found->buf);
    else
        count = common_64(one->buf, ones, other->buf, others, found->buf);
    if (state)
        PyEval_RestoreThread(state);
    return PyLong_FromSize_t(count);
}

PyObject *common_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *objects[3];
    Py_buffer views[3];
    if (!PyArg_ParseTuple(arguments, "OOO:common", &objects[0], &objects[1], &objects[2]) ||
        !hold_views(objects, views, 3, 2))
        return NULL;
    PyObject *result = common_held(&views[0], &views[1], &views[2]);
    release_views(views, 3);
    return result;
}
