/* A switch in user space that is a WAN: every port has a rate each way, a one-way delay, loss, and drop-tail queues.

   usage: wan_link NAME:RATE_MBIT:DELAY_MS:LOSS_PERCENT:QUEUE_KIB ...      (a rate of 0 is no limit)

   Ports are the ends of veth pairs in this network namespace; offloads must be off at both ends of each.  A frame waits
   for its sender's rate, then for the delay of both ports, then for its receiver's rate.  On standard input,
   "NAME RATE_MBIT QUEUE_KIB" sets a port's rate and queue; the program ends with its input, and then says what it
   dropped.  Linux has all of this in netem, which is not in every kernel. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PORTS_MAX 32
#define FRAME_MAX 65600
#define RING (1u << 16)
#define BURST 64

typedef struct {
  int64_t due;
  int length, to;
  unsigned char *bytes;
} frame;

typedef struct {
  frame *ring;
  unsigned head, tail;
  int64_t free_at; /* when the wire is free again */
  uint64_t dropped;
} queue;

typedef struct {
  char name[IFNAMSIZ];
  int socket;
  double ns_per_byte;
  int64_t delay, limit;
  double loss;
  uint64_t lost, sent;
  unsigned char mac[ETH_ALEN];
  int known;
  queue up, down;
} port;

static port ports[PORTS_MAX];
static int count;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static int open_port(const char *name) {
  int one = 1, room = 64 << 20;
  int s = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));
  if (s < 0) fail("socket");
  struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(name)};
  if (!at.sll_ifindex || bind(s, (void *)&at, sizeof at)) fail(name);
  setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
  setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
  setsockopt(s, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one);
  setsockopt(s, SOL_PACKET, PACKET_QDISC_BYPASS, &one, sizeof one);
  return s;
}

static void set_rate(port *p, double mbit, long queue_kib) {
  p->ns_per_byte = mbit > 0 ? 8000.0 / mbit : 0;
  p->limit = queue_kib * 1024;
}

/* Puts a frame at the end of a queue; false if it has to be dropped. */
static int enqueue(queue *q, const port *p, int64_t at, int64_t delay, const unsigned char *bytes, int length, int to) {
  int64_t start = q->free_at > at ? q->free_at : at;
  if (q->tail - q->head >= RING || (p->ns_per_byte > 0 && (start - at) / p->ns_per_byte > p->limit)) {
    q->dropped++;
    return 0;
  }
  q->free_at = start + (int64_t)(length * p->ns_per_byte);
  frame *f = &q->ring[q->tail++ % RING];
  f->due = q->free_at + delay;
  f->length = length;
  f->to = to;
  f->bytes = malloc(length);
  if (!f->bytes) fail("malloc");
  memcpy(f->bytes, bytes, length);
  return 1;
}

static int same(const unsigned char *a, const unsigned char *b) { return !memcmp(a, b, ETH_ALEN); }

/* A frame that came in: to the port that is known for its address, or to all others. */
static void take(int from, const unsigned char *bytes, int length) {
  port *p = &ports[from];
  int64_t n = now();
  memcpy(p->mac, bytes + ETH_ALEN, ETH_ALEN);
  p->known = 1;
  if (p->loss > 0 && drand48() < p->loss) {
    p->lost++;
    return;
  }
  int to = -1;
  for (int i = 0; i < count; i++)
    if (i != from && ports[i].known && same(ports[i].mac, bytes)) to = i;
  enqueue(&p->up, p, n, p->delay, bytes, length, to);
}

/* Moves what is due from the sender's queue to the receiver's, or on to the wire; when the next frame is due. */
static int64_t advance(int64_t n, int64_t next) {
  for (int i = 0; i < count; i++) {
    queue *q = &ports[i].up;
    for (; q->head != q->tail; q->head++) {
      frame *f = &q->ring[q->head % RING];
      if (f->due > n) break;
      for (int k = 0; k < count; k++)
        if (k == f->to || (f->to < 0 && k != i))
          enqueue(&ports[k].down, &ports[k], f->due + ports[k].delay, 0, f->bytes, f->length, k);
      free(f->bytes);
    }
    if (q->head != q->tail && q->ring[q->head % RING].due < next) next = q->ring[q->head % RING].due;
  }
  for (int i = 0; i < count; i++) {
    queue *q = &ports[i].down;
    for (; q->head != q->tail; q->head++) {
      frame *f = &q->ring[q->head % RING];
      if (f->due > n) break;
      if (send(ports[i].socket, f->bytes, f->length, MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == ENOBUFS)) {
        if (n + 100000 < next) next = n + 100000;
        break;
      }
      ports[i].sent++;
      free(f->bytes);
    }
    if (q->head != q->tail && q->ring[q->head % RING].due > n && q->ring[q->head % RING].due < next)
      next = q->ring[q->head % RING].due;
  }
  return next;
}

/* Lines of standard input; false at its end. */
static int command(void) {
  static char text[4096];
  static size_t filled;
  ssize_t got = read(0, text + filled, sizeof text - 1 - filled);
  if (got <= 0) return 0;
  filled += got;
  text[filled] = 0;
  for (char *end; (end = strchr(text, '\n'));) {
    char name[IFNAMSIZ];
    double mbit;
    long queue_kib;
    *end = 0;
    if (sscanf(text, "%15s %lf %ld", name, &mbit, &queue_kib) == 3)
      for (int i = 0; i < count; i++)
        if (!strcmp(ports[i].name, name)) set_rate(&ports[i], mbit, queue_kib);
    filled -= end + 1 - text;
    memmove(text, end + 1, filled + 1);
  }
  return 1;
}

int main(int argc, char **argv) {
  static unsigned char bytes[FRAME_MAX];
  struct pollfd ready[PORTS_MAX + 1];
  for (int i = 1; i < argc && count < PORTS_MAX; i++) {
    double mbit, delay_ms, loss;
    long queue_kib;
    port *p = &ports[count];
    if (sscanf(argv[i], "%15[^:]:%lf:%lf:%lf:%ld", p->name, &mbit, &delay_ms, &loss, &queue_kib) != 5) {
      fprintf(stderr, "wan_link: %s is not NAME:RATE_MBIT:DELAY_MS:LOSS_PERCENT:QUEUE_KIB\n", argv[i]);
      return 2;
    }
    set_rate(p, mbit, queue_kib);
    p->delay = (int64_t)(delay_ms * 1e6);
    p->loss = loss / 100;
    p->up.ring = calloc(RING, sizeof(frame));
    p->down.ring = calloc(RING, sizeof(frame));
    if (!p->up.ring || !p->down.ring) fail("calloc");
    p->socket = open_port(p->name);
    ready[count++] = (struct pollfd){.fd = p->socket, .events = POLLIN};
  }
  ready[count] = (struct pollfd){.fd = 0, .events = POLLIN};
  setpriority(PRIO_PROCESS, 0, -20); /* a wire is never late */
  prctl(PR_SET_TIMERSLACK, 1000);
  srand48(1);
  puts("ready");
  fflush(stdout);
  for (int open = 1; open;) {
    int64_t n = now(), next = advance(n, n + 50000000), wait = next - now();
    if (wait < 0) wait = 0;
    struct timespec pause = {wait / 1000000000, wait % 1000000000};
    if (ppoll(ready, count + 1, &pause, NULL) <= 0) continue;
    for (int i = 0; i < count; i++)
      for (int k = 0; k < BURST && ready[i].revents & POLLIN; k++) {
        ssize_t length = recv(ports[i].socket, bytes, FRAME_MAX, MSG_DONTWAIT);
        if (length < ETH_HLEN) break;
        take(i, bytes, (int)length);
      }
    if (ready[count].revents) open = command();
  }
  for (int i = 0; i < count; i++)
    fprintf(stderr, "%s: %lu frames delivered; dropped: %lu by loss, %lu leaving, %lu arriving\n", ports[i].name,
            (unsigned long)ports[i].sent, (unsigned long)ports[i].lost, (unsigned long)ports[i].up.dropped,
            (unsigned long)ports[i].down.dropped);
  return 0;
}
