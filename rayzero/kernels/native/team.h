/* A team of threads that share one job: the caller and helpers that wait for it (team.c). */

#ifndef RZ_TEAM_H
#define RZ_TEAM_H

typedef struct rz_team rz_team;

/* Call `share(job)` here and, at the same time, in the team's helpers, and return when all those calls have returned. A
 * helper that has not begun when the caller's own call returns stays out, so `share` must take work until none is left.
 * If `team` is NULL, it runs here alone. One caller at a time. */
void rz_team_run(rz_team *team, void (*share)(void *), void *job);

#endif
