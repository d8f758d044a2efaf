/* Calls all kernels of training on buffers of the exact size; DROPOUT, CROSS_ENTROPY, LAYERS and
   ATTENTION stand for their files. */
#include <stdio.h>
#include <stdlib.h>
#include "DROPOUT"
#undef BLOCK
#include "CROSS_ENTROPY"
#include "LAYERS"
/* Room for so many words, from the scratch or in memory of its own */
static uint32_t *exact(uint32_t **scratch, long words);
#include "ATTENTION"

static char *filled(long size, int byte) { return memset(malloc(size), byte, size); }
static uint8_t *masked(long count) {
    uint8_t *mask = malloc(count / 8 + 8);
    const int64_t seed = 1;
    draw_mask(&seed, 20000, mask, count, 2);
    return mask;
}

static void between_products(int type) {
    for (long columns = 1; columns < 9000; columns += columns < 70 ? 1 : 1337) {
        const long rows = 3, count = rows * columns, size = count * (type ? 2 : 4);
        char *a = filled(size, 0), *b = filled(size, 0);
        uint8_t *mask = masked(count);
        int64_t *targets = calloc(rows, 8);
        double *losses = calloc(rows, 8);
        for (long i = 0; i < count; i++) put(type, a, i, i % 13);
        targets[1] = columns - 1;
        drop(type, 1, a, a, b, mask, NULL, 1.5f, count, 2);
        drop(type, 0, a, NULL, b, NULL, a, 1.5f, count, 2);
        cross_entropy(type, a, targets, losses, rows, columns, 0, 2);
        cross_entropy(type, a, targets, losses, rows, columns, 1, 2);
        free(targets), free(losses), free(a), free(b), free(mask);
    }
}

static void layers(int type) {
    for (long columns = 1; columns < 600; columns += columns < 40 ? 1 : 97) {
        const long rows = 35, count = rows * columns, size = count * size_of(type), half = columns / 2;
        char *a = filled(size, 0), *b = filled(size, 0), *c = filled(size, 0);
        float *gain = calloc(columns, 4), *scales = malloc(rows * 4), *sums = malloc(2 * columns * 4);
        float *table = calloc(7 * 2 * half, 4);
        rms_norm(type, a, gain, b, scales, 1e-5f, rows, columns, 2);
        rms_norm_gradient(type, b, a, gain, scales, c, sums, rows, columns, 2);
        rotate(type, a, table, b, -1, 1, 7, 5, columns, half, 2);
        free(a), free(b), free(c), free(gain), free(scales), free(sums), free(table);
    }
}

/* ---- attention ---- */

static void *blocks[1 << 12];
static long allocated;
static void *block(void *room) { return blocks[allocated++] = room; }

static int separate; /* whether each piece of scratch is in memory of its own */
static uint32_t *exact(uint32_t **scratch, long words) {
    if (separate) return block(filled(words * 4, 255));
    *scratch += upto(words, LANES);
    return *scratch - upto(words, LANES);
}

/* A tensor, [batch, time, head, dim] in memory or, by head, [batch, head, time, dim]; 0.75 at most, or NaN */
static View tensor(int type, long batch, long heads, long time, long dim, int by_head, int nan) {
    const long count = batch * heads * time * dim;
    char *data = block(filled(count * size_of(type), 255));
    for (long i = 0; i < count && !nan; i++) put(type, data, i, (i * 7 % 13) / 8.0f - 0.75f);
    return by_head ? (View){data, heads * time * dim, time * dim, dim} : (View){data, time * heads * dim, dim, heads * dim};
}

static int has_nan(int type, const View *view, long count) {
    for (long i = 0; i < count; i++)
        if (isnan(get(type, view->data, i))) return fprintf(stderr, "not written\n");
    return 0;
}

enum { CAUSAL = 1, BIASED = 2, DROPS = 4, RELATIVE = 8 };

static int attends(int type, long queries, long keys, long past, long dim, int kind, int way) {
    enum { ROWS = 2, HEADS = 3 };
    const long pairs = ROWS * HEADS, each[] = {past, keys - past}, threads[] = {1, 2, 5, 6};
    Attention x = {type, ROWS, HEADS, queries, keys, past, dim, kind & CAUSAL, threads[way % 4], 0.3f, 1.5f};
    x.query = tensor(type, ROWS, HEADS, queries, dim, way & 1, 0), x.output = tensor(type, ROWS, HEADS, queries, dim, 0, 1);
    x.of_query = tensor(type, ROWS, HEADS, queries, dim, 0, 1);
    for (int i = past ? 0 : 1; i < 2; i++) {
        x.key[i] = tensor(type, ROWS, HEADS, each[i], dim, way & 2, 0);
        x.value[i] = tensor(type, ROWS, HEADS, each[i], dim, way & 1, 0);
        x.of_key[i] = tensor(type, ROWS, HEADS, each[i], dim, 0, 1);
        x.of_value[i] = tensor(type, ROWS, HEADS, each[i], dim, way & 2, 1);
    }
    if (kind & BIASED) {
        x.bias = way & 1 ? tensor(type, ROWS, HEADS, queries, keys, 1, 0) : tensor(type, 1, 1, queries, keys, 1, 0);
        if (!(way & 1)) x.bias.batch = x.bias.head = 0;
    }
    if (kind & DROPS) x.mask = block(masked(pairs * queries * keys));
    if (kind & RELATIVE) {
        x.distance = tensor(type, ROWS, HEADS, queries, dim, way & 2, 0);
        x.of_distance = tensor(type, ROWS, HEADS, queries, dim, 0, 1);
        x.table = tensor(type, 1, HEADS, keys, dim, way & 1, 0), x.of_table = tensor(type, 1, HEADS, keys, dim, 1, 1);
        x.sums = block(filled((HEADS + x.threads - 1) * attention_sums(&x) * 4, 255));
    }
    const long scratch = attention_scratch(&x) * x.threads * 4;
    x.scratch = separate ? NULL : block(filled(scratch, 255));
    attention(&x); /* without a derivative */
    x.probabilities = block(filled(pairs * queries * keys * size_of(type), 255));
    attention(&x);
    int failed = has_nan(type, &x.output, pairs * queries * dim);
    if (!separate) memset(x.scratch, 255, scratch);
    attention_gradient(&x); /* of the result itself */
    failed += has_nan(type, &x.of_query, pairs * queries * dim);
    for (int i = past ? 0 : 1; i < 2; i++) {
        failed += has_nan(type, &x.of_key[i], pairs * each[i] * dim);
        failed += has_nan(type, &x.of_value[i], pairs * each[i] * dim);
    }
    if (kind & RELATIVE) {
        failed += has_nan(type, &x.of_distance, pairs * queries * dim);
        failed += has_nan(type, &x.of_table, HEADS * keys * dim);
    }
    while (allocated) free(blocks[--allocated]);
    return failed;
}

int main(void) {
    const long shapes[][2] = {{1, 1}, {1, 40}, {5, 9}, {16, 16}, {17, 33}, {8, 15}, {33, 33}, {7, 64}, {40, 71}};
    const long dims[] = {1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 64, 70};
    enum { SHAPES = sizeof shapes / sizeof *shapes, DIMS = sizeof dims / sizeof *dims };
    int way = 0;
    for (int type = 0; type < 2; type++) between_products(type), layers(type);
    for (separate = 0; separate < 2; separate++)
        for (int type = 0; type < 2; type++)
            for (int kind = 0; kind < 16; kind++) {
                if (kind & RELATIVE && !(kind & CAUSAL)) continue;
                for (int i = 0; i < DIMS; i++, way++) {
                    const long dim = dims[i];
                    const long queries = shapes[way % SHAPES][0], keys = shapes[way % SHAPES][1];
                    const long pasts[] = {0, 1, keys - 1, keys / 2, keys - queries};
                    if (attends(type, queries, keys, pasts[way % 5] % keys, dim, kind, way / 2)) return 1;
                }
                /* In some groups of queries, more than a group's; with fewer keys than queries that see them all */
                if (attends(type, 70, 300, 230, 3, kind, way)) return 1;
                if (!(kind & CAUSAL) && attends(type, 40, 3, 1, 5, kind, way)) return 1;
                way++; /* the next kind has other shapes with each width */
            }
    return 0;
}
