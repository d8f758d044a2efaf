/* Dropout on a CPU: a mask with a bit for each element, and its application in one pass over memory.
 *
 * Types of tensors: 0 float32, 1 bfloat16.
 */
#include "vectors.h"

#define BLOCK 4096 /* elements of a parallel piece of work */

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

/* The mask [count / 8 + 8] of count elements that follows from a seed, of which dropped of 65536 are dropped */
void draw_mask(const int64_t *seed, long dropped, uint8_t *mask, long count, long threads) {
    _Pragma("omp parallel for num_threads(threads) schedule(static)")
    for (long first = 0; first < count; first += BLOCK)
        for (long i = first; i < least(count, first + BLOCK); i += 64) {
            Noise noise;
            for (long word = 0; word < 16; word += (long)(sizeof(longs) / 8))
                noise.words[word * 8 / sizeof(longs)] = random_words((uint64_t)*seed, i / 4 + word);
            const uint64_t bits = bits_of(&noise, (int16_t)(dropped - 32768));
            memcpy(mask + i / 8, &bits, sizeof bits);
        }
    const long written = (count + 63) / 64 * 8;
    memset(mask + written, 0, (size_t)(count / 8 + 8 - written));
}

INLINE void drop_piece(int type, int relu, const void *x, const void *residual, void *y, long first, long end,
                       const uint8_t *mask, const void *positive, float scale) {
    EACH(first, end,
        floats value = load(type, x, i, count, 0) * scale;
        value = choose(positive ? above(load(type, positive, i, count, 0), all(0)) : kept(mask, i), value, all(0));
        if (relu) value = choose(above(all(0), value), all(0), value); /* NaN stays */
        if (residual) value += load(type, residual, i, count, 0);
        store(type, y, i, count, value);
    )
}

/* y [size] = scale x, or scale relu(x), where the mask keeps it or, if there are such numbers, they are positive, else 0;
   plus the residual, if there is one */
void drop(long type, long relu, const void *x, const void *residual, void *y, const uint8_t *mask, const void *positive,
          float scale, long size, long threads) {
    PARALLEL(first, size, BLOCK, drop_piece(T, (int)relu, x, residual, y, first, least(size, first + BLOCK), mask,
                                            positive, scale))
}
