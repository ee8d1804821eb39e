/* Elementwise reductions of several arrays in one pass.
 *
 * The counterpart of `reducer` in asyncoll/tensors/reductions.py, with the same bits. All arrays are reduced block by
 * block, so that the block of the result stays in the L1 cache while the operands stream by. The compiler vectorises the
 * loops. On x86-64 each loop is compiled twice: for any processor, and for those with AVX2 and F16C.
 *
 * Numpy and torch themselves give bits that depend on the position of an element in a few cases: the payload of a sum or
 * product of two NaN, and for half types the payload of any NaN, and the sign of a zero that is the MIN or MAX of zeros
 * of both signs. There the bits may differ.
 */
#include "native.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_WIDE 1
#define WIDE_TARGET __attribute__((target("avx2,f16c")))
#include <immintrin.h>
#else
#define HAS_WIDE 0
#endif

/* Elements as they are in memory: at any address, in arrays of any type. */
#define ELEMENT __attribute__((aligned(1), may_alias))
typedef double f64 ELEMENT;
typedef float f32 ELEMENT;
typedef int8_t i8 ELEMENT;
typedef int16_t i16 ELEMENT;
typedef int32_t i32 ELEMENT;
typedef int64_t i64 ELEMENT;
typedef uint8_t u8 ELEMENT;
typedef uint16_t u16 ELEMENT;
typedef uint32_t u32 ELEMENT;
typedef uint64_t u64 ELEMENT;

typedef void Fold(void *into, const void *other, size_t elements);     /* into = into op other */
typedef void Divide(void *into, int64_t divisor, size_t elements);     /* into = into / divisor */
typedef void Widen(float *into, const void *halves, size_t elements);  /* exact */
typedef void Narrow(void *halves, const float *from, size_t elements); /* rounds to nearest, ties to even */

/* A block of the result and one of an operand fit into any L1 cache, and the loop over a block is worth its call. */
enum { BLOCK_BYTES = 4096 };

static void reduce_blocks(Fold *fold, Divide *divide, size_t size, void *into, void *const *arrays, int count,
                          size_t elements, int64_t divisor)
{
    const size_t block = BLOCK_BYTES / size;
    for (size_t first = 0; first < elements; first += block) {
        size_t length = elements - first < block ? elements - first : block, offset = first * size;
        char *target = (char *)into + offset;
        /* The first operand is copied, and the others are folded into it: so the order of the operands is that of
         * the ranks, and all ranks have the same bits. */
        if (into != arrays[0])
            memcpy(target, (const char *)arrays[0] + offset, length * size);
        for (int i = 1; i < count; i++)
            fold(target, (const char *)arrays[i] + offset, length);
        if (divisor != 1 && divide)
            divide(target, divisor, length);
    }
}

/* Half types are reduced in float32 and rounded once. */
static void reduce_halves(Widen *widen, Fold *fold, Divide *divide, Narrow *narrow, void *into, void *const *arrays,
                          int count, size_t elements, int64_t divisor)
{
    enum { BLOCK = BLOCK_BYTES / sizeof(float) };
    /* On the stack: a reduction runs without the GIL, in several threads at once. */
    float total[BLOCK], other[BLOCK];
    for (size_t first = 0; first < elements; first += BLOCK) {
        size_t length = elements - first < BLOCK ? elements - first : BLOCK;
        widen(total, (const u16 *)arrays[0] + first, length);
        for (int i = 1; i < count; i++) {
            widen(other, (const u16 *)arrays[i] + first, length);
            fold(total, other, length);
        }
        if (divisor != 1)
            divide(total, divisor, length);
        narrow((u16 *)into + first, total, length);
    }
}

/* -- loops ------------------------------------------------------------------------------------ */

/* Defines `fold_NAME`, which sets each a to EXPRESSION of a and b, and the kernel `NAME` of it. TARGET is empty or
 * an attribute of the functions. */
#define DEFINE_LOOP(NAME, TARGET, TYPE, DIVIDE, EXPRESSION)                                                            \
    TARGET static void fold_##NAME(void *into, const void *other, size_t elements)                                     \
    {                                                                                                                  \
        TYPE *x = into;                                                                                                \
        const TYPE *y = other;                                                                                         \
        for (size_t i = 0; i < elements; i++) {                                                                        \
            const TYPE a = x[i], b = y[i];                                                                             \
            x[i] = (TYPE)(EXPRESSION);                                                                                 \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME(void *into, void *const *arrays, int count, size_t elements, int64_t divisor)                     \
    {                                                                                                                  \
        reduce_blocks(fold_##NAME, DIVIDE, sizeof(TYPE), into, arrays, count, elements, divisor);                      \
    }

#define DEFINE_DIVISION(NAME, TARGET, TYPE)                                                                            \
    TARGET static void NAME(void *into, int64_t divisor, size_t elements)                                              \
    {                                                                                                                  \
        TYPE *x = into;                                                                                                \
        const TYPE by = (TYPE)divisor;                                                                                 \
        for (size_t i = 0; i < elements; i++)                                                                          \
            x[i] /= by;                                                                                                \
    }

#define DEFINE_HALF(NAME, FOLD, DIVIDE, WIDEN, NARROW)                                                                 \
    static void NAME(void *into, void *const *arrays, int count, size_t elements, int64_t divisor)                     \
    {                                                                                                                  \
        reduce_halves(WIDEN, FOLD, DIVIDE, NARROW, into, arrays, count, elements, divisor);                            \
    }

#if HAS_WIDE
#define DEFINE_LOOPS(NAME, TYPE, DIVIDE, EXPRESSION)                                                                   \
    DEFINE_LOOP(NAME, , TYPE, DIVIDE, EXPRESSION)                                                                      \
    DEFINE_LOOP(NAME##_wide, WIDE_TARGET, TYPE, DIVIDE, EXPRESSION)
#else
#define DEFINE_LOOPS(NAME, TYPE, DIVIDE, EXPRESSION) DEFINE_LOOP(NAME, , TYPE, DIVIDE, EXPRESSION)
#endif

DEFINE_DIVISION(divide_f64, , f64)
DEFINE_DIVISION(divide_f32, , f32)

/* Integers wrap around: their sums and products are those of unsigned ones. */
DEFINE_LOOPS(sum_f64, f64, divide_f64, a + b)
DEFINE_LOOPS(sum_f32, f32, divide_f32, a + b)
DEFINE_LOOPS(sum_u8, u8, NULL, a + b)
DEFINE_LOOPS(sum_u16, u16, NULL, a + b)
DEFINE_LOOPS(sum_u32, u32, NULL, a + b)
DEFINE_LOOPS(sum_u64, u64, NULL, a + b)

DEFINE_LOOPS(prod_f64, f64, NULL, (a * b))
DEFINE_LOOPS(prod_f32, f32, NULL, (a * b))
DEFINE_LOOPS(prod_u8, u8, NULL, (a * b))
DEFINE_LOOPS(prod_u16, u16, NULL, ((u32)a * b)) /* the product of two uint16 overflows int */
DEFINE_LOOPS(prod_u32, u32, NULL, (a * b))
DEFINE_LOOPS(prod_u64, u64, NULL, (a * b))

/* numpy on x86: the first operand if it is NaN, otherwise the second if that is NaN or equal (+0 and -0 are). */
DEFINE_LOOPS(min_f64, f64, NULL, a < b || a != a ? a : b)
DEFINE_LOOPS(min_f32, f32, NULL, a < b || a != a ? a : b)
DEFINE_LOOPS(min_i8, i8, NULL, a < b ? a : b)
DEFINE_LOOPS(min_i16, i16, NULL, a < b ? a : b)
DEFINE_LOOPS(min_i32, i32, NULL, a < b ? a : b)
DEFINE_LOOPS(min_i64, i64, NULL, a < b ? a : b)
DEFINE_LOOPS(min_u8, u8, NULL, a < b ? a : b)
DEFINE_LOOPS(min_u16, u16, NULL, a < b ? a : b)
DEFINE_LOOPS(min_u32, u32, NULL, a < b ? a : b)
DEFINE_LOOPS(min_u64, u64, NULL, a < b ? a : b)

DEFINE_LOOPS(max_f64, f64, NULL, a > b || a != a ? a : b)
DEFINE_LOOPS(max_f32, f32, NULL, a > b || a != a ? a : b)
DEFINE_LOOPS(max_i8, i8, NULL, a > b ? a : b)
DEFINE_LOOPS(max_i16, i16, NULL, a > b ? a : b)
DEFINE_LOOPS(max_i32, i32, NULL, a > b ? a : b)
DEFINE_LOOPS(max_i64, i64, NULL, a > b ? a : b)
DEFINE_LOOPS(max_u8, u8, NULL, a > b ? a : b)
DEFINE_LOOPS(max_u16, u16, NULL, a > b ? a : b)
DEFINE_LOOPS(max_u32, u32, NULL, a > b ? a : b)
DEFINE_LOOPS(max_u64, u64, NULL, a > b ? a : b)

DEFINE_LOOPS(and_u8, u8, NULL, (a & b))
DEFINE_LOOPS(and_u16, u16, NULL, (a & b))
DEFINE_LOOPS(and_u32, u32, NULL, (a & b))
DEFINE_LOOPS(and_u64, u64, NULL, (a & b))
DEFINE_LOOPS(or_u8, u8, NULL, a | b)
DEFINE_LOOPS(or_u16, u16, NULL, a | b)
DEFINE_LOOPS(or_u32, u32, NULL, a | b)
DEFINE_LOOPS(or_u64, u64, NULL, a | b)
DEFINE_LOOPS(xor_u8, u8, NULL, a ^ b)
DEFINE_LOOPS(xor_u16, u16, NULL, a ^ b)
DEFINE_LOOPS(xor_u32, u32, NULL, a ^ b)
DEFINE_LOOPS(xor_u64, u64, NULL, a ^ b)

/* -- half types ------------------------------------------------------------------------------- */

enum {
    SIGN = 0x80000000,     /* of the bits of a float32 */
    INFINITE = 0x7F800000, /* greater magnitudes are NaN */
};

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float value_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline __attribute__((always_inline)) void widen_bf16_as(float *into, const void *halves, size_t elements)
{
    const u16 *from = halves;
    u32 *to = (u32 *)into;
    for (size_t i = 0; i < elements; i++)
        to[i] = (uint32_t)from[i] << 16;
}

/* `nan` is what torch writes for any NaN; it depends on the processor. */
static inline __attribute__((always_inline)) void narrow_bf16_as(void *halves, const float *from, size_t elements,
                                                                 uint32_t nan)
{
    const u32 *bits = (const u32 *)from;
    u16 *to = halves;
    for (size_t i = 0; i < elements; i++) {
        uint32_t rounded = (bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((int32_t)(bits[i] & ~SIGN) > INFINITE ? nan : rounded);
    }
}

static void widen_bf16(float *into, const void *halves, size_t elements)
{
    widen_bf16_as(into, halves, elements);
}

static void narrow_bf16(void *halves, const float *from, size_t elements)
{
    narrow_bf16_as(halves, from, elements, 0x7FC0);
}

#if defined(__aarch64__)

typedef __fp16 f16 ELEMENT; /* the processor converts it */

static void widen_f16(float *into, const void *halves, size_t elements)
{
    const f16 *from = halves;
    for (size_t i = 0; i < elements; i++)
        into[i] = from[i];
}

static void narrow_f16(void *halves, const float *from, size_t elements)
{
    f16 *to = halves;
    for (size_t i = 0; i < elements; i++)
        to[i] = (f16)from[i];
}

#else

/* A NaN becomes quiet and keeps its sign and payload, also in `half_of`. */
static inline uint32_t bits_of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00)
        return sign | INFINITE | rest << 13 | (rest > 0x7C00 ? 0x400000 : 0);
    if (rest < 0x400)
        return sign | bits_of((float)rest * 0x1p-24f); /* zero and subnormal */
    return sign | (rest + (112 << 10)) << 13;          /* 112: the difference of the biases */
}

static inline uint16_t half_of(uint32_t bits)
{
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & ~SIGN;
    if (rest > INFINITE)
        return (uint16_t)(sign | 0x7E00 | (rest >> 13 & 0x1FF));
    if (rest >= 0x477FF000) /* 65520, which is nearer to 2^16 than to the greatest half */
        return (uint16_t)(sign | 0x7C00);
    if (rest < 0x38800000) /* 2^-14: zero and subnormal. The addition rounds to multiples of 2^-24. */
        return (uint16_t)(sign | (bits_of(value_of(rest) + 0.5f) - bits_of(0.5f)));
    return (uint16_t)(sign | (((rest + 0xFFF + (rest >> 13 & 1)) >> 13) - (112 << 10)));
}

static void widen_f16(float *into, const void *halves, size_t elements)
{
    const u16 *from = halves;
    for (size_t i = 0; i < elements; i++)
        into[i] = value_of(bits_of_half(from[i]));
}

static void narrow_f16(void *halves, const float *from, size_t elements)
{
    u16 *to = halves;
    for (size_t i = 0; i < elements; i++)
        to[i] = half_of(bits_of(from[i]));
}

#endif

DEFINE_HALF(sum_bf16, fold_sum_f32, divide_f32, widen_bf16, narrow_bf16)
DEFINE_HALF(prod_bf16, fold_prod_f32, divide_f32, widen_bf16, narrow_bf16)
DEFINE_HALF(min_bf16, fold_min_f32, divide_f32, widen_bf16, narrow_bf16)
DEFINE_HALF(max_bf16, fold_max_f32, divide_f32, widen_bf16, narrow_bf16)
DEFINE_HALF(sum_f16, fold_sum_f32, divide_f32, widen_f16, narrow_f16)
DEFINE_HALF(prod_f16, fold_prod_f32, divide_f32, widen_f16, narrow_f16)
DEFINE_HALF(min_f16, fold_min_f32, divide_f32, widen_f16, narrow_f16)
DEFINE_HALF(max_f16, fold_max_f32, divide_f32, widen_f16, narrow_f16)

#if HAS_WIDE

WIDE_TARGET static void widen_bf16_wide(float *into, const void *halves, size_t elements)
{
    widen_bf16_as(into, halves, elements);
}

WIDE_TARGET static void narrow_bf16_wide(void *halves, const float *from, size_t elements)
{
    narrow_bf16_as(halves, from, elements, 0xFFFF);
}

WIDE_TARGET static void widen_f16_wide(float *into, const void *halves, size_t elements)
{
    const u16 *from = halves;
    size_t i = 0;
    for (; i + 8 <= elements; i += 8)
        _mm256_storeu_ps(into + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < elements; i++)
        into[i] = _cvtsh_ss(from[i]);
}

WIDE_TARGET static void narrow_f16_wide(void *halves, const float *from, size_t elements)
{
    u16 *to = halves;
    size_t i = 0;
    for (; i + 8 <= elements; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < elements; i++)
        to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

DEFINE_HALF(sum_bf16_wide, fold_sum_f32_wide, divide_f32, widen_bf16_wide, narrow_bf16_wide)
DEFINE_HALF(prod_bf16_wide, fold_prod_f32_wide, divide_f32, widen_bf16_wide, narrow_bf16_wide)
DEFINE_HALF(min_bf16_wide, fold_min_f32_wide, divide_f32, widen_bf16_wide, narrow_bf16_wide)
DEFINE_HALF(max_bf16_wide, fold_max_f32_wide, divide_f32, widen_bf16_wide, narrow_bf16_wide)
DEFINE_HALF(sum_f16_wide, fold_sum_f32_wide, divide_f32, widen_f16_wide, narrow_f16_wide)
DEFINE_HALF(prod_f16_wide, fold_prod_f32_wide, divide_f32, widen_f16_wide, narrow_f16_wide)
DEFINE_HALF(min_f16_wide, fold_min_f32_wide, divide_f32, widen_f16_wide, narrow_f16_wide)
DEFINE_HALF(max_f16_wide, fold_max_f32_wide, divide_f32, widen_f16_wide, narrow_f16_wide)

#endif

/* -- the table -------------------------------------------------------------------------------- */

typedef struct {
    const char *dtype; /* its name in asyncoll/tensors/reductions.py */
    size_t size;       /* bytes of an element */
    const char *op;    /* the value of a ReduceOp */
    Kernel portable;
    Kernel wide; /* for processors with AVX2 and F16C; NULL if it has not been compiled */
} Entry;

#if HAS_WIDE
#define BOTH(NAME) NAME, NAME##_wide
#else
#define BOTH(NAME) NAME, NULL
#endif

// clang-format off: it takes the rows of the table for blocks
#define FLOAT_ENTRIES(DTYPE, SIZE, SHORT)                                                                              \
    {DTYPE, SIZE, "sum", BOTH(sum_##SHORT)}, {DTYPE, SIZE, "avg", BOTH(sum_##SHORT)},                                  \
    {DTYPE, SIZE, "avg_active", BOTH(sum_##SHORT)}, {DTYPE, SIZE, "prod", BOTH(prod_##SHORT)},                         \
    {DTYPE, SIZE, "min", BOTH(min_##SHORT)}, {DTYPE, SIZE, "max", BOTH(max_##SHORT)}

/* SHORT has the sign of the dtype; BITS is the unsigned type of its size. */
#define INTEGER_ENTRIES(DTYPE, SIZE, SHORT, BITS)                                                                      \
    {DTYPE, SIZE, "sum", BOTH(sum_##BITS)}, {DTYPE, SIZE, "prod", BOTH(prod_##BITS)},                                  \
    {DTYPE, SIZE, "min", BOTH(min_##SHORT)}, {DTYPE, SIZE, "max", BOTH(max_##SHORT)},                                  \
    {DTYPE, SIZE, "band", BOTH(and_##BITS)}, {DTYPE, SIZE, "bor", BOTH(or_##BITS)},                                    \
    {DTYPE, SIZE, "bxor", BOTH(xor_##BITS)}
// clang-format on

static const Entry entries[] = {
    FLOAT_ENTRIES("float64", 8, f64),
    FLOAT_ENTRIES("float32", 4, f32),
    FLOAT_ENTRIES("float16", 2, f16),
    FLOAT_ENTRIES("bfloat16", 2, bf16),
    INTEGER_ENTRIES("int8", 1, i8, u8),
    INTEGER_ENTRIES("int16", 2, i16, u16),
    INTEGER_ENTRIES("int32", 4, i32, u32),
    INTEGER_ENTRIES("int64", 8, i64, u64),
    INTEGER_ENTRIES("uint8", 1, u8, u8),
    INTEGER_ENTRIES("uint16", 2, u16, u16),
    INTEGER_ENTRIES("uint32", 4, u32, u32),
    INTEGER_ENTRIES("uint64", 8, u64, u64),
    /* A bool is a byte of 0 or 1. */
    {"bool", 1, "sum", BOTH(or_u8)},
    {"bool", 1, "prod", BOTH(and_u8)},
    {"bool", 1, "min", BOTH(and_u8)},
    {"bool", 1, "max", BOTH(or_u8)},
    {"bool", 1, "band", BOTH(and_u8)},
    {"bool", 1, "bor", BOTH(or_u8)},
    {"bool", 1, "bxor", BOTH(xor_u8)},
};

enum { ENTRIES = sizeof entries / sizeof entries[0] };

static bool is_wide(void)
{
#if HAS_WIDE
    /* One wheel runs on all processors of an architecture. */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

/* Numbers are those of the entries from 1; those of portable kernels follow. 0 is none. */
static int number_of(const char *op, const char *dtype, bool portable)
{
    for (int i = 0; i < ENTRIES; i++)
        if (strcmp(entries[i].op, op) == 0 && strcmp(entries[i].dtype, dtype) == 0)
            return 1 + i + (portable || !is_wide() ? ENTRIES : 0);
    return 0;
}

Kernel kernel_at(int number)
{
    if (number < 1 || number > 2 * ENTRIES)
        return NULL;
    return number <= ENTRIES ? entries[number - 1].wide : entries[number - 1 - ENTRIES].portable;
}

size_t kernel_element_size(int number)
{
    return kernel_at(number) ? entries[(number - 1) % ENTRIES].size : 0;
}

void reduce_to_all(Kernel kernel, size_t element, void **arrays, int count, size_t bytes, int64_t divisor)
{
    while (bytes) {
        size_t length = bytes < BLOCK_BYTES ? bytes : BLOCK_BYTES;
        kernel(arrays[0], arrays, count, length / element, divisor);
        for (int i = 1; i < count; i++)
            memcpy(arrays[i], arrays[0], length);
        for (int i = 0; i < count; i++)
            arrays[i] = (char *)arrays[i] + length;
        bytes -= length;
    }
}

/* -- in Python -------------------------------------------------------------------------------- */

PyObject *find_kernel_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    const char *op, *dtype;
    int portable = 0;
    if (!PyArg_ParseTuple(arguments, "ss|p:find_kernel", &op, &dtype, &portable))
        return NULL;
    return PyLong_FromLong(number_of(op, dtype, portable));
}

/* The buffers of `into` and of the arrays, held during a reduction. */
typedef struct {
    Py_buffer into;
    Py_buffer *views;
    void **addresses;
    int count; /* of `views` that are held */
} Operands;

static void release(Operands *operands)
{
    while (operands->count)
        PyBuffer_Release(&operands->views[--operands->count]);
    PyMem_Free(operands->views);
    PyMem_Free(operands->addresses);
    PyBuffer_Release(&operands->into);
}

/* Hold `arrays`, as buffers with `flags`. Returns 0, or -1 with an exception set. */
static int hold(Operands *operands, PyObject *arrays, int flags)
{
    Py_ssize_t count = PySequence_Size(arrays);
    if (count < 0)
        return -1;
    if (count < 1 || count > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "there must be at least one array");
        return -1;
    }
    operands->views = PyMem_Calloc(count, sizeof *operands->views);
    operands->addresses = PyMem_Calloc(count, sizeof *operands->addresses);
    if (!operands->views || !operands->addresses) {
        PyErr_NoMemory();
        return -1;
    }
    while (operands->count < count) {
        PyObject *array = PySequence_GetItem(arrays, operands->count);
        Py_buffer *view = &operands->views[operands->count];
        int failed = array ? PyObject_GetBuffer(array, view, flags) : -1;
        Py_XDECREF(array);
        if (failed)
            return -1;
        operands->addresses[operands->count++] = view->buf;
        if (view->len != operands->into.len) {
            PyErr_SetString(PyExc_ValueError, "the arrays must have the same size");
            return -1;
        }
    }
    return 0;
}

/* Whether the reduction is one that the operands, which are held, allow. Otherwise an exception is set. */
static bool is_sound(const Operands *operands, int kernel, int64_t divisor)
{
    if (!kernel_at(kernel) || divisor < 1) {
        PyErr_SetString(PyExc_ValueError, "the kernel is unknown, or the divisor is not positive");
        return false;
    }
    if (operands->into.len % kernel_element_size(kernel)) {
        PyErr_SetString(PyExc_ValueError, "the arrays must consist of whole elements");
        return false;
    }
    return true;
}

/* Reduce into `into`, or into all arrays. */
static PyObject *reduce_held(Operands *operands, int kernel, int64_t divisor, bool to_all)
{
    bool is_long = operands->into.len > LONG_BYTES / operands->count;
    size_t element = kernel_element_size(kernel), bytes = (size_t)operands->into.len;
    PyThreadState *state = is_long ? PyEval_SaveThread() : NULL;
    if (to_all)
        reduce_to_all(kernel_at(kernel), element, operands->addresses, operands->count, bytes, divisor);
    else
        kernel_at(kernel)(operands->into.buf, operands->addresses, operands->count, bytes / element, divisor);
    pass_point(REDUCTION_DONE);
    if (state)
        PyEval_RestoreThread(state);
    return Py_NewRef(Py_None);
}

PyObject *reduce_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    Operands operands = {0};
    PyObject *into, *arrays, *result = NULL;
    long long divisor;
    int kernel;
    if (!PyArg_ParseTuple(arguments, "iOOL:reduce", &kernel, &into, &arrays, &divisor) ||
        PyObject_GetBuffer(into, &operands.into, PyBUF_WRITABLE) < 0)
        return NULL;
    if (hold(&operands, arrays, PyBUF_SIMPLE) == 0 && is_sound(&operands, kernel, divisor))
        result = reduce_held(&operands, kernel, divisor, false);
    release(&operands);
    return result;
}

PyObject *reduce_to_all_in_python(PyObject *module, PyObject *arguments)
{
    (void)module;
    Operands operands = {0};
    PyObject *arrays, *result = NULL;
    long long divisor;
    int kernel;
    if (!PyArg_ParseTuple(arguments, "iOL:reduce_to_all", &kernel, &arrays, &divisor))
        return NULL;
    PyObject *first = PySequence_GetItem(arrays, 0);
    int failed = first ? PyObject_GetBuffer(first, &operands.into, PyBUF_WRITABLE) : -1;
    Py_XDECREF(first);
    if (failed)
        return NULL;
    if (hold(&operands, arrays, PyBUF_WRITABLE) == 0 && is_sound(&operands, kernel, divisor))
        result = reduce_held(&operands, kernel, divisor, true);
    release(&operands);
    return result;
}
