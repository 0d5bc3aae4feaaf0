// A lean NBD load generator: one thread, one TCP connection over loopback, DEPTH requests in
// flight. Requests that are free together leave in one send, and replies are parsed out of one
// large receive buffer, so that the server sets the figure and not the client.
//
//   nbdperf PORT read|write random|sequential BLOCK DEPTH SECONDS
//
// Prints one line of JSON with the names that `twinrail bench --json` uses.
#include <endian.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define PACKED __attribute__((packed))
struct request { uint32_t magic; uint16_t flags, type; uint64_t cookie, offset; uint32_t length; } PACKED;
struct reply { uint32_t magic, error; uint64_t cookie; } PACKED;
struct option { uint64_t magic; uint32_t option, length, name_length; uint16_t infos; } PACKED;
struct option_reply { uint64_t magic; uint32_t option, type, length; } PACKED;
struct export_info { uint16_t type; uint64_t size; uint16_t flags; } PACKED;

enum { CMD_READ, CMD_WRITE, CMD_DISCONNECT };
enum { OPT_GO = 7, REP_ACK = 1, REP_INFO = 3, INFO_EXPORT = 0, MAX_SEGMENTS = 1024, RECEIVE = 256 << 10 };

static int sock;

static void fail(const char *what) { perror(what); exit(1); }
static void refuse(const char *why) { fprintf(stderr, "nbdperf: %s\n", why); exit(1); }

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static double cpu_seconds(void) {
  struct rusage r;
  getrusage(RUSAGE_SELF, &r);
  return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

static size_t receive_some(void *to, size_t room) {
  ssize_t got = recv(sock, to, room, 0);
  if (got < 0) fail("recv");
  if (got == 0) refuse("the server closed the connection");
  return got;
}

static void receive(void *to, size_t length) {
  for (size_t got = 0; got < length;) got += receive_some((char *)to + got, length - got);
}

static void send_all(struct iovec *v, int n) {
  while (n) {
    struct msghdr m = {.msg_iov = v, .msg_iovlen = n < MAX_SEGMENTS ? n : MAX_SEGMENTS};
    ssize_t sent = sendmsg(sock, &m, MSG_NOSIGNAL);
    if (sent < 0) fail("sendmsg");
    for (; n && (size_t)sent >= v->iov_len; v++, n--) sent -= v->iov_len;
    if (n) *v = (struct iovec){(char *)v->iov_base + sent, v->iov_len - sent};
  }
}

static void send_bytes(void *data, size_t length) { send_all(&(struct iovec){data, length}, 1); }

// Fixed newstyle handshake with the default export; returns its size.
static uint64_t handshake(void) {
  struct { char magic[16]; uint16_t flags; } PACKED hello;
  receive(&hello, sizeof hello);
  if (memcmp(hello.magic, "NBDMAGICIHAVEOPT", 16)) refuse("not a newstyle NBD server");
  uint32_t flags = htobe32(be16toh(hello.flags) & 3);
  send_bytes(&flags, sizeof flags);
  struct option go = {.option = htobe32(OPT_GO), .length = htobe32(6)};
  memcpy(&go.magic, "IHAVEOPT", 8);
  send_bytes(&go, sizeof go);
  for (uint64_t size = 0;;) {
    struct option_reply r;
    char body[4096];
    receive(&r, sizeof r);
    uint32_t type = be32toh(r.type), length = be32toh(r.length);
    if (length > sizeof body) refuse("an option reply is too long");
    receive(body, length);
    if (type == REP_ACK) return size;
    if (type != REP_INFO) refuse("the server refused the default export");
    struct export_info info;
    if (length < sizeof info) continue;
    memcpy(&info, body, sizeof info);
    if (be16toh(info.type) == INFO_EXPORT) size = be64toh(info.size);
  }
}

// Latencies in nanoseconds: 64 steps in each power of two, an error of at most 1.6 %.
static uint64_t histogram[64 * 64];

static int step_of(uint64_t v) {
  if (v < 64) return v;
  int power = 63 - __builtin_clzll(v);
  return (power - 5) * 64 + ((v >> (power - 6)) & 63);
}

static double percentile_us(uint64_t total, double share) {
  uint64_t seen = 0, wanted = total * share;
  for (int i = 0; i < 64 * 64; i++)
    if ((seen += histogram[i]) > wanted) return (i < 64 ? (uint64_t)i : (64ull + i % 64) << (i / 64 - 1)) / 1e3;
  return 0;
}

static uint64_t random_number(void) {
  static uint64_t x = 88172645463325252ull;
  x ^= x << 13;
  x ^= x >> 7;
  return x ^= x << 17;
}

int main(int argc, char **argv) {
  if (argc != 7) refuse("usage: nbdperf PORT read|write random|sequential BLOCK DEPTH SECONDS");
  bool write = !strcmp(argv[2], "write"), at_random = !strcmp(argv[3], "random");
  uint64_t block = strtoull(argv[4], 0, 10), depth = strtoull(argv[5], 0, 10);
  double seconds = atof(argv[6]);
  if (!block || !depth) refuse("BLOCK and DEPTH must be positive");

  struct sockaddr_in to = {AF_INET, htons(atoi(argv[1])), {htonl(INADDR_LOOPBACK)}, {0}};
  if ((sock = socket(AF_INET, SOCK_STREAM, 0)) < 0) fail("socket");
  setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
  if (connect(sock, (void *)&to, sizeof to)) fail("connect");
  uint64_t blocks = handshake() / block;
  if (!blocks) refuse("the export is smaller than one block");

  struct request *requests = calloc(depth, sizeof *requests);
  uint64_t *sent_at = calloc(depth, sizeof *sent_at), *idle = calloc(depth, sizeof *idle);
  struct iovec *segments = calloc(depth, 2 * sizeof *segments);
  char *data = malloc(block * depth), *in = malloc(RECEIVE);
  if (!requests || !sent_at || !idle || !segments || !data || !in) fail("memory");
  memset(data, 0x5a, block * depth);
  for (uint64_t i = 0; i < depth; i++) idle[i] = i;

  uint64_t idles = depth, in_flight = 0, ios = 0, next = 0, slowest = 0;
  size_t have = 0, payload = write ? 0 : block;
  double cpu = cpu_seconds();
  uint64_t begin = now(), time = begin, end = begin + seconds * 1e9;
  while (time < end || in_flight) {
    if (time < end && idles) {
      int n = 0;
      in_flight += idles;
      while (idles) {
        uint64_t slot = idle[--idles], at = at_random ? random_number() % blocks : next++ % blocks;
        requests[slot] = (struct request){htobe32(0x25609513), 0, htobe16(write ? CMD_WRITE : CMD_READ), slot,
                                          htobe64(at * block), htobe32(block)};
        sent_at[slot] = time;
        segments[n++] = (struct iovec){&requests[slot], sizeof *requests};
        if (write) segments[n++] = (struct iovec){data + slot * block, block};
      }
      send_all(segments, n);
    }
    have += receive_some(in + have, RECEIVE - have);
    time = now();
    size_t at = 0;
    for (struct reply r; have - at >= sizeof r; at += sizeof r + payload) {
      memcpy(&r, in + at, sizeof r);
      if (r.magic != htobe32(0x67446698) || r.error || r.cookie >= depth) refuse("a bad reply");
      size_t here = have - at - sizeof r;
      if (here >= payload) {
        memcpy(data + r.cookie * block, in + at + sizeof r, payload);
      } else if (sizeof r + payload <= RECEIVE) {
        break;  // the rest of it will fit behind
      } else {  // larger than the buffer: the rest goes straight to its place
        memcpy(data + r.cookie * block, in + at + sizeof r, here);
        receive(data + r.cookie * block + here, payload - here);
        have = at + sizeof r + payload;
        time = now();
      }
      uint64_t took = time - sent_at[r.cookie];
      histogram[step_of(took)]++;
      slowest = took > slowest ? took : slowest;
      idle[idles++] = r.cookie;
      in_flight--;
      ios++;
    }
    memmove(in, in + at, have - at);
    have -= at;
  }
  seconds = (time - begin) / 1e9;
  cpu = cpu_seconds() - cpu;
  struct request bye = {htobe32(0x25609513), 0, htobe16(CMD_DISCONNECT), 0, 0, 0};
  send_bytes(&bye, sizeof bye);
  printf("{\"ios\": %lu, \"seconds\": %.4f, \"iops\": %.1f, \"mib_per_s\": %.2f, \"p50_us\": %.2f, \"p99_us\": %.2f, "
         "\"p999_us\": %.2f, \"max_us\": %.2f, \"cpu_seconds\": %.4f}\n",
         ios, seconds, ios / seconds, ios / seconds * block / 1048576, percentile_us(ios, .5), percentile_us(ios, .99),
         percentile_us(ios, .999), slowest / 1e3, cpu);
}
