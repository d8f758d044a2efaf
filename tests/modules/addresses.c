/* Calls all kernels of training on buffers of the exact size; FUSED stands for the path of their file. */
#include <stdio.h>
#include <stdlib.h>
#include "FUSED"
static char *filled(long size, int byte) { return memset(malloc(size), byte, size); }
/* The gradient of the last row first: threads compute rows in any order, so that none may write another's. */
static void reversed_gradient(long type, void *p, void *grad, void *result, void *added, long rows, long columns,
                              long period) {
    for (long row = rows - 1; row >= 0; row--)
        softmax_gradient_row(type, row_of(p, NULL, row, columns, period), grad, result, added, columns, NULL, 1);
}
int main(void) {
    const long periods[] = {0, 1, 2, 17, 18, 40};
    for (long type = 0; type < 2; type++)
        for (int kind = 0; kind < 6; kind++)
            for (long columns = periods[kind] ? periods[kind] : 1; columns < 9000; columns += columns < 70 ? 1 : 1337) {
                const long period = periods[kind], rows = period ? 2 * period : 3, count = rows * columns;
                const long size = count * (type ? 2 : 4);
                char *a = filled(size, 0), *b = filled(size, 0), *c = filled(size, 0), *d = filled(size, 0);
                uint8_t *mask = malloc(count / 8 + 8);
                for (long i = 0; i < count; i++) put(type, a, i, i % 13);
                draw_mask(1, 20000, mask, count, 2);
                softmax_drop(type, a, NULL, b, c, mask, 1.5f, rows, columns, period, 2);
                softmax_drop_gradient(type, b, a, c, NULL, mask, 1.5f, rows, columns, period, 2);
                /* As attention by distance calls them: in place, and all is written */
                memset(d, 0, size);
                softmax_drop(type, a, d, a, NULL, NULL, 1, rows, columns, period, 2);
                memset(d, 255, size); /* NaN */
                char *e = filled(size, 255), *f = filled(size, 255);
                reversed_gradient(type, a, c, e, f, rows, columns, period);
                softmax_drop_gradient(type, a, c, c, d, NULL, 1, rows, columns, period, 2);
                if (memcmp(c, e, size) || memcmp(d, f, size)) return fprintf(stderr, "rows of others written\n");
                for (long i = 0; i < count; i++)
                    if (isnan(get(type, d, i)) || isnan(get(type, c, i))) return fprintf(stderr, "not written\n");
                if (!period) {
                    float *sums = calloc(columns, 4);
                    int64_t *targets = calloc(rows, 8);
                    double *losses = calloc(rows, 8);
                    targets[1] = columns - 1;
                    for (long mode = 0; mode < 4; mode++)
                        drop(type, mode, a, b, c, mode == RELU_GRADIENT ? NULL : mask, 1.5f, count, 2);
                    cross_entropy(type, a, targets, losses, rows, columns, 0, 2);
                    cross_entropy(type, a, targets, losses, rows, columns, 1, 2);
                    add_column_sums(type, a, sums, rows, columns, 2);
                    free(sums), free(targets), free(losses);
                }
                free(a), free(b), free(c), free(d), free(e), free(f), free(mask);
            }
}
