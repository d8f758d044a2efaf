/* What layers of recent decoders compute between their matrix products, in one pass over memory each: RMS norm and
 * rotary positions, with their gradients.
 *
 * Arithmetic is in float32. Types of tensors: 0 float32, 1 bfloat16.
 */
#include "vectors.h"

enum { SOME = 32 }; /* rows of a parallel piece of work */

/* ---- rows and pieces of one type ---- */

/* 1 / sqrt(mean of squares + eps) of a row that begins at element first */
INLINE float inverse_rms(int type, const void *x, long first, long columns, float eps) {
    floats squares = all(0);
    EACH(first, first + columns,
        const floats value = load(type, x, i, count, 0);
        squares += value * value;
    )
    return 1 / sqrtf(sum_of(squares) / (float)columns + eps);
}

INLINE float norm_row(int type, const void *x, const float *gain, void *y, long row, long columns, float eps) {
    const long first = row * columns;
    const float scale = inverse_rms(type, x, first, columns, eps);
    EACH(first, first + columns,
        store(type, y, i, count, load(type, x, i, count, 0) * scale * load(FLOAT32, gain, i - first, count, 0));
    )
    return scale;
}

/* The gradient of a row, where y = s x gain: s (grad gain) - s^3 x mean(grad gain x); sums += that of the gain, s grad x */
INLINE void norm_gradient_row(int type, const void *grad, const void *x, const float *gain, float scale, void *of_x,
                              float *sums, long row, long columns) {
    const long first = row * columns, end = first + columns;
    floats products = all(0);
    EACH(first, end,
        products += load(type, grad, i, count, 0) * load(FLOAT32, gain, i - first, count, 0) * load(type, x, i, count, 0);
    )
    const float mean = sum_of(products) / (float)columns * scale * scale;
    EACH(first, end,
        const floats g = load(type, grad, i, count, 0), value = load(type, x, i, count, 0) * scale;
        store(type, of_x, i, count, scale * g * load(FLOAT32, gain, i - first, count, 0) - value * mean);
        store(FLOAT32, sums, i - first, count, load(FLOAT32, sums, i - first, count, 0) + g * value);
    )
}

/* A head: its channels i and i + half turn by the angle of cosines[i] and direction sines[i]; the others stay. */
INLINE void rotate_head(int type, const void *x, const float *cosines, const float *sines, void *y, long start, long half,
                        long dim, float direction) {
    EACH(0, half,
        const floats first = load(type, x, start + i, count, 0), second = load(type, x, start + half + i, count, 0);
        const floats cosine = load(FLOAT32, cosines, i, count, 0);
        const floats sine = load(FLOAT32, sines, i, count, 0) * direction;
        store(type, y, start + i, count, first * cosine - second * sine);
        store(type, y, start + half + i, count, second * cosine + first * sine);
    )
    EACH(start + 2 * half, start + dim, store(type, y, i, count, load(type, x, i, count, 0));)
}

/* ---- tensors of any type, in threads ---- */

/* y [rows, columns] = x gain / rms, and scales [rows] = 1 / rms */
void rms_norm(long type, const void *x, const float *gain, void *y, float *scales, float eps, long rows, long columns,
              long threads) {
    PARALLEL(row, rows, 1, scales[row] = norm_row(T, x, gain, y, row, columns, eps))
}

/* of_x [rows, columns], and sums [rows / 32, rounded up, columns]: the gain's gradient, of so many rows each */
void rms_norm_gradient(long type, const void *grad, const void *x, const float *gain, const float *scales, void *of_x,
                       float *sums, long rows, long columns, long threads) {
    PARALLEL(first, rows, SOME, {
        float *sum = sums + first / SOME * columns;
        memset(sum, 0, (size_t)columns * sizeof *sum);
        for (long row = first; row < least(rows, first + SOME); row++)
            norm_gradient_row(T, grad, x, gain, scales[row], of_x, sum, row, columns);
    })
}

/* y = x [rows, times, heads, dim] turned as table [times, 2, half] says, or back where direction is -1 */
void rotate(long type, const void *x, const float *table, void *y, float direction, long rows, long times, long heads,
            long dim, long half, long threads) {
    PARALLEL(index, rows * times, 1, {
        const float *cosines = table + index % times * 2 * half;
        for (long head = index * heads; head < (index + 1) * heads; head++)
            rotate_head(T, x, cosines, cosines + half, y, head * dim, half, dim, direction);
    })
}
