/* Attention on a CPU, one head of one row of the batch at a time: its scores stay in the cache, and keys
 * that are hidden from all of a few queries are not computed. Structures match attention.py.
 */
#include "products.h"

enum { SCORES = 1 << 14, MOST = 64 }; /* scores, and queries, that are computed together */

typedef struct {
    long type, rows, heads, queries, keys, past, dim; /* past: keys of the first piece; the second has the others */
    long causal, threads;       /* causal: the last query reads all keys, the one before it all but one, and so on */
    float scale, dropout_scale; /* factors of scores, and of what dropout keeps */
    View query, key[2], value[2], output, of_query, of_key[2], of_value[2]; /* output: its gradient, going back */
    char *probabilities;        /* [rows, heads, queries, keys]; only those of keys that are read; NULL: not wanted */
    View bias;                  /* added to scores */
    const uint8_t *mask;        /* of dropout, or NULL */
    View distance, of_distance, table, of_table; /* queries for distances; vectors of the distances keys - 1 ... 0 */
    float *sums;                /* of the gradient of the table: [heads + threads - 1, span, width] */
    word *scratch;              /* attention_scratch() for each thread */
} Attention;

/* Keys that a query reads: the first ones. */
INLINE long visible(const Attention *x, long query) { return x->causal ? x->keys - x->queries + query + 1 : x->keys; }

typedef struct {
    long depth, width, span; /* words of D where it is summed over; columns of D, and of keys */
    long some;               /* queries at a time */
} Sizes;

INLINE Sizes sizes_of(int type, const Attention *x) {
    const long span = upto(x->keys, LANES), fitting = least(SCORES / span / TALL * TALL, MOST);
    const long some = least(fitting < TALL ? TALL : fitting, upto(x->queries, TALL));
    return (Sizes){upto(x->dim, per_word(type)) / per_word(type), upto(x->dim, LANES), span, some};
}

/* ---- one query ---- */

INLINE void clear(int type, void *to, long first, long end) {
    if (first < end) memset((char *)to + first * size_of(type), 0, (size_t)((end - first) * size_of(type)));
}

INLINE long first_score(const Attention *x, long row, long head, long query) {
    return ((row * x->heads + head) * x->queries + query) * x->keys;
}

/* For all vectors of a query's scores with a key that is read: first number i, and how many scores are left from it on.
   What is computed of the others is written, if at all, to where nothing is read or where the next query writes. */
#define EACH_READ(...)                            \
    for (long i = 0; i < seen; i += LANES) {      \
        const long count = least(LANES, keys - i); \
        __VA_ARGS__                               \
    }

/* The numbers of keys that are read, of the vector from i on */
INLINE floats only(floats value, long i, long seen, float rest) {
    return i + LANES <= seen ? value : choose(of_bits((1u << (seen - i)) - 1), value, all(rest));
}

/* Scores, and those of distances, which begin at the query's own, become probabilities; what dropout leaves of them
   goes into kept_ones, with zeros up to span. */
INLINE void soften(int type, const Attention *x, float *scores, const float *by_distance, long row, long head,
                   long query, long span, void *kept_ones) {
    const long seen = visible(x, query), keys = x->keys, first = first_score(x, row, head, query);
    const char *bias = x->bias.data ? address(type, &x->bias, row, head, query) : NULL;
    char *probabilities = x->probabilities;
    const uint8_t *mask = x->mask;
    const float scale = x->scale, larger = x->dropout_scale;
    floats best = all(-INFINITY), sums = all(0);
    EACH_READ(
        floats value = load(FLOAT32, scores, i, LANES, 0) * scale;
        if (by_distance) value += load(FLOAT32, by_distance, i, LANES, 0);
        if (bias) value += load(type, bias, i, count, 0);
        value = only(value, i, seen, -INFINITY);
        store(FLOAT32, scores, i, LANES, value);
        best = choose(above(value, best), value, best);
    )
    /* As torch has it, a query that reads no key is 0. */
    const float largest = largest_of(best) == -INFINITY ? 0 : largest_of(best);
    EACH_READ(
        floats value = exponentials(load(FLOAT32, scores, i, LANES, 0) - largest);
        store(FLOAT32, scores, i, LANES, value);
        sums += value;
        (void)count;
    )
    const float sum = sum_of(sums), factor = sum == 0 ? 0 : 1 / sum;
    EACH_READ(
        floats value = load(FLOAT32, scores, i, LANES, 0) * factor;
        if (probabilities) store(type, probabilities, first + i, count, value);
        if (mask) value = choose(kept(mask, first + i), value * larger, all(0));
        store(type, kept_ones, i, LANES, value);
    )
    clear(type, kept_ones, upto(seen, LANES), span);
}

/* The gradient of scores from that of what dropout left, which is computed again; both with zeros up to span. That of
   scores of distances is the same, moved. */
INLINE void soften_gradient(int type, const Attention *x, float *gradient, long row, long head, long query, long span,
                            void *kept_ones, void *of_scores, void *moved) {
    const long seen = visible(x, query), keys = x->keys, first = first_score(x, row, head, query);
    const long start = x->queries - 1 - query;
    const char *probabilities = x->probabilities;
    const uint8_t *mask = x->mask;
    const float scale = x->scale, larger = x->dropout_scale;
    floats sums = all(0);
    EACH_READ(
        floats own = load(FLOAT32, gradient, i, LANES, 0);
        const floats probability = only(load(type, probabilities, first + i, count, 0), i, seen, 0);
        floats left = probability;
        if (mask) {
            const those stays = kept(mask, first + i);
            own = choose(stays, own * larger, all(0)), left = choose(stays, left * larger, all(0));
            store(FLOAT32, gradient, i, LANES, own);
        }
        sums += own * probability;
        store(type, kept_ones, i, LANES, left);
    )
    const float sum = sum_of(sums);
    EACH_READ(
        const floats probability = only(load(type, probabilities, first + i, count, 0), i, seen, 0);
        const floats own = (load(FLOAT32, gradient, i, LANES, 0) - sum) * probability;
        store(type, of_scores, i, LANES, own * scale);
        if (moved) store(type, moved, start + i, LANES, own);
    )
    clear(type, kept_ones, upto(seen, LANES), span), clear(type, of_scores, upto(seen, LANES), span);
    if (moved) clear(type, moved, 0, start), clear(type, moved, start + upto(seen, LANES), span);
}

/* ---- one head of one row ---- */

#define TAKE(WORDS) (scratch += upto(WORDS, LANES), scratch - upto(WORDS, LANES))
#define EACH_TILE(HEIGHT) for (long r = 0; r < (HEIGHT); r += TALL)

/* While a query is computed, its share of the next head's keys and values is fetched. */
INLINE void expect_next(int type, const Attention *x, long next, long query) {
    const Rows keys = rows_of(type, x->key, x->past, next % x->rows, next / x->rows);
    const Rows values = rows_of(type, x->value, x->past, next % x->rows, next / x->rows);
    for (long i = query * x->keys / x->queries; i < (query + 1) * x->keys / x->queries; i++)
        expect(type, &keys, i, x->keys, x->dim), expect(type, &values, i, x->keys, x->dim);
}

INLINE void forward(int type, const Attention *x, long row, long head, long next, word *scratch) {
    const Sizes s = sizes_of(type, x);
    const long per = per_word(type), dim = x->dim, line = s.span / per;
    const Rows queries = all_rows_of(type, &x->query, row, head), keys = rows_of(type, x->key, x->past, row, head);
    const Rows values = rows_of(type, x->value, x->past, row, head);
    word *key = TAKE(s.depth * s.span), *value = TAKE(line * s.width), *query = TAKE(s.some * s.depth);
    word *kept_ones = TAKE(s.some * line), *table = NULL;
    float *scores = (float *)TAKE(s.some * s.span), *result = (float *)TAKE(s.some * s.width), *by_distance = NULL;
    pack_columns(type, &keys, x->keys, dim, s.depth, s.span, key);
    pack_sums(type, &values, 0, x->keys, dim, s.width, s.span, value);
    if (x->table.data) {
        const Rows distances = all_rows_of(type, &x->table, 0, head);
        table = TAKE(s.depth * s.span), by_distance = (float *)TAKE(s.some * s.span + LANES);
        pack_columns(type, &distances, x->keys, dim, s.depth, s.span, table);
    }
    for (long start = 0; start < x->queries; start += s.some) {
        const long count = least(s.some, x->queries - start), height = upto(count, TALL);
        pack(type, &queries, start, count, dim, s.depth, height, query);
        EACH_TILE(height) {
            const long seen = visible(x, least(start + r + TALL, x->queries) - 1);
            PRODUCT_OF(query + r * s.depth, s.depth, 1, key, s.span, s.depth, scores + r * s.span, s.span,
                       upto(seen, LANES), 0);
        }
        if (table) {
            const Rows distances = all_rows_of(type, &x->distance, row, head);
            pack(type, &distances, start, count, dim, s.depth, height, query);
            EACH_TILE(height) {
                const long first = (x->queries - least(start + r + TALL, x->queries)) / LANES * LANES;
                PRODUCT_OF(query + r * s.depth, s.depth, 1, table + first, s.span, s.depth,
                           by_distance + r * s.span + first, s.span, s.span - first, 0);
            }
        }
        memset(kept_ones + count * line, 0, (size_t)((height - count) * line) * sizeof *kept_ones);
        for (long t = 0; t < count; t++) {
            const float *own = table ? by_distance + t * s.span + x->queries - 1 - start - t : NULL;
            expect_next(type, x, next, start + t);
            soften(type, x, scores + t * s.span, own, row, head, start + t, s.span, kept_ones + t * line);
        }
        EACH_TILE(height) {
            const long seen = visible(x, least(start + r + TALL, x->queries) - 1);
            PRODUCT_OF(kept_ones + r * line, line, 1, value, s.width, upto(seen, per) / per, result + r * s.width,
                       s.width, s.width, 0);
        }
        unpack(type, result, s.width, &x->output, row, head, start, count, dim);
    }
}

INLINE void backward(int type, const Attention *x, long row, long head, long next, float *of_table, word *scratch) {
    const Sizes s = sizes_of(type, x);
    const long per = per_word(type), dim = x->dim, line = s.span / per;
    const Rows queries = all_rows_of(type, &x->query, row, head), keys = rows_of(type, x->key, x->past, row, head);
    const Rows values = rows_of(type, x->value, x->past, row, head);
    const Rows gradients = all_rows_of(type, &x->output, row, head);
    Rows distances = queries;
    word *value = TAKE(s.depth * s.span), *key = TAKE(line * s.width), *gradient = TAKE(s.some * s.depth);
    word *query_sums = TAKE(s.some * s.width), *gradient_sums = TAKE(s.some * s.width), *room = TAKE(s.some * s.span);
    word *kept_ones = TAKE(s.some * line), *of_scores = TAKE(s.some * line), *table = NULL, *moved = NULL;
    float *scores = (float *)TAKE(s.some * s.span), *result = (float *)TAKE(s.some * s.width);
    float *of_key = (float *)TAKE(s.span * s.width), *of_value = (float *)TAKE(s.span * s.width);
    memset(of_key, 0, (size_t)(s.span * s.width) * sizeof *of_key);
    memset(of_value, 0, (size_t)(s.span * s.width) * sizeof *of_value);
    pack_columns(type, &values, x->keys, dim, s.depth, s.span, value);
    pack_sums(type, &keys, 0, x->keys, dim, s.width, s.span, key);
    if (of_table) {
        const Rows vectors = all_rows_of(type, &x->table, 0, head);
        distances = all_rows_of(type, &x->distance, row, head);
        table = TAKE(line * s.width), moved = TAKE(s.some * line + LANES);
        pack_sums(type, &vectors, 0, x->keys, dim, s.width, s.span, table);
    }
    for (long start = 0; start < x->queries; start += s.some) {
        const long count = least(s.some, x->queries - start), height = upto(count, TALL), steps = height / per;
        pack(type, &gradients, start, count, dim, s.depth, height, gradient);
        pack_sums(type, &gradients, start, count, dim, s.width, height, gradient_sums);
        pack_sums(type, &queries, start, count, dim, s.width, height, query_sums);
        EACH_TILE(height) {
            const long seen = visible(x, least(start + r + TALL, x->queries) - 1);
            PRODUCT_OF(gradient + r * s.depth, s.depth, 1, value, s.span, s.depth, scores + r * s.span, s.span,
                       upto(seen, LANES), 0);
        }
        for (long t = 0; t < count; t++) {
            expect_next(type, x, next, start + t);
            soften_gradient(type, x, scores + t * s.span, row, head, start + t, s.span, kept_ones + t * line,
                            of_scores + t * line, moved ? moved + t * line : NULL);
        }
        const size_t rest = (size_t)((height - count) * line) * sizeof *kept_ones;
        memset(kept_ones + count * line, 0, rest), memset(of_scores + count * line, 0, rest);
        if (moved) memset(moved + count * line, 0, rest);
        EACH_TILE(height) {
            const long seen = visible(x, least(start + r + TALL, x->queries) - 1);
            PRODUCT_OF(of_scores + r * line, line, 1, key, s.width, upto(seen, per) / per, result + r * s.width,
                       s.width, s.width, 0);
        }
        unpack(type, result, s.width, &x->of_query, row, head, start, count, dim);
        for (int which = 0; which < 2; which++) {
            const word *own = paired(type, which ? kept_ones : of_scores, height, s.span, room);
            EACH_TILE(s.span) { /* from the first query on that reads these keys */
                const long unread = x->causal ? r - (x->keys - x->queries) - start : 0;
                const long first = unread > 0 ? unread / per : 0;
                if (first < steps)
                    PRODUCT_OF(own + first * s.span + r, 1, s.span,
                               (which ? gradient_sums : query_sums) + first * s.width, s.width, steps - first,
                               (which ? of_value : of_key) + r * s.width, s.width, s.width, 1);
            }
        }
        if (!moved) continue;
        EACH_TILE(height) {
            const long first = (x->queries - least(start + r + TALL, x->queries)) / per;
            PRODUCT_OF(moved + r * line + first, line, 1, table + first * s.width, s.width, line - first,
                       result + r * s.width, s.width, s.width, 0);
        }
        unpack(type, result, s.width, &x->of_distance, row, head, start, count, dim);
        pack_sums(type, &distances, start, count, dim, s.width, height, query_sums);
        const word *own = paired(type, moved, height, s.span, room);
        EACH_TILE(s.span) { /* from the first query on that is as far from its first key */
            const long near = x->queries - (r + TALL) - start, first = near > 0 ? near / per : 0;
            if (first < steps)
                PRODUCT_OF(own + first * s.span + r, 1, s.span, query_sums + first * s.width, s.width, steps - first,
                           of_table + r * s.width, s.width, s.width, 1);
        }
    }
    for (int piece = x->past ? 0 : 1; piece < 2; piece++) {
        const long first = piece ? x->past : 0, count = piece ? x->keys - x->past : x->past;
        unpack(type, of_key + first * s.width, s.width, &x->of_key[piece], row, head, 0, count, dim);
        unpack(type, of_value + first * s.width, s.width, &x->of_value[piece], row, head, 0, count, dim);
    }
}

/* ---- all of them, in threads: each takes some that follow one another, by heads and then by rows ---- */

/* Bytes of the structure, which Python describes once more */
long attention_size(void) { return (long)sizeof(Attention); }

/* Words of scratch for a thread */
long attention_scratch(const Attention *x) {
    const Sizes s = sizes_of((int)x->type, x);
    return 2 * s.depth * s.span + 4 * s.span * s.width + s.some * (s.depth + 6 * s.span + 3 * s.width) + 16 * LANES;
}

/* Numbers of the sums of a thread and a head for the gradient of the table */
long attention_sums(const Attention *x) {
    const Sizes s = sizes_of((int)x->type, x);
    return s.span * s.width;
}

INLINE long first_of(const Attention *x, long worker) { return x->rows * x->heads * worker / x->threads; }

void attention(const Attention *x) {
    const int type = (int)x->type;
    const long scratch = attention_scratch(x);
    _Pragma("omp parallel for num_threads(x->threads) schedule(static, 1)")
    for (long worker = 0; worker < x->threads; worker++)
        for (long i = first_of(x, worker); i < first_of(x, worker + 1); i++) {
            word *own = x->scratch + worker * scratch;
            const long row = i % x->rows, head = i / x->rows, next = least(i + 1, first_of(x, worker + 1) - 1);
            if (type == FLOAT32) forward(FLOAT32, x, row, head, next, own);
            else forward(BFLOAT16, x, row, head, next, own);
        }
}

void attention_gradient(const Attention *x) {
    const int type = (int)x->type;
    const long scratch = attention_scratch(x), each = attention_sums(x);
    _Pragma("omp parallel for num_threads(x->threads) schedule(static, 1)")
    for (long worker = 0; worker < x->threads; worker++)
        for (long i = first_of(x, worker), last = -1; i < first_of(x, worker + 1); i++) {
            word *own = x->scratch + worker * scratch;
            const long row = i % x->rows, head = i / x->rows, next = least(i + 1, first_of(x, worker + 1) - 1);
            /* No two pairs of a thread and a head that it has have equal sums. */
            float *of_table = x->table.data ? x->sums + (head + worker) * each : NULL;
            if (of_table && head != last) memset(of_table, 0, (size_t)each * sizeof *of_table);
            last = head;
            if (type == FLOAT32) backward(FLOAT32, x, row, head, next, of_table, own);
            else backward(BFLOAT16, x, row, head, next, of_table, own);
        }
    if (!x->table.data) return;
    const long width = upto(x->dim, LANES);
    _Pragma("omp parallel for num_threads(x->threads) schedule(static)")
    for (long head = 0; head < x->heads; head++) {
        float *total = NULL;
        for (long worker = 0; worker < x->threads; worker++) {
            if (first_of(x, worker) >= (head + 1) * x->rows || first_of(x, worker + 1) <= head * x->rows) continue;
            float *own = x->sums + (head + worker) * each;
            if (!total) total = own;
            else EACH(0, each,
                store(FLOAT32, total, i, count, load(FLOAT32, total, i, count, 0) + load(FLOAT32, own, i, count, 0));
            )
        }
        if (type == FLOAT32) unpack(FLOAT32, total, width, &x->of_table, 0, head, 0, x->keys, x->dim);
        else unpack(BFLOAT16, total, width, &x->of_table, 0, head, 0, x->keys, x->dim);
    }
}
