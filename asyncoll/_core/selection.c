/* Selection for the sparse allreduces: the elements that reach a magnitude, and the k-th largest magnitude.
 * asyncoll/algorithms/sparse/selection.py has the same in Python, with the same bits.
 *
 * A magnitude is an element without its sign bit, read as an integer.
 */
#include "native.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum {
    GROUP = 16,     /* elements that are compared at once: a bit of a mask for each */
    LIST = 1 << 13, /* elements whose groups are listed before they are looked at */
    DIGIT = 11,     /* bits of the k-th largest that a pass settles: the counters stay in the L1 cache */
    COUNTERS = 1 << DIGIT,
};

/* -- selection -------------------------------------------------------------------------------- */

/* Defines HITS, which returns which of the GROUP elements at `x` have magnitudes of at least `least`: bit i for x[i]. */
#define DEFINE_HITS(HITS, BITS, MASK)                                                                                  \
    static unsigned HITS(const BITS *x, BITS least)                                                                    \
    {                                                                                                                  \
        BITS any = 0;                                                                                                  \
        unsigned hits = 0;                                                                                             \
        for (int i = 0; i < GROUP; i++)                                                                                \
            any |= (x[i] & MASK) >= least;                                                                             \
        for (int i = 0; any && i < GROUP; i++)                                                                         \
            hits |= (unsigned)((x[i] & MASK) >= least) << i;                                                           \
        return hits;                                                                                                   \
    }

#ifdef __SSE2__
/* As DEFINE_HITS, at the speed of the memory: 25 million elements in 3.5 ms instead of 8.4. `least` is at least 1. */
static unsigned hits_32(const int32_t *x, int32_t least)
{
    const __m128i mask = _mm_set1_epi32(INT32_MAX), below = _mm_set1_epi32(least - 1);
    __m128i hits[4];
    for (int i = 0; i < 4; i++)
        hits[i] = _mm_cmpgt_epi32(_mm_and_si128(_mm_loadu_si128((const __m128i *)x + i), mask), below);
    __m128i low = _mm_packs_epi32(hits[0], hits[1]), high = _mm_packs_epi32(hits[2], hits[3]);
    return (unsigned)_mm_movemask_epi8(_mm_packs_epi16(low, high));
}
#else
DEFINE_HITS(hits_32, int32_t, INT32_MAX)
#endif
DEFINE_HITS(hits_64, int64_t, INT64_MAX)

/* Defines SELECT, which writes the indices and the values of the elements whose magnitudes are at least `least`,
 * ascending, as far as there is room for them, and returns their number.
 *
 * The groups that have such elements are listed first, without a branch: it would be mispredicted at every seventh of them
 * if 1 % of the elements are selected. */
#define DEFINE_SELECT(SELECT, HITS, BITS, INDEX, MASK)                                                                 \
    static size_t SELECT(const void *x, size_t elements, int64_t least, void *into_indices, void *into_values,         \
                         size_t room)                                                                                  \
    {                                                                                                                  \
        const BITS *bits = x, reached = (BITS)least;                                                                   \
        INDEX *indices = into_indices;                                                                                 \
        BITS *values = into_values;                                                                                    \
        uint16_t groups[LIST / GROUP], hits[LIST / GROUP];                                                             \
        size_t count = 0;                                                                                              \
        for (size_t start = 0; start < elements; start += LIST) {                                                      \
            size_t length = elements - start < LIST ? elements - start : LIST, listed = 0;                             \
            for (size_t first = 0; first < length; first += GROUP) {                                                   \
                BITS last[GROUP] = {0};                                                                                \
                const BITS *group = bits + start + first;                                                              \
                if (length - first < GROUP)                                                                            \
                    group = memcpy(last, group, (length - first) * sizeof *last);                                      \
                groups[listed] = (uint16_t)first;                                                                      \
                hits[listed] = (uint16_t)HITS(group, reached);                                                         \
                listed += hits[listed] != 0;                                                                           \
            }                                                                                                          \
            for (size_t each = 0; each < listed; each++)                                                               \
                for (unsigned left = hits[each]; left; left &= left - 1, count++) {                                    \
                    size_t i = start + groups[each] + (unsigned)__builtin_ctz(left);                                   \
                    if (count < room) {                                                                                \
                        indices[count] = (INDEX)i;                                                                     \
                        values[count] = bits[i];                                                                       \
                    }                                                                                                  \
                }                                                                                                      \
        }                                                                                                              \
        return count;                                                                                                  \
    }

DEFINE_SELECT(select_32_32, hits_32, int32_t, int32_t, INT32_MAX)
DEFINE_SELECT(select_32_64, hits_32, int32_t, int64_t, INT32_MAX)
DEFINE_SELECT(select_64_32, hits_64, int64_t, int32_t, INT64_MAX)
DEFINE_SELECT(select_64_64, hits_64, int64_t, int64_t, INT64_MAX)

static PyObject *select_held(const Py_buffer *x, int64_t least, const Py_buffer *indices, const Py_buffer *values)
{
    size_t elements = elements_of(x), room = elements_of(values), count;
    if (!has_integers(x) || !has_integers(indices) || !has_integers(values) || values->itemsize != x->itemsize ||
        elements_of(indices) != room || least < 1 || (x->itemsize == 4 && least > INT32_MAX) ||
        (indices->itemsize == 4 && elements > (size_t)INT32_MAX + 1)) {
        PyErr_SetString(PyExc_ValueError, "the arrays do not belong together, or no element has such a magnitude");
        return NULL;
    }
    bool is_short = indices->itemsize == 4;
    PyThreadState *state = elements > LONG_ELEMENTS ? PyEval_SaveThread() : NULL;
    if (x->itemsize == 4)
        count = (is_short ? select_32_32 : select_32_64)(x->buf, elements, least, indices->buf, values->buf, room);
    else
        count = (is_short ? select_64_32 : select_64_64)(x->buf, elements, least, indices->buf, values->buf, room);
    if (state)
        PyEval_RestoreThread(state);
    return PyLong_FromSize_t(count);
}

PyObject *select_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *objects[3];
    Py_buffer views[3];
    long long least;
    if (!PyArg_ParseTuple(arguments, "OLOO:select", &objects[0], &least, &objects[1], &objects[2]) ||
        !hold_views(objects, views, 3, 1))
        return NULL;
    PyObject *result = select_held(&views[0], least, &views[1], &views[2]);
    release_views(views, 3);
    return result;
}

/* -- the k-th largest ------------------------------------------------------------------------- */

/* Defines COUNT, which counts the values by `magnitude - least >> shift`, as far as there is a counter; and RANGE, which
 * finds the least and the largest magnitude. */
#define DEFINE_COUNT(COUNT, RANGE, BITS, UNSIGNED, MASK)                                                               \
    static void COUNT(const void *x, size_t elements, int64_t least, int shift, int64_t *counts, size_t counters)      \
    {                                                                                                                  \
        const BITS *bits = x;                                                                                          \
        for (size_t i = 0; i < elements; i++) {                                                                        \
            size_t counter = (UNSIGNED)((bits[i] & MASK) - (BITS)least) >> shift;                                      \
            if (counter < counters)                                                                                    \
                counts[counter]++;                                                                                     \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static void RANGE(const void *x, size_t elements, int64_t *least, int64_t *largest)                                \
    {                                                                                                                  \
        const BITS *bits = x;                                                                                          \
        BITS low = MASK, high = 0;                                                                                     \
        for (size_t i = 0; i < elements; i++) {                                                                        \
            BITS magnitude = bits[i] & MASK;                                                                           \
            low = magnitude < low ? magnitude : low;                                                                   \
            high = magnitude > high ? magnitude : high;                                                                \
        }                                                                                                              \
        *least = low;                                                                                                  \
        *largest = high;                                                                                               \
    }

DEFINE_COUNT(count_32, range_32, int32_t, uint32_t, INT32_MAX)
DEFINE_COUNT(count_64, range_64, int64_t, uint64_t, INT64_MAX)

/* What is known of the k-th largest magnitude of some elements. */
typedef struct {
    int64_t least;
    size_t place; /* it is this one, from 1 on, of those that are equal, or may be */
} Kth;

/* Find it, for at least k elements. */
static Kth find_kth(const void *x, size_t elements, size_t width, size_t k)
{
    Kth kth = {.place = k};
    int64_t largest, counts[COUNTERS];
    int open = 0; /* it is below `least` + 2^open */
    (width == 4 ? range_32 : range_64)(x, elements, &kth.least, &largest);
    /* Only the bits in which the magnitudes differ are searched. */
    while ((largest - kth.least) >> open)
        open++;
    while (open) {
        int shift = open > DIGIT ? open - DIGIT : 0, counter = (1 << (open - shift)) - 1;
        memset(counts, 0, sizeof counts);
        (width == 4 ? count_32 : count_64)(x, elements, kth.least, shift, counts, (size_t)counter + 1);
        /* From the largest digit down, until the k-th element has this digit. The next pass looks at the elements
         * with this digit only. */
        for (; counter && (size_t)counts[counter] < kth.place; counter--)
            kth.place -= (size_t)counts[counter];
        kth.least += (int64_t)counter << shift;
        open = shift;
    }
    return kth;
}

#define DEFINE_KEEP(KEEP, BITS, INDEX, MASK)                                                                           \
    static size_t KEEP(void *all_indices, void *all_values, size_t elements, Kth kth)                                  \
    {                                                                                                                  \
        INDEX *indices = all_indices;                                                                                  \
        BITS *values = all_values;                                                                                     \
        size_t count = 0;                                                                                              \
        for (size_t i = 0; i < elements; i++) {                                                                        \
            BITS magnitude = values[i] & MASK;                                                                         \
            bool is_equal = magnitude == (BITS)kth.least && kth.place;                                                 \
            indices[count] = indices[i];                                                                               \
            values[count] = values[i];                                                                                 \
            count += is_equal || magnitude > (BITS)kth.least;                                                          \
            kth.place -= is_equal;                                                                                     \
        }                                                                                                              \
        return count;                                                                                                  \
    }

DEFINE_KEEP(keep_32_32, int32_t, int32_t, INT32_MAX)
DEFINE_KEEP(keep_32_64, int32_t, int64_t, INT32_MAX)
DEFINE_KEEP(keep_64_32, int64_t, int32_t, INT64_MAX)
DEFINE_KEEP(keep_64_64, int64_t, int64_t, INT64_MAX)

static PyObject *keep_held(const Py_buffer *indices, const Py_buffer *values, int64_t k)
{
    size_t elements = elements_of(values), count = elements;
    if (!has_integers(indices) || !has_integers(values) || elements_of(indices) != elements || k < 1) {
        PyErr_SetString(PyExc_ValueError, "the arrays do not belong together, or k is not positive");
        return NULL;
    }
    Kth kth = {0};
    PyThreadState *state = elements > LONG_ELEMENTS ? PyEval_SaveThread() : NULL;
    if ((uint64_t)k <= elements) {
        kth = find_kth(values->buf, elements, (size_t)values->itemsize, (size_t)k);
        if (values->itemsize == 4)
            count = (indices->itemsize == 4 ? keep_32_32 : keep_32_64)(indices->buf, values->buf, elements, kth);
        else
            count = (indices->itemsize == 4 ? keep_64_32 : keep_64_64)(indices->buf, values->buf, elements, kth);
    }
    if (state)
        PyEval_RestoreThread(state);
    return Py_BuildValue("nL", (Py_ssize_t)count, (long long)kth.least);
}

PyObject *keep_largest_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *objects[2];
    Py_buffer views[2];
    long long k;
    if (!PyArg_ParseTuple(arguments, "OOL:keep_largest", &objects[0], &objects[1], &k) ||
        !hold_views(objects, views, 2, 0))
        return NULL;
    PyObject *result = keep_held(&views[0], &views[1], k);
    release_views(views, 2);
    return result;
}

static PyObject *count_held(const Py_buffer *values, int64_t least, int shift, const Py_buffer *into)
{
    if (!has_integers(values) || !has_integers(into) || into->itemsize != 8 || least < 0 || shift < 0 ||
        shift >= 8 * values->itemsize) {
        PyErr_SetString(PyExc_ValueError, "the arrays have other widths, or there are no such magnitudes");
        return NULL;
    }
    size_t elements = elements_of(values);
    PyThreadState *state = elements > LONG_ELEMENTS ? PyEval_SaveThread() : NULL;
    (values->itemsize == 4 ? count_32 : count_64)(values->buf, elements, least, shift, into->buf, elements_of(into));
    if (state)
        PyEval_RestoreThread(state);
    return Py_NewRef(Py_None);
}

PyObject *count_magnitudes_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *objects[2];
    Py_buffer views[2];
    long long least;
    int shift;
    if (!PyArg_ParseTuple(arguments, "OLiO:count_magnitudes", &objects[0], &least, &shift, &objects[1]) ||
        !hold_views(objects, views, 2, 1))
        return NULL;
    PyObject *result = count_held(&views[0], least, shift, &views[1]);
    release_views(views, 2);
    return result;
}
