/* Kills the native kernel at every point of an update, and again at every point of its recovery: what a process that was
 * never killed would have left must come out, bit by bit.
 *
 *   crash_points every KIND UNDO    one thread: each point once, and from each some points of the recovery
 *   crash_points random KIND KILLS  two threads, killed from outside after random times
 *   crash_points round              a round that is added to a total: what was kept must bring the total back
 *
 * KIND: fp32, amsgrad, bf16 or int8 moments; split: fp32 ones, and masters as remainders of what is published. UNDO 0 leaves the undo log out, which must be found, at every 16th point.
 * Prints "kills <n> different <n>". tests/kernels/test_crash_points.py builds this with the kernel's own source. */

#define _GNU_SOURCE
#include <stdint.h>

static int64_t points_left; /* 0: not armed */
static void crash_point(void);
#define CRASH_POINT() crash_point()
#include "team.c"

#include "adam.c"

#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>

static void crash_point(void) {
    if (points_left && !--points_left) raise(SIGKILL);
}

#define TILES 3
#define MOST 40000 /* elements */
#define ENTRIES 2

typedef struct { /* all that outlives a process */
    float master[MOST], largest[MOST], scales[2][MOST / SCALED];
    char moments[2][4 * MOST];
    uint16_t params[MOST];
    int64_t stamps[TILES];
    rz_undo undo[ENTRIES];
} state;

static int64_t tile, numel;
static int kind; /* moments_dtype; NONE: fp32 with amsgrad; SPLIT */
#define SPLIT (CODES + 1)
static int with_undo = 1;
static float *gradients[2];

static float noise(uint32_t seed) {
    seed = (seed ^ seed >> 15) * 0x2c1b3c6d, seed = (seed ^ seed >> 12) * 0x297a2d39;
    return (float)((seed ^ seed >> 15) & 0xffffff) / (1 << 23) - 1.0f;
}

static void fill(state *s) {
    memset(s, 0, sizeof *s);
    for (int64_t i = 0; i < numel; i++) s->master[i] = noise(3 * i);
    for (int64_t i = 0; i < numel && kind == SPLIT; i++) {
        uint32_t bits = i % 3 ? bits_of(s->master[i]) : bits_of(s->master[i]) >> 16 << 16 | 0x8000; /* half-way */
        uint32_t rest = bits - ((uint32_t)(s->params[i] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16) << 16);
        ((uint16_t *)s->largest)[i] = rest;
        ((uint32_t *)s->moments[1])[i] = rest == 0x8000 ? 0x80000000 : 0;
        s->master[i] = 0;
    }
}

static int begun(const state *s, int64_t version) {
    for (int i = 0; i < TILES; i++)
        if (s->stamps[i] > 2 * version - 2) return 1;
    return 0;
}

/* Versions 1 and 2, from where `s` is. Parameter 0 has both ranks' gradients, parameter 1 none, 2 one rank's. */
static void run(state *s, rz_team *team) {
    int isa = NUM_ISAS;
    while (!rz_isa(--isa)) {}
    rz_memory memory = {s->master, s->moments[0], s->moments[1], s->scales[0], s->scales[1], kind, 0, s->params, BF16,
                        s->stamps, 0, 7, with_undo ? s->undo : 0, with_undo ? ENTRIES : 0};
    if (kind == NONE) memory.moments_dtype = F32, memory.max_exp_avg_sq = s->largest;
    if (kind == SPLIT) memory.moments_dtype = F32, memory.master = 0, memory.remainders = (uint16_t *)s->largest;
    if (memory.moments_dtype == F32) memory.exp_avg_scale = memory.exp_avg_sq_scale = 0;
    for (int64_t version = 1 + begun(s, 2); version <= 2; version++) {
        rz_gradient both[2] = {{gradients[0], F32, 0}, {gradients[1], F32, 1}};
        float right = 1.0f - 0.999f * (version == 2 ? 0.999f : 1.0f);
        rz_segment like = {0, 0, both, 2, version == 1 ? 0.5f : 0.05f, 0.99f, 0.1f, 0.999f, 0.001f, 0.01f, __builtin_sqrtf(right), 1e-8f, 0,
                           DECAY | (kind == NONE ? AMSGRAD : 0)};
        rz_segment segments[3] = {like, like, like};
        segments[0].length = segments[1].offset = numel / 3 / 64 * 64;
        segments[1].length = 64, segments[1].num_gradients = 0;
        segments[2].offset = segments[1].offset + 64, segments[2].length = numel - segments[2].offset;
        segments[2].gradients = both + 1, segments[2].num_gradients = 1;
        memory.stamp = 2 * version;
        rz_adam(team, isa, &memory, segments, 3, 0, numel, tile);
    }
}

/* Run in a child that is killed at its nth point; returns whether it was. */
static int killed_at(state *s, int64_t point) {
    int status;
    pid_t child = fork();
    if (!child) {
        points_left = point;
        run(s, 0);
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFSIGNALED(status);
}

static int differs(const state *a, const state *b) {
    return memcmp(a, b, offsetof(state, undo)) != 0; /* the log's own content may differ */
}

static state *shared(void) {
    return mmap(0, sizeof(state), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* Adds a round to a total in `s->master`, which is kept in `s->largest`, and is killed at its nth point. */
static int round_killed_at(state *s, int64_t point) {
    static const rz_range ranges[2] = {{64, 2500}, {2560, 6001}};
    int status, isa = NUM_ISAS;
    while (!rz_isa(--isa)) {}
    pid_t child = fork();
    if (!child) {
        rz_gradient both[2] = {{gradients[0], F32, 0}, {gradients[1], F32, 1}};
        points_left = point;
        rz_add(isa, both, 2, ranges, 2, 1, s->master, s->largest, &s->stamps[0]);
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFSIGNALED(status);
}

static void kill_rounds(state *s, state *expected, long *kills, long *different) {
    fill(expected);
    for (int64_t point = 1;; point++) {
        fill(s);
        memset(s->largest, 255, sizeof s->largest); /* what an earlier total has left there */
        int killed = round_killed_at(s, point);
        int64_t changed = memcmp(s->master, expected->master, sizeof s->master) != 0;
        memcpy(s->master, s->largest, sizeof(float) * s->stamps[0]);
        *different += memcmp(s->master, expected->master, sizeof s->master) != 0;
        if (!killed) {
            *different += !changed; /* else nothing was added */
            return;
        }
        ++*kills;
    }
}

int main(int argc, char **argv) {
    static const char *names[] = {[F32] = "fp32", [BF16] = "bf16", [FP16] = "", [NONE] = "amsgrad", [CODES] = "int8",
                                  [SPLIT] = "split"};
    int every = !strcmp(argv[1], "every"), rounds = !strcmp(argv[1], "round");
    long kills = 0, different = 0;
    while (!rounds && strcmp(names[kind], argv[2])) kind++;
    if (every) with_undo = atoi(argv[3]);
    tile = every ? 1024 : 12288, numel = TILES * tile - (every ? 320 : 0);
    for (int rank = 0; rank < 2; rank++) {
        gradients[rank] = malloc(4 * MOST);
        for (int64_t i = 0; i < MOST; i++) gradients[rank][i] = noise(5 * i + rank + 1);
    }
    state *expected = shared(), *s = shared(), *cut = shared();
    fill(expected), run(expected, 0);
    if (rounds) {
        kill_rounds(s, expected, &kills, &different);
    } else if (every) {
        for (int64_t first = 1;; first += with_undo ? 1 : 16) {
            fill(cut);
            if (!killed_at(cut, first)) break;
            kills++;
            for (int64_t second = 1 + first % 4;; second += 1 + second) { /* other points from the next first one */
                memcpy(s, cut, sizeof *s);
                int again = killed_at(s, second);
                kills += again;
                run(s, 0);
                different += differs(s, expected);
                if (!again) break;
            }
        }
    } else {
        srand(1);
        while (kills < atoi(argv[3])) {
            fill(s);
            for (;;) {
                int status;
                pid_t child = fork();
                if (!child) {
                    run(s, rz_team_create(2));
                    _exit(0);
                }
                struct timespec pause = {0, rand() % 400000};
                nanosleep(&pause, 0);
                kill(child, SIGKILL);
                waitpid(child, &status, 0);
                if (!WIFSIGNALED(status)) break;
                kills++;
            }
            different += differs(s, expected);
        }
    }
    printf("kills %ld different %ld\n", kills, different);
    return 0;
}
