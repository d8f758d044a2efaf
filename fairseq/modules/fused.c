/* What a training step does between its matrix products, each in one pass over memory.
 *
 * A mask of dropout is not stored: sixteen bits of a hash of seed, row and column decide about an element, and are
 * computed again in the backward pass. dropout.py computes the same bits with numpy. Arithmetic is in float32.
 */
#include "numbers.h"

#define LANES 16
#define GROUP 32 /* elements of a row that sixteen words of noise decide about */

typedef struct {
    uint64_t seed;
    long dropped; /* of 65536 */
    float scale;  /* of what is not dropped */
} Dropout;

/* ---- sixteen numbers at a time; count may be less at the end of a row ---- */

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

INLINE floats choose(ints condition, floats yes, floats no) {
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

INLINE floats all(float value) { return value - (floats){0}; }

INLINE floats load(int type, const void *from, long first, long count, float rest) {
    floats result = all(rest);
    if (count >= LANES && type == FLOAT32) memcpy(&result, (const float *)from + first, sizeof result);
    else if (count >= LANES && type == BFLOAT16) {
        shorts bits;
        memcpy(&bits, (const uint16_t *)from + first, sizeof bits);
        result = (floats)(__builtin_convertvector(bits, words) << 16);
    } else
        for (int i = 0; i < (int)least(LANES, count); i++) result[i] = get(type, from, first + i);
    return result;
}

INLINE void store(int type, void *to, long first, long count, floats value) {
    if (count >= LANES && type == FLOAT32) memcpy((float *)to + first, &value, sizeof value);
    else if (count >= LANES && type == BFLOAT16) {
        words bits = (words)value, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        ints invalid = (ints)((bits & 0x7fffffff) > 0x7f800000);
        shorts low = __builtin_convertvector((words)choose(invalid, (floats)(bits >> 16 | 0x40), (floats)rounded), shorts);
        memcpy((uint16_t *)to + first, &low, sizeof low);
    } else
        for (int i = 0; i < (int)least(LANES, count); i++) put(type, to, first + i, value[i]);
}

INLINE float sum_of(floats x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* e to the x for x <= 0, to 1e-7 of it */
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

INLINE words mixed(words x) { /* the finaliser of MurmurHash3, a bijection */
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

INLINE long groups(long columns) { return (columns + GROUP - 1) / GROUP; }

/* sixteen random bits for each of 32 elements: of the first sixteen, then of the others */
INLINE words noise(const Dropout *dropout, long row, long columns, long column) {
    words index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    index += (uint32_t)((row * groups(columns) + column / GROUP) * LANES);
    return mixed(mixed(index ^ (uint32_t)dropout->seed) + (uint32_t)(dropout->seed >> 32));
}

/* x times the scale where the mask keeps it, else 0 */
INLINE floats drop16(const Dropout *dropout, words bits, int upper, floats x) {
    ints own = (ints)(upper ? bits >> 16 : bits & 0xffff);
    return choose(own < (int32_t)dropout->dropped, all(0.0f), x * dropout->scale);
}

/* ---- rows of one type ---- */

#define FOR_GROUPS for (long column = 0; column < columns; column += GROUP)
#define FOR_HALVES for (long i = column, upper = 0; upper < 2 && i < columns; i += LANES, upper++)

INLINE void drop_row(int type, const void *x, const void *residual, void *y, long row, long columns,
                     const Dropout *dropout, int rectify) {
    const long start = row * columns;
    FOR_GROUPS {
        const words bits = noise(dropout, row, columns, column);
        FOR_HALVES {
            floats value = drop16(dropout, bits, (int)upper, load(type, x, start + i, columns - i, 0));
            if (rectify) value = choose(value < 0.0f, all(0.0f), value);
            if (residual) value += load(type, residual, start + i, columns - i, 0);
            store(type, y, start + i, columns - i, value);
        }
    }
}

/* The largest x of a row, and the sum of all e to the (x - largest) */
INLINE float exponential_sum(int type, const void *x, long start, long columns, float *largest) {
    floats best = all(-INFINITY), sum = all(0);
    for (long i = 0; i < columns; i += LANES) {
        floats value = load(type, x, start + i, columns - i, -INFINITY);
        best = choose(value > best, value, best);
    }
    *largest = best[0];
    for (int i = 1; i < LANES; i++) *largest = best[i] > *largest ? best[i] : *largest;
    for (long i = 0; i < columns; i += LANES)
        sum += exponentials(load(type, x, start + i, columns - i, -INFINITY) - *largest);
    return sum_of(sum);
}

INLINE void softmax_row(int type, const void *scores, void *probabilities, void *dropped, long row, long columns,
                        const Dropout *dropout) {
    const long start = row * columns;
    float largest, factor = 1.0f / exponential_sum(type, scores, start, columns, &largest);
    FOR_GROUPS {
        const words bits = noise(dropout, row, columns, column);
        FOR_HALVES {
            floats value = exponentials(load(type, scores, start + i, columns - i, 0) - largest) * factor;
            store(type, probabilities, start + i, columns - i, value);
            store(type, dropped, start + i, columns - i, drop16(dropout, bits, (int)upper, value));
        }
    }
}

INLINE void softmax_gradient_row(int type, const void *probabilities, const void *gradient, void *result, long row,
                                 long columns, const Dropout *dropout) {
    const long start = row * columns;
    floats sums = all(0);
    for (int pass = 0; pass < 2; pass++) {
        const float sum = sum_of(sums);
        FOR_GROUPS {
            const words bits = noise(dropout, row, columns, column);
            FOR_HALVES {
                floats own = drop16(dropout, bits, (int)upper, load(type, gradient, start + i, columns - i, 0));
                floats probability = load(type, probabilities, start + i, columns - i, 0);
                if (pass == 0) sums += own * probability;
                else store(type, result, start + i, columns - i, (own - sum) * probability);
            }
        }
    }
}

INLINE float cross_entropy_row(int type, void *logits, long row, long columns, long target, int gradient) {
    const long start = row * columns;
    float largest, own = get(type, logits, start + target);
    const float sum = exponential_sum(type, logits, start, columns, &largest), factor = 1.0f / sum;
    for (long i = 0; gradient && i < columns; i += LANES)
        store(type, logits, start + i, columns - i,
              exponentials(load(type, logits, start + i, columns - i, 0) - largest) * factor);
    if (gradient) put(type, logits, start + target, expf(own - largest) * factor - 1.0f);
    return logf(sum) + largest - own;
}

/* ---- rows of any type, in threads ---- */

#define FOR_ROWS(CALL)                                                                              \
    _Pragma("omp parallel for num_threads(threads) schedule(static)") for (long row = 0; row < rows; row++) { \
        if (type == FLOAT32) { enum { T = FLOAT32 }; CALL; }                                        \
        else if (type == BFLOAT16) { enum { T = BFLOAT16 }; CALL; }                                 \
        else { enum { T = FLOAT16 }; CALL; }                                                        \
    }

/* y = residual + dropout(x), or dropout(relu(x)); x, residual (or NULL), y: [rows, columns] */
void drop(long type, const void *x, const void *residual, void *y, long rows, long columns, const Dropout *dropout,
          long rectify, long threads) {
    if (rectify) FOR_ROWS(drop_row(T, x, NULL, y, row, columns, dropout, 1))
    else if (residual) FOR_ROWS(drop_row(T, x, residual, y, row, columns, dropout, 0))
    else FOR_ROWS(drop_row(T, x, NULL, y, row, columns, dropout, 0))
}

/* probabilities = softmax(scores), dropped = dropout(probabilities): [rows, columns] */
void softmax_drop(long type, const void *scores, void *probabilities, void *dropped, long rows, long columns,
                  const Dropout *dropout, long threads) {
    FOR_ROWS(softmax_row(T, scores, probabilities, dropped, row, columns, dropout))
}

/* result: the gradient of the scores, from that of what was dropped; all [rows, columns] */
void softmax_drop_gradient(long type, const void *probabilities, const void *gradient, void *result, long rows,
                           long columns, const Dropout *dropout, long threads) {
    FOR_ROWS(softmax_gradient_row(T, probabilities, gradient, result, row, columns, dropout))
}

/* losses [rows] = -log softmax(logits)[targets]; with gradient, it replaces the logits [rows, columns] */
void cross_entropy(long type, void *logits, const int64_t *targets, float *losses, long rows, long columns,
                   long gradient, long threads) {
    if (gradient) FOR_ROWS(losses[row] = cross_entropy_row(T, logits, row, columns, targets[row], 1))
    else FOR_ROWS(losses[row] = cross_entropy_row(T, logits, row, columns, targets[row], 0))
}
