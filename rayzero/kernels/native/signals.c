/* Words in shared memory by which processes signal each other: flags, bells, cells, versions.
 *
 * Everything that was written before a release is seen after the acquire that reads the released word. Every function
 * here that writes a word for other processes releases, and every one that reads a word of others acquires. Words are
 * naturally aligned, and a 64-bit word never crosses a cache line. rayzero/store/shm/signals.py is the only caller.
 */

#include <stdint.h>
#include <string.h>

#if defined(__linux__) && defined(__LP64__)
#define HAS_FUTEX 1
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#define HAS_FUTEX 0
#endif

#define EXPORT __attribute__((visibility("default")))

/* Whether bells work here. */
EXPORT int32_t rz_has_futex(void) { return HAS_FUTEX; }

/* ---- Flags ------------------------------------------------------------------------------------------------------- */

EXPORT void rz_store_release_32(uint32_t *flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
EXPORT void rz_store_release_64(uint64_t *flag, uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
EXPORT uint32_t rz_load_acquire_32(const uint32_t *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
EXPORT uint64_t rz_load_acquire_64(const uint64_t *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

/* What was loaded before this was loaded before what is loaded after it: the end of a seqlock's read. */
EXPORT void rz_fence_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

/* Write the indices of the words that differ from `seen`, and put the new words into `seen`. Returns how many differ. */
EXPORT int64_t rz_changed(const char *words, int64_t stride, uint64_t *seen, int64_t count, int64_t *indices) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t word = rz_load_acquire_64((const uint64_t *)(words + i * stride));
        if (word == seen[i]) continue;
        seen[i] = word;
        indices[found++] = i;
    }
    return found;
}

/* ---- Bells: a count of rings to sleep on. Shared futexes, because other processes sleep on them too -------------- */

#if HAS_FUTEX
EXPORT void rz_ring(uint32_t *bell) {
    __atomic_fetch_add(bell, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleep while the bell is at `seen`, at most until CLOCK_MONOTONIC reaches `deadline` (ns). Returns the bell's count. It
 * is still `seen` after a signal, so that the caller can handle the signal and call again. */
EXPORT uint32_t rz_wait(const uint32_t *bell, uint32_t seen, int64_t deadline) {
    struct timespec until = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
    while (rz_load_acquire_32(bell) == seen) /* a wakeup without a ring is one more round */
        if (syscall(SYS_futex, bell, FUTEX_WAIT_BITSET, seen, &until, NULL, FUTEX_BITSET_MATCH_ANY)) break;
    return rz_load_acquire_32(bell);
}
#else
EXPORT void rz_ring(uint32_t *bell) { __atomic_fetch_add(bell, 1, __ATOMIC_RELEASE); }
EXPORT uint32_t rz_wait(const uint32_t *bell, uint32_t seen, int64_t deadline) {
    (void)seen, (void)deadline;
    return rz_load_acquire_32(bell);
}
#endif

/* ---- Cells: a message that its one writer replaces while others read (a seqlock) --------------------------------- */

/* After Boehm, "Can seqlocks get along with programming language memory models?" (MSPC 2012): the words of the message
 * are relaxed atomics between fences. So a read beside a write is not a data race, and the sequence reveals it. */
typedef struct {
    uint64_t sequence; /* 0: never written; odd: being written; each message adds 2 */
    uint64_t size;     /* bytes of the message */
    uint64_t words[];
} rz_cell;

#define TRIES 100 /* of a read: a running writer is done after a few; one that died or sleeps is not */

EXPORT void rz_cell_write(rz_cell *cell, const char *message, uint64_t size) {
    uint64_t writing = __atomic_load_n(&cell->sequence, __ATOMIC_RELAXED) | 1; /* if odd already, a writer died here */
    __atomic_store_n(&cell->sequence, writing, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&cell->size, size, __ATOMIC_RELAXED);
    for (uint64_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, message + at, size - at < 8 ? size - at : 8);
        __atomic_store_n(&cell->words[at / 8], word, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&cell->sequence, writing + 1, __ATOMIC_RELEASE);
}

/* Copy the message into `to` (`capacity` bytes, a multiple of 8) and its size into `size`. Returns its sequence; 0 where
 * there is none that is whole. */
EXPORT uint64_t rz_cell_read(const rz_cell *cell, uint64_t *to, uint64_t capacity, uint64_t *size) {
    for (int tries = 0; tries < TRIES; tries++) {
        uint64_t before = __atomic_load_n(&cell->sequence, __ATOMIC_ACQUIRE);
        if (before == 0) return 0;
        if (before & 1) continue;
        *size = __atomic_load_n(&cell->size, __ATOMIC_RELAXED);
        if (*size > capacity) continue;
        for (uint64_t at = 0; at < *size; at += 8) to[at / 8] = __atomic_load_n(&cell->words[at / 8], __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (__atomic_load_n(&cell->sequence, __ATOMIC_RELAXED) == before) return before;
    }
    return 0;
}
