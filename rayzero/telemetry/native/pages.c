/* Pages for scrapers over HTTP/1.1: one thread that holds no interpreter lock but when a page is to be made.
 *
 * The thread is Python's: it calls rz_pages_serve(), which answers whoever asks from the pages as they were last made,
 * and comes back when somebody asks for one that is too old; then it makes the page, gives it by rz_pages_set() and calls
 * again. One thread calls everything here. rayzero/telemetry/native_http.py is the only caller.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(__linux__)

#define REQUEST_BYTES 8192
#define MOST 64       /* clients; the oldest is cut for a new one */
#define PATH_BYTES 64 /* of a page, its zero included */
#define SWEEP_MS 1000 /* between two looks for clients that do not move */

typedef struct {
    int64_t users;   /* the page, and clients that it is being sent to */
    size_t size, head; /* bytes of it all, and up to the empty line */
    bool last;       /* the connection ends after it */
    char bytes[];
} answer;

typedef struct {
    char path[PATH_BYTES];
    answer *now;      /* NULL: never made */
    int64_t until_ns; /* how long it is young enough */
} page;

typedef struct {
    int fd, page;          /* page: that it has asked for and not got; -1: none */
    bool head_only, last;  /* of its request */
    bool ended;            /* it sends no more */
    answer *sending;       /* NULL: nothing is on its way */
    size_t sent, until;    /* of `sending` */
    int64_t moved_ns;      /* last request, or last time an answer was begun or taken */
    size_t have;           /* bytes of `asked` */
    char asked[REQUEST_BYTES + 1];
} client;

typedef struct {
    int listener, wake;
    int64_t refresh_ns, idle_ns, write_ns;
    int64_t deaf_until_ns; /* nobody is admitted before: it could not be done */
    int num_clients, num_pages;
    client *clients[MOST]; /* oldest first */
    page pages[];          /* then what is said of an unknown path, and of what is no GET */
} server;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- Answers, shared by those they are sent to -------------------------------------------------------------------- */

static answer *release(answer *held) {
    if (held && --held->users == 0) free(held);
    return NULL;
}

/* Begin to send the client the page that it asked for. */
static void begin(server *s, client *c) {
    answer *found = s->pages[c->page].now;
    found->users++;
    c->sending = found;
    c->sent = 0;
    c->until = c->head_only ? found->head : found->size;
    c->last |= found->last;
    c->page = -1;
    c->moved_ns = now_ns();
}

/* ---- Clients -------------------------------------------------------------------------------------------------------- */

static void drop(server *s, int i) {
    client *gone = s->clients[i];
    shutdown(gone->fd, SHUT_RDWR); /* a process forked off, a loader of data, may hold it too */
    close(gone->fd);
    release(gone->sending);
    free(gone);
    memmove(&s->clients[i], &s->clients[i + 1], sizeof(client *) * (size_t)(--s->num_clients - i));
}

static void admit(server *s) {
    int fd = accept4(s->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
        s->deaf_until_ns = now_ns() + SWEEP_MS * 1000000L; /* no descriptor left: no use to look again at once */
    if (fd < 0) return;
    client *fresh = malloc(sizeof *fresh);
    if (!fresh) {
        close(fd);
        return;
    }
    if (s->num_clients == MOST) drop(s, 0);
    *fresh = (client){.fd = fd, .page = -1, .moved_ns = now_ns()};
    s->clients[s->num_clients++] = fresh;
}

static int find_page(const server *s, const char *path, size_t size) {
    for (int i = 0; i < s->num_pages; i++)
        if (strlen(s->pages[i].path) == size && !memcmp(s->pages[i].path, path, size)) return i;
    return s->num_pages;
}

/* Take the next whole request out of what came; false: there is none yet. */
static bool next_request(server *s, client *c) {
    char *end = memmem(c->asked, c->have, "\r\n\r\n", 4);
    if (!end) return false;
    bool text = !memchr(c->asked, 0, (size_t)(end - c->asked));
    *end = 0;
    char *line_end = memmem(c->asked, (size_t)(end - c->asked), "\r\n", 2);
    size_t line = (size_t)((line_end ? line_end : end) - c->asked);
    bool http_1_1 = memmem(c->asked, line, "HTTP/1.1", 8) != NULL;
    bool head = !strncmp(c->asked, "HEAD ", 5), get = !strncmp(c->asked, "GET ", 4);
    if (text && (get || head)) {
        const char *path = c->asked + (head ? 5 : 4);
        c->page = find_page(s, path, strcspn(path, " ?\r"));
    } else {
        c->page = s->num_pages + 1;
    }
    c->head_only = head;
    c->last = !http_1_1 || strcasestr(c->asked, "connection: close");
    c->have -= (size_t)(end + 4 - c->asked);
    memmove(c->asked, end + 4, c->have);
    c->moved_ns = now_ns();
    return true;
}

/* Send what the kernel takes of the answer. false: the connection is broken. */
static bool send_rest(client *c) {
    while (c->sent < c->until) {
        ssize_t took = send(c->fd, c->sending->bytes + c->sent, c->until - c->sent, MSG_NOSIGNAL);
        if (took < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
        c->sent += (size_t)took;
    }
    c->sending = release(c->sending);
    c->moved_ns = now_ns();
    return true;
}

/* Do for a client what can be done without waiting. false: its connection is over. */
static bool go_on(server *s, client *c) {
    for (;;) {
        if (c->sending) {
            if (!send_rest(c)) return false;
            if (c->sending) return true; /* it reads no further while an answer waits to be taken */
            if (c->last) return false;
        }
        if (c->page < 0 && !next_request(s, c)) return c->have < REQUEST_BYTES && !c->ended;
        if (!s->pages[c->page].now || s->pages[c->page].until_ns < now_ns()) return true;
        begin(s, c);
    }
}

static bool read_more(client *c) {
    ssize_t came = recv(c->fd, c->asked + c->have, REQUEST_BYTES - c->have, 0);
    if (came < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    c->ended = came == 0;
    c->have += (size_t)came;
    return true;
}

static short awaited(const client *c) { return c->sending ? POLLOUT : c->page < 0 ? POLLIN : 0; }

/* Cut those that have not moved for too long; not those that wait for us. */
static void sweep(server *s) {
    int64_t now = now_ns();
    for (int i = s->num_clients - 1; i >= 0; i--) {
        const client *c = s->clients[i];
        if (c->page < 0 && now - c->moved_ns > (c->sending ? s->write_ns : s->idle_ns)) drop(s, i);
    }
}

/* The page that somebody waits for; -1: nobody waits. */
static int wanted(const server *s) {
    for (int i = 0; i < s->num_clients; i++)
        if (s->clients[i]->page >= 0) return s->clients[i]->page;
    return -1;
}

/* ---- What Python calls ---------------------------------------------------------------------------------------------- */

/* The text that this was built from: hatch_build.py. */
EXPORT const char *rz_pages_source(void) { return RZ_SOURCE; }

/* A server on a listening socket, nonblocking; a byte on `wake` ends a serve(). Both stay the caller's. NULL: no memory. */
EXPORT server *rz_pages_open(int32_t listener, int32_t wake, int32_t num_pages, double refresh_s, double idle_s,
                             double write_s) {
    server *s = calloc(1, sizeof(server) + sizeof(page) * (size_t)(num_pages + 2));
    if (!s) return NULL;
    s->listener = listener, s->wake = wake, s->num_pages = num_pages;
    s->refresh_ns = (int64_t)(refresh_s * 1e9), s->idle_ns = (int64_t)(idle_s * 1e9);
    s->write_ns = (int64_t)(write_s * 1e9);
    return s;
}

EXPORT int32_t rz_pages_name(server *s, int32_t index, const char *path) {
    if (strlen(path) >= PATH_BYTES) return -1;
    strcpy(s->pages[index].path, path);
    return 0;
}

/* What page `index` is now (`num_pages`: said of an unknown path; one more: of what is no GET), given to all who wait for
 * it. `head`: its bytes up to the empty line; `lasting`: it is never too old; `last`: a connection ends after it.
 * -1: no memory. */
EXPORT int32_t rz_pages_set(server *s, int32_t index, const char *bytes, int64_t size, int64_t head, int32_t lasting,
                            int32_t last) {
    answer *made = malloc(sizeof(answer) + (size_t)size);
    if (!made) return -1;
    *made = (answer){.users = 1, .size = (size_t)size, .head = (size_t)head, .last = last};
    memcpy(made->bytes, bytes, (size_t)size);
    page *where = &s->pages[index];
    release(where->now);
    where->now = made;
    where->until_ns = lasting ? INT64_MAX : now_ns() + s->refresh_ns;
    for (int i = 0; i < s->num_clients; i++)
        if (s->clients[i]->page == index) begin(s, s->clients[i]);
    return 0;
}

/* Wait for clients, but not longer than `wait_ms` (-1: for ever), take in what they say and who is new. False: woken, or
 * the wait failed (`errno`, else 0). */
static bool hear(server *s, int wait_ms) {
    struct pollfd fds[MOST + 2];
    bool deaf = s->deaf_until_ns > now_ns();
    int known = s->num_clients;
    fds[0] = (struct pollfd){.fd = s->wake, .events = POLLIN};
    fds[1] = (struct pollfd){.fd = deaf ? -1 : s->listener, .events = POLLIN};
    for (int i = 0; i < known; i++)
        fds[2 + i] = (struct pollfd){.fd = s->clients[i]->fd, .events = awaited(s->clients[i])};
    errno = 0;
    if (wait_ms < 0 && (known || deaf)) wait_ms = SWEEP_MS;
    if (poll(fds, (nfds_t)(2 + known), wait_ms) < 0) return errno == EINTR;
    if (fds[0].revents) return false;
    for (int i = known - 1; i >= 0; i--) {
        short told = fds[2 + i].revents;
        if (told & (POLLERR | POLLNVAL) || (told & (POLLIN | POLLHUP) && !read_more(s->clients[i]))) drop(s, i);
    }
    if (fds[1].revents) admit(s);
    return true;
}

/* Answer until a page is to be made: its index; -1: woken, to be closed; -2: it cannot go on, see errno. */
EXPORT int32_t rz_pages_serve(server *s) {
    int wait_ms = 0; /* many pages may be made one after the other: hear between them who is new, and the end */
    for (;; wait_ms = -1) {
        if (!hear(s, wait_ms)) return errno ? -2 : -1;
        for (int i = s->num_clients - 1; i >= 0; i--)
            if (!go_on(s, s->clients[i])) drop(s, i);
        sweep(s);
        int stale = wanted(s);
        if (stale >= 0) return stale;
    }
}

/* Cut every client and free it all. */
EXPORT void rz_pages_close(server *s) {
    while (s->num_clients) drop(s, s->num_clients - 1);
    for (int i = 0; i < s->num_pages + 2; i++) release(s->pages[i].now);
    free(s);
}

#endif
