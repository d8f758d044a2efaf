/* Conversions between number types, and products of few rows with a packed matrix by several threads. */
#ifndef KERNELS_H
#define KERNELS_H
#include <math.h>
#include <sched.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "numbers.h"

typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, BFLOAT16_PAIRS };

typedef struct {
    long type, outputs, inputs;
    const void *weight;
    const float *scale; /* [outputs], of int8 */
    const float *bias;  /* [outputs] or NULL */
} Matrix;

/* ---- numbers of one type ---- */

INLINE float half(uint16_t bits) {
#ifdef __F16C__
    return _cvtsh_ss(bits);
#else
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, word;
    float value;
    if (rest >= 0x7c00) word = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) word = sign | ((rest << 13) + 0x38000000);
    else { value = (float)rest * 0x1p-24f; return sign ? -value : value; }
    memcpy(&value, &word, 4);
    return value;
#endif
}

INLINE uint16_t to_half(float value) {
#ifdef __F16C__
    return _cvtss_sh(value, 0);
#else
    uint32_t word;
    memcpy(&word, &value, 4);
    uint32_t sign = word >> 16 & 0x8000, rest = word & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;
    if (rest >= 0x477ff000) return sign | 0x7c00;
    if (rest < 0x38800000) return sign | (uint16_t)rintf(fabsf(value) * 0x1p24f);
    rest += 0xfff + (rest >> 13 & 1);
    return sign | (rest - 0x38000000) >> 13;
#endif
}

INLINE float get(int type, const void *from, long i) {
    if (type == FLOAT32) return ((const float *)from)[i];
    if (type == FLOAT16) return half(((const uint16_t *)from)[i]);
    uint32_t word = (uint32_t)((const uint16_t *)from)[i] << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

INLINE uint16_t to_bfloat16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7fffffff) > 0x7f800000) return word >> 16 | 0x40;
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

INLINE void put(int type, void *to, long i, float value) {
    if (type == FLOAT32) ((float *)to)[i] = value;
    else ((uint16_t *)to)[i] = type == FLOAT16 ? to_half(value) : to_bfloat16(value);
}

/* LANES weights; of bfloat16 the even or odd ones of LANES pairs */
INLINE floats weights(int type, const void *from, int odd) {
    if (type == FLOAT32) return *(const floats *)from;
    if (type == BFLOAT16) {
        ints pairs = *(const ints *)from;
        return (floats)(odd ? pairs & (int32_t)0xffff0000 : pairs << 16);
    }
#ifdef __AVX512F__
    if (type == INT8) return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__) && defined(__F16C__)
    /* GCC 12 converts these vectors number by number. */
    if (type == INT8) return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    if (type == INT8) return __builtin_convertvector(__builtin_convertvector(*(const bytes *)from, ints), floats);
    floats result;
    for (int i = 0; i < LANES; i++) result[i] = half(((const uint16_t *)from)[i]);
    return result;
#endif
}

/* e to the x; 0 for -inf */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * LOG2_E);
    float r = LN2_REST(x, n), p = EXPONENTIAL_SERIES(r);
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x <= -87.0f ? 0.0f : p * power;
}

/* ---- matrix products ---- */

/* Whether products of bfloat16 pairs take one instruction, for which inputs are rounded to bfloat16. On an Intel Xeon
 * (family 6, model 207) it does half as many multiplications as float32 (84 and 166 GFLOP/s); on AMD's Zen 4 torch's
 * products of bfloat16 are the faster ones, and this instruction was not measured apart. */
#if !defined(__AVX512BF16__)
#define PAIRED 0
#elif !defined(PAIRED)
#define PAIRED __builtin_cpu_is("amd")
#endif

/* How many of the rows that are left a product takes at once. Registers limit it: each holds LANES sums. */
INLINE long group(long rows) {
#ifdef __AVX512F__
    return rows >= 16 ? 16 : rows >= 8 ? 8 : rows >= 4 ? 4 : 1;
#else
    return rows >= 4 ? 4 : 1;
#endif
}

/* Bytes of the LANES weights of a panel that multiply one input, or two of bfloat16 */
INLINE long step_size(int type) { return LANES * (type == INT8 ? 1 : type == FLOAT16 ? 2 : 4); }

/* ROWS rows of x times BLOCKS panels: float32 [ROWS, BLOCKS * LANES], before scale and bias. x: [K, ROWS], so that a
 * step reads adjacent numbers: float32, or pairs of bfloat16 along K. */
INLINE void tile(int type, int paired, int ROWS, int BLOCKS, const char *weight, long inputs, const void *x, floats *out) {
    floats sum[16];
    const long steps = type == BFLOAT16 ? (inputs + 1) / 2 : inputs;
    const long size = step_size(type), panel = steps * size;
    const float *input = x;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * BLOCKS; i++) sum[i] = (floats){0};
    for (long k = 0; k < steps; k++) {
#pragma GCC unroll 8
        for (int j = 0; j < BLOCKS; j++) {
            const char *w = weight + j * panel + k * size;
            __builtin_prefetch(w + BLOCKS * panel, 0, 2); /* for the next panels */
#ifdef __AVX512BF16__
            if (paired) {
                __m512bh pairs = (__m512bh)_mm512_loadu_si512(w);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
                    sum[r * BLOCKS + j] = (floats)_mm512_dpbf16_ps(
                        (__m512)sum[r * BLOCKS + j], pairs,
                        (__m512bh)_mm512_set1_epi32(((const int32_t *)x)[k * ROWS + r]));
                continue;
            }
#endif
            if (type == BFLOAT16) {
                floats even = weights(type, w, 0), odd = weights(type, w, 1);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) sum[r * BLOCKS + j] += even * input[2 * k * ROWS + r];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) sum[r * BLOCKS + j] += odd * input[(2 * k + 1) * ROWS + r];
            } else {
                floats own = weights(type, w, 0);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) sum[r * BLOCKS + j] += own * input[k * ROWS + r];
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * BLOCKS; i++) out[i] = sum[i];
}

static __attribute__((noinline)) void finish(const Matrix *m, const float *bias, long rows, long panels, long first,
                                             const floats *sums, float *y, long stride, int add) {
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < panels; j++) {
            long start = (first + j) * LANES, count = least(LANES, m->outputs - start);
            float *to = y + r * stride + start;
            floats value = sums[r * panels + j];
            if (count == LANES) {
                if (m->scale) value *= *(const floats *)(m->scale + start);
                if (bias) value += *(const floats *)(bias + start);
                if (add) value += *(const floats *)to;
                *(floats *)to = value;
                continue;
            }
            for (long i = 0; i < count; i++)
                to[i] = value[i] * (m->scale ? m->scale[start + i] : 1) + (bias ? bias[start + i] : 0) + (add ? to[i] : 0);
        }
}

/* rows [row, row + ROWS) times the panels [panel, stop), BLOCKS at a time */
#define TILE(ROWS, BLOCKS)                                                                                       \
    for (; panel + BLOCKS <= stop; panel += BLOCKS) {                                                            \
        floats sums[ROWS * BLOCKS];                                                                              \
        tile(type, paired, ROWS, BLOCKS, (const char *)m->weight + panel * size, m->inputs, input, sums);        \
        finish(m, bias, ROWS, BLOCKS, panel, sums, y + row * y_stride, y_stride, add);                           \
    }

INLINE void product_of(int type, int paired, const Matrix *m, const float *bias, const float *x, long rows, long first,
                       long end, float *y, long y_stride, int add) {
    const long even = (m->inputs + 1) & ~1L, steps = type == BFLOAT16 ? even / 2 : m->inputs;
    const long size = steps * step_size(type);
    for (long begin = first, stop; begin < end; begin = stop) {
        stop = least(end, begin + 8); /* stay in the cache for all rows */
        for (long row = 0, count; row < rows; row += count) {
            const float *input = x + row * even;
            long panel = begin;
            count = group(rows - row);
#ifdef __AVX512F__
            if (count == 16) TILE(16, 1)
            if (count == 8) TILE(8, 2)
            if (count == 8) TILE(8, 1)
            if (count == 4) TILE(4, 4)
            if (count == 1) TILE(1, 8)
#else
            if (count == 4) TILE(4, 2)
            if (count == 1) TILE(1, 8)
#endif
            if (count == 4) TILE(4, 1)
            if (count == 1) TILE(1, 1)
        }
    }
}

#ifdef __AVX512F__
/* Of two vectors, those halves of each group of 2 * half lanes that are first, or second, in it: a's, then b's. */
INLINE floats crossed(floats a, floats b, int half, int second) {
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const ints other = -((lane & half) != 0) * (16 - half); /* indices from 16 on are those of the second vector */
    return (floats)_mm512_permutex2var_ps((__m512)a, (__m512i)(lane + other + second * half), (__m512)b);
}

/* Columns of 16 rows of x as rows of 16 numbers. Element by element this took an eighth of the time of the products. */
INLINE void transpose(const float *x, long stride, float *to) {
    floats line[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) line[i] = *(const floats *)(x + i * stride);
#pragma GCC unroll 4
    for (int half = 8; half; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & half) continue;
            const floats first = crossed(line[i], line[i + half], half, 0);
            line[i + half] = crossed(line[i], line[i + half], half, 1);
            line[i] = first;
        }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) *(floats *)(to + i * 16) = line[i];
}
#endif

/* Copy x [rows, stride] for products: each group of rows as [K, rows of the group], K even. */
static void arrange(int paired, const float *x, long stride, long rows, long inputs, float *to) {
    const long even = (inputs + 1) & ~1L;
    for (long row = 0, count; row < rows; row += count, to += count * even) {
        count = group(rows - row);
        uint16_t *pairs = (uint16_t *)to;
        long done = 0;
#ifdef __AVX512F__
        for (; count == 16 && !paired && done + 16 <= inputs; done += 16)
            transpose(x + row * stride + done, stride, to + done * 16);
#endif
        for (long r = 0; r < count; r++) {
            const float *from = x + (row + r) * stride;
            if (paired) {
                for (long k = 0; k < inputs; k++) pairs[(k / 2 * count + r) * 2 + k % 2] = to_bfloat16(from[k]);
                if (even != inputs) pairs[(inputs / 2 * count + r) * 2 + 1] = 0;
            } else {
                for (long k = done; k < inputs; k++) to[k * count + r] = from[k];
                if (even != inputs) to[inputs * count + r] = 0;
            }
        }
    }
}

/* y (+)= x Wᵀ + bias for the panels first ... end - 1; x as arranged. One function per type, each compiled for it. */
#define PRODUCT(NAME, TYPE, PAIRS)                                                                                \
    static void NAME(const Matrix *m, const float *bias, const float *x, long rows, long first, long end, float *y, \
                     long y_stride, int add) {                                                                     \
        product_of(TYPE, PAIRS, m, bias, x, rows, first, end, y, y_stride, add);                                   \
    }
PRODUCT(product_float32, FLOAT32, 0)
PRODUCT(product_bfloat16, BFLOAT16, 0)
PRODUCT(product_float16, FLOAT16, 0)
PRODUCT(product_int8, INT8, 0)
PRODUCT(product_pairs, BFLOAT16, 1)

typedef void (*Product)(const Matrix *, const float *, const float *, long, long, long, float *, long, int);
static const Product PRODUCTS[] = {product_float32, product_bfloat16, product_float16, product_int8, product_pairs};

/* ---- threads ---- */

typedef struct {
    int arrived, turn;
} Barrier;

typedef struct {
    long number, count; /* of this thread, and of all */
    Barrier *barrier;
    float *normed;      /* [rows, C] */
    float *arranged;    /* inputs of a product: [rows, widest] */
    float *scores;      /* [S + LANES] */
} Worker;

/* Of the running thread of a parallel region. */
INLINE Worker this_worker(Barrier *barrier) {
    Worker worker = {0, 1, barrier, NULL, NULL, NULL};
#ifdef _OPENMP
    worker.number = omp_get_thread_num();
    worker.count = omp_get_num_threads();
#endif
    return worker;
}

/* Barrier. After some microseconds of spinning it yields the core, which other workers may need on a busy machine. */
static void wait_for_all(const Worker *worker) {
    Barrier *barrier = worker->barrier;
    if (worker->count == 1) return;
    int turn = __atomic_load_n(&barrier->turn, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == worker->count) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->turn, turn + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int i = 0; __atomic_load_n(&barrier->turn, __ATOMIC_ACQUIRE) == turn; i++)
        if (i > 20000) sched_yield();
}

/* y (+)= x Wᵀ + bias; this worker's share of the outputs */
static void multiply(const Worker *worker, const Matrix *m, const float *bias, const float *x, long stride, long rows,
                     float *y, long y_stride, int add) {
    long panels = (m->outputs + LANES - 1) / LANES;
    long first = panels * worker->number / worker->count, end = panels * (worker->number + 1) / worker->count;
    if (first == end) return;
    const int paired = m->type == BFLOAT16 && PAIRED;
    arrange(paired, x, stride, rows, m->inputs, worker->arranged);
    PRODUCTS[paired ? BFLOAT16_PAIRS : m->type](m, bias, worker->arranged, rows, first, end, y, y_stride, add);
}

#endif
