/* Includes BODY once for each instruction set that this compiler has: with ISA, the prefix of the vector functions, WIDTH,
 * the floats in a vector, TARGET, the functions' attribute, and V(name), a name of this instruction set. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define V(name) JOIN(ISA, name)

#define ISA portable
#define TARGET
#define WIDTH 4
#include BODY
#undef ISA
#undef TARGET
#undef WIDTH

#if defined(__x86_64__)
#define ISA avx2
#define TARGET TARGET_AVX2
#define WIDTH 8
#include BODY
#undef ISA
#undef TARGET
#undef WIDTH

#define ISA avx512
#define TARGET TARGET_AVX512
#define WIDTH 16
#include BODY
#undef ISA
#undef TARGET
#undef WIDTH

#elif defined(__aarch64__)
#define ISA neon
#define TARGET
#define WIDTH 4
#include BODY
#undef ISA
#undef TARGET
#undef WIDTH
#endif

#undef JOIN_
#undef JOIN
#undef V
