/* Helper threads for the kernels.
 *
 * They are C threads and not Python threads, because waking a Python thread needs the interpreter lock, which the caller
 * and every other thread of an owner also want. On shards of 2M elements that cost a sixth of the update.
 *
 * [Note: waiting] Waking a sleeping helper takes 80-100 us on a virtual machine, a twelfth of an update of 2M elements.
 * So a helper that has finished first polls for POLL_NS, a little longer than that, and then sleeps. The shards of one
 * decision follow each other within that time, and an idle team uses no processor. The helper yields its processor
 * after each look, and sleeps at once if others take it. A helper that wakes too late finds no job and sleeps on: the
 * caller never waits for a helper that has not begun.
 *
 * [Note: fork] A child process has none of its parent's threads, and one of them may have held a mutex. So a team belongs
 * to a process id: the first run in another process begins with a new mutex and new helpers.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setname_np */
#endif
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define POLL_NS 150000
#define TAKEN_NS 20000 /* if two looks are further apart, others have taken the processor */

struct rz_team {
    int32_t wanted, helpers; /* helpers: how many run; fewer than wanted if the system refuses threads */
    pid_t owner;             /* the process that they run in; 0 before the first run */
    pthread_t *threads;
    pthread_mutex_t lock;     /* guards everything below */
    pthread_cond_t job_there; /* there is a job, or the team ends */
    pthread_cond_t all_out;
    void (*share)(void *); /* NULL: no job, or too late to begin */
    void *job;
    int64_t jobs;   /* how many jobs there were; changed under the lock, polled without it */
    int64_t inside; /* helpers at work; changed and polled likewise */
    int ending;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Poll for a while as long as the word is `value`. Returns whether it changed. */
static int poll_while(const int64_t *word, int64_t value) {
    int64_t begun = now_ns(), last = begun;
    for (;;) {
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) return 1;
        sched_yield();
        int64_t now = now_ns();
        if (now - begun > POLL_NS || now - last > TAKEN_NS) return 0;
        last = now;
    }
}

static void *help(void *argument) {
    rz_team *team = argument;
    int64_t seen = 0;
    pthread_mutex_lock(&team->lock);
    for (;;) {
        while (team->jobs == seen && !team->ending) pthread_cond_wait(&team->job_there, &team->lock);
        if (team->ending) break;
        seen = team->jobs;
        if (team->share) {
            void (*share)(void *) = team->share;
            void *job = team->job;
            __atomic_store_n(&team->inside, team->inside + 1, __ATOMIC_RELEASE);
            pthread_mutex_unlock(&team->lock);
            share(job);
            pthread_mutex_lock(&team->lock);
            __atomic_store_n(&team->inside, team->inside - 1, __ATOMIC_RELEASE);
            if (!team->inside) pthread_cond_signal(&team->all_out);
        }
        pthread_mutex_unlock(&team->lock);
        poll_while(&team->jobs, seen);
        pthread_mutex_lock(&team->lock);
    }
    pthread_mutex_unlock(&team->lock);
    return 0;
}

/* Start the helpers with all signals blocked, because signals are for the interpreter's threads. */
static void start(rz_team *team) {
    sigset_t all, before;
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->job_there, 0);
    pthread_cond_init(&team->all_out, 0);
    team->share = 0, team->jobs = 0, team->inside = 0, team->helpers = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team->helpers < team->wanted && !pthread_create(&team->threads[team->helpers], 0, help, team)) {
#ifdef __linux__
        pthread_setname_np(team->threads[team->helpers], "rayzero-kernel");
#endif
        team->helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    team->owner = getpid();
}

/* Make a team of `threads`, the caller included. The helpers start with the first run. NULL without memory. */
EXPORT rz_team *rz_team_create(int32_t threads) {
    rz_team *team = calloc(1, sizeof *team);
    pthread_t *members = calloc((size_t)threads, sizeof *members);
    if (!team || !members) {
        free(team), free(members);
        return 0;
    }
    team->wanted = threads - 1;
    team->threads = members;
    return team;
}

/* End the helpers of this process. Call it between runs. */
EXPORT void rz_team_destroy(rz_team *team) {
    if (team->owner == getpid()) {
        pthread_mutex_lock(&team->lock);
        team->ending = 1;
        pthread_cond_broadcast(&team->job_there);
        pthread_mutex_unlock(&team->lock);
        for (int32_t i = 0; i < team->helpers; i++) pthread_join(team->threads[i], 0);
        pthread_cond_destroy(&team->all_out);
        pthread_cond_destroy(&team->job_there);
        pthread_mutex_destroy(&team->lock);
    }
    free(team->threads);
    free(team);
}

/* How many threads of this process share a run, the caller included. */
EXPORT int32_t rz_team_size(rz_team *team) {
    if (team->owner != getpid()) start(team);
    return team->helpers + 1;
}

void rz_team_run(rz_team *team, void (*share)(void *), void *job) {
    if (!team || rz_team_size(team) == 1) {
        share(job);
        return;
    }
    pthread_mutex_lock(&team->lock);
    team->share = share, team->job = job;
    __atomic_store_n(&team->jobs, team->jobs + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&team->job_there);
    pthread_mutex_unlock(&team->lock);
    share(job);
    pthread_mutex_lock(&team->lock);
    team->share = 0;
    pthread_mutex_unlock(&team->lock);
    for (int64_t left = 1; left && poll_while(&team->inside, left);)
        left = __atomic_load_n(&team->inside, __ATOMIC_ACQUIRE);
    pthread_mutex_lock(&team->lock);
    while (team->inside) pthread_cond_wait(&team->all_out, &team->lock);
    pthread_mutex_unlock(&team->lock);
}
