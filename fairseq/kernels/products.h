/* Products of small matrices, and what they multiply: rows of a head's numbers, with zeros up to whole tiles.
 *
 * What products multiply are words of 32 bits: a float32, or two bfloat16 that follow one another in the dimension that
 * is summed over, which one instruction multiplies. Sums are in float32.
 */
#ifndef PRODUCTS_H
#define PRODUCTS_H
#include "vectors.h"

typedef uint32_t word;

#ifdef __AVX512F__
enum { TALL = 8, WIDEST = 3 }; /* rows, and at most vectors of a row, whose sums are in registers */
#else
enum { TALL = 4, WIDEST = 3 };
#endif

INLINE long upto(long n, long step) { return (n + step - 1) / step * step; }
INLINE long per_word(int type) { return 4 / size_of(type); }

/* ---- products ---- */

INLINE floats multiply_add(int type, floats sum, word a, words b) {
    const words left = a - (words){0};
    if (type == FLOAT32) return sum + (floats)left * (floats)b;
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)b);
#else
    return sum + (floats)(left << 16) * (floats)(b << 16) + (floats)(left & 0xffff0000) * (floats)(b & 0xffff0000);
#endif
}

INLINE void tile(int type, int wide, const word *a, long row, long along, const word *b, long width, long depth,
                 float *c, long stride, int add) {
    floats sum[TALL][WIDEST];
    float *line = c;
#pragma GCC unroll 8
    for (int r = 0; r < TALL; r++, line += stride)
#pragma GCC unroll 3
        for (int w = 0; w < wide; w++) sum[r][w] = add ? load(FLOAT32, line, w * LANES, LANES, 0) : all(0);
    for (long k = 0; k < depth; k++, a += along, b += width) {
        words right[WIDEST];
#pragma GCC unroll 3
        for (int w = 0; w < wide; w++) right[w] = *(const words_there *)(b + w * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TALL; r++)
#pragma GCC unroll 3
            for (int w = 0; w < wide; w++) sum[r][w] = multiply_add(type, sum[r][w], a[r * row], right[w]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < TALL; r++, c += stride)
#pragma GCC unroll 3
        for (int w = 0; w < wide; w++) store(FLOAT32, c, w * LANES, LANES, sum[r][w]);
}

/* C [TALL, columns] = A B, or with add C += A B: A(r, k) = a[r * row + k * along], B(k, n) = b[k * width + n]. Columns
   are whole vectors: three at a time, but two and two of the last four. */
#define PRODUCT(NAME, TYPE)                                                                                            \
    static __attribute__((noinline)) void NAME(const word *a, long row, long along, const word *b, long width,         \
                                               long depth, float *c, long stride, long columns, int add) {             \
        for (long left = columns / LANES, wide; left > 0; left -= wide, b += wide * LANES, c += wide * LANES) {        \
            wide = least(left == 4 ? 2 : left, WIDEST);                                                                \
            if (wide == 3) tile(TYPE, least(3, WIDEST), a, row, along, b, width, depth, c, stride, add);               \
            else if (wide == 2) tile(TYPE, least(2, WIDEST), a, row, along, b, width, depth, c, stride, add);          \
            else tile(TYPE, 1, a, row, along, b, width, depth, c, stride, add);                                        \
        }                                                                                                              \
    }
PRODUCT(product_float32, FLOAT32)
PRODUCT(product_bfloat16, BFLOAT16)
#define PRODUCT_OF(...) (type == FLOAT32 ? product_float32 : product_bfloat16)(__VA_ARGS__)

/* ---- rows of a head ---- */

typedef struct { /* [batch, head, time, D] with strides in numbers; D is contiguous; data NULL: there is none */
    char *data;
    long batch, head, time;
} View;

typedef struct { /* of a head, in two pieces: rows from first on are in the second one */
    const char *piece[2];
    long time[2], first;
} Rows;

INLINE char *address(int type, const View *view, long row, long head, long time) {
    return view->data + (view->batch * row + view->head * head + view->time * time) * size_of(type);
}

INLINE Rows rows_of(int type, const View view[2], long first, long row, long head) {
    Rows rows = {{NULL, NULL}, {0, 0}, first};
    for (int i = first ? 0 : 1; i < 2; i++) {
        rows.piece[i] = address(type, &view[i], row, head, 0);
        rows.time[i] = view[i].time * size_of(type);
    }
    return rows;
}

INLINE Rows all_rows_of(int type, const View *view, long row, long head) {
    return (Rows){{NULL, address(type, view, row, head, 0)}, {0, view->time * size_of(type)}, 0};
}

INLINE const char *row_at(const Rows *rows, long i) {
    return i < rows->first ? rows->piece[0] + i * rows->time[0] : rows->piece[1] + (i - rows->first) * rows->time[1];
}

/* Rows of one head lie apart in memory, which processors do not foresee. */
INLINE void expect(int type, const Rows *rows, long i, long end, long dim) {
    if (i >= end) return;
    const char *from = row_at(rows, i);
    for (long at = 0; at < dim * size_of(type); at += 64) __builtin_prefetch(from + at);
}

/* To be summed over D: [height, depth] */
INLINE void pack(int type, const Rows *rows, long from, long count, long dim, long depth, long height, word *to) {
    for (long i = 0; i < height; i++, to += depth) {
        expect(type, rows, from + i + LANES, from + count, dim);
        to[depth - 1] = 0;
        if (i < count) memcpy(to, row_at(rows, from + i), (size_t)(dim * size_of(type)));
        else memset(to, 0, (size_t)depth * sizeof *to);
    }
}

/* To be summed over D, as columns: [depth, span] */
INLINE void pack_columns(int type, const Rows *rows, long count, long dim, long depth, long span, word *to) {
    for (long i = 0; i < span; i += LANES)
        for (long k = 0; k < depth; k += LANES) {
            words square[LANES];
            for (long r = 0; r < LANES && k == 0; r++) expect(type, rows, i + r + LANES, count, dim);
            for (long r = 0; r < LANES; r++) {
                square[r] = (words){0};
                if (i + r < count) square[r] = some_words(row_at(rows, i + r) + k * 4, dim * size_of(type) - k * 4);
            }
            transpose_words(square);
            for (long c = 0; c < least(LANES, depth - k); c++)
                *(words_there *)(to + (k + c) * span + i) = square[c];
        }
}

/* To be summed over rows: [height, width], of bfloat16 [height / 2, width], in which a word has two rows */
INLINE void pack_sums(int type, const Rows *rows, long from, long count, long dim, long width, long height, word *to) {
    for (long i = 0; i < height; i += per_word(type), to += width) {
        for (long r = 0; r < per_word(type); r++) expect(type, rows, from + i + r + LANES, from + count, dim);
        const char *first = i < count ? row_at(rows, from + i) : NULL;
        const char *second = i + 1 < count ? row_at(rows, from + i + 1) : NULL;
        for (long k = 0; k < width; k += LANES) {
            const long left = (dim - k) * size_of(type), at = k * size_of(type);
            words own = {0};
            if (type == FLOAT32 && first) own = some_words(first + at, left);
            if (type != FLOAT32 && first) own = widened(some_halves(first + at, left));
            if (type != FLOAT32 && second) own |= widened(some_halves(second + at, left)) << 16;
            *(words_there *)(to + k) = own;
        }
    }
}

/* Sums [count, width] into rows of a view */
INLINE void unpack(int type, const float *from, long width, const View *view, long row, long head, long start,
                   long count, long dim) {
    for (long r = 0; r < count; r++) {
        char *to = address(type, view, row, head, start + r);
        EACH(0, dim, store(type, to, i, count, load(FLOAT32, from, r * width + i, count, 0));)
    }
}

/* Rows [height, span] as operands that are summed over rows: [height / per, span]; float32 are that already. */
INLINE word *paired(int type, word *rows, long height, long span, word *room) {
    if (type == FLOAT32) return rows;
    const Rows own = {{NULL, (const char *)rows}, {0, span * size_of(type)}, 0};
    pack_sums(type, &own, 0, height, span, span, height, room);
    return room;
}

#endif
