/* What a training step on a CPU computes between its matrix products, each in one pass over memory.
 *
 * Arithmetic is in float32, longer sums in float64. Types of tensors: 0 float32, 1 bfloat16.
 */
#include <math.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "numbers.h"

#define BLOCK 4096 /* elements between two additions in float64, and of a parallel piece of work */

enum { FLOAT32, BFLOAT16 };

typedef uint32_t words __attribute__((vector_size(64)));
typedef uint64_t longs __attribute__((vector_size(64)));

/* ---- sixteen numbers at a time; count may be less at the end of a row ---- */

INLINE floats all(float value) { return value - (floats){0}; }

INLINE floats choose(ints condition, floats yes, floats no) {
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

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
    ints nan = (ints)((bits & 0x7fffffff) > 0x7f800000); /* rounding up would make infinity or zero of it */
    return __builtin_convertvector((words)choose(nan, (floats)(bits >> 16 | 0x40), (floats)rounded), shorts);
#endif
}

INLINE floats load(int type, const void *from, long first, long count, float rest) {
    floats result = all(rest);
    if (count < LANES)
        for (int i = 0; i < (int)count; i++) result[i] = get(type, from, first + i);
    else if (type == FLOAT32) memcpy(&result, (const float *)from + first, sizeof result);
    else {
        shorts bits;
        memcpy(&bits, (const uint16_t *)from + first, sizeof bits);
        result = (floats)(__builtin_convertvector(bits, words) << 16);
    }
    return result;
}

INLINE void store(int type, void *to, long first, long count, floats value) {
    const size_t some = (size_t)least(LANES, count);
    if (type == FLOAT32) {
        if (count >= LANES) memcpy((float *)to + first, &value, sizeof value);
        else memcpy((float *)to + first, &value, some * 4);
    } else {
        shorts bits = to_bfloat16(value);
        if (count >= LANES) memcpy((uint16_t *)to + first, &bits, sizeof bits);
        else memcpy((uint16_t *)to + first, &bits, some * 2);
    }
}

INLINE void put(int type, void *to, long i, float value) { store(type, to, i, 1, all(value)); }

INLINE float sum_of(floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* e to the x for x <= 0; 0 for -inf */
INLINE floats exponentials(floats x) {
    const ints tiny = x < -87.0f;
    x = choose(tiny, all(-87.0f), x);
    ints n = __builtin_convertvector(x * LOG2_E - 0.5f, ints);
    floats r = LN2_REST(x, __builtin_convertvector(n, floats)), p = EXPONENTIAL_SERIES(r);
    return choose(tiny, all(0.0f), p * (floats)((n + 127) << 23));
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

/* ---- masks of dropout: a bit an element, 1 where it is kept; a buffer has 8 bytes more, for whole words ---- */

INLINE ints kept(const uint8_t *mask, long first) {
    const words powers = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    uint32_t bits;
    memcpy(&bits, mask + first / 8, sizeof bits);
    return (ints)(((bits >> first % 8) & powers) != 0);
}

/* Words first + 1 to first + 8 of SplitMix64's sequence from a seed (Steele, Lea & Flood 2014, "Fast splittable
   pseudorandom number generators"): any of them is computed alone, so that threads share the work. */
INLINE longs random_words(uint64_t seed, long first) {
    const longs steps = {1, 2, 3, 4, 5, 6, 7, 8};
    longs z = seed + (steps + (uint64_t)first) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The mask of count elements: of the 65536 values of sixteen bits of noise, the lowest as signed numbers drop one. */
void draw_mask(uint64_t seed, long dropped, uint8_t *mask, long count, long threads) {
    typedef int16_t signs __attribute__((vector_size(64)));
    typedef int8_t flags __attribute__((vector_size(32)));
    typedef uint8_t bytes __attribute__((vector_size(8)));
    const int16_t lowest = (int16_t)(dropped - 32768);
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (long first = 0; first < count; first += BLOCK)
        for (long i = first; i < least(count, first + BLOCK); i += 64) {
            union {
                flags halves[2];
                longs words;
            } ones;
            for (int half = 0; half < 2; half++) {
                const signs values = (signs)random_words(seed, i / 4 + 8 * half);
                ones.halves[half] = __builtin_convertvector((values >= lowest) & 1, flags);
            }
            /* The product moves the lowest bits of eight bytes into its highest byte. */
            const bytes bits = __builtin_convertvector(ones.words * 0x0102040810204080u >> 56, bytes);
            memcpy(mask + i / 8, &bits, sizeof bits);
        }
}

/* ---- pieces and rows of one type ---- */

enum { PLAIN, ADD, RELU, RELU_GRADIENT };

INLINE void drop_piece(int type, int mode, const void *x, const void *other, void *y, long first, long end,
                       const uint8_t *mask, float scale) {
    EACH(first, end,
        floats value = load(type, x, i, count, 0) * scale;
        if (mode == RELU_GRADIENT) value = choose(load(type, other, i, count, 0) > 0.0f, value, all(0));
        else value = choose(kept(mask, i), value, all(0));
        if (mode == RELU) value = choose(value < 0.0f, all(0), value); /* NaN stays */
        if (mode == ADD) value += load(type, other, i, count, 0);
        store(type, y, i, count, value);
    )
}

/* A row of scores from start on: x, and what is added to it, of which the row begins at moved; visible ones come first,
   and the others are not read beyond the vector of the last one */
typedef struct {
    const void *x, *added; /* added may be NULL */
    long start, moved, visible, end;
} scores;

/* The row of a matrix with so many columns. With a period, the number of queries T, the last query of each T sees all
   columns, the one before it one less, and so on; a row of what is added then begins T - 1 - t columns later (Dai et
   al. 2019, appendix B). */
INLINE scores row_of(const void *x, const void *added, long row, long columns, long period) {
    const long start = row * columns, hidden = period ? period - 1 - row % period : 0, visible = columns - hidden;
    return (scores){x, added, start, start + hidden, visible, least(columns, (visible + LANES - 1) / LANES * LANES)};
}

INLINE floats score(int type, scores row, long i, long count) {
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats value = load(type, row.x, row.start + i, count, 0);
    if (row.added) value += load(type, row.added, row.moved + i, count, 0);
    return i + LANES <= row.visible ? value : choose(lanes < (int)(row.visible - i), value, all(-INFINITY));
}

/* e to the (score - largest) of a row from first on, at most BLOCK of them; returns their sum */
INLINE float exponential_block(int type, scores row, long first, float largest, float *values) {
    floats sum = all(0);
    EACH(first, least(row.end, first + BLOCK),
        floats value = exponentials(score(type, row, i, count) - largest);
        store(FLOAT32, values, i - first, count, value);
        sum += value;
    )
    return sum_of(sum);
}

/* The sum of all e to the (score - largest) of a row; values are those of its last block. */
INLINE double exponential_sum(int type, scores row, float *largest, float *values) {
    floats best = all(-INFINITY);
    EACH(0, row.end,
        floats value = score(type, row, i, count);
        best = choose(value > best, value, best);
    )
    *largest = best[0];
    for (int i = 1; i < LANES; i++) *largest = best[i] > *largest ? best[i] : *largest;
    double total = 0;
    for (long first = 0; first < row.end; first += BLOCK)
        total += exponential_block(type, row, first, *largest, values);
    return total;
}

/* For the blocks of a row, with their exponentials: those of a row of one block are still there. */
#define EACH_EXPONENTIAL(...)                                                                  \
    for (long first = 0; first < row.end; first += BLOCK) {                                    \
        if (row.end > BLOCK) exponential_block(type, row, first, largest, values);             \
        EACH(first, least(row.end, first + BLOCK),                                             \
            floats value = load(FLOAT32, values, i - first, count, 0) * factor;                \
            __VA_ARGS__                                                                        \
        )                                                                                      \
    }

INLINE void clear(int type, void *to, long first, long count) {
    const size_t size = type == FLOAT32 ? 4 : 2;
    memset((char *)to + (size_t)first * size, 0, (size_t)count * size);
}

INLINE void softmax_row(int type, scores row, void *probabilities, void *dropped, long columns, const uint8_t *mask,
                        float scale) {
    float largest, values[BLOCK];
    const float factor = (float)(1 / exponential_sum(type, row, &largest, values));
    EACH_EXPONENTIAL(
        store(type, probabilities, row.start + i, count, value);
        if (dropped)
            store(type, dropped, row.start + i, count, choose(kept(mask, row.start + i), value * scale, all(0)));
    )
    clear(type, probabilities, row.start + row.end, columns - row.end);
    if (dropped) clear(type, dropped, row.start + row.end, columns - row.end);
}

INLINE void softmax_gradient_row(int type, scores row, const void *gradient, void *result, void *added, long columns,
                                 const uint8_t *mask, float scale) {
    floats sums = all(0);
    if (added) clear(type, added, row.start, columns - row.visible);
    for (int pass = 0; pass < 2; pass++) {
        const float sum = sum_of(sums);
        EACH(0, row.end,
            floats own = load(type, gradient, row.start + i, count, 0);
            if (mask) own = choose(kept(mask, row.start + i), own * scale, all(0));
            floats probability = load(type, row.x, row.start + i, count, 0);
            if (pass == 0) sums += own * probability;
            else {
                own = (own - sum) * probability;
                store(type, result, row.start + i, count, own);
                /* Hidden ones would be the next row's. */
                if (added && i + LANES <= row.visible) store(type, added, row.moved + i, LANES, own);
                else if (added) store(type, added, row.moved + i, row.visible - i, own);
            }
        )
    }
    clear(type, result, row.start + row.end, columns - row.end);
}

INLINE double cross_entropy_row(int type, void *x, long number, long columns, long target, int gradient) {
    const scores row = row_of(x, NULL, number, columns, 0);
    float largest, chosen = get(type, x, row.start + target), values[BLOCK];
    const double sum = exponential_sum(type, row, &largest, values);
    const float factor = (float)(1 / sum), rest = (float)(exp((double)chosen - largest) / sum - 1);
    if (gradient) {
        EACH_EXPONENTIAL(store(type, x, row.start + i, count, value);)
        put(type, x, row.start + target, rest);
    }
    return log(sum) + largest - chosen;
}

/* ---- tensors of any type, in threads ---- */

#define PARALLEL(FROM, END, STEP, CALL)                                                                  \
    _Pragma("omp parallel for num_threads(threads) schedule(static)") for (long FROM = 0; FROM < END; FROM += STEP) { \
        if (type == FLOAT32) { enum { T = FLOAT32 }; CALL; }                                             \
        else { enum { T = BFLOAT16 }; CALL; }                                                            \
    }
#define FOR_ROWS(CALL) PARALLEL(row, rows, 1, CALL)
#define FOR_PIECES(MODE) \
    PARALLEL(first, size, BLOCK, drop_piece(T, MODE, x, other, y, first, least(size, first + BLOCK), mask, scale))

/* y [size]: by mode dropout(x), other + dropout(x), dropout(relu(x)), or for that the gradient, with x the gradient of
   the result and other the result; no mask then */
void drop(long type, long mode, const void *x, const void *other, void *y, const uint8_t *mask, float scale, long size,
          long threads) {
    if (mode == PLAIN) FOR_PIECES(PLAIN)
    else if (mode == ADD) FOR_PIECES(ADD)
    else if (mode == RELU) FOR_PIECES(RELU)
    else FOR_PIECES(RELU_GRADIENT)
}

/* probabilities = softmax(x + added), by rows as of row_of, and dropped = dropout(probabilities): [rows, columns];
   dropped with its mask, and added, may be NULL */
void softmax_drop(long type, const void *x, const void *added, void *probabilities, void *dropped, const uint8_t *mask,
                  float scale, long rows, long columns, long period, long threads) {
    FOR_ROWS(softmax_row(T, row_of(x, added, row, columns, period), probabilities, dropped, columns, mask, scale))
}

/* result: the gradient of x, and another of what was added to it, unless that is NULL, from that of what was dropped,
   or, without a mask, of the probabilities; all [rows, columns] */
void softmax_drop_gradient(long type, const void *probabilities, const void *gradient, void *result, void *added,
                           const uint8_t *mask, float scale, long rows, long columns, long period, long threads) {
    FOR_ROWS(softmax_gradient_row(T, row_of(probabilities, NULL, row, columns, period), gradient, result, added,
                                  columns, mask, scale))
}

/* losses [rows] = -log softmax(logits)[targets]; with gradient, it replaces the logits [rows, columns] */
void cross_entropy(long type, void *logits, const int64_t *targets, double *losses, long rows, long columns,
                   long gradient, long threads) {
    if (gradient) FOR_ROWS(losses[row] = cross_entropy_row(T, logits, row, columns, targets[row], 1))
    else FOR_ROWS(losses[row] = cross_entropy_row(T, logits, row, columns, targets[row], 0))
}

/* sums [columns] += the sum of x [rows, columns] over its rows */
void add_column_sums(long type, const void *x, float *sums, long rows, long columns, long threads) {
    enum { WIDTH = 16 * LANES, SOME = 64 }; /* columns whose sums stay in registers, and rows of a sum in float32 */
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (long first = 0; first < columns; first += WIDTH) {
        double totals[WIDTH] = {0};
        for (long start = 0; start < rows; start += SOME) {
            floats sum[16] = {0};
            for (long row = start; row < least(rows, start + SOME); row++)
                for (long part = 0, i = first; part < 16 && i < columns; part++, i += LANES)
                    sum[part] += load((int)type, x, row * columns + i, columns - i, 0);
            for (int i = 0; i < WIDTH; i++) totals[i] += sum[i / LANES][i % LANES];
        }
        for (long i = first; i < least(columns, first + WIDTH); i++) sums[i] += (float)totals[i - first];
    }
}
