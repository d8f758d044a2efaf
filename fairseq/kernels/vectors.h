/* LANES numbers at a time, as kernels read and write them: float32 and bfloat16, and masks of dropout. */
#ifndef VECTORS_H
#define VECTORS_H
#include <math.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "numbers.h"

#if LANES == 16
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define STEPS {1, 2, 3, 4, 5, 6, 7, 8}
#elif LANES == 8
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define STEPS {1, 2, 3, 4}
#else
#define NUMBERS {0, 1, 2, 3}
#define STEPS {1, 2}
#endif

enum { FLOAT32, BFLOAT16 };
INLINE long size_of(int type) { return type == FLOAT32 ? 4 : 2; }

typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint64_t longs __attribute__((vector_size(4 * LANES)));
/* Of any type in memory, at any address. Not memcpy: for it GCC keeps vectors in memory, unless they have 64 bytes. */
typedef uint32_t words_there __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t halves_there __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

/* ---- LANES numbers at a time; count may be less at the end of a row ---- */

INLINE floats all(float value) { return value - (floats){0}; }

/* Some of them: lanes, or, where there are masks of them, bits */
#ifdef __AVX512F__
typedef __mmask16 those;
INLINE those above(floats a, floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
INLINE those of_bits(uint32_t bits) { return (those)bits; }
INLINE floats choose(those condition, floats yes, floats no) {
    return (floats)_mm512_mask_mov_ps((__m512)no, condition, (__m512)yes);
}
#else
typedef ints those;
INLINE those above(floats a, floats b) { return a > b; }
INLINE those of_bits(uint32_t bits) {
    const words numbers = NUMBERS;
    return (those)((bits >> numbers & 1) != 0);
}
INLINE floats choose(those condition, floats yes, floats no) {
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}
#endif

INLINE float get(int type, const void *from, long i) {
    if (type == FLOAT32) return ((const float *)from)[i];
    uint32_t word = (uint32_t)((const uint16_t *)from)[i] << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

INLINE shorts to_bfloat16(floats value) {
#ifdef __AVX512BF16__
    return (shorts)_mm512_cvtneps_pbh((__m512)value); /* the same but for numbers below 1.2e-38, which become 0 */
#else
    words bits = (words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
    const words nan = (words)((bits & 0x7fffffff) > 0x7f800000); /* rounding up would make infinity or zero of it */
    return __builtin_convertvector((nan & (bits >> 16 | 0x40)) | (~nan & rounded), shorts);
#endif
}

INLINE words widened(shorts bits) { return __builtin_convertvector(bits, words); }

/* The first bytes at an address, none if there are fewer than one, and zeros after them */
INLINE words some_words(const void *from, long bytes) {
    words result = {0};
    if (bytes >= (long)sizeof result) return *(const words_there *)from;
#ifdef __AVX512BW__
    return (words)_mm512_maskz_loadu_epi8(bytes > 0 ? (1ul << bytes) - 1 : 0, from);
#else
    if (bytes > 0) memcpy(&result, from, (size_t)bytes);
    return result;
#endif
}

INLINE shorts some_halves(const void *from, long bytes) {
    shorts result = {0};
    if (bytes >= (long)sizeof result) return *(const halves_there *)from;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (shorts)_mm256_maskz_loadu_epi8(bytes > 0 ? (uint32_t)((1ul << bytes) - 1) : 0, from);
#else
    if (bytes > 0) memcpy(&result, from, (size_t)bytes);
    return result;
#endif
}

INLINE floats load(int type, const void *from, long first, long count, float rest) {
    floats result;
    if (type == FLOAT32) result = (floats)some_words((const float *)from + first, count * 4);
    else result = (floats)(widened(some_halves((const uint16_t *)from + first, count * 2)) << 16);
    return count >= LANES ? result : choose(of_bits(count > 0 ? (1u << count) - 1 : 0), result, all(rest));
}

INLINE void store(int type, void *to, long first, long count, floats value) {
    if (type == FLOAT32) {
        float *start = (float *)to + first;
        if (count >= LANES) *(words_there *)start = (words)value;
#ifdef __AVX512F__
        else _mm512_mask_storeu_ps(start, (__mmask16)((1u << count) - 1), (__m512)value);
#else
        else memcpy(start, &value, (size_t)count * 4);
#endif
    } else {
        uint16_t *start = (uint16_t *)to + first;
        const shorts bits = to_bfloat16(value);
        if (count >= LANES) *(halves_there *)start = bits;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        else _mm256_mask_storeu_epi16(start, (__mmask16)((1u << count) - 1), (__m256i)bits);
#else
        else memcpy(start, &bits, (size_t)count * 2);
#endif
    }
}

INLINE void put(int type, void *to, long i, float value) { store(type, to, i, 1, all(value)); }

INLINE float sum_of(floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE float largest_of(floats x) {
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* e to the x for x <= 0; 0 for -inf */
INLINE floats exponentials(floats x) {
#ifdef __AVX512F__
    x = (floats)_mm512_max_ps((__m512)all(-104.0f), (__m512)x); /* whose power is 0; NaN stays */
    const floats n = (floats)_mm512_roundscale_ps((__m512)(x * LOG2_E), 0);
    const floats r = LN2_REST(x, n);
    return (floats)_mm512_scalef_ps((__m512)EXPONENTIAL_SERIES(r), (__m512)n);
#else
    const those tiny = above(all(-87.0f), x);
    x = choose(tiny, all(-87.0f), x);
    ints n = __builtin_convertvector(x * LOG2_E - 0.5f, ints);
    floats r = LN2_REST(x, __builtin_convertvector(n, floats)), p = EXPONENTIAL_SERIES(r);
    return choose(tiny, all(0.0f), p * (floats)((n + 127) << 23));
#endif
}

/* For i from FIRST in steps of LANES, with the count of numbers: a constant but at the end, so that loads and stores
   are one instruction each. */
#define EACH(FIRST, END, ...)                              \
    {                                                      \
        long i = FIRST;                                    \
        for (; i + LANES <= (END); i += LANES) {           \
            enum { count = LANES };                        \
            __VA_ARGS__                                    \
        }                                                  \
        if (i < (END)) {                                   \
            const long count = (END) - i;                  \
            __VA_ARGS__                                    \
        }                                                  \
    }

/* CALL for each FROM in steps of STEP, in threads, with T the type of the tensors: a constant */
#define PARALLEL(FROM, END, STEP, CALL)                                                                  \
    _Pragma("omp parallel for num_threads(threads) schedule(static)") for (long FROM = 0; FROM < END; FROM += STEP) { \
        if (type == FLOAT32) { enum { T = FLOAT32 }; CALL; }                                             \
        else { enum { T = BFLOAT16 }; CALL; }                                                            \
    }

/* ---- masks of dropout: a bit an element, 1 where it is kept; a buffer has 8 bytes more, for whole words ---- */

INLINE those kept(const uint8_t *mask, long first) {
    uint32_t bits;
    memcpy(&bits, mask + first / 8, sizeof bits);
    return of_bits(bits >> first % 8);
}

/* A matrix of LANES rows, transposed: at each step, lanes of pairs of rows change places. */
INLINE void transpose_words(words x[LANES]) {
#ifdef __clang__ /* has no such instruction for lanes that are no constants */
    words y[LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) y[j][i] = x[i][j];
    memcpy(x, y, sizeof y);
#else
    const words lanes = NUMBERS;
#pragma GCC unroll 4
    for (uint32_t step = 1; step < LANES; step *= 2) {
        const words odd = (lanes & step) != 0, even = ~odd;
        const words low = (even & lanes) | (odd & (lanes - step + LANES));
        const words high = (even & (lanes + step)) | (odd & (lanes + LANES));
#pragma GCC unroll 16
        for (uint32_t i = 0; i < LANES; i++) {
            if (i & step) continue;
            const words a = x[i], b = x[i | step];
            x[i] = __builtin_shuffle(a, b, low), x[i | step] = __builtin_shuffle(a, b, high);
        }
    }
#endif
}

#endif
