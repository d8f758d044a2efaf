/* What a training step on a CPU computes between its matrix products, each in one pass over memory.
 *
 * Arithmetic is in float32, longer sums in float64. Types of tensors: 0 float32, 1 bfloat16.
 */
#include "vectors.h"

#define BLOCK 4096 /* elements between two additions in float64, and of a parallel piece of work */

/* A register of SplitMix64's words first + 1, first + 2, ... from a seed (Steele, Lea & Flood 2014, "Fast splittable
   pseudorandom number generators"): any of them is computed alone, so that threads share the work. */
INLINE longs random_words(uint64_t seed, long first) {
    const longs steps = STEPS;
    longs z = seed + (steps + (uint64_t)first) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The bits of 64 elements: of the 65536 values of sixteen bits of noise, signed ones below lowest drop an element. */
typedef union {
    longs words[128 / sizeof(longs)];
    int16_t values[64];
} Noise;

INLINE uint64_t bits_of(const Noise *noise, int16_t lowest) {
    uint64_t bits = 0;
#if defined(__AVX512BW__)
    for (int i = 0; i < 2; i++)
        bits |= (uint64_t)_mm512_cmpge_epi16_mask((__m512i)noise->words[i], _mm512_set1_epi16(lowest)) << 32 * i;
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
        const __m256i least_one = _mm256_set1_epi16(lowest);
        const __m256i *words = (const __m256i *)noise + 2 * i;
        const __m256i low = _mm256_cmpgt_epi16(least_one, _mm256_loadu_si256(words));
        const __m256i high = _mm256_cmpgt_epi16(least_one, _mm256_loadu_si256(words + 1));
        const __m256i dropped = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8); /* their quarters in order */
        bits |= (uint64_t)(uint32_t)~_mm256_movemask_epi8(dropped) << 32 * i;
    }
#else
    for (int i = 0; i < 64; i++) bits |= (uint64_t)(noise->values[i] >= lowest) << i;
#endif
    return bits;
}

/* The mask of count elements, of which dropped of 65536 are dropped */
void draw_mask(uint64_t seed, long dropped, uint8_t *mask, long count, long threads) {
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (long first = 0; first < count; first += BLOCK)
        for (long i = first; i < least(count, first + BLOCK); i += 64) {
            Noise noise;
            for (long word = 0; word < 16; word += (long)(sizeof(longs) / 8))
                noise.words[word * 8 / sizeof(longs)] = random_words(seed, i / 4 + word);
            const uint64_t bits = bits_of(&noise, (int16_t)(dropped - 32768));
            memcpy(mask + i / 8, &bits, sizeof bits);
        }
}

/* ---- pieces and rows of one type ---- */

enum { PLAIN, ADD, RELU, RELU_GRADIENT };

INLINE void drop_piece(int type, int mode, const void *x, const void *other, void *y, long first, long end,
                       const uint8_t *mask, float scale) {
    EACH(first, end,
        floats value = load(type, x, i, count, 0) * scale;
        if (mode == RELU_GRADIENT) value = choose(above(load(type, other, i, count, 0), all(0)), value, all(0));
        else value = choose(kept(mask, i), value, all(0));
        if (mode == RELU) value = choose(above(all(0), value), all(0), value); /* NaN stays */
        if (mode == ADD) value += load(type, other, i, count, 0);
        store(type, y, i, count, value);
    )
}

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

/* ---- tensors of any type, in threads ---- */

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

/* losses [rows] = -log softmax(logits)[targets]; with gradient, it replaces the logits [rows, columns] */
void cross_entropy(long type, void *logits, const int64_t *targets, double *losses, long rows, long columns,
                   long gradient, long threads) {
    char *data = logits;
    const long line = columns * size_of((int)type);
    if (gradient) FOR_ROWS(losses[row] = cross_entropy_row(T, data + row * line, columns, targets[row], 1))
    else FOR_ROWS(losses[row] = cross_entropy_row(T, data + row * line, columns, targets[row], 0))
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

/* A square of LANES x LANES of x, or less at its edges, to its place in y; returns the sums over its rows. */
INLINE floats transpose_square(const float *x, float *y, long rows, long columns, long height, long width) {
    words square[LANES];
    floats sum = all(0);
    if (height == LANES && width == LANES) {
        for (int i = 0; i < LANES; i++) square[i] = *(const words_there *)(x + i * columns);
        for (int i = 0; i < LANES; i++) sum += (floats)square[i];
        transpose_words(square);
        for (int i = 0; i < LANES; i++) *(words_there *)(y + i * rows) = square[i];
        return sum;
    }
    for (long i = 0; i < width; i++)
        for (long j = 0; j < height; j++) sum[i] += y[i * rows + j] = x[j * columns + i];
    return sum;
}

/* y [columns, rows] = x [rows, columns] transposed, of float32, and sums [columns] of x over its rows: some columns at
   a time, of which the next rows are fetched meanwhile, as processors do not foresee such strides */
void transpose(const float *x, float *y, float *sums, long rows, long columns, long threads) {
    enum { SOME = 8 };
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (long first = 0; first < columns; first += SOME * LANES) {
        const long end = least(columns, first + SOME * LANES);
        double totals[SOME * LANES] = {0};
        floats sum[SOME] = {0};
        for (long row = 0; row < rows; row += LANES) {
            for (long column = first; column < end; column += LANES) {
                const long height = least(LANES, rows - row), width = least(LANES, columns - column);
                const float *from = x + row * columns + column;
                for (long i = LANES; i < least(2 * LANES, rows - row); i++) __builtin_prefetch(from + i * columns);
                sum[(column - first) / LANES] +=
                    transpose_square(from, y + column * rows + row, rows, columns, height, width);
            }
            if (row / LANES % SOME != SOME - 1 && row + LANES < rows) continue;
            for (long i = 0; i < SOME * LANES; i++) totals[i] += sum[i / LANES][i % LANES];
            memset(sum, 0, sizeof sum);
        }
        for (long i = first; i < end; i++) sums[i] = (float)totals[i - first];
    }
}
