/* One token through a stack of transformer decoder layers, for a few rows at a time.
 *
 * A decoding step reads every weight once for little arithmetic, so it is bound by memory bandwidth. At small sizes
 * separate torch kernels are far from that bound, because launching one costs more than reading its weights. Here the
 * whole stack is one parallel region.
 *
 * Activations are float32. Weights are float32, bfloat16, float16, or int8 with a scale for each output, in panels of L =
 * LANES outputs: [ceil(N / L), K, L]; bfloat16 in pairs along K: [ceil(N / L), ceil(K / 2), L, 2]. Structures match
 * stack.py. Compiled at run time for this machine.
 */
#include "words.h"

enum { RELU, GELU, GELU_TANH, TANH, LINEAR, RELU_SQUARED, SILU };

typedef struct {
    Matrix qkv, out, fc1, fc2, fc3; /* fc3 multiplies the activations of fc1; weight NULL: none */
    const float *attention_norm, *final_norm; /* gain, then bias: [2, C] */
    const float *content_bias, *position_bias; /* [H, D] or NULL */
    const float *query_norm, *key_norm;        /* gains of RMS norms before rotation: [D] or NULL */
} Layer;

/* H heads of queries share G = kv_heads heads of keys and values. */
typedef struct {
    long layers, width, heads, kv_heads, head_dim, ffn_width, pre_norm, parallel, rms, activation;
    float norm_eps, head_norm_eps;
    const Layer *layer;
    const float *norm; /* after the last layer, or NULL */
    Matrix project;    /* of the hidden states; weight NULL: none */
} Stack;

typedef struct {
    void *keys, *values;          /* [B, G, S, D] */
    const void *bias;             /* of query, key and value at each position: [S, (H + 2 G) D] */
    const void *distance_keys;    /* [H, S, D] or NULL */
    const float *distance_scores; /* [H, S] or NULL */
    const float *rotation;        /* cosines and sines: [S, 2, R / 2] or NULL */
} LayerCache;

typedef struct {
    long type, rows, length, bias_stride, rotated, held, window; /* rotated: channels R of a head */
    const LayerCache *layer;
} Cache;

/* Outputs of a panel of weights */
long lanes(void) { return LANES; }

/* ---- parts of a layer ---- */

static void normalize(const Stack *stack, const float *weight, const float *x, long rows, float *y) {
    const long width = stack->width;
    for (long r = 0; r < rows; r++, x += width, y += width) {
        float sum = 0, squares = 0;
        for (long i = 0; i < width && !stack->rms; i++) sum += x[i];
        float mean = sum / width;
        for (long i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
        float scale = 1.0f / sqrtf(squares / width + stack->norm_eps);
        for (long i = 0; i < width; i++) y[i] = (x[i] - mean) * scale * weight[i] + weight[width + i];
    }
}

/* A query or key as scores take it: its norm, then its rotation by a row of the table. Channels d and R / 2 + d make a pair. */
INLINE void place(float eps, const float *gain, const float *rotation, long half, const float *x, long dim, float *y) {
    float squares = 0;
    for (long d = 0; gain && d < dim; d++) squares += x[d] * x[d];
    const float scale = gain ? 1.0f / sqrtf(squares / dim + eps) : 1;
    for (long d = 0; d < dim; d++) y[d] = gain ? x[d] * scale * gain[d] : x[d];
    for (long d = 0; d < half; d++) {
        const float first = y[d], second = y[half + d];
        y[d] = first * rotation[d] - second * rotation[half + d];
        y[half + d] = second * rotation[d] + first * rotation[half + d];
    }
}

static void activate(long kind, float *x, long count) {
    if (kind == RELU)
        for (long i = 0; i < count; i++) x[i] = x[i] > 0 ? x[i] : 0;
    else if (kind == GELU)
        for (long i = 0; i < count; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    else if (kind == GELU_TANH)
        for (long i = 0; i < count; i++)
            x[i] = 0.5f * x[i] * (1.0f + tanhf(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
    else if (kind == TANH)
        for (long i = 0; i < count; i++) x[i] = tanhf(x[i]);
    else if (kind == RELU_SQUARED)
        for (long i = 0; i < count; i++) x[i] = x[i] > 0 ? x[i] * x[i] : 0;
    else if (kind == SILU)
        for (long i = 0; i < count; i++) x[i] /= 1.0f + exponential(-x[i]);
}

/* the share of the outputs of fc1, x, and of fc3, other or NULL, that this worker computed */
static void activate_own(const Worker *worker, const Stack *stack, long rows, float *x, const float *other) {
    long width = stack->ffn_width, panels = (width + LANES - 1) / LANES;
    long first = panels * worker->number / worker->count * LANES;
    long end = least(width, panels * (worker->number + 1) / worker->count * LANES);
    for (long r = 0; r < rows && first < end; r++) {
        activate(stack->activation, x + r * width + first, end - first);
        for (long i = r * width + first; other && i < r * width + end; i++) x[i] *= other[i];
    }
}

#ifdef __AVX512F__
/* 16 of 32 numbers: the first or the second half, of bfloat16 the even or the odd ones, which need no shuffle */
INLINE floats part(int type, const char *from, int second) {
    return weights(type, type == BFLOAT16 ? from : from + 16 * second * (type == FLOAT32 ? 4 : 2), second);
}

INLINE long part_index(int type, long i) { return type == BFLOAT16 ? i % 16 * 2 + i / 16 % 2 + i / 32 * 32 : i; }

/* The sum of the lanes of each of 16 vectors, in 15 additions. Folding vectors i and i + half leaves the sums of i where the
 * lane's bit `half` is 0 and those of i + half where it is 1, so that vector j ends in lane j. */
INLINE floats lane_sums(floats *sum) {
#pragma GCC unroll 4
    for (int half = 8; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) sum[i] = crossed(sum[i], sum[i + half], half, 0) + crossed(sum[i], sum[i + half], half, 1);
    return sum[0];
}
#endif

/* scores[j] += query . keys[j]; the keys are count rows of dim; scores have room for LANES more, which may change. */
INLINE void score(int type, const float *query, const char *keys, long dim, long count, float *scores) {
    const long size = type == FLOAT32 ? 4 : 2;
#ifdef __AVX512F__
    if (dim % 32 == 0) {
        float arranged[dim];
        for (long i = 0; i < dim; i++) arranged[i] = query[part_index(type, i)];
        for (long j = 0; j < count; j += 16, keys += 16 * dim * size) {
            floats sum[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                sum[i] = (floats){0};
                for (long d = 0; d < dim && j + i < count; d += 32)
                    sum[i] += part(type, keys + (i * dim + d) * size, 0) * *(const floats *)(arranged + d) +
                              part(type, keys + (i * dim + d) * size, 1) * *(const floats *)(arranged + d + 16);
            }
            *(floats *)(scores + j) += lane_sums(sum);
        }
        return;
    }
#endif
    for (long j = 0; j < count; j++) {
        float sum = 0;
        for (long d = 0; d < dim; d++) sum += query[d] * get(type, keys, j * dim + d);
        scores[j] += sum;
    }
}

INLINE void weighted_sum(int type, const float *weight, const char *values, long dim, long count, float *to) {
    long d = 0;
#ifdef __AVX512F__
    for (; d + 64 <= dim; d += 64) {
        floats sum[4] = {{0}};
        const char *value = values + d * (type == FLOAT32 ? 4 : 2), *half = value + 32 * (type == FLOAT32 ? 4 : 2);
        for (long j = 0; j < count; j++) {
            const long at = j * dim * (type == FLOAT32 ? 4 : 2);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                sum[i] += weight[j] * part(type, value + at, i);
                sum[2 + i] += weight[j] * part(type, half + at, i);
            }
        }
        for (long i = 0; i < 64; i++) to[d + part_index(type, i)] = ((float *)sum)[i];
    }
#endif
    for (long i = d; i < dim; i++) to[i] = 0;
    for (long j = 0; j < count && d < dim; j++)
        for (long i = d; i < dim; i++) to[i] += weight[j] * get(type, values, j * dim + i);
}

/* The heads of one row that share keys: append key and value to the cache, then attend to the visible keys. */
INLINE void attend(int type, const long dim, const Stack *stack, const Layer *layer, const Cache *cache, const LayerCache *own,
                   long row, long group, long held, const float *qkv, float *scores, float *attended) {
    const long heads = stack->heads, groups = stack->kv_heads, together = heads / groups;
    const long size = type == FLOAT32 ? 4 : 2, start = (row * groups + group) * cache->length * dim;
    const long seen = cache->window ? least(held + 1, cache->window) : held + 1, first = held + 1 - seen;
    const float *of_row = qkv + row * (heads + 2 * groups) * dim, scale = 1.0f / sqrtf(dim);
    const float *key = of_row + (heads + group) * dim, *value = key + groups * dim;
    const float *rotation = own->rotation ? own->rotation + held * cache->rotated : NULL, eps = stack->head_norm_eps;
    const long half = cache->rotated / 2;
    char *keys = (char *)own->keys + start * size, *values = (char *)own->values + start * size;
    float placed[dim], query[dim];
    place(eps, layer->key_norm, rotation, half, key, dim, placed);
    for (long d = 0; d < dim; d++) put(type, keys, held * dim + d, placed[d]);
    for (long d = 0; d < dim; d++) put(type, values, held * dim + d, value[d]);
    for (long head = group * together; head < (group + 1) * together; head++) {
        float best = -INFINITY, sum = 0;
        float *to = attended + (row * heads + head) * dim;
        place(eps, layer->query_norm, rotation, half, of_row + head * dim, dim, placed);
        for (long j = 0; j < seen; j++) scores[j] = 0;
        if (own->distance_keys) {
            const long nearest = (head + 1) * cache->length - seen;
            const float *bias = layer->position_bias;
            for (long d = 0; d < dim; d++) query[d] = (placed[d] + (bias ? bias[head * dim + d] : 0)) * scale;
            score(type, query, (const char *)own->distance_keys + nearest * dim * size, dim, seen, scores);
            if (own->distance_scores)
                for (long j = 0; j < seen; j++) scores[j] += own->distance_scores[nearest + j];
        }
        const float *bias = layer->content_bias;
        for (long d = 0; d < dim; d++) query[d] = (placed[d] + (bias ? bias[head * dim + d] : 0)) * scale;
        score(type, query, keys + first * dim * size, dim, seen, scores);
        float most[LANES];
        for (long i = 0; i < LANES; i++) most[i] = scores[seen + i] = -INFINITY;
        for (long j = 0; j < seen; j += LANES) /* independent ones, as the order matters to NaN */
            for (long i = 0; i < LANES; i++) most[i] = scores[j + i] > most[i] ? scores[j + i] : most[i];
        for (long i = 0; i < LANES; i++) best = most[i] > best ? most[i] : best;
        for (long j = 0; j < seen; j++) scores[j] = exponential(scores[j] - best);
        for (long j = 0; j < seen; j++) sum += scores[j];
        weighted_sum(type, scores, values + first * dim * size, dim, seen, to);
        for (long d = 0; d < dim; d++) to[d] /= sum;
    }
}

#define ATTEND(NAME, TYPE)                                                                                         \
    static void NAME(const Stack *stack, const Layer *layer, const Cache *cache, const LayerCache *own, long row,  \
                     long group, long held, const float *qkv, float *scores, float *attended) {                    \
        if (stack->head_dim == 64) /* constant for the compiler */                                                 \
            attend(TYPE, 64, stack, layer, cache, own, row, group, held, qkv, scores, attended);                   \
        else                                                                                                       \
            attend(TYPE, stack->head_dim, stack, layer, cache, own, row, group, held, qkv, scores, attended);      \
    }
ATTEND(attend_float32, FLOAT32)
ATTEND(attend_bfloat16, BFLOAT16)
ATTEND(attend_float16, FLOAT16)

/* ---- the stack ---- */

typedef struct {
    float *x, *qkv, *attended; /* [rows, C], [rows, (H + 2 G) D], [rows, H D] */
    float *inner, *gate;       /* [rows, F] of fc1 and of fc3 */
    float *bias;               /* [(H + 2 G) D] of each worker */
} Shared;

static void take_normed(const Worker *worker, const Shared *shared, long count) {
    if (worker->number == 0) memcpy(shared->x, worker->normed, count * sizeof(float));
    wait_for_all(worker);
}

/* outputs of qkv */
static long projected(const Stack *stack) { return (stack->heads + 2 * stack->kv_heads) * stack->head_dim; }

static void layer_step(const Worker *worker, const Shared *shared, const Stack *stack, const Layer *layer,
                       const Cache *cache, const LayerCache *own, long held) {
    const long rows = cache->rows, width = stack->width, inner = stack->heads * stack->head_dim, qkv = projected(stack);
    const float *input = shared->x;
    float *bias = shared->bias + worker->number * qkv;
    if (stack->pre_norm) {
        normalize(stack, layer->attention_norm, shared->x, rows, worker->normed);
        input = worker->normed;
    }
    /* Each worker fills a copy of its own, which needs no barrier. */
    for (long i = 0; i < qkv; i++) bias[i] = get(cache->type, own->bias, held * cache->bias_stride + i);
    multiply(worker, &layer->qkv, bias, input, width, rows, shared->qkv, qkv, 0);
    /* of the layer's input, before attention is added to it */
    if (stack->parallel) normalize(stack, layer->final_norm, shared->x, rows, worker->normed);
    wait_for_all(worker);
    const long groups = rows * stack->kv_heads, end = groups * (worker->number + 1) / worker->count;
    for (long i = groups * worker->number / worker->count; i < end; i++)
        (cache->type == FLOAT32 ? attend_float32 : cache->type == BFLOAT16 ? attend_bfloat16 : attend_float16)(
            stack, layer, cache, own, i / stack->kv_heads, i % stack->kv_heads, held, shared->qkv, worker->scores,
            shared->attended);
    wait_for_all(worker);
    multiply(worker, &layer->out, layer->out.bias, shared->attended, inner, rows, shared->x, width, 1);
    if (!stack->parallel) {
        wait_for_all(worker);
        normalize(stack, stack->pre_norm ? layer->final_norm : layer->attention_norm, shared->x, rows, worker->normed);
    }
    multiply(worker, &layer->fc1, layer->fc1.bias, worker->normed, width, rows, shared->inner, stack->ffn_width, 0);
    const int gated = layer->fc3.weight != NULL;
    if (gated)
        multiply(worker, &layer->fc3, layer->fc3.bias, worker->normed, width, rows, shared->gate, stack->ffn_width, 0);
    activate_own(worker, stack, rows, shared->inner, gated ? shared->gate : NULL);
    wait_for_all(worker);
    if (!stack->pre_norm) take_normed(worker, shared, rows * width);
    multiply(worker, &layer->fc2, layer->fc2.bias, shared->inner, stack->ffn_width, rows, shared->x, width, 1);
    wait_for_all(worker);
    if (!stack->pre_norm) {
        normalize(stack, layer->final_norm, shared->x, rows, worker->normed);
        wait_for_all(worker);
        take_normed(worker, shared, rows * width);
    }
}

static long widest(const Stack *stack) {
    long width = stack->width, inner = stack->heads * stack->head_dim;
    if (inner > width) width = inner;
    return (stack->ffn_width > width ? stack->ffn_width : width) + 1;
}

static long of_worker(const Stack *stack, const Cache *cache) {
    return cache->rows * (stack->width + widest(stack)) + cache->length + LANES;
}

/* size of the scratch memory of steps(), in float32 numbers */
long scratch_size(const Stack *stack, const Cache *cache, long threads) {
    long inner = stack->heads * stack->head_dim, qkv = projected(stack);
    return cache->rows * (stack->width + qkv + inner + 2 * stack->ffn_width) + threads * (qkv + of_worker(stack, cache));
}

/* Read tokens one by one. Several threads of a program may call it at once: the stack is only read, and cache and
 * scratch belong to one call.
 *
 * embedded: [B, T, C]; hidden: [B, T, C'] in the width of the output; scratch: scratch_size() floats. */
void steps(const Stack *stack, const Cache *cache, const float *embedded, long tokens, float *hidden, long threads,
           float *scratch) {
    const long rows = cache->rows, width = stack->width, inner = stack->heads * stack->head_dim, qkv = projected(stack);
    const long out_width = stack->project.weight ? stack->project.outputs : width;
    Barrier barrier = {0, 0};
    Shared shared;
    shared.x = scratch;
    shared.qkv = shared.x + rows * width;
    shared.attended = shared.qkv + rows * qkv;
    shared.inner = shared.attended + rows * inner;
    shared.gate = shared.inner + rows * stack->ffn_width;
    shared.bias = shared.gate + rows * stack->ffn_width;
    float *rest = shared.bias + threads * qkv;
#pragma omp parallel num_threads(threads)
    {
        Worker worker = this_worker(&barrier);
        worker.normed = rest + worker.number * of_worker(stack, cache);
        worker.scores = worker.normed + rows * width;
        worker.arranged = worker.scores + cache->length + LANES;
        for (long t = 0; t < tokens; t++) {
            if (worker.number == 0)
                for (long r = 0; r < rows; r++)
                    memcpy(shared.x + r * width, embedded + (r * tokens + t) * width, width * sizeof(float));
            wait_for_all(&worker);
            for (long i = 0; i < stack->layers; i++)
                layer_step(&worker, &shared, stack, &stack->layer[i], cache, &cache->layer[i], cache->held + t);
            const float *last = shared.x;
            if (stack->norm) {
                normalize(stack, stack->norm, shared.x, rows, worker.normed);
                last = worker.normed;
            }
            float *to = hidden + t * out_width;
            if (stack->project.weight)
                multiply(&worker, &stack->project, NULL, last, width, rows, to, tokens * out_width, 0);
            else if (worker.number == 0)
                for (long r = 0; r < rows; r++)
                    memcpy(to + r * tokens * out_width, last + r * width, width * sizeof(float));
            wait_for_all(&worker);
        }
    }
}
