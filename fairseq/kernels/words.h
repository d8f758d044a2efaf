/* Words in and out: embeddings, output layers, and the most probable words. Structures match words.py. */
#include "decoding.h"

typedef struct {
    long bands, width, widest, table_type;
    const long *bounds;  /* [bands + 1] */
    const void **tables; /* [words, d] each */
    const Matrix *projections; /* [width, d] each; weight NULL: none */
    float scale;
} Embedding;

typedef struct {
    Matrix narrow, words; /* [d, C], weight NULL: none; [n, d], of the head followed by a row for each tail */
} Band;

typedef struct {
    long bands, width, widest; /* widest: most inputs of a product */
    const long *bounds;        /* [bands + 1] */
    const Band *band;          /* the head first */
} Output;

/* y [rows, N] = x [rows, K] Wᵀ + bias; scratch: room for threads * rows * (K + 1) floats */
void linear(const Matrix *matrix, const float *x, long rows, float *y, long threads, float *scratch) {
#pragma omp parallel num_threads(threads)
    {
        Worker worker = this_worker(NULL);
        worker.arranged = scratch + worker.number * rows * (matrix->inputs + 1);
        multiply(&worker, matrix, matrix->bias, x, matrix->inputs, rows, y, matrix->outputs, 0);
    }
}

/* Embeddings of tokens [rows] in y [rows, width], added [width] or NULL added to each; scratch: rows * (3 * widest + 1)
 * floats a thread. Returns whether all tokens are words; otherwise nothing is computed. */
int embed(const Embedding *embedding, const int64_t *tokens, long rows, const float *added, float *y, long threads,
          float *scratch) {
    for (long r = 0; r < rows; r++)
        if (tokens[r] < 0 || tokens[r] >= embedding->bounds[embedding->bands]) return 0;
#pragma omp parallel num_threads(threads)
    {
        Worker worker = this_worker(NULL);
        const long width = embedding->width, panels = (width + LANES - 1) / LANES;
        const long first = panels * worker.number / worker.count * LANES;
        const long end = least(width, panels * (worker.number + 1) / worker.count * LANES);
        float *from = scratch + worker.number * rows * (3 * embedding->widest + 1);
        float *projected = from + rows * embedding->widest;
        worker.arranged = projected + rows * embedding->widest;
        for (long band = 0; band < embedding->bands; band++) { /* a projection is read once for all tokens of its band */
            const Matrix *projection = &embedding->projections[band];
            const long low = embedding->bounds[band], high = embedding->bounds[band + 1];
            const long dim = projection->weight ? projection->inputs : width;
            long count = 0;
            for (long r = 0; r < rows; r++) {
                if (tokens[r] < low || tokens[r] >= high) continue;
                for (long i = 0; i < dim; i++)
                    from[count * dim + i] = get(embedding->table_type, embedding->tables[band], (tokens[r] - low) * dim + i);
                count++;
            }
            const float *result = projection->weight ? projected : from;
            if (projection->weight) multiply(&worker, projection, NULL, from, dim, count, projected, width, 0);
            for (long r = 0; r < rows; r++) {
                if (tokens[r] < low || tokens[r] >= high) continue;
                for (long i = first; i < end; i++)
                    y[r * width + i] = result[i] * embedding->scale + (added ? added[i] : 0);
                result += width;
            }
        }
    }
    return 1;
}

/* ---- the most probable words ---- */

#define NO_WORD INT64_MAX
#define NUMBER (long)(sizeof(long) / sizeof(float)) /* floats that a whole number takes */
#define MARGIN 1e-3f /* tolerance for rounding of a band's log-probability */

/* The count most probable words of a row so far: a heap, the least probable one first. */
typedef struct {
    long count;
    float *scores;
    int64_t *words;
} Best;

/* Order of choice: of equal scores the first word; NaN first, as in torch, so that the caller sees it. */
INLINE int precedes(float score, int64_t word, float other, int64_t other_word) {
    if (isnan(score) || isnan(other)) return isnan(score) && (!isnan(other) || word < other_word);
    return score > other || (score == other && word < other_word);
}

/* Replace the first of a heap of size words. */
static void replace(Best *best, long size, float score, int64_t word) {
    float *scores = best->scores;
    int64_t *words = best->words;
    long i = 0;
    for (long child = 1; child < size; i = child, child = 2 * i + 1) {
        if (child + 1 < size && precedes(scores[child], words[child], scores[child + 1], words[child + 1])) child++;
        if (!precedes(score, word, scores[child], words[child])) break;
        scores[i] = scores[child];
        words[i] = words[child];
    }
    scores[i] = score;
    words[i] = word;
}

/* Scores of the n words from first on. Most do not reach those that are held: LANES are compared at a time. */
static void consider(Best *best, const float *scores, long n, int64_t first) {
    for (long start = 0; start < n; start += LANES) {
        const long end = least(n, start + LANES);
        const float least_score = best->scores[0];
        int reached = end - start < LANES || best->words[0] == NO_WORD;
        for (long i = start; i < start + LANES && end - start == LANES; i++) reached |= !(scores[i] <= least_score);
        for (long i = start; i < end && reached; i++)
            if (precedes(scores[i], first + i, best->scores[0], best->words[0]))
                replace(best, best->count, scores[i], first + i);
    }
}

/* The heap in falling order: its first word is the last of those that are left. */
static void sort(Best *best) {
    for (long last = best->count - 1; last > 0; last--) {
        const float score = best->scores[0], moved = best->scores[last];
        const int64_t word = best->words[0], moved_word = best->words[last];
        replace(best, last, moved, moved_word);
        best->scores[last] = score;
        best->words[last] = word;
    }
}

static double logsumexp(const float *x, long n) {
    float most = -INFINITY;
    double total = 0;
    for (long i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    for (long start = 0; start < n; start += 1024) { /* in float32 a sum of many words would lose the small ones */
        float sum = 0;
        for (long i = start; i < least(n, start + 1024); i++) sum += exponential(x[i] - most);
        total += sum;
    }
    return most + log(total);
}

static void forbid(float *scores, int64_t first, int64_t end, const int64_t *forbidden, long count) {
    for (long i = 0; i < count; i++)
        if (forbidden[i] >= first && forbidden[i] < end) scores[forbidden[i] - first] = -INFINITY;
}

/* logits [rows, n] of a band; narrowed: room for [rows, d] */
static void band_logits(const Worker *worker, const Band *band, const float *hidden, long width, long rows, float *narrowed,
                        float *logits) {
    const float *x = hidden;
    if (band->narrow.weight) {
        multiply(worker, &band->narrow, NULL, hidden, width, rows, narrowed, band->narrow.outputs, 0);
        wait_for_all(worker);
        x = narrowed;
    }
    multiply(worker, &band->words, band->words.bias, x, band->words.inputs, rows, logits, band->words.outputs, 0);
    wait_for_all(worker);
}

static long widest_tail(const Output *output) {
    long most = 0;
    for (long b = 1; b < output->bands; b++)
        if (output->band[b].words.outputs > most) most = output->band[b].words.outputs;
    return most;
}

/* size of the scratch memory of best(), in float32 numbers */
long best_size(const Output *output, long rows, long threads) {
    const long shared = output->band[0].words.outputs + widest_tail(output) + output->widest;
    const long of_thread = NUMBER + output->width + output->widest + 1;
    return rows * (shared + threads * of_thread);
}

/* The count most probable words that are not forbidden, in falling order: scores and words [rows, count] from hidden
 * [rows, width]. Scores are log-probabilities up to a constant for each row. No word of a tail is more probable than its
 * band, so a band is not computed for rows of which all words found so far are more probable; with fewer than count
 * words found, NO_WORD at -inf is the least of them. */
void best(const Output *output, const float *hidden, long rows, long count, const int64_t *forbidden, long forbidden_count,
          float *scores, int64_t *words, long threads, float *scratch) {
    const long width = output->width, head_width = output->band[0].words.outputs, head_words = output->bounds[1];
    float *head = scratch + threads * rows * NUMBER; /* behind the numbers of active rows, which are aligned so */
    float *logits = head + rows * head_width, *narrowed = logits + rows * widest_tail(output);
    float *rest = narrowed + rows * output->widest;
    Barrier barrier = {0, 0};
    for (long i = 0; i < rows * count; i++) scores[i] = -INFINITY, words[i] = NO_WORD;
#pragma omp parallel num_threads(threads)
    {
        Worker worker = this_worker(&barrier);
        long *active = (long *)scratch + worker.number * rows; /* not on the stack, which a million rows would exceed */
        float *some = rest + worker.number * rows * (width + output->widest + 1); /* hidden states of active rows */
        worker.arranged = some + rows * width;
        const long first = rows * worker.number / worker.count, end = rows * (worker.number + 1) / worker.count;
        band_logits(&worker, &output->band[0], hidden, width, rows, narrowed, head);
        for (long r = first; r < end; r++) {
            Best row = {count, scores + r * count, words + r * count};
            forbid(head + r * head_width, 0, head_words, forbidden, forbidden_count);
            consider(&row, head + r * head_width, head_words, 0);
        }
        wait_for_all(&worker);
        for (long b = 1; b < output->bands; b++) {
            const long low = output->bounds[b], size = output->bounds[b + 1] - low;
            long n = 0;
            for (long r = 0; r < rows; r++) {
                if (head[r * head_width + head_words + b - 1] + MARGIN < scores[r * count]) continue;
                memcpy(some + n * width, hidden + r * width, width * sizeof(float));
                active[n++] = r;
            }
            wait_for_all(&worker); /* all have read the scores */
            if (n == 0) continue;
            band_logits(&worker, &output->band[b], some, width, n, narrowed, logits);
            for (long i = n * worker.number / worker.count; i < n * (worker.number + 1) / worker.count; i++) {
                const long r = active[i];
                float *own = logits + i * size;
                Best row = {count, scores + r * count, words + r * count};
                const float shift = head[r * head_width + head_words + b - 1] - logsumexp(own, size);
                for (long j = 0; j < size; j++) own[j] += shift;
                forbid(own, low, low + size, forbidden, forbidden_count);
                consider(&row, own, size, low);
            }
            wait_for_all(&worker);
        }
        for (long r = first; r < end; r++) {
            Best row = {count, scores + r * count, words + r * count};
            sort(&row);
        }
    }
}
