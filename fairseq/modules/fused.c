/* What a training step on a CPU computes between its matrix products, each in one pass over memory.
 *
 * Arithmetic is in float32, longer sums in float64. Types of tensors: 0 float32, 1 bfloat16.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define BLOCK 4096 /* elements between two additions in float64, and of a parallel piece of work */

enum { FLOAT32, BFLOAT16 };

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

/* ---- sixteen numbers at a time; count may be less at the end of a row ---- */

INLINE long least(long a, long b) { return a < b ? a : b; }

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
    words bits = (words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
    ints nan = (ints)((bits & 0x7fffffff) > 0x7f800000); /* rounding up would make infinity or zero of it */
    return __builtin_convertvector((words)choose(nan, (floats)(bits >> 16 | 0x40), (floats)rounded), shorts);
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

INLINE float sum_of(floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* e to the x for x <= 0, to 1e-7 of it: 2^n e^r with |r| <= ln 2 / 2, and Taylor's series fitted to that interval */
INLINE floats exponentials(floats x) {
    const ints tiny = x < -87.0f;
    x = choose(tiny, all(-87.0f), x);
    ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    floats whole = __builtin_convertvector(n, floats), r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return choose(tiny, all(0.0f), p * (floats)((n + 127) << 23));
}

/* ---- rows of one type ---- */

/* The sum of all e to the (x - largest) of a row */
INLINE double exponential_sum(int type, const void *x, long start, long columns, float *largest) {
    floats best = all(-INFINITY);
    for (long i = 0; i < columns; i += LANES) {
        floats value = load(type, x, start + i, columns - i, -INFINITY);
        best = choose(value > best, value, best);
    }
    *largest = best[0];
    for (int i = 1; i < LANES; i++) *largest = best[i] > *largest ? best[i] : *largest;
    double total = 0;
    for (long block = 0; block < columns; block += BLOCK) {
        floats sum = all(0);
        for (long i = block; i < least(columns, block + BLOCK); i += LANES)
            sum += exponentials(load(type, x, start + i, columns - i, -INFINITY) - *largest);
        total += sum_of(sum);
    }
    return total;
}

INLINE double cross_entropy_row(int type, void *logits, long row, long columns, long target, int gradient) {
    const long start = row * columns;
    float largest, chosen = get(type, logits, start + target);
    const double sum = exponential_sum(type, logits, start, columns, &largest);
    const float factor = (float)(1 / sum), rest = (float)(exp((double)chosen - largest) / sum - 1);
    for (long i = 0; gradient && i < columns; i += LANES) {
        floats value = exponentials(load(type, logits, start + i, columns - i, 0) - largest) * factor;
        if (target - i >= 0 && target - i < LANES) value[target - i] = rest;
        store(type, logits, start + i, columns - i, value);
    }
    return log(sum) + largest - chosen;
}

/* ---- rows of any type, in threads ---- */

#define FOR_ROWS(CALL)                                                                              \
    _Pragma("omp parallel for num_threads(threads) schedule(static)") for (long row = 0; row < rows; row++) { \
        if (type == FLOAT32) { enum { T = FLOAT32 }; CALL; }                                        \
        else { enum { T = BFLOAT16 }; CALL; }                                                       \
    }

/* losses [rows] = -log softmax(logits)[targets]; with gradient, it replaces the logits [rows, columns] */
void cross_entropy(long type, void *logits, const int64_t *targets, double *losses, long rows, long columns,
                   long gradient, long threads) {
    if (gradient) FOR_ROWS(losses[row] = cross_entropy_row(T, logits, row, columns, targets[row], 1))
    else FOR_ROWS(losses[row] = cross_entropy_row(T, logits, row, columns, targets[row], 0))
}

/* sums [columns] += the sum of x [rows, columns] over its rows */
void add_column_sums(long type, const void *x, float *sums, long rows, long columns, long threads) {
    enum { WIDTH = 16 * LANES }; /* columns whose sums stay in registers */
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (long first = 0; first < columns; first += WIDTH) {
        floats sum[16] = {0};
        for (long row = 0; row < rows; row++)
            for (long part = 0, i = first; part < 16 && i < columns; part++, i += LANES)
                sum[part] += load((int)type, x, row * columns + i, columns - i, 0);
        for (long i = first; i < least(columns, first + WIDTH); i++) sums[i] += sum[(i - first) / LANES][(i - first) % LANES];
    }
}
