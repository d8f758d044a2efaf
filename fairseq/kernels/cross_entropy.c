/* Cross entropy on a CPU: losses of rows of logits, which become their own gradient, in one pass over memory.
 *
 * Arithmetic is in float32, longer sums in float64. Types of tensors: 0 float32, 1 bfloat16.
 */
#include "vectors.h"

#define BLOCK 4096 /* elements between two additions in float64 */

/* e to the (x - largest) of a row from first on, at most BLOCK of them; returns their sum */
INLINE float exponential_block(int type, const void *x, long first, long columns, float largest, float *values) {
    floats sum = all(0);
    EACH(first, least(columns, first + BLOCK),
        floats value = exponentials(load(type, x, i, count, -INFINITY) - largest);
        store(FLOAT32, values, i - first, count, value);
        sum += value;
    )
    return sum_of(sum);
}

/* -log softmax(x)[target] of a row; with gradient, that replaces the row */
INLINE double cross_entropy_row(int type, void *x, long columns, long target, int gradient) {
    float largest, chosen = get(type, x, target), values[BLOCK];
    floats best = all(-INFINITY);
    EACH(0, columns,
        const floats value = load(type, x, i, count, -INFINITY);
        best = choose(above(value, best), value, best);
    )
    largest = largest_of(best);
    double sum = 0;
    for (long first = 0; first < columns; first += BLOCK)
        sum += exponential_block(type, x, first, columns, largest, values);
    const float factor = (float)(1 / sum), rest = (float)(exp((double)chosen - largest) / sum - 1);
    for (long first = 0; gradient && first < columns; first += BLOCK) {
        /* Those of a row of one block are still there. */
        if (columns > BLOCK) exponential_block(type, x, first, columns, largest, values);
        EACH(first, least(columns, first + BLOCK),
            store(type, x, i, count, load(FLOAT32, values, i - first, count, 0) * factor);
        )
    }
    if (gradient) put(type, x, target, rest);
    return log(sum) + largest - chosen;
}

/* losses [rows] = -log softmax(logits)[targets]; with gradient, it replaces the logits [rows, columns] */
void cross_entropy(long type, void *logits, const int64_t *targets, double *losses, long rows, long columns,
                   long gradient, long threads) {
    char *data = logits;
    const long line = columns * size_of((int)type);
    if (gradient) PARALLEL(row, rows, 1, losses[row] = cross_entropy_row(T, data + row * line, columns, targets[row], 1))
    else PARALLEL(row, rows, 1, losses[row] = cross_entropy_row(T, data + row * line, columns, targets[row], 0))
}
