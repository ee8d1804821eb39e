/* Passes over long vectors for the sparse allreduces, in asyncoll/algorithms/sparse: selection.py and parts.py have the
 * same in Python, with the same bits.
 *
 * Indices come from other ranks. None is used before it is known to lie in its block.
 */
#include "native.h"

#include <string.h>

enum {
    GROUP = 16,      /* elements that are looked at one by one if one of them is selected */
    BLOCK = 1 << 14, /* elements: their sums stay in the L2 cache while the parts stream by */
    WORD = 64,       /* bits of a word of the map of elements that have a sum */
    SMALL = 4096,    /* elements from which the GIL is released */
};

/* -- selection -------------------------------------------------------------------------------- */

/* Defines SELECT, which writes the indices of the elements whose magnitudes are at least `least`, ascending, and returns
 * their number. `found` has room for all. */
#define DEFINE_SELECT(SELECT, BITS, INDEX, MASK)                                                                       \
    static size_t SELECT(const void *x, size_t elements, int64_t least, void *found)                                   \
    {                                                                                                                  \
        const BITS *bits = x, reached = (BITS)least;                                                                   \
        INDEX *indices = found;                                                                                        \
        size_t count = 0, first = 0;                                                                                   \
        for (; first + GROUP <= elements; first += GROUP) {                                                            \
            BITS hits = 0;                                                                                             \
            for (size_t i = 0; i < GROUP; i++)                                                                         \
                hits |= (bits[first + i] & MASK) >= reached;                                                           \
            if (hits)                                                                                                  \
                for (size_t i = first; i < first + GROUP; i++) {                                                       \
                    indices[count] = (INDEX)i;                                                                         \
                    count += (bits[i] & MASK) >= reached;                                                              \
                }                                                                                                      \
        }                                                                                                              \
        for (size_t i = first; i < elements; i++) {                                                                    \
            indices[count] = (INDEX)i;                                                                                 \
            count += (bits[i] & MASK) >= reached;                                                                      \
        }                                                                                                              \
        return count;                                                                                                  \
    }

DEFINE_SELECT(select_32_32, int32_t, int32_t, INT32_MAX)
DEFINE_SELECT(select_32_64, int32_t, int64_t, INT32_MAX)
DEFINE_SELECT(select_64_32, int64_t, int32_t, INT64_MAX)
DEFINE_SELECT(select_64_64, int64_t, int64_t, INT64_MAX)

static bool is_4_or_8(const Py_buffer *view)
{
    return view->itemsize == 4 || view->itemsize == 8;
}

static size_t elements_of(const Py_buffer *view)
{
    return (size_t)(view->len / view->itemsize);
}

static PyObject *select_held(const Py_buffer *x, int64_t least, const Py_buffer *found)
{
    size_t elements = elements_of(x), count;
    if (!is_4_or_8(x) || !is_4_or_8(found) || elements_of(found) < elements ||
        (found->itemsize == 4 && elements > (size_t)INT32_MAX + 1)) {
        PyErr_SetString(PyExc_ValueError, "the elements or indices have another width, or there is no room for all");
        return NULL;
    }
    PyThreadState *state = elements > SMALL ? PyEval_SaveThread() : NULL;
    if (x->itemsize == 4)
        count = (found->itemsize == 4 ? select_32_32 : select_32_64)(x->buf, elements, least, found->buf);
    else
        count = (found->itemsize == 4 ? select_64_32 : select_64_64)(x->buf, elements, least, found->buf);
    if (state)
        PyEval_RestoreThread(state);
    return PyLong_FromSize_t(count);
}

PyObject *select_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *array, *into, *result = NULL;
    Py_buffer x, found;
    long long least;
    if (!PyArg_ParseTuple(arguments, "OLO:select", &array, &least, &into) ||
        PyObject_GetBuffer(array, &x, PyBUF_ND) < 0)
        return NULL;
    if (PyObject_GetBuffer(into, &found, PyBUF_ND | PyBUF_WRITABLE) == 0) {
        result = select_held(&x, least, &found);
        PyBuffer_Release(&found);
    }
    PyBuffer_Release(&x);
    return result;
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

/* The parts, one after the other, as they came, and room for their sums. */
typedef struct {
    Py_buffer sizes, indices, values, into_indices, into_values;
} Views;

static PyObject *sum_held(const Views *views, int64_t first, int64_t end)
{
    size_t total = elements_of(&views->indices), count = elements_of(&views->sizes), left = total;
    const Kind *kind = NULL;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (views->indices.itemsize == (Py_ssize_t)kinds[i].index &&
            views->values.itemsize == (Py_ssize_t)kinds[i].value)
            kind = &kinds[i];
    if (!kind || views->sizes.itemsize != 8 || views->into_indices.itemsize != views->indices.itemsize ||
        views->into_values.itemsize != views->values.itemsize || elements_of(&views->values) != total ||
        elements_of(&views->into_indices) < total || elements_of(&views->into_values) < total || first < 0) {
        PyErr_SetString(PyExc_ValueError, "the arrays do not belong together");
        return NULL;
    }
    Rest *rests = PyMem_Calloc(count + 1, sizeof *rests);
    Block block = {.sums = PyMem_Calloc(BLOCK, kind->value), .map = PyMem_Calloc(BLOCK / WORD, sizeof *block.map)};
    PyObject *result = NULL;
    if (!rests || !block.sums || !block.map) {
        PyErr_NoMemory();
    } else {
        const int64_t *sizes = views->sizes.buf;
        size_t parts = 0;
        for (; parts < count && sizes[parts] >= 0 && (uint64_t)sizes[parts] <= left; parts++) {
            size_t done = total - left;
            rests[parts] = (Rest){(const char *)views->indices.buf + done * kind->index,
                                  (const char *)views->values.buf + done * kind->value, (size_t)sizes[parts]};
            left -= (size_t)sizes[parts];
        }
        bool are_sound = parts == count && !left;
        PyThreadState *state = total > SMALL ? PyEval_SaveThread() : NULL;
        Py_ssize_t found = are_sound ? sum_rests(kind, rests, count, first, end, &block, views->into_indices.buf,
                                                 views->into_values.buf)
                                     : -1;
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
    PyObject *objects[5], *result = NULL;
    Views views;
    Py_buffer *each[] = {&views.sizes, &views.indices, &views.values, &views.into_indices, &views.into_values};
    long long first, end;
    int held = 0;
    if (!PyArg_ParseTuple(arguments, "OOOLLOO:sum_parts", &objects[0], &objects[1], &objects[2], &first, &end,
                          &objects[3], &objects[4]))
        return NULL;
    while (held < 5 &&
           PyObject_GetBuffer(objects[held], each[held], held < 3 ? PyBUF_ND : PyBUF_ND | PyBUF_WRITABLE) == 0)
        held++;
    if (held == 5)
        result = sum_held(&views, first, end);
    while (held)
        PyBuffer_Release(each[--held]);
    return result;
}

/* -- indices ---------------------------------------------------------------------------------- */

/* Defines COMMON, which writes the indices that both arrays have, ascending as they are, and returns their number. */
#define DEFINE_COMMON(COMMON, INDEX)                                                                                   \
    static size_t COMMON(const INDEX *one, size_t ones, const INDEX *other, size_t others, INDEX *found)               \
    {                                                                                                                  \
        size_t count = 0, i = 0, j = 0;                                                                                \
        while (i < ones && j < others) {                                                                               \
            INDEX a = one[i], b = other[j];                                                                            \
            found[count] = a;                                                                                          \
            count += a == b;                                                                                           \
            i += a <= b;                                                                                               \
            j += b <= a;                                                                                               \
        }                                                                                                              \
        return count;                                                                                                  \
    }

DEFINE_COMMON(common_32, int32_t)
DEFINE_COMMON(common_64, int64_t)

static PyObject *common_held(const Py_buffer *one, const Py_buffer *other, const Py_buffer *found)
{
    size_t ones = elements_of(one), others = elements_of(other), count;
    if (!is_4_or_8(one) || other->itemsize != one->itemsize || found->itemsize != one->itemsize ||
        elements_of(found) < ones) {
        PyErr_SetString(PyExc_ValueError, "the indices have different widths, or there is no room for all");
        return NULL;
    }
    PyThreadState *state = ones + others > SMALL ? PyEval_SaveThread() : NULL;
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
    PyObject *objects[3], *result = NULL;
    Py_buffer views[3];
    int held = 0;
    if (!PyArg_ParseTuple(arguments, "OOO:common", &objects[0], &objects[1], &objects[2]))
        return NULL;
    while (held < 3 &&
           PyObject_GetBuffer(objects[held], &views[held], held < 2 ? PyBUF_ND : PyBUF_ND | PyBUF_WRITABLE) == 0)
        held++;
    if (held == 3)
        result = common_held(&views[0], &views[1], &views[2]);
    while (held)
        PyBuffer_Release(&views[--held]);
    return result;
}
