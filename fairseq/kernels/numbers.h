/* What kernels of training and of decoding share: LANES numbers at a time, and the exponential function. */
#ifndef NUMBERS_H
#define NUMBERS_H
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
/* As many as a register holds: compilers keep wider vectors in memory. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(2)));

INLINE long least(long a, long b) { return a < b ? a : b; }

/* e to the x, to 1e-7 of it, is 2 to the n times e to the r, n a whole number near x / ln 2; for a float or a vector. The
 * series is Taylor's, fitted to |r| <= ln 2 / 2; ln 2 has two parts, so that n times the first is exact. */
#define LOG2_E 1.44269504f
#define LN2_REST(x, n) (((x) - (n) * 0.693359375f) + (n) * 2.12194440e-4f)
#define EXPONENTIAL_SERIES(r)                                                                                          \
    ((((((1.9875691500e-4f * (r) + 1.3981999507e-3f) * (r) + 8.3334519073e-3f) * (r) + 4.1665795894e-2f) * (r) +        \
       1.6666665459e-1f) * (r) + 5.0000001201e-1f) * (r) * (r) + (r) + 1.0f)

#endif
